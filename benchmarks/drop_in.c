/* Programs that call ScaLAPACK, timed: drop_in.py compiles and starts this file with and without the drop-in.

       mpirun -n 4 ./drop_in lu|cholesky n block rounds          p?getrf, p?potrf
       mpirun -n 4 ./drop_in rotation n block rounds kinds       products of `kinds` different sizes in turns, near n
       mpirun -n 4 ./drop_in scf n block rounds                  purification of a density matrix

   On the process grid nearest to a square. Prints "first" and "round", each with the seconds of the slowest rank (of a
   product for rotation), "error" with the largest error of a result, and "MB" with the largest memory of a rank. */
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void Cblacs_get(int context, int request, int *value);
void Cblacs_gridinit(int *context, const char *order, int rows, int columns);
void Cblacs_gridinfo(int context, int *rows, int *columns, int *row, int *column);
int numroc_(const int *n, const int *block, const int *process, const int *first, const int *processes);
void descinit_(int *desc, const int *m, const int *n, const int *mb, const int *nb, const int *row, const int *column,
               const int *context, const int *leading, int *info);
void pdgemm_(const char *, const char *, const int *, const int *, const int *, const double *, const double *,
             const int *, const int *, const int *, const double *, const int *, const int *, const int *,
             const double *, double *, const int *, const int *, const int *);
void pdgetrf_(const int *, const int *, double *, const int *, const int *, const int *, int *, int *);
void pdgetrs_(const char *, const int *, const int *, const double *, const int *, const int *, const int *,
              const int *, double *, const int *, const int *, const int *, int *);
void pdpotrf_(const char *, const int *, double *, const int *, const int *, const int *, int *);
void pdpotrs_(const char *, const int *, const int *, const double *, const int *, const int *, const int *, double *,
              const int *, const int *, const int *, int *);

static const int zero = 0, one = 1;
static int context, rows, columns, row, column, n, block, tall;

typedef struct {
    int desc[9], height, width;
    double *data;
} Matrix;

static int global(int local, int process, int processes) {
    return (local / block * processes + process) * block + local % block;
}

/* A matrix with the elements value(i, j). */
static Matrix matrix(int m, int k, double (*value)(int, int)) {
    Matrix made;
    int info;
    made.height = numroc_(&m, &block, &row, &zero, &rows), made.width = numroc_(&k, &block, &column, &zero, &columns);
    int leading = made.height > 1 ? made.height : 1;
    descinit_(made.desc, &m, &k, &block, &block, &zero, &zero, &context, &leading, &info);
    made.data = calloc((size_t)leading * (made.width + 1), sizeof(double));
    for (int j = 0; j < made.width; j++)
        for (int i = 0; i < made.height; i++)
            made.data[(size_t)j * leading + i] = value(global(i, row, rows), global(j, column, columns));
    return made;
}

static size_t bytes(const Matrix *of) { return (size_t)of->height * of->width * sizeof(double); }

/* Symmetric and positive definite. */
static double dominant(int i, int j) { return i == j ? 2.0 : 0.5 / (1 + (i - j) * (double)(i - j)); }
static double row_sum(int i, int j) {
    double sum = 0;
    for (j = 0; j < n; j++) sum += dominant(i, j);
    return sum;
}
static double nothing(int i, int j) { return (void)i, (void)j, 0; }
static double unity(int i, int j) { return i == j; }
static double ones(int i, int j) { return (void)i, (void)j, 1; }
static double sum(int i, int j) { return i % 7 + j % 5; }
/* Row i < tall of the product of two matrices `sum`; other rows are 0. Sums are by k % 35. */
static double product(int i, int j) {
    double found = 0;
    for (int k = 0; k < 35 && k < n && i < tall; k++) found += sum(i, k) * sum(k, j) * ((n - k + 34) / 35);
    return found;
}
static double hamilton(int i, int j) { return i == j ? (i % 3 ? 1.0 : -1.0) : 0.1 / (1 + abs(i - j)); }

