/* Drop-in for ScaLAPACK's p?gemm: linked before -lscalapack, or in LD_PRELOAD. This file then replaces psgemm_,
   pdgemm_, pcgemm_ and pzgemm_ for the program and for ScaLAPACK itself. ScaLAPACK's own routine computes small
   products, and products that PMM3D rejects on all ranks of the process grid. It reports errors in its usual way.
   Python starts at the first product that is large enough.

   PMM3D_SCALAPACK_BELOW   a length L (1024; 0: PMM3D takes all products). A product is small if m, n or k is below L, or
                           if m n k / ranks is below L^3. The value of the first rank of a process grid counts for the
                           grid
   PMM3D_EMBED_LOG         a file, and no symbolic link, to which each process appends a line when it is loaded, a line
                           for each call (routine, sizes, library), and, if it made a call, a summary in MPI_Finalize */
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

enum { CTXT = 1, COMM_OF_GRID = 10, DENSE = 1, DENSE_INB = 2, TEXT = 2048, REASONS = 16 };
static const double DEFAULT_BELOW = 1024;

/* A process grid.
   ranks     its ranks in MPI_COMM_WORLD, row by row
   below     PMM3D_SCALAPACK_BELOW
   tried     whether the context was requested
   context   the context of PMM3D on these ranks, or 0
   alone     whether the context failed on this rank, but perhaps not on the others */
typedef struct Known {
    struct Known *next;
    int rows, columns, tried, context, alone;
    double below;
    char why_not[TEXT];
    int ranks[];
} Known;

/* Calls of this process, and their seconds. why: the reason why ScaLAPACK computed them. */
typedef struct {
    char why[TEXT];
    long calls;
    double seconds;
} Calls;

static Known *all_known = NULL;
static Calls taken, left[REASONS];
static int reasons = 0, log_failed = 0;
static double starting = 0;
static const char TOO_SMALL[] = "small (PMM3D_SCALAPACK_BELOW)";

typedef void gemm(const char *, const char *, const int *, const int *, const int *, const void *, const void *,
                  const int *, const int *, const int *, const void *, const int *, const int *, const int *,
                  const void *, void *, const int *, const int *, const int *, size_t, size_t);

/* A call of p?gemm. scalapacks: ScaLAPACK's routine, or NULL. */
typedef struct {
    char type;
    const char *name;
    gemm *scalapacks;
    const char *transa, *transb;
    const int *m, *n, *k;
    const void *alpha, *a;
    const int *ia, *ja, *desca;
    const void *b;
    const int *ib, *jb, *descb;
    const void *beta;
    void *c;
    const int *ic, *jc, *descc;
} Call;

static const char *log_path(void) {
    const char *path = getenv("PMM3D_EMBED_LOG");
    return path && *path ? path : NULL;
}

/* Append a line, which ends with a line feed even if it was cut. */
static void append(char *line, int length, int size) {
    int file = open(log_path(), O_WRONLY | O_APPEND | O_CREAT | O_NOFOLLOW, 0600);
    if (file < 0) {
        if (!log_failed)
            fprintf(stderr, "pmm3d: PMM3D_EMBED_LOG=%s cannot be opened: %s. Name a file that this user may write to, "
                    "and that is no symbolic link\n", log_path(), strerror(errno));
        log_failed = 1;
        return;
    }
    if (length >= size) length = size - 1, line[length - 1] = '\n';
    if (write(file, line, length) < 0) perror("PMM3D_EMBED_LOG");
    close(file);
}

#define LOG(...)                                                                                                       \
    do {                                                                                                               \
        char line_[TEXT];                                                                                              \
        if (log_path()) append(line_, snprintf(line_, sizeof line_, __VA_ARGS__), sizeof line_);                       \
    } while (0)

/* Other processes that inherit LD_PRELOAD, such as a shell, have no BLACS. */
__attribute__((constructor)) static void log_presence(void) {
    if (dlsym(RTLD_DEFAULT, "Cblacs_gridinfo"))
        LOG("process %ld, %s: pmm3d's p?gemm is loaded\n", (long)getpid(), program_invocation_short_name);
}

static int rank_in_world(void) {
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    return rank;
}

