/* What a call from C costs beyond the same call in Python, and what many of them leave in memory.

       mpicc overhead.c -I embed -L build/embed -lpmm3d -ldl -Wl,-rpath,build/embed -o overhead && mpirun -n 2 ./overhead 1000 */
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
    "from pmm3d import DistMatrix, Grid, Layout, matmul\n"
    "grid, best = Grid(MPI.COMM_WORLD, 'auto'), 1e9\n"
    "a, b, c = (DistMatrix.from_function(grid, (%d, %d), lambda i, j: i + j, layout=layout)\n"
    "           for layout in (Layout.A, Layout.B, Layout.C))\n"
    "def calls(count):\n"
    "    begun = perf_counter()\n"
    "    for _ in range(count):\n"
    "        matmul(a, b, out=c, alpha=1.0, beta=0.0)\n"
    "    return (perf_counter() - begun) / count\n";
static const char *again = "best = min(best, calls(%d))\n";
static const char *end =
    "if grid.rank == 0:\n"
    "    print(f'from Python {best * 1e6:.1f} us a call', flush=True)\n"
    "grid.close()\n";

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
static void python(const char *program, int number) {
    char text[2000];
    int (*run)(const char *) = (int (*)(const char *))dlsym(RTLD_DEFAULT, "PyRun_SimpleString");
    int (*ensure)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
    void (*release)(int) = (void (*)(int))dlsym(RTLD_DEFAULT, "PyGILState_Release");
    snprintf(text, sizeof text, program, number, number);
    int held = ensure();
    if (run(text)) MPI_Abort(MPI_COMM_WORLD, 1);
    release(held);
}

int main(int count, char **words) {
    int calls = count > 1 ? atoi(words[1]) : 1000, rank, grid, matrices[3];
    static double shards[3][N * N], alpha = 1, beta = 0;
    const char *layouts[] = {"A", "B", "C"};
    double best = 1e9;
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    check(pmm3d_grid(MPI_COMM_WORLD, 0, 0, 0, &grid));
    for (int i = 0; i < 3; i++) check(pmm3d_matrix(grid, 'd', N, N, layouts[i], 'C', shards[i], &matrices[i]));
    python(begin, N);
    for (int round = 0; round <= ROUNDS; round++) {
        double begun = MPI_Wtime();
        for (int call = 0; call < calls; call++)
            check(pmm3d_matmul('N', 'N', &alpha, matrices[0], matrices[1], &beta, matrices[2]));
        double took = (MPI_Wtime() - begun) / calls;
        if (took < best) best = took;
        python(again, calls);
        if (rank == 0 && (round == 0 || round == 4))
            printf("after %d calls: VmData %ld KiB, VmRSS %ld KiB\n", calls * (round + 1), memory("VmData"),
                   memory("VmRSS"));
    }
    if (rank == 0) printf("from C      %.1f us a call\n", best * 1e6), fflush(stdout);
    python(end, 0);
    check(pmm3d_finalize());
    MPI_Finalize();
    return 0;
}
