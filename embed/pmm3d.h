/* pmm3d from C and C++: distributed products on the caller's communicators. Link with -lpmm3d.

   The first call starts Python in this process: the interpreter of PMM3D_PYTHON (its path), or else the one with which
   the library was built. Python uses the MPI of this process.

   Errors. Every function returns PMM3D_OK or another of the codes below; pmm3d_last_error returns the text. An error in
   the arguments of a collective call, on any rank, is returned on every rank, with the same text, before anything is
   sent. Then pmm3d_error_everywhere returns 1. If it returns 0, other ranks may wait in a call: end the job. This is so
   for a communicator that the process cannot use; for the arguments of pmm3d_run, pmm3d_run_matmul, pmm3d_begin and
   pmm3d_wait, which do not compare the ranks; and, in a process with several grids or contexts, if the number of the
   object over which the call is collective names none (pmm3d_matmul: if none of the three names one). The library ends
   the process only if a call can never return: if a rank is lost, or if ranks wait for each other. Any other wait
   beyond PMM3D_TIMEOUT (600 seconds; 0: no limit) is logged, and continues.

   Order. Call MPI_Init or MPI_Init_thread first. Users are counted: each component of a program (the program itself, a
   library) calls pmm3d_start at its begin and pmm3d_finalize at its end, on all its ranks. Each component frees its own
   objects with pmm3d_free before pmm3d_finalize. If components run on different ranks, they must: users are counted on
   each rank, and only pmm3d_finalize of the last user frees all objects. A program with one component may omit
   pmm3d_start: pmm3d_grid and pmm3d_context count one user if there is none. After the last pmm3d_finalize, a program
   may start again. Numbers of freed objects are not used again. MPI_Finalize frees all objects, whatever the count.

   Threads. One thread at a time may call. A call during another call returns PMM3D_ERROR_THREAD. Below
   MPI_THREAD_SERIALIZED only the thread that started MPI may call, and messages make progress only in calls, so nothing
   overlaps with a GEMM.

   Integers are int (32 bits). Rows, columns and boxes of matrices are int64_t. The functions with descriptors have
   integers pmm3d_int for sizes, rows, columns, descriptors and INFO: int, or int64_t if PMM3D_ILP64 is defined before
   this header is included. Both kinds may be used in one program. Objects are numbers above 0.
   The number of an object may differ between ranks. In a collective call all ranks name the same object: the ranks of a
   grid make its matrices and plans in the same order. */
#ifndef PMM3D_H
#define PMM3D_H

#include <mpi.h>
#include <stdint.h>

#ifdef PMM3D_ILP64
typedef int64_t pmm3d_int;
#define pmm3d_pgemm pmm3d_pgemm_64
#define pmm3d_pgemr2d pmm3d_pgemr2d_64
#define pmm3d_ptran pmm3d_ptran_64
#define pmm3d_ptranu pmm3d_ptranu_64
#define pmm3d_ptranc pmm3d_ptranc_64
#define pmm3d_pgeadd pmm3d_pgeadd_64
#define pmm3d_psyrk pmm3d_psyrk_64
#define pmm3d_pherk pmm3d_pherk_64
#define pmm3d_psyr2k pmm3d_psyr2k_64
#define pmm3d_pher2k pmm3d_pher2k_64
#define pmm3d_psymm pmm3d_psymm_64
#define pmm3d_phemm pmm3d_phemm_64
#define pmm3d_ptrmm pmm3d_ptrmm_64
#define pmm3d_ptrsm pmm3d_ptrsm_64
#define pmm3d_ppotrf pmm3d_ppotrf_64
#define pmm3d_ppotrs pmm3d_ppotrs_64
#define pmm3d_pposv pmm3d_pposv_64
#define pmm3d_ptrtri pmm3d_ptrtri_64
#define pmm3d_from_block_cyclic pmm3d_from_block_cyclic_64
#define pmm3d_to_block_cyclic pmm3d_to_block_cyclic_64
#define pmm3d_plan_pgemm pmm3d_plan_pgemm_64
#define pmm3d_plan_pgemr2d pmm3d_plan_pgemr2d_64
#define pmm3d_plan_ptran pmm3d_plan_ptran_64
#define pmm3d_plan_ptranu pmm3d_plan_ptranu_64
#define pmm3d_plan_ptranc pmm3d_plan_ptranc_64
#define pmm3d_plan_pgeadd pmm3d_plan_pgeadd_64
#define pmm3d_plan_from_block_cyclic pmm3d_plan_from_block_cyclic_64
#define pmm3d_plan_to_block_cyclic pmm3d_plan_to_block_cyclic_64
#else
typedef int pmm3d_int;
#endif