static int log_summary(MPI_Comm comm, int key, void *value, void *extra) {
    (void)comm, (void)key, (void)value, (void)extra;
    int rank = rank_in_world();
    LOG("rank %d summary: pmm3d computed %ld calls in %.6f s, and started in %.6f s\n", rank, taken.calls,
        taken.seconds, starting);
    for (int i = 0; i < reasons; i++)
        LOG("rank %d summary: scalapack computed %ld calls in %.6f s, %.1900s\n", rank, left[i].calls, left[i].seconds,
            left[i].why);
    return MPI_SUCCESS;
}

/* MPI_Finalize first deletes the attributes of MPI_COMM_SELF. */
static void log_summary_at_end(void) {
    static int done = 0;
    int key;
    if (done || !log_path()) return;
    done = 1;
    MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, log_summary, &key, NULL);
    MPI_Comm_set_attr(MPI_COMM_SELF, key, NULL);
    MPI_Comm_free_keyval(&key);
}

/* Count a call that began at `begun`, and log it. */
static void count(Calls *calls, const Call *call, const char *by, double begun) {
    double seconds = MPI_Wtime() - begun;
    calls->calls++, calls->seconds += seconds;
    log_summary_at_end();
    LOG("rank %d %s %c%c %d %d %d: %s, %.6f s%s%.1900s\n", rank_in_world(), call->name, *call->transa, *call->transb,
        *call->m, *call->n, *call->k, by, seconds, *calls->why ? ", " : "", calls->why);
}

/* Abort the program as ScaLAPACK does after a fatal error. If all ranks of the grid are here, one prints the text. */
static void give_up(const Call *call, const char *text, int everywhere) {
    int rows, columns, row, column, handle;
    Cblacs_gridinfo(call->desca[CTXT], &rows, &columns, &row, &column);
    if (!everywhere || (row == 0 && column == 0))
        fprintf(stderr, "{%5d,%5d}:  On entry to %s: %s\n", row, column, call->name, text);
    if (everywhere) {
        Cblacs_get(call->desca[CTXT], COMM_OF_GRID, &handle);
        MPI_Barrier(Cblacs2sys_handle(handle));
    }
    Cblacs_abort(call->desca[CTXT], 1);
}

/* Return the calls that ScaLAPACK computes for a reason. The last entry has all further reasons. */
static Calls *left_because(const char *why) {
    for (int i = 0; i < reasons; i++)
        if (!strncmp(left[i].why, why, TEXT - 1)) return left + i;
    if (reasons == REASONS) return left + REASONS - 1;
    snprintf(left[reasons].why, TEXT, "%s", reasons < REASONS - 1 ? why : "for further reasons, which are not listed");
    return left + reasons++;
}

/* begun: the time at which PMM3D was first asked. */
static void by_scalapack(const Call *call, const char *why, double begun) {
    int rows, columns, row, column;
    if (!call->scalapacks) {
        give_up(call, why, 0);
        return;
    }
    Calls *calls = left_because(why);
    if (!calls->calls && why != TOO_SMALL) {
        Cblacs_gridinfo(call->desca[CTXT], &rows, &columns, &row, &column);
        if (row == 0 && column == 0)
            fprintf(stderr, "pmm3d: %s is left to ScaLAPACK (further calls for this reason are not reported): %s\n",
                    call->name, calls->why);
    }
    call->scalapacks(call->transa, call->transb, call->m, call->n, call->k, call->alpha, call->a, call->ia, call->ja,
                     call->desca, call->b, call->ib, call->jb, call->descb, call->beta, call->c, call->ic, call->jc,
                     call->descc, 1, 1);
    count(calls, call, "scalapack", begun);
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

/* Return PMM3D_SCALAPACK_BELOW of this process. */
static double below_here(void) {
    const char *asked = getenv("PMM3D_SCALAPACK_BELOW");
    char *end;
    if (!asked || !*asked) return DEFAULT_BELOW;
    double below = strtod(asked, &end);
    if (end != asked && !*end && below >= 0) return below;
    fprintf(stderr, "pmm3d: PMM3D_SCALAPACK_BELOW=%s is not a length. The default %g is used. Set a number; 0: pmm3d "
            "computes all products\n", asked, DEFAULT_BELOW);
    return DEFAULT_BELOW;
}

/* Return the process grid of these ranks. Collective over the ranks if it is new. */
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
    int rank;
    MPI_Comm_rank(comm, &rank);
    if (rank == 0) made->below = below_here();
    MPI_Bcast(&made->below, 1, MPI_DOUBLE, 0, comm);
    made->next = all_known;
    return all_known = made;
}

