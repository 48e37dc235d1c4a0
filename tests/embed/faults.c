/* What a caller can do wrong: faults CASE. Each rank prints "rank code everywhere text" for each call that was wrong,
   and a right product shows that it lives on. */
#define _GNU_SOURCE
#include <locale.h>
#include <pmm3d.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { N = 6 };
static int rank, size, grid, matrices[3];
static double shards[3][N * N];
static const double one = 1, zero = 0;
static const char *layouts[] = {"A", "B", "C"};

static void tell(int code) {
    char text[20000] = "";
    pmm3d_last_error(text, sizeof text);
    for (char *sign = text; *sign; sign++)
        if (*sign == '\n') *sign = ' ';
    printf("%d %d %d %s\n", rank, code, pmm3d_error_everywhere(), text);
    fflush(stdout);
}

static int make(MPI_Comm comm) {
    int code = pmm3d_grid(comm, 0, 0, 0, &grid);
    for (int which = 0; !code && which < 3; which++) {
        for (int i = 0; i < N * N; i++) shards[which][i] = which + 1;
        code = pmm3d_matrix(grid, 'd', N, N, layouts[which], 'C', shards[which], &matrices[which]);
    }
    return code;
}

static int multiply(void) { return pmm3d_matmul('N', 'N', &one, matrices[0], matrices[1], &zero, matrices[2]); }

static void lives_on(void) {
    int64_t box[4];
    int code = multiply();
    if (!code) code = pmm3d_box(grid, "C", N, N, box);
    int right = code == PMM3D_OK;
    for (int64_t i = 0; right && i < (box[1] - box[0]) * (box[3] - box[2]); i++) right = shards[2][i] == 2.0 * N;
    if (code) tell(code);
    printf("%d lives on: %s\n", rank, right ? "right" : "wrong");
}

static void *call_in_thread(void *_) {
    tell(multiply());
    return _;
}

static void in_thread(void) {
    pthread_t thread;
    pthread_create(&thread, NULL, call_in_thread, NULL);
    pthread_join(thread, NULL);
}

static volatile int going = 1, found;

/* Calls whenever it can, until it was told that another call was under way. */
static void *calls_between(void *_) {
    int64_t box[4];
    while (going && !found) found |= pmm3d_box(grid, "A", N, N, box) == PMM3D_ERROR_THREAD;
    return _;
}

static void two_threads(void) {
    pthread_t thread;
    int held = 0;
    pthread_create(&thread, NULL, calls_between, NULL);
    for (int call = 0; call < 2000; call++) {
        int code;
        while ((code = multiply()) == PMM3D_ERROR_THREAD) held = 1; /* the other one's call is short */
        if (code) tell(code);
    }
    going = 0;
    pthread_join(thread, NULL);
    printf("%d met: %d\n", rank, found || held);
}

/* Each thread has the error of its own last call: on all ranks in this thread, on one rank in the other. */
static void *fails_here(void *_) {
    int64_t box[4];
    if (pmm3d_last_error(NULL, 0) != 1) printf("%d a new thread has an error\n", rank);
    if (pmm3d_box(-1, "A", N, N, box) != PMM3D_ERROR_ARGUMENT) printf("%d no error\n", rank);
    tell(PMM3D_ERROR_ARGUMENT);
    return _;
}

static void two_errors(void) {
    pthread_t thread;
    int code = pmm3d_matmul('X', 'N', &one, matrices[0], matrices[1], &zero, matrices[2]);
    pthread_create(&thread, NULL, fails_here, NULL);
    pthread_join(thread, NULL);
    tell(code);
}

