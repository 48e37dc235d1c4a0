/* Block-cyclic products and moves of one type beside ScaLAPACK's: cyclic s|d|c|z rows columns. Prints the largest
   difference, in units of rounding times k. Ranks that are left over hold nothing. */
#include <complex.h>
#include <math.h>
#include <pmm3d.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void Cblacs_get(int context, int request, int *value);
void Cblacs_gridinit(int *context, const char *order, int rows, int columns);
void Cblacs_gridinfo(int context, int *rows, int *columns, int *row, int *column);
int numroc_(const int *n, const int *block, const int *process, const int *first, const int *processes);
void descinit_(int *desc, const int *m, const int *n, const int *mb, const int *nb, const int *row, const int *column,
               const int *context, const int *leading, int *info);
typedef void gemm(const char *, const char *, const int *, const int *, const int *, const void *, const void *,
                  const int *, const int *, const int *, const void *, const int *, const int *, const int *,
                  const void *, void *, const int *, const int *, const int *);
typedef void gemr2d(const int *, const int *, const void *, const int *, const int *, const int *, void *, const int *,
                    const int *, const int *, const int *);
gemm psgemm_, pdgemm_, pcgemm_, pzgemm_;
gemr2d psgemr2d_, pdgemr2d_, pcgemr2d_, pzgemr2d_;

static char kind;
static int size, blacs, rows, columns, row = -1, column = -1, context, other;
static gemm *theirs;
static gemr2d *their_move;

typedef struct {
    int desc[9], rows, columns;
    void *data;
} Matrix;

