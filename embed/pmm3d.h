/* PMM3D from C and C++: distributed products on the caller's communicators. Link with -lpmm3d.

   The first call starts Python in this process: the one that PMM3D_PYTHON names (the path of its python), or else the
   one that the library was built with. It uses the MPI of this process.

   Results. Every function returns PMM3D_OK, or another of the codes below, and pmm3d_last_error has its text. What is
   wrong with a collective call, on whatever rank, comes back on every rank that made it, with the same text, before
   anything is sent; pmm3d_error_everywhere says whether an error is such a one. After one that is not, the ranks may
   be in different places: end the job. A call ends the process only if it can never end: if a rank is lost, or if ranks
   wait for each other. Any other wait beyond PMM3D_TIMEOUT (600 seconds; 0: never) is logged, and goes on.

   Order. MPI_Init or MPI_Init_thread first. pmm3d_finalize, before MPI_Finalize, gives back all that was made;
   MPI_Finalize calls it where the program did not. Any call after it is PMM3D_ERROR_FINALIZED. Python itself stays
   until the process ends.

   Threads. One thread at a time; a call while another one lasts is PMM3D_ERROR_THREAD. Below MPI_THREAD_SERIALIZED it
   must be the thread that started MPI, else PMM3D_ERROR_THREAD too. With less than MPI_THREAD_SERIALIZED messages make
   progress only in calls, so that nothing overlaps with a GEMM.

   Integers are 32-bit (int), but for the dims of pmm3d_matrix and pmm3d_box. Objects are numbers, above 0. */
#ifndef PMM3D_H
#define PMM3D_H

#include <mpi.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    PMM3D_OK = 0,
    PMM3D_ERROR_ARGUMENT = 1,     /* an argument cannot be; the text says which, and what could */
    PMM3D_ERROR_DISAGREEMENT = 2, /* the ranks passed different arguments */
    PMM3D_ERROR_MEMORY = 3,       /* memory could not be had */
    PMM3D_ERROR_MPI = 4,          /* MPI is not running, or Python has another one */
    PMM3D_ERROR_PYTHON = 5,       /* Python cannot be started, or lacks a package */
    PMM3D_ERROR_THREAD = 6,       /* another thread is in a call, or this one may not call */
    PMM3D_ERROR_FINALIZED = 7,    /* after pmm3d_finalize */
    PMM3D_ERROR_OTHER = 8         /* the text has Python's traceback */
};

/* Starts Python and loads PMM3D, which the first call would do: 1 to 2 seconds. Not collective. */
int pmm3d_start(void);

/* Gives back all objects. Collective over their communicators, on each rank in the opposite order of their making. */
int pmm3d_finalize(void);

/* The text of the last error that a call returned to this thread, cut to size - 1 bytes and ended by a zero; empty if
   there was none. Returns the size that the whole text needs. At any time. */
int pmm3d_last_error(char *text, int size);

/* 1 if that error was returned on every rank of the call, else 0. */
int pmm3d_error_everywhere(void);

/* gx x gy x gz of the ranks of comm, which run fastest along x; comm is duplicated and left as it was. 0, 0, 0: the
   grid of least time for a cube. Collective over comm. Keep a grid for the whole run. */
int pmm3d_grid(MPI_Comm comm, int gx, int gy, int gz, int *grid);

/* What a grid is: gx, gy, gz. Not collective. */
int pmm3d_grid_shape(int grid, int shape[3]);

/* Rows box[0] to box[1] and columns box[2] to box[3] (from 0, the ends not included) of a rows x columns matrix in that
   layout are this rank's shard. Not collective.

   layout   "A", "B" or "C", those of the operands and the result of a product, which moves nothing first; or the axes
            that cut the rows, a slash, and those that cut the columns: "z/y", "zx/y" (rows into gz parts, each of
            them into gx), "/" (the whole matrix on every rank). A = "zx/y", B = "yz/x", C = "zy/x" */