/* The arguments of a block-cyclic matrix that is read, or written: for example a, ia, ja, desca. The part of the matrix
   begins at row ia and column ja, counted from 1. */
#define PMM3D_IN(x) const void *x, pmm3d_int i##x, pmm3d_int j##x, const pmm3d_int desc##x[9]
#define PMM3D_OUT(x) void *x, pmm3d_int i##x, pmm3d_int j##x, const pmm3d_int desc##x[9]

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

/* Name the array library of the shards, blocks and arrays that later calls get, on a grid or a context: "numpy" (the
   default: memory of the host), "cupy" or "torch:cuda" (memory of the current device of this thread). The Python of
   PMM3D_PYTHON needs this library. alpha, beta, boxes, descriptors and INFO are in memory of the host. Before a call,
   the caller waits until the device has written the elements. When a call returns, its results are in the memory. Not
   collective, but the same on all ranks, before the matrices of a grid are made. */
int pmm3d_library(int object, const char *library);

/* target = source, between any two layouts and storage orders, also onto another grid of the same ranks in the same
   order. Collective over the source's grid. */
int pmm3d_redistribute(int source, int target);

/* A = Q R of an m x n matrix with m >= n, by CholeskyQR2, with shifted passes for an ill-conditioned A. Q, m x n, may be
   A. R, n x n, shares no elements with them, and has zeros below its diagonal. Any layouts on grids of the same ranks.
   PMM3D_ERROR_ARGUMENT, also if the columns of A are linearly dependent to rounding; Q and R are then unchanged.
   Collective over the grid of A. */
int pmm3d_cholesky_qr(int a, int q, int r);

/* Make a process grid of the first rows x columns ranks of comm, as a BLACS context. They are numbered by rows (order
   'R', the default of BLACS) or by columns ('C'). All other ranks of comm make the same calls. comm is duplicated.
   Collective over comm. Keep a context for the whole run: it caches the plans of products. */
int pmm3d_context(MPI_Comm comm, int rows, int columns, char order, int *context);

/* Free the memory that a context keeps for later products, and the plans that it caches. Plans of the caller remain. An
   error if a product of the context has a request. Collective over the context's communicator. */
int pmm3d_context_trim(int context);

/* ScaLAPACK's routines on block-cyclic matrices. Arguments are those of ScaLAPACK, in its order, after the context and
   the type. Descriptors are ScaLAPACK's; the context in them is ignored: all matrices are on the context of the call.
   alpha and beta point to one element of the matrices' type. Letters are passed by value. If alpha is 0, A and B are not
   read, also if they contain NaN; if beta is 0, C is not read. Elements outside of sub(C), and the triangle that uplo
   does not name, are neither read nor written. Collective over the context's communicator: ranks outside of the process
   grid pass the same descriptors, with LLD 1.

   p?gemm: sub(C) = alpha op(sub(A)) op(sub(B)) + beta sub(C). */
int pmm3d_pgemm(int context, char type, char transa, char transb, pmm3d_int m, pmm3d_int n, pmm3d_int k,
                const void *alpha, PMM3D_IN(a), PMM3D_IN(b), const void *beta, PMM3D_OUT(c));

/* p?gemr2d: sub(B) = sub(A), m x n, between two contexts of the same ranks in the same order. Collective over the
   communicator of contexta. */
int pmm3d_pgemr2d(char type, pmm3d_int m, pmm3d_int n, PMM3D_IN(a), int contexta, PMM3D_OUT(b), int contextb);

/* sub(C) = alpha op(sub(A)) + beta sub(C), where sub(C) is m x n. p?tran, p?tranu: op(A) = A^T. p?tranc: op(A) = A^H.
   p?geadd: op by trans, 'N', 'T' or 'C'. */
int pmm3d_ptran(int context, char type, pmm3d_int m, pmm3d_int n, const void *alpha, PMM3D_IN(a), const void *beta,
                PMM3D_OUT(c));
int pmm3d_ptranu(int context, char type, pmm3d_int m, pmm3d_int n, const void *alpha, PMM3D_IN(a), const void *beta,
                 PMM3D_OUT(c));
int pmm3d_ptranc(int context, char type, pmm3d_int m, pmm3d_int n, const void *alpha, PMM3D_IN(a), const void *beta,
                 PMM3D_OUT(c));
int pmm3d_pgeadd(int context, char type, char trans, pmm3d_int m, pmm3d_int n, const void *alpha, PMM3D_IN(a),
                 const void *beta, PMM3D_OUT(c));

/* sub(C) = alpha sub(A) sub(A)^T + beta sub(C) (trans 'N', A is n x k), or alpha sub(A)^T sub(A) + beta sub(C) (trans
   'T', A is k x n). p?herk: ^H instead of ^T, trans 'N' or 'C'; alpha and beta are real numbers: float for types 's' and
   'c', double for 'd' and 'z'. uplo 'L' or 'U': the triangle of sub(C), n x n, that is computed. */
