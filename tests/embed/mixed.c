/* Products of 2 ranks that ScaLAPACK computes, for two reasons, and one that PMM3D computes. With "disagree", alpha
   differs between the ranks. */
#include <mpi.h>
#include <stdio.h>

enum { N = 6 };
void Cblacs_get(int context, int request, int *value);
void Cblacs_gridinit(int *context, const char *order, int rows, int columns);
void pdgemm_(const char *, const char *, const int *, const int *, const int *, const double *, const double *,
             const int *, const int *, const int *, const double *, const int *, const int *, const int *,
             const double *, double *, const int *, const int *, const int *);

int main(int count, char **words) {
    static double a[N * N], b[N * N], c[N * N];
    const int n = N, first = 1;
    const double zero = 0;
    int context, rank;
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    Cblacs_get(-1, 0, &context);
    Cblacs_gridinit(&context, "R", 2, 1);
    const int usual[9] = {1, context, N, N, 1, N, 0, 0, N}, replicated[9] = {1, context, N, N, 1, N, -1, -1, N},
              longer[11] = {2, context, N, N, 2, N, 1, N, 0, 0, N}, *descs[] = {replicated, longer, usual};
    const double alpha = count > 1 ? 1 + rank : 1;
    for (int i = 0; i < N * N; i++) a[i] = 1, b[i] = 2;
    for (int call = count > 1 ? 4 : 0; call < 6; call++) {
        c[0] = 0;
        pdgemm_("N", "N", &n, &n, &n, &alpha, a, &first, &first, descs[call / 2], b, &first, &first, usual, &zero, c,
                &first, &first, usual);
        printf("C %g\n", c[0]);
    }
    MPI_Finalize();
    return 0;
}