int pmm3d_box(int grid, const char *layout, int64_t rows, int64_t columns, int64_t box[4]);

/* A rows x columns matrix of which each rank holds its shard, which is used where it is, as long as the matrix is not
   freed: without gaps, by rows (order 'C') or by columns (order 'F'). NULL for a shard without elements.
   type   's', 'd', 'c' or 'z', as in the BLAS. Collective over the grid. */
int pmm3d_matrix(int grid, char type, int64_t rows, int64_t columns, const char *layout, char order, void *shard,
                 int *matrix);

/* C = alpha op(A) op(B) + beta C on matrices of one grid; op by 'N', 'T' or 'C' (conjugate transpose). alpha and beta
   point to one element of the matrices' type. Collective over the grid. */
int pmm3d_matmul(char transa, char transb, const void *alpha, int a, int b, const void *beta, int c);

/* A plan of the same product, to be repeated: arguments are compared, checked and planned once. Small products gain
   most. alpha and beta are those of this call; the matrices must outlive the plan. Collective over the grid, and so are
   pmm3d_multiply, which multiplies what the shards contain at that time, and pmm3d_free of a plan. */
int pmm3d_plan(char transa, char transb, const void *alpha, int a, int b, const void *beta, int c, int *plan);
int pmm3d_multiply(int plan);

/* target = source, from any layout and order to any other, also onto another grid over the same ranks in the same
   order. Collective over the source's grid. */
int pmm3d_redistribute(int source, int target);

/* A process grid of rows x columns ranks, as a BLACS context is: the first ones of comm, by rows (order 'R', as BLACS
   has them by default) or by columns ('C'). The others take part in every call too. comm is duplicated. Collective over
   comm. Keep a context for the whole run: it keeps the plans of products. */
int pmm3d_context(MPI_Comm comm, int rows, int columns, char order, int *context);

/* As ScaLAPACK's p?gemm, on block-cyclic matrices of one context: sub(C) = alpha op(sub(A)) op(sub(B)) + beta sub(C).
   Descriptors are ScaLAPACK's; the context in them is not looked at. ia, ja, ... count from 1. Collective over the
   context's communicator. */
int pmm3d_pgemm(int context, char type, char transa, char transb, int m, int n, int k, const void *alpha,
                const void *a, int ia, int ja, const int desca[9], const void *b, int ib, int jb, const int descb[9],
                const void *beta, void *c, int ic, int jc, const int descc[9]);

/* As ScaLAPACK's p?gemr2d: sub(B) = sub(A), m x n, between two contexts over the same ranks in the same order.
   Collective. */
int pmm3d_pgemr2d(char type, int m, int n, const void *a, int ia, int ja, const int desca[9], int contexta, void *b,
                  int ib, int jb, const int descb[9], int contextb);

/* matrix = a, block-cyclic, and a = matrix. The context is over the ranks of the matrix's grid, in the same order.
   Collective. */
int pmm3d_from_block_cyclic(int context, const void *a, const int desca[9], int matrix);
int pmm3d_to_block_cyclic(int matrix, int context, void *a, const int desca[9]);

/* matrix = blocks, and blocks = matrix, where each rank has one block of any rows and columns of the matrix: uneven
   slabs of rows, for example. Rows box[0] to box[1] and columns box[2] to box[3] are this rank's (from 0, the ends not
   included; an empty block has equal ends). The blocks of all ranks cover each element of the matrix once. A block is
   stored without gaps, by rows (order 'C') or by columns (order 'F'), in the same order on all ranks; NULL for a block
   without elements. Collective over the grid of the matrix. */
int pmm3d_from_blocks(const void *block, const int64_t box[4], char order, int matrix);
int pmm3d_to_blocks(int matrix, void *block, const int64_t box[4], char order);

/* Gives back a grid, a matrix, a plan or a context, and makes it 0; 0 is left alone. Of grids, plans and contexts
   collective. A grid outlives its matrices and plans. */
int pmm3d_free(int *object);

#ifdef __cplusplus
}
#endif

#endif