int pmm3d_psyrk(int context, char type, char uplo, char trans, pmm3d_int n, pmm3d_int k, const void *alpha, PMM3D_IN(a),
                const void *beta, PMM3D_OUT(c));
int pmm3d_pherk(int context, char type, char uplo, char trans, pmm3d_int n, pmm3d_int k, const void *alpha, PMM3D_IN(a),
                const void *beta, PMM3D_OUT(c));

/* sub(C) = alpha sub(A) sub(B)^T + alpha sub(B) sub(A)^T + beta sub(C) (trans 'N'), or with A^T B and B^T A (trans 'T').
   p?her2k: alpha sub(A) sub(B)^H + conj(alpha) sub(B) sub(A)^H + beta sub(C); beta is a real number, as of p?herk. */
int pmm3d_psyr2k(int context, char type, char uplo, char trans, pmm3d_int n, pmm3d_int k, const void *alpha,
                 PMM3D_IN(a), PMM3D_IN(b), const void *beta, PMM3D_OUT(c));
int pmm3d_pher2k(int context, char type, char uplo, char trans, pmm3d_int n, pmm3d_int k, const void *alpha,
                 PMM3D_IN(a), PMM3D_IN(b), const void *beta, PMM3D_OUT(c));

/* sub(C) = alpha sub(A) sub(B) + beta sub(C) (side 'L'), or alpha sub(B) sub(A) + beta sub(C) (side 'R'). sub(A) is
   symmetric (p?symm) or Hermitian (p?hemm); uplo names the triangle that is read. sub(C) is m x n. */
int pmm3d_psymm(int context, char type, char side, char uplo, pmm3d_int m, pmm3d_int n, const void *alpha, PMM3D_IN(a),
                PMM3D_IN(b), const void *beta, PMM3D_OUT(c));
int pmm3d_phemm(int context, char type, char side, char uplo, pmm3d_int m, pmm3d_int n, const void *alpha, PMM3D_IN(a),
                PMM3D_IN(b), const void *beta, PMM3D_OUT(c));

/* p?trmm: sub(B) = alpha op(sub(A)) sub(B) (side 'L'), or alpha sub(B) op(sub(A)) (side 'R'). p?trsm: the solution X of
   op(sub(A)) X = alpha sub(B), or X op(sub(A)) = alpha sub(B), overwrites sub(B), m x n. sub(A) is triangular; diag 'U':
   with a diagonal of ones, which is not read; 'N': with any diagonal. */
int pmm3d_ptrmm(int context, char type, char side, char uplo, char transa, char diag, pmm3d_int m, pmm3d_int n,
                const void *alpha, PMM3D_IN(a), PMM3D_OUT(b));
int pmm3d_ptrsm(int context, char type, char side, char uplo, char transa, char diag, pmm3d_int m, pmm3d_int n,
                const void *alpha, PMM3D_IN(a), PMM3D_OUT(b));

/* p?potrf: the Cholesky factor of sub(A), symmetric or Hermitian and positive definite, overwrites its triangle. p?potrs
   solves sub(A) X = sub(B) for nrhs columns with this factor; X overwrites sub(B). p?posv does both. p?trtri: the
   inverse of a triangular sub(A) overwrites it. info is that of ScaLAPACK, the same on all ranks. i > 0: the leading
   minor of order i is not positive definite (p?potrf, p?posv), or element (i, i) is zero (p?trtri); the function returns
   PMM3D_OK. If it returns an error, info is -1. */
int pmm3d_ppotrf(int context, char type, char uplo, pmm3d_int n, PMM3D_OUT(a), pmm3d_int *info);
int pmm3d_ppotrs(int context, char type, char uplo, pmm3d_int n, pmm3d_int nrhs, PMM3D_IN(a), PMM3D_OUT(b),
                 pmm3d_int *info);
int pmm3d_pposv(int context, char type, char uplo, pmm3d_int n, pmm3d_int nrhs, PMM3D_OUT(a), PMM3D_OUT(b),
                pmm3d_int *info);
int pmm3d_ptrtri(int context, char type, char uplo, char diag, pmm3d_int n, PMM3D_OUT(a), pmm3d_int *info);

/* matrix = a, and a = matrix, where a is block-cyclic. The context has the ranks of the matrix's grid, in the same
   order. Collective over the grid of the matrix. */
int pmm3d_from_block_cyclic(int context, const void *a, const pmm3d_int desca[9], int matrix);
int pmm3d_to_block_cyclic(int matrix, int context, void *a, const pmm3d_int desca[9]);

