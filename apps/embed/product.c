/* C = A B from C: each rank makes its shards, and looks at its shard of the result.

       mpicc apps/embed/product.c -I embed -L build/embed -lpmm3d -Wl,-rpath,$PWD/build/embed -o product
       mpirun -n 4 ./product 300 200 100 */
#include <pmm3d.h>
#include <stdio.h>
#include <stdlib.h>

static void check(int code, const char *what) {
    char text[2000];
    if (code == PMM3D_OK) return;
    pmm3d_last_error(text, sizeof text);
    fprintf(stderr, "%s: code %d: %s\n", what, code, text);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

/* Elements that make every sum exact. */
static double a_at(int64_t i, int64_t l) { return (double)((i + 2 * l) % 7) - 3; }
static double b_at(int64_t l, int64_t j) { return (double)((3 * l + j) % 5) - 2; }

/* This rank's shard of a matrix, by columns. */
static double *shard(int grid, const char *layout, int64_t rows, int64_t columns, double (*at)(int64_t, int64_t),
                     int *matrix, int64_t box[4]) {
    check(pmm3d_box(grid, layout, rows, columns, box), "pmm3d_box");
    int64_t height = box[1] - box[0], width = box[3] - box[2];
    double *made = calloc((size_t)(height * width + 1), sizeof *made);
    for (int64_t j = 0; at && j < width; j++)
        for (int64_t i = 0; i < height; i++) made[j * height + i] = at(box[0] + i, box[2] + j);
    check(pmm3d_matrix(grid, 'd', rows, columns, layout, 'F', made, matrix), "pmm3d_matrix");
    return made;
}

int main(int count, char **words) {
    int64_t m = count > 1 ? atoll(words[1]) : 300, n = count > 2 ? atoll(words[2]) : 200,
            k = count > 3 ? atoll(words[3]) : 100, box[4];
    int rank, size, grid, a, b, c, shape[3], right = 1, all = 0;
    double alpha = 2, beta = 0;
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);

    check(pmm3d_grid(MPI_COMM_WORLD, 0, 0, 0, &grid), "pmm3d_grid");
    check(pmm3d_grid_shape(grid, shape), "pmm3d_grid_shape");
    double *shard_a = shard(grid, "A", m, k, a_at, &a, box), *shard_b = shard(grid, "B", k, n, b_at, &b, box),
           *shard_c = shard(grid, "C", m, n, NULL, &c, box);
    check(pmm3d_matmul('N', 'N', &alpha, a, b, &beta, c), "pmm3d_matmul");

    for (int64_t j = box[2]; j < box[3]; j++)
        for (int64_t i = box[0]; i < box[1]; i++) {
            double sum = 0;
            for (int64_t l = 0; l < k; l++) sum += 2 * a_at(i, l) * b_at(l, j);
            right &= shard_c[(j - box[2]) * (box[1] - box[0]) + i - box[0]] == sum;
        }
    MPI_Reduce(&right, &all, 1, MPI_INT, MPI_MIN, 0, MPI_COMM_WORLD);
    if (rank == 0)
        printf("%d ranks as %d x %d x %d: %s\n", size, shape[0], shape[1], shape[2], all ? "right" : "wrong");
    check(pmm3d_finalize(), "pmm3d_finalize");
    free(shard_a), free(shard_b), free(shard_c);
    MPI_Finalize();
    return rank == 0 && !all;
}
