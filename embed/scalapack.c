/* Drop-in for routines of ScaLAPACK: linked before -lscalapack, or in LD_PRELOAD. This file then replaces the routines
   of scalapack_routines.h, for the program and for ScaLAPACK itself. PMM3D computes large calls of the routines that are
   switched on. ScaLAPACK computes all other calls, and those that PMM3D rejects on all ranks of the process grid: it
   reports errors in its usual way. Python starts at the first call that is large enough.

   PMM3D_SCALAPACK_ROUTINES   the routines that are switched on, separated by commas, without p and type: gemm,syrk; or
                              all. Default: gemm
   PMM3D_SCALAPACK_BELOW      a length L (1024; 0: no call is small). A call is small if m, n or k is below L, or if its
                              multiplications / ranks are below L^3: those of p?gemm are m n k. A call that only moves
                              m n elements is small if m n / ranks is below L^2
   PMM3D_EMBED_LOG            a file, and no symbolic link, to which each process appends a line when it is loaded, a
                              line for each call (routine, letters, sizes, library), and, if it made a call, a summary
                              in MPI_Finalize

   For the routines and the length, the value of the first rank of a process grid counts for the grid. */
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
#include "scalapack_routines.h"

void Cblacs_gridinfo(int context, int *rows, int *columns, int *row, int *column);
void Cblacs_get(int context, int request, int *value);
MPI_Comm Cblacs2sys_handle(int handle);
void Cblacs_abort(int context, int code);

enum { CTXT = 1, COMM_OF_GRID = 10, DENSE = 1, DENSE_INB = 2, TEXT = 2048, REASONS = 16, MATRICES = 3 };
static const double DEFAULT_BELOW = 1024;
static const char DEFAULT_ROUTINES[] = "gemm";

/* A call of a routine. name: with p and type. scalapacks: ScaLAPACK's routine, or NULL. descs: of the matrices. */
typedef struct {
    const Routine *routine;
    char type;
    const char *name;
    void *scalapacks;
    int count, matrices;
    void *const *words;
    const int *descs[MATRICES];
} Call;

/* A process grid.
   ranks      its ranks in MPI_COMM_WORLD, row by row
   below      PMM3D_SCALAPACK_BELOW
   routines   PMM3D_SCALAPACK_ROUTINES, a bit for each
   tried      whether the context was requested
   context    the context of PMM3D on these ranks, or 0
   alone      whether the context failed on this rank, but perhaps not on the others */
typedef struct Known {
    struct Known *next;
    int rows, columns, tried, context, alone;
    double below;
    unsigned long routines;
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
static const char TOO_SMALL[] = "small (PMM3D_SCALAPACK_BELOW)",
                  SWITCHED_OFF[] = "not switched on (PMM3D_SCALAPACK_ROUTINES)",
                  WIDE[] = "its descriptors are of integers of 8 bytes";

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
        LOG("process %ld, %s: pmm3d's drop-in for ScaLAPACK is loaded\n", (long)getpid(),
            program_invocation_short_name);
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
    char letters[8] = "", sizes[64] = "";
    void *const *words = call->words;
    int letter = 0, size = 0, at = 0;
    calls->calls++, calls->seconds += seconds;
    log_summary_at_end();
    if (!log_path()) return;
    for (const char *form = call->routine->form; *form == 'c' || *form == 'i'; form++, at++)
        if (*form == 'c') letters[letter++] = C(at);
        else size += snprintf(sizes + size, sizeof sizes - size, " %d", I(at));
    LOG("rank %d %s%s%s%s: %s, %.6f s%s%.1900s\n", rank_in_world(), call->name, letter ? " " : "", letters, sizes, by,
        seconds, *calls->why ? ", " : "", calls->why);
}

