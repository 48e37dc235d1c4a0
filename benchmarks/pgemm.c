/* ScaLAPACK's p?gemm, timed: the peer of small_products.py, which compiles and starts it.

       mpirun -n 8 ./pgemm m n k d|s rows columns block calls rounds

   C = A B on a rows x columns process grid, block-cyclic with square blocks. Prints, for each round, the seconds of one
   of so many calls that follow each other, of the slowest rank; "wrong" if an element of C is. */
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

void Cblacs_get(int context, int request, int *value);
void Cblacs_gridinit(int *context, const char *order, int rows, int columns);
void Cblacs_gridinfo(int context, int *rows, int *columns, int *row, int *column);
int numroc_(const int *n, const int *block, const int *process, const int *first, const int *processes);
void descinit_(int *desc, const int *m, const int *n, const int *mb, const int *nb, const int *row, const int *column,
               const int *context, const int *leading, int *info);
void pdgemm_(const char *, const char *, const int *, const int *, const int *, const double *, const double *,
             const int *, const int *, const int *, const double *, const int *, const int *, const int *,
             const double *, double *, const int *, const int *, const int *);
void psgemm_(const char *, const char *, const int *, const int *, const int *, const float *, const float *,
             const int *, const int *, const int *, const float *, const int *, const int *, const int *,
             const float *, float *, const int *, const int *, const int *);

static const int zero = 0, one = 1;

typedef struct {
    int rows, columns, context, row, column, block, single;
} Grid;

typedef struct {
    int desc[9], height, width;
    void *data;
} Matrix;

/* element (i, j) = (i + 2 j + seed) mod 7 - 3, so that products are exact */
static double element(long i, long j, int seed) { return (double)((i + 2 * j + seed) % 7) - 3; }

static int global(int local, int block, int process, int processes) {
    return (local / block * processes + process) * block + local % block;
}

static Matrix matrix(const Grid *grid, int m, int n, int seed) {
    Matrix made;
    int info;
    made.height = numroc_(&m, &grid->block, &grid->row, &zero, &grid->rows);
    made.width = numroc_(&n, &grid->block, &grid->column, &zero, &grid->columns);
    int leading = made.height > 1 ? made.height : 1;
    descinit_(made.desc, &m, &n, &grid->block, &grid->block, &zero, &zero, &grid->context, &leading, &info);
    made.data = calloc((size_t)leading * (made.width + 1), sizeof(double));
    for (int j = 0; j < made.width; j++)
        for (int i = 0; i < made.height; i++) {
            double value = element(global(i, grid->block, grid->row, grid->rows),
                                   global(j, grid->block, grid->column, grid->columns), seed);
            size_t place = (size_t)j * leading + i;
            if (grid->single) ((float *)made.data)[place] = (float)value;
            else ((double *)made.data)[place] = value;
        }
    return made;
}

static void multiply(const Grid *grid, int m, int n, int k, const Matrix *a, const Matrix *b, Matrix *c) {
    if (grid->single) {
        float alpha = 1, beta = 0;
        psgemm_("N", "N", &m, &n, &k, &alpha, a->data, &one, &one, a->desc, b->data, &one, &one, b->desc, &beta,
                c->data, &one, &one, c->desc);
    } else {
        double alpha = 1, beta = 0;
        pdgemm_("N", "N", &m, &n, &k, &alpha, a->data, &one, &one, a->desc, b->data, &one, &one, b->desc, &beta,
                c->data, &one, &one, c->desc);
    }
}

/* whether the first element of C that is here is right */
static int right(const Grid *grid, int k, const Matrix *c) {
    if (c->height == 0 || c->width == 0) return 1;
    double sum = 0, found = grid->single ? ((float *)c->data)[0] : ((double *)c->data)[0];
    for (int l = 0; l < k; l++)
        sum += element(global(0, grid->block, grid->row, grid->rows), l, 0) *
               element(l, global(0, grid->block, grid->column, grid->columns), 1);
    return fabs(sum - found) < 1e-3;
}

int main(int count, char **words) {
    MPI_Init(&count, &words);
    if (count != 10) return 2;
    int m = atoi(words[1]), n = atoi(words[2]), k = atoi(words[3]), calls = atoi(words[8]), rounds = atoi(words[9]);
    Grid grid = {.rows = atoi(words[5]), .columns = atoi(words[6]), .block = atoi(words[7]),
                 .single = words[4][0] == 's'};
    Cblacs_get(-1, 0, &grid.context);
    Cblacs_gridinit(&grid.context, "Row", grid.rows, grid.columns);
    Cblacs_gridinfo(grid.context, &grid.rows, &grid.columns, &grid.row, &grid.column);
    int here = grid.row >= 0, rank, good = 1;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    Matrix a, b, c;
    if (here) a = matrix(&grid, m, k, 0), b = matrix(&grid, k, n, 1), c = matrix(&grid, m, n, 2);
    for (int round = -1; round < rounds; round++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double begun = MPI_Wtime(), mine, slowest;
        for (int call = 0; here && call < calls; call++) multiply(&grid, m, n, k, &a, &b, &c);
        mine = (MPI_Wtime() - begun) / calls;
        MPI_Reduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (rank == 0 && round >= 0) printf("%.9f\n", slowest);
    }
    int mine = here ? right(&grid, k, &c) : 1;
    MPI_Reduce(&mine, &good, 1, MPI_INT, MPI_MIN, 0, MPI_COMM_WORLD);
    if (rank == 0 && !good) printf("wrong\n");
    MPI_Finalize();
    return 0;
}
