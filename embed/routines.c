/* The functions with descriptors. Arguments are passed in the order of pmm3d.embedding.routines. */
#include "calls.h"
#include "pmm3d.h"

enum { UNKNOWN = 0 }; /* in place of the letter of a type, which only Fortran knows */
#define WIDTH sizeof(pmm3d_int)
#define FACTOR(x) ADDRESS(x), UNKNOWN
#define MATRIX(x) ADDRESS(x), i##x, j##x, ADDRESS(desc##x), UNKNOWN

/* TYPES: declarations of the arguments. */
#define ROUTINE(name, TYPES, ...)                                                                                      \
    int pmm3d_##name(TYPES) {                                                                                          \
        int64_t results[4];                                                                                            \
        return CALL(#name, results, WIDTH, AT_ONCE, __VA_ARGS__);                                                      \
    }
#define PLAN(name, TYPES, ...)                                                                                         \
    int pmm3d_plan_##name(TYPES, int *plan) {                                                                          \
        int64_t results[4];                                                                                            \
        return pmm3d_made(CALL("plan_" #name, results, WIDTH, ADDRESS(plan), __VA_ARGS__), results, plan);             \
    }
#define ROUTINE_WITH_INFO(name, TYPES, ...)                                                                            \
    int pmm3d_##name(TYPES, pmm3d_int *info) {                                                                         \
        int64_t results[4];                                                                                            \
        int code = CALL(#name, results, WIDTH, AT_ONCE, __VA_ARGS__, ADDRESS(info));                                   \
        if (info) *info = code ? -1 : (pmm3d_int)results[0];                                                           \
        return code;                                                                                                   \
    }

#define PGEMM                                                                                                          \
    int context, char type, char transa, char transb, pmm3d_int m, pmm3d_int n, pmm3d_int k, const void *alpha,        \
        PMM3D_IN(a), PMM3D_IN(b), const void *beta, PMM3D_OUT(c)
#define PASS_PGEMM                                                                                                     \
    context, type, transa, transb, m, n, k, FACTOR(alpha), MATRIX(a), MATRIX(b), FACTOR(beta), MATRIX(c)
ROUTINE(pgemm, PGEMM, PASS_PGEMM)
PLAN(pgemm, PGEMM, PASS_PGEMM)

#define PGEMR2D char type, pmm3d_int m, pmm3d_int n, PMM3D_IN(a), int contexta, PMM3D_OUT(b), int contextb
#define PASS_PGEMR2D type, m, n, MATRIX(a), contexta, MATRIX(b), contextb
ROUTINE(pgemr2d, PGEMR2D, PASS_PGEMR2D)
PLAN(pgemr2d, PGEMR2D, PASS_PGEMR2D)

#define MOVED                                                                                                          \
    int context, char type, pmm3d_int m, pmm3d_int n, const void *alpha, PMM3D_IN(a), const void *beta, PMM3D_OUT(c)
#define PASS_MOVED context, type, m, n, FACTOR(alpha), MATRIX(a), FACTOR(beta), MATRIX(c)
ROUTINE(ptran, MOVED, PASS_MOVED)
PLAN(ptran, MOVED, PASS_MOVED)
ROUTINE(ptranu, MOVED, PASS_MOVED)
PLAN(ptranu, MOVED, PASS_MOVED)
ROUTINE(ptranc, MOVED, PASS_MOVED)
PLAN(ptranc, MOVED, PASS_MOVED)

#define PGEADD                                                                                                         \
    int context, char type, char trans, pmm3d_int m, pmm3d_int n, const void *alpha, PMM3D_IN(a), const void *beta,    \
        PMM3D_OUT(c)
#define PASS_PGEADD context, type, trans, m, n, FACTOR(alpha), MATRIX(a), FACTOR(beta), MATRIX(c)
ROUTINE(pgeadd, PGEADD, PASS_PGEADD)
PLAN(pgeadd, PGEADD, PASS_PGEADD)

#define RANK_K                                                                                                         \
    int context, char type, char uplo, char trans, pmm3d_int n, pmm3d_int k, const void *alpha, PMM3D_IN(a),           \
        const void *beta, PMM3D_OUT(c)
#define PASS_RANK_K context, type, uplo, trans, n, k, FACTOR(alpha), MATRIX(a), FACTOR(beta), MATRIX(c)
ROUTINE(psyrk, RANK_K, PASS_RANK_K)
ROUTINE(pherk, RANK_K, PASS_RANK_K)

#define RANK_2K                                                                                                        \
    int context, char type, char uplo, char trans, pmm3d_int n, pmm3d_int k, const void *alpha, PMM3D_IN(a),           \
        PMM3D_IN(b), const void *beta, PMM3D_OUT(c)
#define PASS_RANK_2K context, type, uplo, trans, n, k, FACTOR(alpha), MATRIX(a), MATRIX(b), FACTOR(beta), MATRIX(c)
ROUTINE(psyr2k, RANK_2K, PASS_RANK_2K)
ROUTINE(pher2k, RANK_2K, PASS_RANK_2K)

#define SYMMETRIC                                                                                                      \
    int context, char type, char side, char uplo, pmm3d_int m, pmm3d_int n, const void *alpha, PMM3D_IN(a),            \
        PMM3D_IN(b), const void *beta, PMM3D_OUT(c)
#define PASS_SYMMETRIC context, type, side, uplo, m, n, FACTOR(alpha), MATRIX(a), MATRIX(b), FACTOR(beta), MATRIX(c)
ROUTINE(psymm, SYMMETRIC, PASS_SYMMETRIC)
ROUTINE(phemm, SYMMETRIC, PASS_SYMMETRIC)

#define TRIANGULAR                                                                                                     \
    int context, char type, char side, char uplo, char transa, char diag, pmm3d_int m, pmm3d_int n, const void *alpha, \
        PMM3D_IN(a), PMM3D_OUT(b)
#define PASS_TRIANGULAR context, type, side, uplo, transa, diag, m, n, FACTOR(alpha), MATRIX(a), MATRIX(b)
ROUTINE(ptrmm, TRIANGULAR, PASS_TRIANGULAR)
ROUTINE(ptrsm, TRIANGULAR, PASS_TRIANGULAR)

#define PPOTRF int context, char type, char uplo, pmm3d_int n, PMM3D_OUT(a)
ROUTINE_WITH_INFO(ppotrf, PPOTRF, context, type, uplo, n, MATRIX(a))

#define PPOTRS int context, char type, char uplo, pmm3d_int n, pmm3d_int nrhs, PMM3D_IN(a), PMM3D_OUT(b)
ROUTINE_WITH_INFO(ppotrs, PPOTRS, context, type, uplo, n, nrhs, MATRIX(a), MATRIX(b))

#define PPOSV int context, char type, char uplo, pmm3d_int n, pmm3d_int nrhs, PMM3D_OUT(a), PMM3D_OUT(b)
ROUTINE_WITH_INFO(pposv, PPOSV, context, type, uplo, n, nrhs, MATRIX(a), MATRIX(b))

#define PTRTRI int context, char type, char uplo, char diag, pmm3d_int n, PMM3D_OUT(a)
ROUTINE_WITH_INFO(ptrtri, PTRTRI, context, type, uplo, diag, n, MATRIX(a))

/* Between a block-cyclic matrix and a matrix of a grid. */
#define CYCLIC(name, TYPES, ...)                                                                                       \
    int pmm3d_##name(TYPES) {                                                                                          \
        int64_t results[4];                                                                                            \
        return CALL(#name, results, __VA_ARGS__, UNKNOWN, WIDTH, AT_ONCE);                                             \
    }                                                                                                                  \
    int pmm3d_plan_##name(TYPES, int *plan) {                                                                          \
        int64_t results[4];                                                                                            \
        return pmm3d_made(CALL("plan_" #name, results, __VA_ARGS__, UNKNOWN, WIDTH, ADDRESS(plan)), results, plan);    \
    }

#define FROM_BLOCK_CYCLIC int context, const void *a, const pmm3d_int desca[9], int matrix
CYCLIC(from_block_cyclic, FROM_BLOCK_CYCLIC, context, ADDRESS(a), ADDRESS(desca), matrix)

#define TO_BLOCK_CYCLIC int matrix, int context, void *a, const pmm3d_int desca[9]
CYCLIC(to_block_cyclic, TO_BLOCK_CYCLIC, matrix, context, ADDRESS(a), ADDRESS(desca))
