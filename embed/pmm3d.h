/* pmm3d from C and C++: distributed products on the caller's communicators. Link with -lpmm3d.

   The first call starts Python in this process: the interpreter of PMM3D_PYTHON (its path), or else the one with which
   the library was built. Python uses the MPI of this process.

   Errors. Every function returns PMM3D_OK or another of the codes below; pmm3d_last_error returns the text. An error in
   the arguments of a collective call, on any rank, is returned on every rank, with the same text, before anything is
   sent. Then pmm3d_error_everywhere returns 1. If it returns 0, other ranks may wait in a call: end the job. This is so
   for a communicator that the process cannot use; for a wrong plan in pmm3d_run; and, in a process with several grids
   or contexts, if the number of the object over which the call is collective names none (pmm3d_matmul: if none of the
   three names one). The library ends the process only if a call can never return: if a rank is lost, or if ranks wait
   for each other. Any other wait beyond PMM3D_TIMEOUT (600 seconds; 0: no limit) is logged, and continues.

   Order. Call MPI_Init or MPI_Init_thread first. Users are counted: each component of a program (the program itself, a
   library) calls pmm3d_start at its begin and pmm3d_finalize at its end, on all its ranks. Each component frees its own
   objects with pmm3d_free before pmm3d_finalize. If components run on different ranks, they must: users are counted on
   each rank, and only pmm3d_finalize of the last user frees all objects. A program with one component may omit
   pmm3d_start: pmm3d_grid and pmm3d_context count one user if there is none. After the last pmm3d_finalize, a program
   may start again. Numbers of freed objects are not used again. MPI_Finalize frees all objects, whatever the count.

   Threads. One thread at a time may call. A call during another call returns PMM3D_ERROR_THREAD. Below
   MPI_THREAD_SERIALIZED only the thread that started MPI may call, and messages make progress only in calls, so nothing
   overlaps with a GEMM.

   Integers are int (32 bits). Rows, columns and boxes of matrices are int64_t. Objects are numbers above 0.
   The number of an object may differ between ranks. In a collective call all ranks name the same object: the ranks of a
   grid make its matrices and plans in the same order. */
#ifndef PMM3D_H
#define PMM3D_H

#include <mpi.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    PMM3D_OK = 0,
    PMM3D_ERROR_ARGUMENT = 1,     /* an argument is invalid */
    PMM3D_ERROR_DISAGREEMENT = 2, /* the ranks passed different arguments */
    PMM3D_ERROR_MEMORY = 3,       /* out of memory */
    PMM3D_ERROR_MPI = 4,          /* MPI is not running, or Python has another MPI */
    PMM3D_ERROR_PYTHON = 5,       /* Python cannot be started, or lacks a package */
    PMM3D_ERROR_THREAD = 6,       /* another thread is in a call, or this thread may not call */
    PMM3D_ERROR_OTHER = 8         /* another error; the text has Python's traceback */
};

/* Count one user. The first call of any function starts Python and loads pmm3d (1 to 2 seconds). Not collective. */
int pmm3d_start(void);

/* Count one user less. If no other is left, free all objects, the newest first: collective over their communicators.
   After an error, pmm3d_finalize can be called again, and MPI_Finalize repeats it. Without a user, do nothing. */
int pmm3d_finalize(void);

/* Copy the text of the last error of this thread to `text`, cut to size - 1 bytes and ended by a zero; empty if no call
   of this thread has failed. Calls that succeed do not change it. Return the size of the whole text, with the zero. May
   be called at any time. */
int pmm3d_last_error(char *text, int size);

/* Return 1 if this last error was returned on every rank of its call, else 0. */
int pmm3d_error_everywhere(void);

/* Make a grid of gx x gy x gz ranks on a duplicate of comm. Ranks run fastest along x. 0, 0, 0 selects the fastest grid
   for a large product with m = n = k. pmm3d_grid_for selects the fastest grid for products C (m x n) = A (m x k) B
   (k x n) of a type 's', 'd', 'c' or 'z'. For a small product some ranks may be idle: they make the same calls, and
   store no elements. Collective over comm. Keep a grid for the whole run. */
int pmm3d_grid(MPI_Comm comm, int gx, int gy, int gz, int *grid);
int pmm3d_grid_for(MPI_Comm comm, char type, int64_t m, int64_t n, int64_t k, int *grid);

/* Return gx, gy, gz of a grid. Not collective. */
int pmm3d_grid_shape(int grid, int shape[3]);

/* Return the shard of this rank, of a rows x columns matrix in a layout: rows box[0] to box[1] and columns box[2] to
   box[3], counted from 0, the ends excluded. Not collective.

   layout   "A", "B" or "C": the layouts in which a product redistributes neither operands nor result. Or the axes that
            cut the rows, a slash, and the axes that cut the columns: "z/y"; "zx/y" (rows into gz parts, each of them
            into gx parts); "/" (the whole matrix on every rank). "A" is "zx/y", "B" is "yz/x", "C" is "zy/x". As all
            letters, they may be lower or upper case */
int pmm3d_box(int grid, const char *layout, int64_t rows, int64_t columns, int64_t box[4]);

/* Make a rows x columns matrix of the shards of all ranks. The shard is used in place: keep it until the matrix is
   freed. It has no gaps, and is stored by rows (order 'C') or by columns (order 'F'). NULL is a shard without elements.
   type   's', 'd', 'c' or 'z', as in the BLAS. Collective over the grid. */
