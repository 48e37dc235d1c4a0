/* A positive definite system on ScaLAPACK's block-cyclic matrices from C: S = X X^T + n I, and the solution of S Y = B.
   Integers have 8 bytes, as in a program that links a ScaLAPACK of such integers; without the first line, 4.

       mpicc apps/embed/solve.c -I embed -L build/embed -lpmm3d -Wl,-rpath,$PWD/build/embed -lm -o solve
       mpirun -n 4 ./solve */
#define PMM3D_ILP64
#include <math.h>
#include <pmm3d.h>
#include <stdio.h>
#include <stdlib.h>

enum { N = 200, BLOCK = 32 };

static void check(int code) { /* end the job if a call failed */
    char text[2000];
    if (code == PMM3D_OK) return;
    pmm3d_last_error(text, sizeof text);
    fprintf(stderr, "%s\n", text);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

int main(int count, char **words) {
    int rank, size, context, columns = 0;
    const double one = 1, zero = 0;
    double worst = 0, all;
    pmm3d_int n = N, info;
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);

    /* A process grid of one row: each rank stores whole columns, by columns. */
    const pmm3d_int desc[9] = {1, 0, N, N, BLOCK, BLOCK, 0, 0, N};
    double *x = calloc(N * N, sizeof *x), *s = calloc(N * N, sizeof *s);
    double *ones = calloc(N * N, sizeof *ones), *b = calloc(N * N, sizeof *b);
    for (int j = 0; j < N; j++) {
        if (j / BLOCK % size != rank) continue;
        for (int i = 0; i < N; i++) {
            x[columns * N + i] = (i * 3 + j * 5) % 7 - 3;
            s[columns * N + i] = i == j ? N : 0;
            ones[columns * N + i] = 1;
        }
        columns++;
    }
    check(pmm3d_context(MPI_COMM_WORLD, 1, size, 'R', &context));

    check(pmm3d_psyrk(context, 'd', 'L', 'N', n, n, &one, x, 1, 1, desc, &one, s, 1, 1,
                      desc));
    check(pmm3d_psymm(context, 'd', 'L', 'L', n, n, &one, s, 1, 1, desc, ones, 1, 1,
                      desc, &zero, b, 1, 1, desc));
    check(pmm3d_ppotrf(context, 'd', 'L', n, s, 1, 1, desc, &info));
    if (info == 0)
        check(pmm3d_ppotrs(context, 'd', 'L', n, n, s, 1, 1, desc, b, 1, 1, desc,
                           &info));

    for (int i = 0; i < columns * N; i++) worst = fmax(worst, fabs(b[i] - 1));
    MPI_Reduce(&worst, &all, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    if (rank == 0)
        printf("%d ranks: info %d, every element of Y is %s\n", size, (int)info, all < 1e-9 ? "right" : "wrong");
    check(pmm3d_finalize());
    MPI_Finalize();
    return 0;
}