static double largest(double mine) {
    double found;
    MPI_Allreduce(&mine, &found, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return found;
}

static void multiply(const char *transa, double alpha, const Matrix *a, const Matrix *b, double beta, Matrix *c, int m) {
    pdgemm_(transa, "N", &m, &n, &n, &alpha, a->data, &one, &one, a->desc, b->data, &one, &one, b->desc, &beta, c->data,
            &one, &one, c->desc);
}

static double trace(const Matrix *of) {
    double mine = 0, sum;
    for (int j = 0; j < of->width; j++)
        for (int i = 0; i < of->height; i++)
            if (global(i, row, rows) == global(j, column, columns)) mine += of->data[(size_t)j * of->height + i];
    MPI_Allreduce(&mine, &sum, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    return sum;
}

/* The larger of two errors: infinity for one that is not a number. */
static double worse(double known, double found) { return found <= known ? known : isnan(found) ? INFINITY : found; }

/* Largest |element - value(i, j)|. */
static double error(const Matrix *of, double (*value)(int, int)) {
    double found = 0;
    for (int j = 0; j < of->width; j++)
        for (int i = 0; i < of->height; i++)
            found = worse(found, fabs(of->data[(size_t)j * of->height + i] -
                                      value(global(i, row, rows), global(j, column, columns))));
    return largest(found);
}

/* Seconds of a factorisation, and the error of the solution of A x = b with x = 1. */
static double factor(int lu, double *wrong) {
    static Matrix a, x;
    static int *pivots, info;
    if (!pivots) pivots = malloc((n + block) * sizeof(int));
    free(a.data), free(x.data);
    a = matrix(n, n, dominant), x = matrix(n, 1, row_sum);
    MPI_Barrier(MPI_COMM_WORLD);
    double begun = MPI_Wtime(), seconds;
    if (lu) pdgetrf_(&n, &n, a.data, &one, &one, a.desc, pivots, &info);
    else pdpotrf_("L", &n, a.data, &one, &one, a.desc, &info);
    seconds = MPI_Wtime() - begun;
    if (lu) pdgetrs_("N", &n, &one, a.data, &one, &one, a.desc, pivots, x.data, &one, &one, x.desc, &info);
    else pdpotrs_("L", &n, &one, a.data, &one, &one, a.desc, x.data, &one, &one, x.desc, &info);
    *wrong = error(&x, ones);
    return seconds;
}

/* Seconds of a product. All results of the first round are checked, and the last result of the others. */
static double rotate(int first, int kinds, double *wrong) {
    static Matrix a, b, c;
    if (first) a = matrix(n, n, sum), b = matrix(n, n, sum), c = matrix(n, n, nothing);
    memset(c.data, 0, bytes(&c));
    MPI_Barrier(MPI_COMM_WORLD);
    double begun = MPI_Wtime(), checks = 0;
    *wrong = 0;
    for (int kind = kinds - 1; kind >= 0; kind--) {
        tall = n - kind;
        multiply("N", 1, &a, &b, 0, &c, tall);
        double before = MPI_Wtime();
        if (first || kind == 0) *wrong = worse(*wrong, error(&c, product));
        if (first) memset(c.data, 0, bytes(&c));
        checks += MPI_Wtime() - before;
    }
    return (MPI_Wtime() - begun - checks) / kinds;
}

/* Seconds of a step: X = Z^T H Z, 16 steps of second-order trace-correcting purification, P = Z^T (Z X); Z = 1. The error
   is that of the trace of P, the number of electrons. */
static double scf(double *wrong) {
    static Matrix z, h, w, x, square;
    if (!z.data)
        z = matrix(n, n, unity), h = matrix(n, n, hamilton), w = matrix(n, n, nothing), x = matrix(n, n, nothing),
        square = matrix(n, n, nothing);
    int electrons = (n + 2) / 3;
    memset(w.data, 0, bytes(&w)), memset(x.data, 0, bytes(&x)), memset(square.data, 0, bytes(&square));
    MPI_Barrier(MPI_COMM_WORLD);
    double begun = MPI_Wtime();
    multiply("N", 1, &h, &z, 0, &w, n);
    multiply("T", 1, &z, &w, 0, &x, n);
    for (int j = 0; j < x.width; j++) /* the spectrum of H is between -2 and 2 */
        for (int i = 0; i < x.height; i++) {
            double *element = x.data + (size_t)j * x.height + i;
            *element = ((global(i, row, rows) == global(j, column, columns)) * 2 - *element) / 4;
        }
    for (int step = 0; step < 16; step++) {
        multiply("N", 1, &x, &x, 0, &square, n);
        double full = trace(&x), less = trace(&square);
        int down = fabs(less - electrons) < fabs(2 * full - less - electrons);
        for (size_t i = 0; i < bytes(&x) / sizeof(double); i++)
            x.data[i] = down ? square.data[i] : 2 * x.data[i] - square.data[i];
    }
    multiply("N", 1, &z, &x, 0, &w, n);
    multiply("T", 1, &z, &w, 0, &square, n);
    double seconds = MPI_Wtime() - begun;
    *wrong = fabs(trace(&square) - electrons);
    return seconds;
}

static double resident(void) {
    char line[256];
    double kilobytes = 0;
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status)) sscanf(line, "VmRSS: %lf", &kilobytes);
    if (status) fclose(status);
    return kilobytes / 1024;
}

int main(int count, char **words) {
    int ranks, rank, shape[2] = {0, 0};
    MPI_Init(&count, &words);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (count < 5) return 2;
    n = atoi(words[2]), block = atoi(words[3]);
    int rounds = atoi(words[4]), kinds = count > 5 ? atoi(words[5]) : 1;
    MPI_Dims_create(ranks, 2, shape);
    Cblacs_get(-1, 0, &context);
    Cblacs_gridinit(&context, "Row", shape[1], shape[0]);
    Cblacs_gridinfo(context, &rows, &columns, &row, &column);
    double worst = 0;
    for (int round = -1; round < rounds; round++) {
        double wrong, seconds = !strcmp(words[1], "rotation") ? rotate(round < 0, kinds, &wrong)
                                : !strcmp(words[1], "scf")    ? scf(&wrong)
                                                              : factor(!strcmp(words[1], "lu"), &wrong);
        seconds = largest(seconds), worst = worse(worst, wrong);
        if (rank == 0) printf("%s %.9f\n", round < 0 ? "first" : "round", seconds);
    }
    double memory = largest(resident());
    if (rank == 0) printf("error %.3g\nMB %.0f\n", worst, memory);
    MPI_Finalize();
    return 0;
}