/* A product on a context of size x 1 ranks, on which a descriptor or an array is wrong: on the last rank, or on all. */
static int bad_cyclic(const char *which) {
    int context, mine = rank == size - 1, desc[9], wrong[9];
    int64_t wide[9];
    static double local[3][N * N];
    int code = pmm3d_context(MPI_COMM_WORLD, size, 1, 'R', &context);
    const int right[9] = {1, 0, N, N, 2, N, 0, 0, N};
    memcpy(desc, right, sizeof desc);
    memcpy(wrong, right, sizeof wrong);
    const int *given = wrong;
    char transa = 'N', type = 'd';
    const void *a = local[0];
    int n = N, ia = 1, number = context;
    if (!strcmp(which, "cyclic kind")) wrong[0] = 501;
    else if (!strcmp(which, "cyclic block")) wrong[4] = 0;
    else if (!strcmp(which, "cyclic lld")) wrong[8] = mine ? 1 : N;
    else if (!strcmp(which, "cyclic source")) wrong[6] = size;
    else if (!strcmp(which, "cyclic copies")) wrong[6] = -1;
    else if (!strcmp(which, "cyclic size")) n = N + 1;
    else if (!strcmp(which, "cyclic ia")) ia = 2;
    else if (!strcmp(which, "cyclic null")) given = mine ? NULL : desc;
    else if (!strcmp(which, "cyclic array")) a = mine ? NULL : local[0];
    else if (!strcmp(which, "cyclic type")) type = mine ? 'i' : 'd';
    else if (!strcmp(which, "cyclic logical")) transa = 1; /* what LOGICAL :: transa = .true. looks like */
    else if (!strcmp(which, "cyclic number")) number = grid;
    else if (!strcmp(which, "cyclic wide")) {
        for (int i = 0; i < 9; i++) wide[i] = desc[i];
        given = (const int *)wide;
    }
    if (!code)
        code = pmm3d_pgemm(number, type, transa, 'N', N, n, N, &one, a, ia, 1, given, local[1], 1, 1, desc, &zero,
                           local[2], 1, 1, desc);
    if (!strcmp(which, "cyclic right") && code == PMM3D_OK) {
        code = pmm3d_pgemr2d('d', N, N, local[0], 1, 1, desc, context, local[1], 1, 1, desc, grid);
    }
    pmm3d_free(&context);
    return code;
}

