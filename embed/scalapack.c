/* Drop-in for ScaLAPACK's p?gemm: linked before -lscalapack, or in LD_PRELOAD. This file then replaces psgemm_,
   pdgemm_, pcgemm_ and pzgemm_ for the program and for ScaLAPACK itself. If PMM3D cannot multiply, or rejects the
   arguments, on all ranks of the process grid, ScaLAPACK's own routine is called. It reports errors in its usual way.

   PMM3D_EMBED_LOG   a file, and no symbolic link, to which each process appends a line for each call: routine, sizes,
                     and who multiplied */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "embedded.h"
#include "pmm3d.h"

void Cblacs_gridinfo(int context, int *rows, int *columns, int *row, int *column);
void Cblacs_get(int context, int request, int *value);
MPI_Comm Cblacs2sys_handle(int handle);
void Cblacs_abort(int context, int code);

enum { CTXT = 1, COMM_OF_GRID = 10, DENSE = 1, DENSE_INB = 2, TEXT = 2048 };

/* A process grid.
   ranks     its ranks in MPI_COMM_WORLD, row by row
   context   the context of PMM3D on these ranks, or 0
   alone     whether the context failed on this rank, but perhaps not on the others */
typedef struct Known {
    struct Known *next;
    int rows, columns, context, alone;
    char why_not[TEXT];
    int ranks[];
} Known;

static Known *all_known = NULL;
static int said = 0, log_failed = 0;

typedef struct {
    char type;
    const char *name, *transa, *transb;
    const int *m, *n, *k;
    const void *alpha, *a;
    const int *ia, *ja, *desca;
    const void *b;
    const int *ib, *jb, *descb;
    const void *beta;
    void *c;
    const int *ic, *jc, *descc;
} Call;

typedef void gemm(const char *, const char *, const int *, const int *, const int *, const void *, const void *,
                  const int *, const int *, const int *, const void *, const int *, const int *, const int *,
                  const void *, void *, const int *, const int *, const int *, size_t, size_t);

static void log_call(const Call *call, const char *by) {
    const char *path = getenv("PMM3D_EMBED_LOG");
    char line[TEXT];
    if (!path || !*path) return;
    int rank = 0, file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_NOFOLLOW, 0600);
    if (file < 0) {
        if (!log_failed)
            fprintf(stderr, "pmm3d: PMM3D_EMBED_LOG=%s cannot be opened: %s. Name a file that this user may write to, "
                    "and that is no symbolic link\n", path, strerror(errno));
        log_failed = 1;
        return;
    }
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    int length = snprintf(line, sizeof line, "rank %d %s %c%c %d %d %d: %s\n", rank, call->name, *call->transa,
                          *call->transb, *call->m, *call->n, *call->k, by);
    if (length >= (int)sizeof line) length = sizeof line - 1, line[length - 1] = '\n';
    if (write(file, line, length) < 0) perror("PMM3D_EMBED_LOG");
    close(file);
}

/* Abort the program as ScaLAPACK does after a fatal error. */
static void give_up(const Call *call, const char *text) {
    int rows, columns, row, column;
    Cblacs_gridinfo(call->desca[CTXT], &rows, &columns, &row, &column);
    fprintf(stderr, "{%5d,%5d}:  On entry to %s: %s\n", row, column, call->name, text);
    Cblacs_abort(call->desca[CTXT], 1);
}

static void by_scalapack(const Call *call, const char *why) {
    char name[16], by[TEXT];
    int rows, columns, row, column;
    snprintf(name, sizeof name, "%s_", call->name);
    gemm *original = (gemm *)dlsym(RTLD_NEXT, name);
    Cblacs_gridinfo(call->desca[CTXT], &rows, &columns, &row, &column);
    if (!original) {
        give_up(call, why);
        return;
    }
    if (!said && row == 0 && column == 0)
        fprintf(stderr, "pmm3d: %s is left to ScaLAPACK (further calls are not reported): %s\n", call->name, why);
    said |= row >= 0;
    snprintf(by, sizeof by, "scalapack, %.1900s", why);
    log_call(call, by);
    original(call->transa, call->transb, call->m, call->n, call->k, call->alpha, call->a, call->ia, call->ja,
             call->desca, call->b, call->ib, call->jb, call->descb, call->beta, call->c, call->ic, call->jc,
             call->descc, 1, 1);
}

/* Convert a descriptor to nine numbers. A descriptor with the size of the first block (DTYPE 2: DTYPE, CTXT, M, N,
   IMB, INB, MB, NB, RSRC, CSRC, LLD) is accepted if IMB = MB and INB = NB. Return 0, or 1 for other descriptors. */
static int in_nine(const int *desc, int nine[9]) {
    if (desc[0] == DENSE_INB && desc[4] == desc[6] && desc[5] == desc[7]) {
        memcpy(nine, desc, 4 * sizeof(int));
        memcpy(nine + 4, desc + 6, 5 * sizeof(int));
        nine[0] = DENSE;
        return 0;
    }
    memcpy(nine, desc, 9 * sizeof(int));
    return desc[0] != DENSE;
}