int pmm3d_matrix(int grid, char type, int64_t rows, int64_t columns, const char *layout, char order, void *shard,
                 int *matrix);

/* C = alpha op(A) op(B) + beta C on matrices of one grid; op by 'N', 'T' or 'C' (conjugate transpose). alpha and beta
   point to one element of the matrices' type. Collective over the grid. */
int pmm3d_matmul(char transa, char transb, const void *alpha, int a, int b, const void *beta, int c);

/* Limit the work memory of later products of a grid (pmm3d_matmul) or of a context (pmm3d_pgemm) to a number of bytes
   per rank; 0, the default: no limit. A product is cut into panels along k until it fits, or else returns
   PMM3D_ERROR_MEMORY. The limit does not count A, B and C, nor the copies of them that pmm3d_pgemm makes for a
   product. Not collective, but the same on all ranks. A plan keeps the limit with which it was made. */
int pmm3d_max_workspace(int object, int64_t bytes);

/* target = source, between any two layouts and storage orders, also onto another grid of the same ranks in the same
   order. Collective over the source's grid. */
int pmm3d_redistribute(int source, int target);

/* Make a process grid of the first rows x columns ranks of comm, as a BLACS context. They are numbered by rows (order
   'R', the default of BLACS) or by columns ('C'). All other ranks of comm make the same calls. comm is duplicated.
   Collective over comm. Keep a context for the whole run: it caches the plans of products. */
int pmm3d_context(MPI_Comm comm, int rows, int columns, char order, int *context);

/* As ScaLAPACK's p?gemm, on block-cyclic matrices of one context: sub(C) = alpha op(sub(A)) op(sub(B)) + beta sub(C).
   Descriptors are ScaLAPACK's; the context in them is ignored. ia, ja, ... count from 1. Collective over the context's
   communicator: ranks outside of the process grid pass the same descriptors, with LLD 1. */
int pmm3d_pgemm(int context, char type, char transa, char transb, int m, int n, int k, const void *alpha,
                const void *a, int ia, int ja, const int desca[9], const void *b, int ib, int jb, const int descb[9],
                const void *beta, void *c, int ic, int jc, const int descc[9]);

/* As ScaLAPACK's p?gemr2d: sub(B) = sub(A), m x n, between two contexts of the same ranks in the same order.
   Collective over the communicator of contexta. */
int pmm3d_pgemr2d(char type, int m, int n, const void *a, int ia, int ja, const int desca[9], int contexta, void *b,
                  int ib, int jb, const int descb[9], int contextb);

/* matrix = a, and a = matrix, where a is block-cyclic. The context has the ranks of the matrix's grid, in the same
   order. Collective over the grid of the matrix. */
int pmm3d_from_block_cyclic(int context, const void *a, const int desca[9], int matrix);
int pmm3d_to_block_cyclic(int matrix, int context, void *a, const int desca[9]);

/* matrix = blocks, and blocks = matrix. Each rank has one block of any rows and columns, such as a slab of rows: rows
   box[0] to box[1] and columns box[2] to box[3], counted from 0, the ends excluded. An empty block has equal ends, and
   may be NULL. The blocks of all ranks contain each element of the matrix once. A block has no gaps. All ranks store
   their blocks by rows (order 'C'), or all by columns (order 'F'). Collective over the grid of the matrix. */
int pmm3d_from_blocks(const void *block, const int64_t box[4], char order, int matrix);
int pmm3d_to_blocks(int matrix, void *block, const int64_t box[4], char order);

/* Plans, for operations that are repeated with the same arguments. pmm3d_plan_NAME takes the arguments of pmm3d_NAME,
   checks and plans the operation, and stores the arguments, also alpha and beta. pmm3d_run executes it on the current
   elements of the matrices and arrays: keep these in place until the plan is freed. Small operations gain most.
   Planning, pmm3d_run, and pmm3d_free of a plan are collective, as the operation. pmm3d_run of a plan of
   pmm3d_plan_matmul or pmm3d_plan_redistribute does not compare the ranks, except with PMM3D_DEBUG=1: if ranks run
   different plans, they hang, or the result is wrong. */
int pmm3d_run(int plan);
int pmm3d_plan_matmul(char transa, char transb, const void *alpha, int a, int b, const void *beta, int c, int *plan);
int pmm3d_plan_pgemm(int context, char type, char transa, char transb, int m, int n, int k, const void *alpha,
                     const void *a, int ia, int ja, const int desca[9], const void *b, int ib, int jb,
                     const int descb[9], const void *beta, void *c, int ic, int jc, const int descc[9], int *plan);
int pmm3d_plan_redistribute(int source, int target, int *plan);
int pmm3d_plan_pgemr2d(char type, int m, int n, const void *a, int ia, int ja, const int desca[9], int contexta,
                       void *b, int ib, int jb, const int descb[9], int contextb, int *plan);
int pmm3d_plan_from_block_cyclic(int context, const void *a, const int desca[9], int matrix, int *plan);
int pmm3d_plan_to_block_cyclic(int matrix, int context, void *a, const int desca[9], int *plan);
int pmm3d_plan_from_blocks(const void *block, const int64_t box[4], char order, int matrix, int *plan);
int pmm3d_plan_to_blocks(int matrix, void *block, const int64_t box[4], char order, int *plan);

/* Free a grid, a matrix, a plan or a context, and set its number to 0. 0 is ignored. Collective for grids, plans and
   contexts. Free the matrices and plans of a grid before the grid. */
int pmm3d_free(int *object);

#ifdef __cplusplus
}
#endif

#endif