static int bad(const char *which) {
    int made = 0, mine = rank == size - 1; /* of faults of one rank: the last */
    const double *alpha = mine ? NULL : &one;
    const int *m = matrices;
    MPI_Comm other;
    if (!strcmp(which, "alpha")) return pmm3d_matmul('N', 'N', alpha, m[0], m[1], &zero, m[2]);
    if (!strcmp(which, "comm freed")) {
        MPI_Comm own;
        MPI_Comm_dup(MPI_COMM_WORLD, &own);
        make(own);
        MPI_Comm_free(&own);
        return pmm3d_matmul('X', 'N', &one, m[0], m[1], &zero, m[2]);
    }
    if (!strcmp(which, "huge"))
        return pmm3d_matrix(grid, 'd', mine ? (int64_t)1 << 62 : N, N, "/", 'C', shards, &made);
    if (!strcmp(which, "box negative")) {
        int64_t box[4];
        return pmm3d_box(grid, "A", -5, N, box);
    }
    if (!strcmp(which, "beta")) return pmm3d_matmul('N', 'N', &one, m[0], m[1], mine ? NULL : &zero, m[2]);
    if (!strcmp(which, "transa")) return pmm3d_matmul(mine ? 1 : 'N', 'N', &one, m[0], m[1], &zero, m[2]);
    if (!strcmp(which, "number")) return pmm3d_matmul('N', 'N', &one, m[0], mine ? 99 : m[1], &zero, m[2]);
    if (!strcmp(which, "kind")) return pmm3d_matmul('N', 'N', &one, m[0], grid, &zero, m[2]);
    if (!strcmp(which, "numbers")) return pmm3d_matmul('N', 'N', &one, 97, 98, &zero, 99);
    if (!strcmp(which, "exchanged") || !strcmp(which, "two grids")) { /* two matrices that differ in nothing */
        static double equal[2][N * N];
        int two[2], second;
        for (int i = 0; i < 2; i++) pmm3d_matrix(grid, 'd', N, N, "/", 'C', equal[i], &two[i]);
        if (!strcmp(which, "exchanged")) return pmm3d_matmul('N', 'N', &one, two[mine], two[!mine], &zero, m[2]);
        pmm3d_grid(MPI_COMM_WORLD, 1, 1, size, &second);
        return pmm3d_matmul('N', 'N', &one, 97, 98, &zero, 99);
    }
    if (!strncmp(which, "several", 7)) { /* grids: the number of the grid of the call is wrong, or another number is */
        int context, desc[9] = {1, 0, N, N, N, N, 0, 0, N}, code = pmm3d_context(MPI_COMM_WORLD, 1, 1, 'R', &context);
        static double local[N * N];
        if (code) return code;
        if (!strcmp(which, "several source")) return pmm3d_redistribute(97, m[2]);
        if (!strcmp(which, "several target")) return pmm3d_redistribute(m[0], mine ? 97 : m[2]);
        if (!strcmp(which, "several matrix")) return pmm3d_to_block_cyclic(97, context, local, desc);
        if (!strcmp(which, "several context"))
            return pmm3d_from_block_cyclic(mine ? 97 : context, local, desc, m[0]);
        if (!strcmp(which, "several a"))
            return pmm3d_pgemr2d('d', N, N, local, 1, 1, desc, 97, local, 1, 1, desc, context);
        return pmm3d_matmul('N', 'N', &one, mine ? 97 : m[0], m[1], &zero, m[2]);
    }
    if (!strcmp(which, "planned")) /* on one rank */
        return mine ? pmm3d_plan_matmul('N', 'N', &one, m[0], m[1], &zero, m[2], &made) : multiply();
    if (!strcmp(which, "planned cyclic")) {
        int context, desc[9] = {1, 0, N, N, N, N, 0, 0, N}, code = pmm3d_context(MPI_COMM_WORLD, 1, 1, 'R', &context);
        static double x[3][N * N];
        if (code) return code;
        return mine ? pmm3d_plan_pgemm(context, 'd', 'N', 'N', N, N, N, &one, x[0], 1, 1, desc, x[1], 1, 1, desc, &zero,
                                       x[2], 1, 1, desc, &made)
                    : pmm3d_pgemm(context, 'd', 'N', 'N', N, N, N, &one, x[0], 1, 1, desc, x[1], 1, 1, desc, &zero,
                                  x[2], 1, 1, desc);
    }
    if (!strcmp(which, "plan out")) return pmm3d_plan_redistribute(m[0], m[2], mine ? NULL : &made);
    if (!strcmp(which, "limits")) {
        pmm3d_max_workspace(grid, mine ? 1 << 30 : 0);
        int code = multiply();
        pmm3d_max_workspace(grid, 0);
        return code;
    }
    if (!strncmp(which, "request", 7)) {
        int plan, other_plan, request, again, code, *freed = &plan;
        pmm3d_plan_redistribute(m[0], m[2], &other_plan);
        pmm3d_plan_matmul('N', 'N', &one, m[0], m[1], &zero, m[2], &plan);
        if (pmm3d_begin(plan, &request)) return -1;
        if (strstr(which, "run")) code = pmm3d_run(plan);
        else if (strstr(which, "begin")) code = pmm3d_begin(plan, &again);
        else if (strstr(which, "operands")) code = pmm3d_run_matmul(plan, &one, m[0], m[1], &zero, m[2]);
        else if (strstr(which, "free")) code = pmm3d_free(strstr(which, "grid") ? &grid : freed);
        else if (strstr(which, "kind")) again = plan, code = pmm3d_wait(&again);
        else if (strstr(which, "pgemm")) code = pmm3d_run_pgemm(other_plan, &one, shards, shards, &zero, shards);
        else if (strstr(which, "null")) code = pmm3d_begin(other_plan, NULL);
        else if (strstr(which, "matrix") || strstr(which, "form")) {
            code = pmm3d_wait(&request);
            static double whole[N * N];
            int wrong = 97;
            if (strstr(which, "form") && pmm3d_matrix(grid, 'd', N, N, "/", 'C', whole, &wrong)) return -1;
            if (!code) code = pmm3d_run_matmul(plan, &one, m[0], wrong, &zero, m[2]);
        }
        else code = pmm3d_wait(NULL);
        return pmm3d_wait(&request) || request || pmm3d_free(&plan) || pmm3d_free(&other_plan) ? -1 : code;
    }
    if (!strncmp(which, "library", 7)) return pmm3d_library(grid, strstr(which, "null") ? NULL : "abacus");
    if (!strcmp(which, "runs")) { /* different plans */
        int plans[2];
        pmm3d_plan_redistribute(m[0], m[2], &plans[0]), pmm3d_plan_redistribute(m[1], m[2], &plans[1]);
        return pmm3d_run(plans[mine]);
    }
    if (!strcmp(which, "for type")) return pmm3d_grid_for(MPI_COMM_WORLD, mine ? 'q' : 'd', N, N, N, &made);
    if (!strcmp(which, "grid number")) return pmm3d_matrix(mine ? 77 : grid, 'd', N, N, "/", 'C', shards, &made);
    if (!strcmp(which, "plan")) return pmm3d_run(m[0]);
    if (!strcmp(which, "disagree")) return pmm3d_matmul('N', mine ? 'T' : 'N', &one, m[0], m[1], &zero, m[2]);
    if (!strcmp(which, "alias")) return pmm3d_matmul('N', 'N', &one, m[0], m[1], &zero, m[1]);
    if (!strcmp(which, "shard")) return pmm3d_matrix(grid, 'd', N, N, "/", 'C', mine ? NULL : shards, &made);
    if (!strcmp(which, "layout")) return pmm3d_matrix(grid, 'd', N, N, mine ? NULL : "/", 'C', shards, &made);
    if (!strcmp(which, "axes")) return pmm3d_matrix(grid, 'd', N, N, "w/x", 'C', shards, &made);
    if (!strcmp(which, "twice")) return pmm3d_matrix(grid, 'd', N, N, "x/x", 'C', shards, &made);
    if (!strcmp(which, "type")) return pmm3d_matrix(grid, 'q', N, N, "/", 'C', shards, &made);
    if (!strcmp(which, "order")) return pmm3d_matrix(grid, 'd', N, N, "/", 'X', shards, &made);
    if (!strcmp(which, "negative")) return pmm3d_matrix(grid, 'd', -1, N, "/", 'C', shards, &made);
    if (!strcmp(which, "out")) return pmm3d_matrix(grid, 'd', N, N, "/", 'C', shards, mine ? NULL : &made);
    if (!strcmp(which, "grid out")) return pmm3d_grid(MPI_COMM_WORLD, 0, 0, 0, mine ? NULL : &made);
    if (!strcmp(which, "shape")) return pmm3d_grid(MPI_COMM_WORLD, 7, 7, 7, &made);
    if (!strcmp(which, "shapes")) return pmm3d_grid(MPI_COMM_WORLD, 1, 1, mine ? 1 : size, &made);
    if (!strcmp(which, "null comm")) return pmm3d_grid(MPI_COMM_NULL, 0, 0, 0, &made);
    if (!strcmp(which, "box")) return pmm3d_box(grid, "A", N, N, NULL);
    if (!strcmp(which, "free")) return pmm3d_free(NULL);
    if (!strcmp(which, "freed")) {
        int copy = matrices[0];
        pmm3d_free(&copy);
        int code = multiply();
        pmm3d_matrix(grid, 'd', N, N, "A", 'C', shards[0], &matrices[0]);
        return code;
    }
    if (!strcmp(which, "calls"))
        return mine ? pmm3d_redistribute(m[0], m[2]) : pmm3d_matmul('N', 'N', &one, m[0], m[1], &zero, m[2]);
    if (!strcmp(which, "closed")) {
        pmm3d_free(&grid);
        int code = multiply();
        make(MPI_COMM_WORLD);
        return code;
    }
    if (!strcmp(which, "move")) {
        int code = pmm3d_matrix(grid, 'd', N, N + 1, "/", 'C', calloc(N * N + N, sizeof(double)), &made);
        return code ? code : pmm3d_redistribute(matrices[0], made);
    }
    if (!strcmp(which, "intercomm")) {
        MPI_Comm half;
        MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half);
        MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, 1 - rank % 2, 7, &other);
        return pmm3d_grid(other, 0, 0, 0, &made);
    }
    if (!strncmp(which, "cyclic", 6)) return bad_cyclic(which);
    printf("no such case\n");
    return -1;
}