/* Return the reason why PMM3D cannot multiply, if the arguments show one; NULL otherwise. All ranks find the same
   reason, without communication. */
static const char *why_not(const Call *call, int nine[3][9]) {
    const int *a = call->desca, *b = call->descb, *c = call->descc;
    if (!a[1] && !a[3] && !a[5] && !a[7]) return "its descriptors are of integers of 8 bytes";
    if (a[CTXT] != b[CTXT] || a[CTXT] != c[CTXT]) return "the descriptors are of several contexts";
    return in_nine(a, nine[0]) || in_nine(b, nine[1]) || in_nine(c, nine[2]) ? "a descriptor is of another kind" : NULL;
}

static int key_of_known(void) {
    static int key = MPI_KEYVAL_INVALID;
    if (key == MPI_KEYVAL_INVALID) MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, MPI_COMM_NULL_DELETE_FN, &key, NULL);
    return key;
}

/* Translate the ranks of the grid's communicator to ranks of MPI_COMM_WORLD. */
static void ranks_of(MPI_Comm comm, int size, int *ranks) {
    MPI_Group here, world;
    int *mine = malloc(size * sizeof *mine);
    for (int i = 0; i < size; i++) mine[i] = i;
    MPI_Comm_group(comm, &here);
    MPI_Comm_group(MPI_COMM_WORLD, &world);
    MPI_Group_translate_ranks(here, size, mine, world, ranks);
    MPI_Group_free(&here);
    MPI_Group_free(&world);
    free(mine);
}

/* Return the process grid of these ranks. If it is new, create its context, collectively over the ranks. */
static Known *known_as(MPI_Comm comm, int rows, int columns) {
    int size = rows * columns;
    Known *made = calloc(1, sizeof *made + size * sizeof(int));
    ranks_of(comm, size, made->ranks);
    made->rows = rows, made->columns = columns;
    for (Known *each = all_known; each; each = each->next)
        if (each->rows == rows && each->columns == columns && !memcmp(each->ranks, made->ranks, size * sizeof(int))) {
            free(made);
            return each;
        }
    if (pmm3d_lasting_context(comm, rows, columns, &made->context)) {
        pmm3d_last_error(made->why_not, TEXT);
        made->alone = !pmm3d_error_everywhere();
    }
    made->next = all_known;
    return all_known = made;
}

/* Return the process grid of a BLACS context; NULL if this rank is not in the grid. The communicator of the grid has
   its ranks row by row. The result is cached as an attribute of the communicator, because BLACS and MPI reuse the
   numbers of freed contexts and communicators. */
static Known *known(int context) {
    int rows, columns, row, column, handle, size, found = 0;
    Known *there;
    Cblacs_gridinfo(context, &rows, &columns, &row, &column);
    if (row < 0) return NULL;
    Cblacs_get(context, COMM_OF_GRID, &handle);
    MPI_Comm comm = Cblacs2sys_handle(handle);
    MPI_Comm_get_attr(comm, key_of_known(), &there, &found);
    if (found) return there;
    MPI_Comm_size(comm, &size);
    if (size != rows * columns) return NULL;
    there = known_as(comm, rows, columns);
    MPI_Comm_set_attr(comm, key_of_known(), there);
    return there;
}

static void multiply(const Call *call) {
    char text[TEXT];
    int nine[3][9];
    const char *why = why_not(call, nine);
    Known *on = why ? NULL : known(call->desca[CTXT]);
    if (on && on->alone) {
        give_up(call, on->why_not);
        return;
    }
    if (!on || !on->context) {
        by_scalapack(call, on ? on->why_not : why ? why : "this rank is not in the process grid");
        return;
    }
    int code = pmm3d_pgemm(on->context, call->type, *call->transa, *call->transb, *call->m, *call->n, *call->k,
                           call->alpha, call->a, *call->ia, *call->ja, nine[0], call->b, *call->ib, *call->jb, nine[1],
                           call->beta, call->c, *call->ic, *call->jc, nine[2]);
    if (code == PMM3D_OK) {
        log_call(call, "pmm3d");
        return;
    }
    pmm3d_last_error(text, sizeof text);
    if (pmm3d_error_everywhere()) by_scalapack(call, text);
    else give_up(call, text);
}

#define GEMM(letter)                                                                                                   \
    void p##letter##gemm_(const char *transa, const char *transb, const int *m, const int *n, const int *k,            \
                          const void *alpha, const void *a, const int *ia, const int *ja, const int *desca,            \
                          const void *b, const int *ib, const int *jb, const int *descb, const void *beta, void *c,    \
                          const int *ic, const int *jc, const int *descc) {                                            \
        const Call call = {#letter[0], "p" #letter "gemm", transa, transb, m, n, k, alpha, a, ia, ja, desca, b, ib,    \
                           jb, descb, beta, c, ic, jc, descc};                                                         \
        multiply(&call);                                                                                               \
    }

GEMM(s)
GEMM(d)
GEMM(c)
GEMM(z)