static void check(int code, const char *what) {
    char text[3000];
    if (code == PMM3D_OK) return;
    pmm3d_last_error(text, sizeof text);
    fprintf(stderr, "%s: code %d: %s\n", what, code, text);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static size_t bytes(const Matrix *matrix) { return (size_t)matrix->desc[8] * (matrix->columns + 1) * size; }

static double complex load(const void *memory, size_t at) {
    if (kind == 's') return ((const float *)memory)[at];
    if (kind == 'd') return ((const double *)memory)[at];
    if (kind == 'c') return ((const float complex *)memory)[at];
    return ((const double complex *)memory)[at];
}

static void store(void *memory, size_t at, double complex value) {
    if (kind == 's') ((float *)memory)[at] = (float)creal(value);
    if (kind == 'd') ((double *)memory)[at] = creal(value);
    if (kind == 'c') ((float complex *)memory)[at] = (float complex)value;
    if (kind == 'z') ((double complex *)memory)[at] = value;
}

static double drawn(void) { return rand() / (double)RAND_MAX - 0.5; }

static Matrix make(int m, int n, int mb, int nb, int rsrc, int csrc, int gap) {
    Matrix made = {{1, -1, m, n, mb, nb, rsrc, csrc, 1 + gap}, 0, 0, NULL};
    int info, leading;
    if (row < 0) return made;
    made.rows = numroc_(&m, &mb, &row, &rsrc, &rows);
    made.columns = numroc_(&n, &nb, &column, &csrc, &columns);
    leading = (made.rows > 1 ? made.rows : 1) + gap;
    descinit_(made.desc, &m, &n, &mb, &nb, &rsrc, &csrc, &blacs, &leading, &info);
    made.data = calloc((size_t)leading * (made.columns + 1), size);
    for (size_t i = 0; i < (size_t)leading * made.columns; i++) store(made.data, i, CMPLX(drawn(), drawn()));
    return made;
}

static double difference(const Matrix *one, const void *two) {
    double most = 0;
    for (size_t i = 0; i < (size_t)one->desc[8] * one->columns; i++) {
        double here = cabs(load(one->data, i) - load(two, i));
        most = here > most || isnan(here) ? here : most;
    }
    return most;
}

static void *copy_of(const Matrix *matrix) {
    return matrix->data ? memcpy(malloc(bytes(matrix)), matrix->data, bytes(matrix)) : NULL;
}

static double product(char transa, char transb, int m, int n, int k, int at) {
    Matrix a = transa == 'N' ? make(m + at, k + at, 3, 2, 0, 0, 0) : make(k + at, m + at, 3, 2, 0, columns - 1, 2);
    Matrix b = transb == 'N' ? make(k + at, n + at, 2, 4, rows - 1, 0, 1) : make(n + at, k + at, 4, 2, 0, 0, 0);
    Matrix c = make(m + at, n + at, 3, 4, 0, 0, 3);
    char alpha[16], beta[16];
    int from = at + 1;
    void *expected = copy_of(&c);
    store(alpha, 0, CMPLX(1.5, -0.5)), store(beta, 0, CMPLX(at ? -0.75 : 0, 0));
    if (row >= 0) theirs(&transa, &transb, &m, &n, &k, alpha, a.data, &from, &from, a.desc, b.data, &from, &from, b.desc, beta,
           expected, &from, &from, c.desc);
    check(pmm3d_pgemm(context, kind, transa, transb, m, n, k, alpha, a.data, from, from, a.desc, b.data, from, from,
                      b.desc, beta, c.data, from, from, c.desc), "pmm3d_pgemm");
    double found = difference(&c, expected) / (k + 1);
    free(a.data), free(b.data), free(c.data), free(expected);
    return found;
}

static double move(int m, int n, int at) {
    Matrix a = make(m + at, n + at, 3, 2, 0, 0, 1), b = make(m + at, n + at, 2, 5, rows - 1, 0, 0);
    void *expected = copy_of(&b);
    int from = at + 1;
    if (row >= 0) their_move(&m, &n, a.data, &from, &from, a.desc, expected, &from, &from, b.desc, &blacs);
    check(pmm3d_pgemr2d(kind, m, n, a.data, from, from, a.desc, context, b.data, from, from, b.desc, other),
          "pmm3d_pgemr2d");
    double found = difference(&b, expected);
    free(a.data), free(b.data), free(expected);
    return found;
}

/* From block-cyclic to a layout, and back into another array. */
static double there_and_back(const char *layout, char order) {
    Matrix a = make(13, 11, 3, 2, 0, 0, 1), b = make(13, 11, 3, 2, 0, 0, 1);
    int64_t box[4];
    int grid, matrix;
    check(pmm3d_grid(MPI_COMM_WORLD, 0, 0, 0, &grid), "pmm3d_grid");
    check(pmm3d_box(grid, layout, 13, 11, box), "pmm3d_box");
    void *shard = calloc(13 * 11, size);
    check(pmm3d_matrix(grid, kind, 13, 11, layout, order, shard, &matrix), "pmm3d_matrix");
    check(pmm3d_from_block_cyclic(context, a.data, a.desc, matrix), "pmm3d_from_block_cyclic");
    check(pmm3d_to_block_cyclic(matrix, context, b.data, b.desc), "pmm3d_to_block_cyclic");
    check(pmm3d_free(&matrix), "pmm3d_free"), check(pmm3d_free(&grid), "pmm3d_free");
    double found = 0;
    for (int j = 0; j < a.columns; j++)
        for (int i = 0; i < a.rows; i++) {
            size_t at = (size_t)j * a.desc[8] + i;
            double here = cabs(load(a.data, at) - load(b.data, at));
            found = here > found ? here : found;
        }
    free(a.data), free(b.data), free(shard);
    return found;
}

int main(int count, char **words) {
    static const int sizes[][3] = {{13, 11, 9}, {1, 1, 1}, {24, 5, 40}, {4, 6, 0}};
    double most = 0, moved = 0, mine[2], all[2];
    int rank, products = 0;
    kind = words[1][0];
    rows = atoi(words[2]), columns = atoi(words[3]);
    size = kind == 's' ? 4 : kind == 'z' ? 16 : 8;
    theirs = kind == 's' ? psgemm_ : kind == 'd' ? pdgemm_ : kind == 'c' ? pcgemm_ : pzgemm_;
    their_move = kind == 's' ? psgemr2d_ : kind == 'd' ? pdgemr2d_ : kind == 'c' ? pcgemr2d_ : pzgemr2d_;
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    srand(rank + 1);
    Cblacs_get(-1, 0, &blacs);
    Cblacs_gridinit(&blacs, "Row", rows, columns);
    if (blacs >= 0) Cblacs_gridinfo(blacs, &rows, &columns, &row, &column);
    check(pmm3d_context(MPI_COMM_WORLD, rows, columns, 'R', &context), "pmm3d_context");
    check(pmm3d_context(MPI_COMM_WORLD, rows, columns, 'R', &other), "pmm3d_context");
    for (const char *transa = "NTC"; *transa; transa++)
        for (const char *transb = "NTC"; *transb; transb++)
            for (int i = 0; i < 4; i++, products++)
                most = fmax(most, product(*transa, *transb, sizes[i][0], sizes[i][1], sizes[i][2], i % 2 * 3));
    moved = fmax(moved, fmax(move(13, 11, 0), move(7, 9, 4)));
    moved = fmax(moved, fmax(there_and_back("A", 'C'), there_and_back("zy/x", 'F')));
    mine[0] = most / (size == 16 || kind == 'd' ? 2.2e-16 : 1.2e-7), mine[1] = moved;
    MPI_Reduce(mine, all, 2, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    if (rank == 0) printf("%d products: %.1f roundings; moves: %g\n", products, all[0], all[1]);
    check(pmm3d_finalize(), "pmm3d_finalize");
    MPI_Finalize();
    return 0;
}
