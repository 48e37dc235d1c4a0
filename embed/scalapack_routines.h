/* The routines of ScaLAPACK that scalapack.c replaces: their arguments, their operations, and the call of PMM3D. */
#ifndef PMM3D_SCALAPACK_ROUTINES_H
#define PMM3D_SCALAPACK_ROUTINES_H

#include "pmm3d.h"

/* The arguments of a routine are pointers, here called words. C, I and M are the values of a character, of an integer,
   and of a matrix: four words, of which the last is one of the descriptors in nine. contexts: those of PMM3D of the
   first and of the last matrix. */
#define C(at) (*(const char *)words[at])
#define I(at) (*(const int *)words[at])
#define M(at, which) words[at], I(at + 1), I(at + 2), nine[which]
#define ON contexts[0], type
#define BY_PMM3D(name, ...)                                                                                            \
    static int name##_by_pmm3d(const int *contexts, char type, void *const *words, int (*nine)[9]) {                   \
        return pmm3d_p##name(__VA_ARGS__);                                                                             \
    }
#define MOVE(name) BY_PMM3D(name, ON, I(0), I(1), words[2], M(3, 0), words[7], M(8, 1))
#define RANK_K(name) BY_PMM3D(name, ON, C(0), C(1), I(2), I(3), words[4], M(5, 0), words[9], M(10, 1))
#define TWO_FACTORS(name) BY_PMM3D(name, ON, C(0), C(1), I(2), I(3), words[4], M(5, 0), M(9, 1), words[13], M(14, 2))
#define TRIANGLE(name) BY_PMM3D(name, ON, C(0), C(1), C(2), C(3), I(4), I(5), words[6], M(7, 0), M(11, 1))
BY_PMM3D(gemm, ON, C(0), C(1), I(2), I(3), I(4), words[5], M(6, 0), M(10, 1), words[14], M(15, 2))
MOVE(tran)
MOVE(tranu)
MOVE(tranc)
BY_PMM3D(geadd, ON, C(0), I(1), I(2), words[3], M(4, 0), words[8], M(9, 1))
BY_PMM3D(gemr2d, type, I(0), I(1), M(2, 0), contexts[0], M(6, 1), contexts[1])
RANK_K(syrk)
RANK_K(herk)
TWO_FACTORS(syr2k)
TWO_FACTORS(her2k)
TWO_FACTORS(symm)
TWO_FACTORS(hemm)
TRIANGLE(trmm)
TRIANGLE(trsm)
BY_PMM3D(potrf, ON, C(0), I(1), M(2, 0), words[6])
BY_PMM3D(potrs, ON, C(0), I(1), I(2), M(3, 0), M(7, 1), words[11])
BY_PMM3D(trtri, ON, C(0), C(1), I(2), M(3, 0), words[7])

/* form       the arguments: c a character, i an integer, s a number, M a matrix, x a context, o INFO
   m, n, k    the words with the sizes; or, for k, NONE for a move, and OF_SIDE if k is m (side 'L') or n
   share      multiplications / (m n k) */
typedef struct {
    const char *name, *form;
    int m, n, k;
    double share;
    int (*by_pmm3d)(const int *contexts, char type, void *const *words, int (*nine)[9]);
} Routine;

enum { NONE = -1, OF_SIDE = -2 };
#define ROUTINE(name, ...) [of_##name] = {#name, __VA_ARGS__, name##_by_pmm3d}
enum { of_gemm, of_tran, of_tranu, of_tranc, of_geadd, of_gemr2d, of_syrk, of_herk, of_syr2k, of_her2k, of_symm,
       of_hemm, of_trmm, of_trsm, of_potrf, of_potrs, of_trtri, KINDS };
static const Routine ROUTINES[KINDS] = {
    ROUTINE(gemm, "cciiisMMsM", 2, 3, 4, 1),
    ROUTINE(tran, "iisMsM", 0, 1, NONE, 0),
    ROUTINE(tranu, "iisMsM", 0, 1, NONE, 0),
    ROUTINE(tranc, "iisMsM", 0, 1, NONE, 0),
    ROUTINE(geadd, "ciisMsM", 1, 2, NONE, 0),
    ROUTINE(gemr2d, "iiMMx", 0, 1, NONE, 0),
    ROUTINE(syrk, "cciisMsM", 2, 2, 3, 1. / 2),
    ROUTINE(herk, "cciisMsM", 2, 2, 3, 1. / 2),
    ROUTINE(syr2k, "cciisMMsM", 2, 2, 3, 1),
    ROUTINE(her2k, "cciisMMsM", 2, 2, 3, 1),
    ROUTINE(symm, "cciisMMsM", 2, 3, OF_SIDE, 1),
    ROUTINE(hemm, "cciisMMsM", 2, 3, OF_SIDE, 1),
    ROUTINE(trmm, "cccciisMM", 4, 5, OF_SIDE, 1. / 2),
    ROUTINE(trsm, "cccciisMM", 4, 5, OF_SIDE, 1. / 2),
    ROUTINE(potrf, "ciMo", 1, 1, 1, 1. / 6),
    ROUTINE(potrs, "ciiMMo", 1, 2, 1, 1),
    ROUTINE(trtri, "cciMo", 2, 2, 2, 1. / 6),
};

#endif