/* Abort the program as ScaLAPACK does after a fatal error. If all ranks of the grid are here, one prints the text. */
static void give_up(const Call *call, const char *text, int everywhere) {
    int rows, columns, row, column, handle, context = call->descs[0][CTXT];
    Cblacs_gridinfo(context, &rows, &columns, &row, &column);
    if (!everywhere || (row == 0 && column == 0))
        fprintf(stderr, "{%5d,%5d}:  On entry to %s: %s\n", row, column, call->name, text);
    if (everywhere) {
        Cblacs_get(context, COMM_OF_GRID, &handle);
        MPI_Barrier(Cblacs2sys_handle(handle));
    }
    Cblacs_abort(context, 1);
}

/* Return the calls that ScaLAPACK computes for a reason. The last entry has all further reasons. */
static Calls *left_because(const char *why) {
    for (int i = 0; i < reasons; i++)
        if (!strncmp(left[i].why, why, TEXT - 1)) return left + i;
    if (reasons == REASONS) return left + REASONS - 1;
    snprintf(left[reasons].why, TEXT, "%s", reasons < REASONS - 1 ? why : "for further reasons, which are not listed");
    return left + reasons++;
}

/* Return whether this rank reports a reason of all ranks: the first of the process grid. BLACS is not asked about a
   context of 8 bytes, because its own integers may be of 8 bytes too. */
static int reports(const Call *call, const char *why) {
    int rows, columns, row, column;
    if (why == WIDE) return rank_in_world() == 0;
    Cblacs_gridinfo(call->descs[0][CTXT], &rows, &columns, &row, &column);
    return row == 0 && column == 0;
}

/* The words of a routine, by their number. */
#define WORDS_7(OF) OF(0), OF(1), OF(2), OF(3), OF(4), OF(5), OF(6)
#define WORDS_8(OF) WORDS_7(OF), OF(7)
#define WORDS_11(OF) WORDS_8(OF), OF(8), OF(9), OF(10)
#define WORDS_12(OF) WORDS_11(OF), OF(11)
#define WORDS_13(OF) WORDS_12(OF), OF(12)
#define WORDS_14(OF) WORDS_13(OF), OF(13)
#define WORDS_15(OF) WORDS_14(OF), OF(14)
#define WORDS_18(OF) WORDS_15(OF), OF(15), OF(16), OF(17)
#define WORDS_19(OF) WORDS_18(OF), OF(18)
#define TYPE_OF(at) void *
#define WORD(at) call->words[at]

