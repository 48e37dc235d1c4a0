/* A program that calls p?gemm through the drop-in, and pmm3d itself. Its pmm3d_finalize frees its objects only. */
#include <pmm3d.h>
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
    const double one = 1, zero = 0;
    int context, rank, size, grid, code = 0, shape[3];
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    Cblacs_get(-1, 0, &context);
    Cblacs_gridinit(&context, "R", size, 1);
    const int desc[9] = {1, context, N, N, 1, N, 0, 0, N};
    for (int i = 0; i < N * N; i++) a[i] = 1, b[i] = 2;
    for (int times = 0; times < 2; times++) {
        pdgemm_("N", "N", &n, &n, &n, &one, a, &first, &first, desc, b, &first, &first, desc, &zero, c, &first, &first,
                desc);
        code |= pmm3d_grid(MPI_COMM_WORLD, 0, 0, 0, &grid) || pmm3d_grid_shape(grid, shape);
        code |= pmm3d_finalize() || pmm3d_grid_shape(grid, shape) != PMM3D_ERROR_ARGUMENT;
    }
    printf("%d: code %d, C %g\n", rank, code, c[0]);
    MPI_Finalize();
    return 0;
}