/* matrix = blocks, and blocks = matrix. Each rank has one block of any rows and columns, such as a slab of rows: rows
   box[0] to box[1] and columns box[2] to box[3], counted from 0, the ends excluded. An empty block has equal ends, and
   may be NULL. The blocks of all ranks contain each element of the matrix once. A block has no gaps. All ranks store
   their blocks by rows (order 'C'), or all by columns (order 'F'). Collective over the grid of the matrix. */
int pmm3d_from_blocks(const void *block, const int64_t box[4], char order, int matrix);
int pmm3d_to_blocks(int matrix, void *block, const int64_t box[4], char order);

/* Plans, for operations that are repeated with the same arguments. pmm3d_plan_NAME takes the arguments of pmm3d_NAME,
   checks and plans the operation, and stores the arguments, also alpha and beta. pmm3d_run executes it on the current
   elements of the matrices and arrays: keep these in place until the plan is freed. Small operations gain most.
   Planning, pmm3d_run, and pmm3d_free of a plan are collective, as the operation. Running a plan of pmm3d_plan_matmul or
   pmm3d_plan_redistribute does not compare the ranks, except with PMM3D_DEBUG=1: if ranks run different plans, they
   hang, or the result is wrong. */
int pmm3d_run(int plan);
int pmm3d_plan_matmul(char transa, char transb, const void *alpha, int a, int b, const void *beta, int c, int *plan);
int pmm3d_plan_pgemm(int context, char type, char transa, char transb, pmm3d_int m, pmm3d_int n, pmm3d_int k,
                     const void *alpha, PMM3D_IN(a), PMM3D_IN(b), const void *beta, PMM3D_OUT(c), int *plan);
int pmm3d_plan_redistribute(int source, int target, int *plan);
int pmm3d_plan_pgemr2d(char type, pmm3d_int m, pmm3d_int n, PMM3D_IN(a), int contexta, PMM3D_OUT(b), int contextb,
                       int *plan);
int pmm3d_plan_ptran(int context, char type, pmm3d_int m, pmm3d_int n, const void *alpha, PMM3D_IN(a), const void *beta,
                     PMM3D_OUT(c), int *plan);
int pmm3d_plan_ptranu(int context, char type, pmm3d_int m, pmm3d_int n, const void *alpha, PMM3D_IN(a),
                      const void *beta, PMM3D_OUT(c), int *plan);
int pmm3d_plan_ptranc(int context, char type, pmm3d_int m, pmm3d_int n, const void *alpha, PMM3D_IN(a),
                      const void *beta, PMM3D_OUT(c), int *plan);
int pmm3d_plan_pgeadd(int context, char type, char trans, pmm3d_int m, pmm3d_int n, const void *alpha, PMM3D_IN(a),
                      const void *beta, PMM3D_OUT(c), int *plan);
int pmm3d_plan_from_block_cyclic(int context, const void *a, const pmm3d_int desca[9], int matrix, int *plan);
int pmm3d_plan_to_block_cyclic(int matrix, int context, void *a, const pmm3d_int desca[9], int *plan);
int pmm3d_plan_from_blocks(const void *block, const int64_t box[4], char order, int matrix, int *plan);
int pmm3d_plan_to_blocks(int matrix, void *block, const int64_t box[4], char order, int *plan);

/* Run a plan of pmm3d_plan_matmul with other matrices, or of pmm3d_plan_pgemm with other arrays, and with other factors.
   The matrices have the shapes, layouts and storage orders of those of the plan, and the arrays have its descriptors.
   pmm3d_run and pmm3d_begin use the arguments of the plan. Collective, as pmm3d_run. */
int pmm3d_run_matmul(int plan, const void *alpha, int a, int b, const void *beta, int c);
int pmm3d_run_pgemm(int plan, const void *alpha, const void *a, const void *b, const void *beta, void *c);

/* Begin to run a plan, and end it. pmm3d_begin sends the first messages, and returns. Until pmm3d_wait returns, the
   caller changes none of the matrices and arrays of the plan, and does not use those that are written. pmm3d_wait
   computes, ends the messages, and sets the number of the request to 0, also if it returns an error; 0 is ignored.
   Several plans may be under way. A plan with a request cannot be run, begun or freed, nor can its grid or context be
   freed; pmm3d_finalize waits for all requests. Below MPI_THREAD_SERIALIZED messages make progress only in calls. Both
   are collective, in the same order on all ranks. */
int pmm3d_begin(int plan, int *request);
int pmm3d_wait(int *request);

/* Free a grid, a matrix, a plan or a context, and set its number to 0. 0 is ignored. Collective for grids, plans and
   contexts. Free the matrices and plans of a grid before the grid. */
int pmm3d_free(int *object);

#ifdef __cplusplus
}
#endif

#endif