/* Return the process grid of a BLACS context; NULL if this rank is not in the grid. The communicator of the grid has
   its ranks row by row. The result is cached as an attribute of the communicator, because BLACS and MPI reuse the
   numbers of freed contexts and communicators. */
static Known *known(int context, MPI_Comm *comm) {
    int rows, columns, row, column, handle, size, found = 0;
    Known *there;
    Cblacs_gridinfo(context, &rows, &columns, &row, &column);
    if (row < 0) return NULL;
    Cblacs_get(context, COMM_OF_GRID, &handle);
    *comm = Cblacs2sys_handle(handle);
    MPI_Comm_get_attr(*comm, key_of_known(), &there, &found);
    if (found) return there;
    MPI_Comm_size(*comm, &size);
    if (size != rows * columns) return NULL;
    there = known_as(*comm, rows, columns);
    MPI_Comm_set_attr(*comm, key_of_known(), there);
    return there;
}

/* Return whether a product is left to ScaLAPACK for its size. The fixed time of a call of PMM3D needs many operations
   on each rank. The time to redistribute the matrices needs many operations on each element. */
static int is_small(const Call *call, const Known *on) {
    double m = *call->m, n = *call->n, k = *call->k, length = on->below, ranks = on->rows * on->columns;
    return m < length || n < length || k < length || m * n * k < ranks * length * length * length;
}

/* Create the context of a process grid, collectively over its ranks. */
static void start(Known *on, MPI_Comm comm) {
    double begun = MPI_Wtime();
    on->tried = 1;
    if (pmm3d_lasting_context(comm, on->rows, on->columns, &on->context)) {
        pmm3d_last_error(on->why_not, TEXT);
        on->alone = !pmm3d_error_everywhere();
    }
    starting += MPI_Wtime() - begun;
}

static void multiply(const Call *call) {
    char text[TEXT];
    int nine[3][9];
    MPI_Comm comm = MPI_COMM_NULL;
    const char *why = why_not(call, nine);
    double begun = MPI_Wtime();
    Known *on = why ? NULL : known(call->desca[CTXT], &comm);
    if (!on || is_small(call, on)) {
        by_scalapack(call, on ? TOO_SMALL : why ? why : "this rank is not in the process grid",
                     begun);
        return;
    }
    if (!on->tried) {
        start(on, comm);
        begun = MPI_Wtime();
    }
    if (!on->context) {
        if (on->alone) give_up(call, on->why_not, 0);
        else by_scalapack(call, on->why_not, begun);
        return;
    }
    int code = pmm3d_pgemm(on->context, call->type, *call->transa, *call->transb, *call->m, *call->n, *call->k,
                           call->alpha, call->a, *call->ia, *call->ja, nine[0], call->b, *call->ib, *call->jb, nine[1],
                           call->beta, call->c, *call->ic, *call->jc, nine[2]);
    if (code == PMM3D_OK) {
        count(&taken, call, "pmm3d", begun);
        return;
    }
    int everywhere = pmm3d_error_everywhere();
    pmm3d_last_error(text, sizeof text);
    if (everywhere && code != PMM3D_ERROR_DISAGREEMENT) by_scalapack(call, text, begun);
    else give_up(call, text, everywhere);
}

#define GEMM(letter)                                                                                                   \
    void p##letter##gemm_(const char *transa, const char *transb, const int *m, const int *n, const int *k,            \
                          const void *alpha, const void *a, const int *ia, const int *ja, const int *desca,            \
                          const void *b, const int *ib, const int *jb, const int *descb, const void *beta, void *c,    \
                          const int *ic, const int *jc, const int *descc) {                                            \
        static gemm *original = NULL;                                                                                  \
        if (!original) original = (gemm *)dlsym(RTLD_NEXT, "p" #letter "gemm_");                                       \
        const Call call = {#letter[0], "p" #letter "gemm", original, transa, transb, m, n, k, alpha, a, ia, ja, desca, \
                           b, ib, jb, descb, beta, c, ic, jc, descc};                                                  \
        multiply(&call);                                                                                               \
    }

GEMM(s)
GEMM(d)
GEMM(c)
GEMM(z)
