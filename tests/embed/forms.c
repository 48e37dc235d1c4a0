/* Every transpose, memory order and a few layouts of one type, by exact sums: forms s|d|c|z. */
#include <complex.h>
#include <pmm3d.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { M = 7, N_ = 5, K = 9, FORMS = 4 };
static const char *layouts[FORMS] = {"A", "B", "/", "y/zx"};
static char kind;
static int grid;

static void check(int code) {
    char text[2000];
    if (code == PMM3D_OK) return;
    pmm3d_last_error(text, sizeof text);
    fprintf(stderr, "code %d: %s\n", code, text);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static double complex element(int64_t i, int64_t j, int which) {
    double real = (double)((i + 2 * j + which) % 7) - 3, imaginary = (double)((3 * i + j) % 5) - 2;
    return kind == 'c' || kind == 'z' ? CMPLX(real, imaginary) : CMPLX(real, 0);
}

static void store(void *memory, int64_t at, double complex value) {
    if (kind == 's') ((float *)memory)[at] = (float)creal(value);
    if (kind == 'd') ((double *)memory)[at] = creal(value);
    if (kind == 'c') ((float complex *)memory)[at] = (float complex)value;
    if (kind == 'z') ((double complex *)memory)[at] = value;
}

static double complex load(const void *memory, int64_t at) {
    if (kind == 's') return ((const float *)memory)[at];
    if (kind == 'd') return ((const double *)memory)[at];
    if (kind == 'c') return ((const float complex *)memory)[at];
    return ((const double complex *)memory)[at];
}

typedef struct {
    int64_t box[4];
    char order;
    void *memory;
    int number;
} Matrix;

static int64_t place(const Matrix *matrix, int64_t i, int64_t j) {
    const int64_t *box = matrix->box;
    return matrix->order == 'F' ? (j - box[2]) * (box[1] - box[0]) + i - box[0]
                                : (i - box[0]) * (box[3] - box[2]) + j - box[2];
}

static Matrix make(int64_t rows, int64_t columns, const char *layout, char order, int which) {
    Matrix made = {.order = order};
    check(pmm3d_box(grid, layout, rows, columns, made.box));
    made.memory = calloc((size_t)(rows * columns), sizeof(double complex));
    for (int64_t i = made.box[0]; i < made.box[1]; i++)
        for (int64_t j = made.box[2]; j < made.box[3]; j++)
            store(made.memory, place(&made, i, j), element(i, j, which));
    check(pmm3d_matrix(grid, kind, rows, columns, layout, order, made.memory, &made.number));
    return made;
}

static void drop(Matrix *matrix) {
    check(pmm3d_free(&matrix->number));
    free(matrix->memory);
}

static double complex op(char by, int64_t i, int64_t j, int which) {
    return by == 'N' ? element(i, j, which) : by == 'T' ? element(j, i, which) : conj(element(j, i, which));
}

static double complex product(int64_t i, int64_t j, char transa, char transb) {
    double complex sum = 3 * element(i, j, 2);
    for (int64_t l = 0; l < K; l++) sum += 2 * op(transa, i, l, 0) * op(transb, l, j, 1);
    return sum;
}

static int wrong_product(char transa, char transb, int form) {
    char a_order = form % 2 ? 'F' : 'C', c_order = form / 2 % 2 ? 'F' : 'C';
    Matrix a = transa == 'N' ? make(M, K, layouts[form], a_order, 0) : make(K, M, layouts[form], a_order, 0);
    Matrix b = transb == 'N' ? make(K, N_, layouts[FORMS - 1 - form], 'C', 1) : make(N_, K, layouts[form], 'F', 1);
    Matrix c = make(M, N_, form ? "C" : "/", c_order, 2);
    char alpha[16], beta[16];
    int wrong = 0;
    store(alpha, 0, 2);
    store(beta, 0, 3);
    check(pmm3d_matmul(transa, transb, alpha, a.number, b.number, beta, c.number));
    for (int64_t i = c.box[0]; i < c.box[1]; i++)
        for (int64_t j = c.box[2]; j < c.box[3]; j++)
            wrong |= load(c.memory, place(&c, i, j)) != product(i, j, transa, transb);
    drop(&a), drop(&b), drop(&c);
    return wrong;
}

static int wrong_move(int from, int to, char order) {
    Matrix source = make(M, N_, layouts[from], 'C', 0), target = make(M, N_, layouts[to], order, 1);
    int wrong = 0;
    check(pmm3d_redistribute(source.number, target.number));
    for (int64_t i = target.box[0]; i < target.box[1]; i++)
        for (int64_t j = target.box[2]; j < target.box[3]; j++)
            wrong |= load(target.memory, place(&target, i, j)) != element(i, j, 0);
    drop(&source), drop(&target);
    return wrong;
}

int main(int count, char **words) {
    int rank, products = 0, moves = 0, wrong = 0, all;
    kind = count > 1 ? words[1][0] : 'd';
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    check(pmm3d_grid(MPI_COMM_WORLD, 0, 0, 0, &grid));
    for (const char *transa = "NTC"; *transa; transa++)
        for (const char *transb = "NTC"; *transb; transb++)
            for (int form = 0; form < FORMS; form++, products++) wrong += wrong_product(*transa, *transb, form);
    for (int from = 0; from < FORMS; from++)
        for (int to = 0; to < FORMS; to++)
            for (const char *order = "CF"; *order; order++, moves++) wrong += wrong_move(from, to, *order);
    MPI_Reduce(&wrong, &all, 1, MPI_INT, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0) printf("%d products, %d moves, %d wrong\n", products, moves, all);
    check(pmm3d_finalize());
    MPI_Finalize();
    return 0;
}