/* Call ScaLAPACK's routine. Fortran also passes the lengths of the characters, at most four. */
#define CASE(count)                                                                                                    \
    case count:                                                                                                        \
        ((void (*)(WORDS_##count(TYPE_OF), size_t, size_t, size_t, size_t))call->scalapacks)(WORDS_##count(WORD), 1,   \
                                                                                             1, 1, 1);                 \
        break;

/* begun: the time at which PMM3D was first asked. */
static void by_scalapack(const Call *call, const char *why, double begun) {
    if (!call->scalapacks) {
        give_up(call, why, 0);
        return;
    }
    Calls *calls = left_because(why);
    if (!calls->calls && why != TOO_SMALL && why != SWITCHED_OFF && reports(call, why))
        fprintf(stderr, "pmm3d: %s is left to ScaLAPACK (further calls for this reason are not reported): %s\n",
                call->name, calls->why);
    switch (call->count) {
        CASE(7) CASE(8) CASE(11) CASE(12) CASE(13) CASE(14) CASE(15) CASE(18) CASE(19)
    }
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

/* Whether the two process grids of a move may differ. */
static int has_two_grids(const Call *call) { return call->routine == ROUTINES + of_gemr2d; }

/* Return the reason why PMM3D cannot compute a call, if the arguments show one; NULL otherwise. All ranks find the same
   reason, without communication. */
static const char *why_not(const Call *call, int nine[MATRICES][9]) {
    const int *first = call->descs[0];
    /* The upper halves of DTYPE, CTXT (which may be -1), M and N. As a descriptor of 4 bytes it has no columns in a
       block. */
    if (!first[1] && (!first[3] || first[3] == -1) && !first[5] && !first[7]) return WIDE;
    for (int i = 0; i < call->matrices; i++) {
        if (!has_two_grids(call) && call->descs[i][CTXT] != first[CTXT]) return "the descriptors are of several contexts";
        if (in_nine(call->descs[i], nine[i])) return "a descriptor is of another kind";
    }
    return NULL;
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
    fprintf(stderr, "pmm3d: PMM3D_SCALAPACK_BELOW=%s is not a length. The default %g is used. Set a number; 0: no call "
            "is small\n", asked, DEFAULT_BELOW);
    return DEFAULT_BELOW;
}

static int is_named(const char *known, const char *name, size_t length) {
    return strlen(known) == length && !strncmp(known, name, length);
}

/* Return a bit for each routine in a list of names, or 0 if a name is unknown. */
static unsigned long routines_in(const char *names) {
    unsigned long found = 0, named;
    for (const char *name = names; *name; found |= named) {
        size_t length = strcspn(name, ",");
        named = 0;
        for (int i = 0; i < KINDS; i++)
            if (is_named("all", name, length) || is_named(ROUTINES[i].name, name, length)) named |= 1ul << i;
        if (!named) return 0;
        name += length + (name[length] == ',');
    }
    return found;
}

/* Return PMM3D_SCALAPACK_ROUTINES of this process, a bit for each. */
static unsigned long routines_here(void) {
    const char *asked = getenv("PMM3D_SCALAPACK_ROUTINES");
    if (!asked || !*asked) return routines_in(DEFAULT_ROUTINES);
    unsigned long found = routines_in(asked);
    if (found) return found;
    fprintf(stderr, "pmm3d: PMM3D_SCALAPACK_ROUTINES=%s is no list of routines. The default %s is used. Set all, or "
            "names with commas between them: ", asked, DEFAULT_ROUTINES);
    for (int i = 0; i < KINDS; i++) fprintf(stderr, "%s%s", ROUTINES[i].name, i < KINDS - 1 ? "," : "\n");
    return routines_in(DEFAULT_ROUTINES);
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
    if (rank == 0) made->below = below_here(), made->routines = routines_here();
    MPI_Bcast(&made->below, 1, MPI_DOUBLE, 0, comm);
    MPI_Bcast(&made->routines, 1, MPI_UNSIGNED_LONG, 0, comm);
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

/* Return whether a call is left to ScaLAPACK for its size. The fixed time of a call of PMM3D needs many operations on
   each rank. The time to redistribute the matrices needs many operations on each element. */
static int is_small(const Call *call, const Known *on) {
    const Routine *routine = call->routine;
    void *const *words = call->words;
    double m = I(routine->m), n = I(routine->n), length = on->below, ranks = on->rows * on->columns;
    if (routine->k == NONE) return m < 0 || n < 0 || m * n < ranks * length * length;
    double k = routine->k != OF_SIDE ? I(routine->k) : C(0) == 'L' || C(0) == 'l' ? m : n;
    return m < length || n < length || k < length || routine->share * m * n * k < ranks * length * length * length;
}

/* Get the process grids of the first and of the last matrix. Return the reason why PMM3D cannot work on them, or NULL.
   In a move, all ranks of the last argument's process grid must be in both, in the same order. */
static const char *find_grids(const Call *call, Known *on[2], MPI_Comm comms[2]) {
    static const char not_here[] = "this rank is not in the process grid";
    int rows, columns, row, column;
    for (int i = 0; i < 2; i++) {
        on[i] = i && !has_two_grids(call) ? on[0] : known(call->descs[i ? call->matrices - 1 : 0][CTXT], comms + i);
        if (!on[i]) return not_here;
    }
    if (!has_two_grids(call)) return NULL;
    int ranks = on[0]->rows * on[0]->columns;
    Cblacs_gridinfo(*(const int *)call->words[call->count - 1], &rows, &columns, &row, &column);
    return rows * columns == ranks && on[1]->rows * on[1]->columns == ranks &&
                   !memcmp(on[0]->ranks, on[1]->ranks, ranks * sizeof(int))
               ? NULL
               : "the process grids have different ranks, or these in another order";
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

/* Return whether ScaLAPACK can compute a call that PMM3D left with this error on all ranks. Arguments are checked before
   anything is written. After other errors, the result of a routine of several products may be there in part. */
static int can_be_left(const Call *call, int code) {
    int in_steps = call->routine != ROUTINES + of_gemm && call->routine->k != NONE;
    return code != PMM3D_ERROR_DISAGREEMENT && !(in_steps && (code == PMM3D_ERROR_MEMORY || code == PMM3D_ERROR_OTHER));
}

static void compute(const Call *call) {
    char text[TEXT];
    int nine[MATRICES][9], contexts[2];
    MPI_Comm comms[2];
    Known *on[2];
    const char *why = why_not(call, nine);
    double begun = MPI_Wtime();
    if (!why) why = find_grids(call, on, comms);
    if (!why && !(on[0]->routines >> (call->routine - ROUTINES) & 1)) why = SWITCHED_OFF;
    if (!why && is_small(call, on[0])) why = TOO_SMALL;
    for (int i = 0; i < 2 && !why; i++) {
        if (!on[i]->tried) {
            start(on[i], comms[i]);
            begun = MPI_Wtime();
        }
        contexts[i] = on[i]->context;
        if (on[i]->alone) {
            give_up(call, on[i]->why_not, 0);
            return;
        }
        if (!contexts[i]) why = on[i]->why_not;
    }
    if (why) {
        by_scalapack(call, why, begun);
        return;
    }
    int code = call->routine->by_pmm3d(contexts, call->type, call->words, nine);
    if (code == PMM3D_OK) {
        count(&taken, call, "pmm3d", begun);
        return;
    }
    int everywhere = pmm3d_error_everywhere();
    pmm3d_last_error(text, sizeof text);
    if (everywhere && can_be_left(call, code)) by_scalapack(call, text, begun);
    else give_up(call, text, everywhere);
}

/* original: where ScaLAPACK's routine is kept. */
static void call(const Routine *routine, char type, const char *name, void **original, int count, void *const *words) {
    char full[16];
    if (!*original) {
        snprintf(full, sizeof full, "%s_", name);
        *original = dlsym(RTLD_NEXT, full);
    }
    Call made = {routine, type, name, *original, count, 0, words, {NULL}};
    for (const char *form = routine->form; *form; words += *form++ == 'M' ? 4 : 1)
        if (*form == 'M') made.descs[made.matrices++] = words[3];
    compute(&made);
}

#define TAKEN(at) void *word##at
#define GIVEN(at) word##at
#define REPLACE(letter, name, count)                                                                                   \
    void p##letter##name##_(WORDS_##count(TAKEN)) {                                                                    \
        static void *original = NULL;                                                                                  \
        void *const words[] = {WORDS_##count(GIVEN)};                                                                  \
        call(ROUTINES + of_##name, #letter[0], "p" #letter #name, &original, count, words);                            \
    }
#define REAL(name, count) REPLACE(s, name, count) REPLACE(d, name, count)
#define COMPLEX(name, count) REPLACE(c, name, count) REPLACE(z, name, count)
#define EACH(name, count) REAL(name, count) COMPLEX(name, count)

EACH(gemm, 19)
REAL(tran, 12)
COMPLEX(tranu, 12)
COMPLEX(tranc, 12)
EACH(geadd, 13)
EACH(gemr2d, 11)
EACH(syrk, 14)
COMPLEX(herk, 14)
EACH(syr2k, 18)
COMPLEX(her2k, 18)
EACH(symm, 18)
COMPLEX(hemm, 18)
EACH(trmm, 15)
EACH(trsm, 15)
EACH(potrf, 7)
EACH(potrs, 12)
EACH(trtri, 8)
