/* What a call from C costs beyond the same call in Python, in the same process, and what many calls leave in memory.

       mpicc benchmarks/embed_calls.c -I embed -L build/embed -lpmm3d -ldl -Wl,-rpath,$PWD/build/embed -o overhead
       mpirun -n 2 ./overhead 1000 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pmm3d.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N = 8, ROUNDS = 10 };

static const char *begin =
    "from time import perf_counter\n"
    "from mpi4py import MPI\n"
    "from pmm3d import BlacsContext, DistMatrix, Grid, Layout, MatmulPlan, matmul, pgemm\n"
    "grid, context, best = Grid(MPI.COMM_WORLD, 'auto'), BlacsContext(MPI.COMM_WORLD, (1, MPI.COMM_WORLD.size)), 1e9\n"
    "a, b, c = (DistMatrix.from_function(grid, (%d, %d), lambda i, j: i + j, layout=layout)\n"
    "           for layout in (Layout.A, Layout.B, Layout.C))\n"
    "desc = context.descriptor(%d, %d, 2, 2)\n"
    "p, q, r = desc.empty(), desc.empty(), desc.empty()\n"
    "p[...] = q[...] = 1\n"
    "def call_matmul():\n"
    "    matmul(a, b, out=c, alpha=1.0, beta=0.0)\n"
    "call_plan = MatmulPlan(a, b, out=c)\n"
    "def call_pgemm():\n"
    "    pgemm('N', 'N', len(p), len(p), len(p), 1.0, p, 1, 1, desc, q, 1, 1, desc, 0.0, r, 1, 1, desc)\n"
    "def timed(call, count):\n"
    "    begun = perf_counter()\n"
    "    for _ in range(count):\n"
    "        call()\n"
    "    return (perf_counter() - begun) / count\n";
static const char *again = "best = min(best, timed(call_%s, %d))\n";
static const char *end_of_one =
    "if grid.rank == 0:\n"
    "    print(f'%s from Python {best * 1e6:.1f} us a call', flush=True)\n"
    "best = 1e9\n";
static const char *end = "context.close()\ngrid.close()\n";

static double shards[3][N * N], alpha = 1, beta = 0;
static int rank, ranks, matrices[3], plan, context, desc[9] = {1, 0, N, N, 2, 2, 0, 0, N};

static void check(int code) {
    char text[2000];
    if (code == PMM3D_OK) return;
    pmm3d_last_error(text, sizeof text);
    fprintf(stderr, "code %d: %s\n", code, text);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

/* Of this process, in KiB: a line of /proc/self/status. */
static long memory(const char *name) {
    char line[200];
    long found = 0;
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status))
        if (!strncmp(line, name, strlen(name))) found = atol(line + strlen(name) + 1);
    if (status) fclose(status);
    return found;
}

/* The Python of this process runs that. */
static void python(const char *program) {
    int (*run)(const char *) = (int (*)(const char *))dlsym(RTLD_DEFAULT, "PyRun_SimpleString");
    int (*ensure)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
    void (*release)(int) = (void (*)(int))dlsym(RTLD_DEFAULT, "PyGILState_Release");
    int held = ensure();
    if (run(program)) MPI_Abort(MPI_COMM_WORLD, 1);
    release(held);
}

static int call_matmul(void) { return pmm3d_matmul('N', 'N', &alpha, matrices[0], matrices[1], &beta, matrices[2]); }

static int call_plan(void) { return pmm3d_run(plan); }

static int call_pgemm(void) {
    return pmm3d_pgemm(context, 'd', 'N', 'N', N, N, N, &alpha, shards[0], 1, 1, desc, shards[1], 1, 1, desc, &beta,
                       shards[2], 1, 1, desc);
}

/* The fastest of some rounds, each in C and then in Python. */
static void measure(const char *name, int (*call)(void), int calls) {
    char program[200];
    double best = 1e9;
    for (int round = 0; round < ROUNDS; round++) {
        double begun = MPI_Wtime();
        for (int i = 0; i < calls; i++) check(call());
        double took = (MPI_Wtime() - begun) / calls;
        if (took < best) best = took;
        if (rank == 0 && (round == 0 || round == 4 || round == ROUNDS - 1))
            printf("%s after %d calls: VmData %ld KiB, VmRSS %ld KiB\n", name, calls * (round + 1), memory("VmData"),
                   memory("VmRSS"));
        snprintf(program, sizeof program, again, name, calls);
        python(program);
    }
    if (rank == 0) printf("%s from C      %.1f us a call\n", name, best * 1e6), fflush(stdout);
    snprintf(program, sizeof program, end_of_one, name);
    python(program);
}

int main(int count, char **words) {
    char program[2000];
    int calls = count > 1 ? atoi(words[1]) : 1000, grid;
    const char *layouts[] = {"A", "B", "C"};
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    check(pmm3d_grid(MPI_COMM_WORLD, 0, 0, 0, &grid));
    check(pmm3d_context(MPI_COMM_WORLD, 1, ranks, 'R', &context));
    for (int i = 0; i < 3; i++) check(pmm3d_matrix(grid, 'd', N, N, layouts[i], 'C', shards[i], &matrices[i]));
    snprintf(program, sizeof program, begin, N, N, N, N);
    python(program);
    check(pmm3d_plan_matmul('N', 'N', &alpha, matrices[0], matrices[1], &beta, matrices[2], &plan));
    measure("plan", call_plan, calls);
    measure("matmul", call_matmul, calls);
    measure("pgemm", call_pgemm, calls);
    python(end);
    check(pmm3d_finalize());
    MPI_Finalize();
    return 0;
}
