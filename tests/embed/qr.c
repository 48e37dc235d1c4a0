/* QR factorisations of pmm3d_cholesky_qr: of a matrix, in place, and what is refused. */
#include <math.h>
#include <pmm3d.h>
#include <stdio.h>

enum { M = 40, N = 6 };
static int rank, grid;
static const double one = 1, minus = -1;

static double element(int64_t i, int64_t j) { return sin(1.0 + 3 * i + 7 * j * j) + (i == j); }

static int matrix(int64_t rows, int64_t columns, const char *layout, double *shard, double (*at)(int64_t, int64_t)) {
    int64_t box[4];
    int made = 0;
    pmm3d_box(grid, layout, rows, columns, box);
    for (int64_t i = box[0]; i < box[1]; i++)
        for (int64_t j = box[2]; j < box[3]; j++) shard[(i - box[0]) * (box[3] - box[2]) + j - box[2]] = at ? at(i, j) : -9;
    pmm3d_matrix(grid, 'd', rows, columns, layout, 'C', shard, &made);
    return made;
}

static double identity(int64_t i, int64_t j) { return i == j; }
static double one_column(int64_t i, int64_t j) { return j ? 0 : 1 + i; }

/* Whether all elements of a replicated matrix are 0 to rounding. */
static int vanishes(const double *whole, int64_t elements) {
    for (int64_t i = 0; i < elements; i++)
        if (!(fabs(whole[i]) < 1e-13)) return 0;
    return 1;
}

int main(int argc, char **argv) {
    static double of_a[M * N], of_q[M * N], of_r[N * N], rest[M * N], square[N * N], of_dependent[M * N];
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    pmm3d_grid(MPI_COMM_WORLD, 0, 0, 0, &grid);
    int a = matrix(M, N, "A", of_a, element), q = matrix(M, N, "B", of_q, NULL), r = matrix(N, N, "/", of_r, NULL);
    int left = matrix(M, N, "/", rest, element), gram = matrix(N, N, "/", square, identity);
    for (int in_place = 0; in_place < 2; in_place++) {
        int of = in_place ? a : q, code = pmm3d_cholesky_qr(a, of, r), below = 1;
        for (int i = 0; i < N; i++)
            for (int j = 0; j < i; j++) below &= of_r[i * N + j] == 0;
        pmm3d_matmul('N', 'N', &minus, of, r, &one, left);
        pmm3d_matmul('T', 'N', &minus, of, of, &one, gram);
        printf("%d factors %d %d %d %d\n", rank, code, below, vanishes(rest, M * N), vanishes(square, N * N));
        for (int i = 0; i < M * N; i++) rest[i] = element(i / N, i % N);
        for (int i = 0; i < N * N; i++) square[i] = i % (N + 1) == 0;
    }
    int dependent = matrix(M, N, "A", of_dependent, one_column);
    double before = of_r[0];
    int code = pmm3d_cholesky_qr(dependent, q, r), wrong = pmm3d_cholesky_qr(a, q, q);
    int same = pmm3d_cholesky_qr(gram, r, r), over = pmm3d_cholesky_qr(r, gram, r); /* R in Q, and in A */
    int kept = of_r[0] == before, single = 0, of_another_type = -1;
    static float narrow[N * N], shard;
    shard = of_q[0];
    pmm3d_matrix(grid, 's', N, N, "/", 'C', narrow, &single);
    of_another_type = pmm3d_cholesky_qr(a, q, single);
    kept &= (float)of_q[0] == shard; /* Q is not written if R cannot be */
    printf("%d refused %d %d %d %d %d kept %d\n", rank, code, wrong, same, over, of_another_type, kept);
    pmm3d_finalize();
    MPI_Finalize();
    return 0;
}