/* What Python's start could change in the process, and in MPI. */
static void untouched(void) {
    MPI_Errhandler before[2], after[2];
    struct sigaction was[3], is[3];
    const int signals[] = {SIGINT, SIGPIPE, SIGSEGV};
    char locale[200];
    int same = 1;
    MPI_Comm_get_errhandler(MPI_COMM_WORLD, &before[0]);
    MPI_Comm_get_errhandler(MPI_COMM_SELF, &before[1]);
    snprintf(locale, sizeof locale, "%s", setlocale(LC_ALL, NULL));
    for (int i = 0; i < 3; i++) sigaction(signals[i], NULL, &was[i]);
    make(MPI_COMM_WORLD);
    MPI_Comm_get_errhandler(MPI_COMM_WORLD, &after[0]);
    MPI_Comm_get_errhandler(MPI_COMM_SELF, &after[1]);
    for (int i = 0; i < 3; i++) {
        sigaction(signals[i], NULL, &is[i]);
        same &= was[i].sa_handler == is[i].sa_handler;
    }
    printf("%d untouched: %d %d %d\n", rank, before[0] == after[0] && before[1] == after[1], same,
           !strcmp(locale, setlocale(LC_ALL, NULL)));
}

/* A component that starts, multiplies and ends, while the program keeps its grid. Then a second start. */
static void two_users(void) {
    int kept[4], code = pmm3d_start();
    if (!code) code = make(MPI_COMM_WORLD);
    memcpy(kept, matrices, sizeof matrices);
    kept[3] = grid;
    for (int component = 0; !code && component < 2; component++) {
        code = pmm3d_start();
        if (!code) code = make(MPI_COMM_WORLD);
        lives_on();
        if (!code) code = pmm3d_finalize();
    }
    memcpy(matrices, kept, sizeof matrices);
    grid = kept[3];
    lives_on();
    if (code || pmm3d_finalize()) tell(1);
    tell(multiply());
    if (make(MPI_COMM_WORLD)) tell(1);
    lives_on();
}

int main(int count, char **words) {
    const char *which = count > 1 ? words[1] : "";
    int provided, finalizes = 1;
    if (!strcmp(which, "before")) tell(pmm3d_start()), pmm3d_finalize();
    if (!strncmp(which, "two ", 4)) MPI_Init_thread(&count, &words, MPI_THREAD_MULTIPLE, &provided);
    else MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (!strcmp(which, "untouched")) untouched();
    else if (!strcmp(which, "numbers differ")) { /* because one rank has a grid of its own */
        if (rank) pmm3d_grid(MPI_COMM_SELF, 1, 1, 1, &grid);
        if (make(MPI_COMM_WORLD)) tell(1);
        else lives_on();
    } else if (!strcmp(which, "start")) tell(make(MPI_COMM_WORLD)), tell(make(MPI_COMM_WORLD));
    else if (!strcmp(which, "one comes late")) {
        if (rank) sleep(5);
        if (make(MPI_COMM_WORLD)) tell(1);
        else lives_on();
    } else if (!strcmp(which, "long wait")) { /* of the last rank, for ranks that compute on their own */
        if (make(MPI_COMM_WORLD)) tell(1);
        if (rank < size - 1) sleep(9);
        lives_on();
    } else if (!strcmp(which, "start on one")) {
        if (rank == size - 1) setenv("PMM3D_PYTHON", "/no/such/python", 1);
        tell(make(MPI_COMM_WORLD));
    } else if (!strcmp(which, "subset")) {
        MPI_Comm part;
        MPI_Comm_split(MPI_COMM_WORLD, rank == 1 ? MPI_UNDEFINED : 0, -rank, &part);
        if (part == MPI_COMM_NULL) printf("%d stays out\n", rank);
        else if (make(part)) tell(1);
        else lives_on();
    } else if (!strcmp(which, "not finalized")) make(MPI_COMM_WORLD), lives_on(), finalizes = 0;
    else if (!strncmp(which, "skips", 5)) { /* rank 1 ends, by pmm3d_finalize or not, while rank 0 multiplies */
        int silent = !strcmp(which, "skips silently");
        make(MPI_COMM_WORLD);
        for (int times = 0; rank == 0 && times <= silent; times++) tell(multiply());
        if (rank && !silent) tell(pmm3d_finalize());
        finalizes = rank == 0;
    } else if (!strcmp(which, "two users")) two_users();
    else {
        if (make(MPI_COMM_WORLD)) tell(1);
        if (!strcmp(which, "other thread")) in_thread();
        else if (!strcmp(which, "two threads")) two_threads();
        else if (!strcmp(which, "two errors")) two_errors();
        else if (strcmp(which, "after") && strcmp(which, "before")) {
            multiply();
            tell(bad(which));
        }
        lives_on();
    }
    if (finalizes && pmm3d_finalize()) tell(1);
    MPI_Finalize();
    if (!strcmp(which, "after")) tell(pmm3d_start()), pmm3d_finalize();
    printf("%d ended\n", rank);
    return 0;
}
