/* Programs that call ScaLAPACK, timed: drop_in.py compiles and starts this file with and without the drop-in.

       mpirun -n 4 ./drop_in lu|cholesky n block rounds          p?getrf, p?potrf
       mpirun -n 4 ./drop_in rotation n block rounds kinds       products of `kinds` different sizes in turns, near n
       mpirun -n 4 ./drop_in scf n block rounds                  purification of a density matrix
       mpirun -n 4 ./drop_in NAME n block rounds                 pdNAME of n x n matrices, such as syrk

   On the process grid nearest to a square. Prints "first" and "round", each with the seconds of the slowest rank (of a
   product for rotation), "error" with the largest error of a result, and "MB" with the largest memory of a rank. For a
   routine, "theirs" are the seconds of ScaLAPACK's own routine in this process, in turns with the program's. */
#define _GNU_SOURCE
#include <dlfcn.h>
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

void pdgemv_(const char *, const int *, const int *, const double *, const double *, const int *, const int *,
             const int *, const double *, const int *, const int *, const int *, const int *, const double *, double *,
             const int *, const int *, const int *, const int *);
void pdsymv_(const char *, const int *, const double *, const double *, const int *, const int *, const int *,
             const double *, const int *, const int *, const int *, const int *, const double *, double *, const int *,
             const int *, const int *, const int *);
void pdtrmv_(const char *, const char *, const char *, const int *, const double *, const int *, const int *,
             const int *, double *, const int *, const int *, const int *, const int *);

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

/* Elements of a general matrix, of one on or below whose diagonal is well conditioned, and of a vector. */
static double general(int i, int j) { return (i * 31 + j * 17) % 61 / 61. - 0.5; }
static double triangle(int i, int j) { return i == j ? 1 + i % 3 : general(i, j) / n; }
static double vector(int i, int j) { return (void)j, 1 + i % 7; }

#define PASSED(matrix) (matrix).data, &one, &one, (matrix).desc

/* y = op(A) x + beta y. kind: 'N' or 'T' of a general matrix; 'S' for a symmetric matrix that is stored on and below its
   diagonal; 'L' or 'U' for a triangle, or its transpose, with beta = 0. */
static void apply(char kind, const Matrix *a, const Matrix *x, double beta, Matrix *y) {
    static const double unit = 1;
    const char op[] = {kind, 0};
    if (kind == 'S') pdsymv_("L", &n, &unit, PASSED(*a), PASSED(*x), &one, &beta, PASSED(*y), &one);
    else if (kind != 'L' && kind != 'U') pdgemv_(op, &n, &n, &unit, PASSED(*a), PASSED(*x), &one, &beta, PASSED(*y), &one);
    else {
        if (x != y) memcpy(y->data, x->data, bytes(x));
        pdtrmv_("L", kind == 'L' ? "N" : "T", "N", &n, PASSED(*a), PASSED(*y), &one);
    }
}

/* Call pdNAME: with A and B, which are not changed, and C, which is. Multiplications by 1, sums with C. */
static void run(void (*routine)(), const char *name, const Matrix *a, const Matrix *b, Matrix *c) {
    static const double unit = 1;
    const size_t length = 1;
    int info = 0;
    if (!strcmp(name, "gemm"))
        routine("N", "N", &n, &n, &n, &unit, PASSED(*a), PASSED(*b), &unit, PASSED(*c), length, length);
    else if (!strcmp(name, "tran")) routine(&n, &n, &unit, PASSED(*a), &unit, PASSED(*c));
    else if (!strcmp(name, "geadd")) routine("T", &n, &n, &unit, PASSED(*a), &unit, PASSED(*c), length);
    else if (!strcmp(name, "gemr2d")) routine(&n, &n, PASSED(*a), PASSED(*c), &context);
    else if (!strcmp(name, "syrk"))
        routine("L", "N", &n, &n, &unit, PASSED(*a), &unit, PASSED(*c), length, length);
    else if (!strcmp(name, "syr2k"))
        routine("L", "N", &n, &n, &unit, PASSED(*a), PASSED(*b), &unit, PASSED(*c), length, length);
    else if (!strcmp(name, "symm"))
        routine("L", "L", &n, &n, &unit, PASSED(*a), PASSED(*b), &unit, PASSED(*c), length, length);
    else if (!strcmp(name, "trmm") || !strcmp(name, "trsm"))
        routine("L", "L", "N", "N", &n, &n, &unit, PASSED(*a), PASSED(*c), length, length, length, length);
    else if (!strcmp(name, "potrf")) routine("L", &n, PASSED(*c), &info, length);
    else if (!strcmp(name, "potrs")) routine("L", &n, &n, PASSED(*a), PASSED(*c), &info, length);
    else if (!strcmp(name, "trtri")) routine("L", "N", &n, PASSED(*c), &info, length, length);
    else {
        fprintf(stderr, "drop_in: there is no routine %s\n", name);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    if (info) fprintf(stderr, "pd%s: INFO is %d\n", name, info);
}

/* The relative error of the result in C, by products with a vector v. started: C before the call. */
static double error_of(const char *name, const Matrix *a, const Matrix *b, const Matrix *c, const Matrix *started) {
    Matrix v = matrix(n, 1, vector), found = matrix(n, 1, nothing), right = matrix(n, 1, nothing),
           step = matrix(n, 1, nothing);
    char kind = strstr("syrk syr2k", name) ? 'S' : 'N';
    if (!strcmp(name, "trsm")) { /* A (C v) = B v */
        apply('N', c, &v, 0, &step), apply('L', a, &step, 0, &found), apply('N', started, &v, 0, &right);
    } else if (!strcmp(name, "potrs")) { /* A A^T (C v) = B v */
        apply('N', c, &v, 0, &step), apply('U', a, &step, 0, &step), apply('L', a, &step, 0, &found);
        apply('N', started, &v, 0, &right);
    } else if (!strcmp(name, "potrf")) { /* C (C^T v) = A v */
        apply('U', c, &v, 0, &step), apply('L', c, &step, 0, &found), apply('S', started, &v, 0, &right);
    } else if (!strcmp(name, "trtri")) { /* C (A v) = v */
        apply('L', started, &v, 0, &step), apply('L', c, &step, 0, &found), memcpy(right.data, v.data, bytes(&v));
    } else {
        apply(kind, c, &v, 0, &found);
        if (strcmp(name, "trmm") && strcmp(name, "gemr2d")) apply(kind, started, &v, 0, &right);
        if (!strcmp(name, "tran") || !strcmp(name, "geadd")) apply('T', a, &v, 1, &right);
        if (!strcmp(name, "gemr2d")) apply('N', a, &v, 1, &right);
        if (!strcmp(name, "gemm")) apply('N', b, &v, 0, &step), apply('N', a, &step, 1, &right);
        if (!strcmp(name, "symm")) apply('N', b, &v, 0, &step), apply('S', a, &step, 1, &right);
        if (!strcmp(name, "trmm")) apply('N', started, &v, 0, &step), apply('L', a, &step, 0, &right);
        if (!strcmp(name, "syrk")) apply('T', a, &v, 0, &step), apply('N', a, &step, 1, &right);
        if (!strcmp(name, "syr2k")) {
            apply('T', b, &v, 0, &step), apply('N', a, &step, 1, &right);
            apply('T', a, &v, 0, &step), apply('N', b, &step, 1, &right);
        }
    }
    double wrong = 0, size = 0;
    for (int i = 0; i < right.height * right.width; i++) {
        size = fmax(size, fabs(right.data[i]));
        wrong = worse(wrong, fabs(found.data[i] - right.data[i]));
    }
    free(v.data), free(found.data), free(right.data), free(step.data);
    return largest(wrong) / largest(size);
}

/* ScaLAPACK's own routine: that of the library which has p?getrf. */
static void *of_scalapack(const char *symbol) {
    Dl_info there;
    if (!dladdr(dlsym(RTLD_DEFAULT, "pdgetrf_"), &there)) return NULL;
    return dlsym(dlopen(there.dli_fname, RTLD_NOW | RTLD_NOLOAD), symbol);
}

/* Time a routine of the program and ScaLAPACK's, in turns. Print the seconds, and return the largest error. */
static double both(const char *name, int rounds, int rank) {
    int factor = !strcmp(name, "potrf"), inverse = !strcmp(name, "trtri"), own = block;
    double (*of_a)(int, int) = strstr("trmm trsm potrs", name) ? triangle : general, wrong = 0;
    char symbol[32];
    snprintf(symbol, sizeof symbol, "pd%s_", name);
    Matrix a = matrix(n, n, of_a), b = matrix(n, n, general);
    if (!strcmp(name, "gemr2d")) block *= 2; /* the target has other blocks */
    Matrix started = matrix(n, n, factor ? dominant : inverse ? triangle : general), c = matrix(n, n, nothing);
    for (int turn = 0; turn < 2 * (rounds + 1); turn++) {
        int theirs = (turn + turn / 2) % 2;
        void *routine = theirs ? of_scalapack(symbol) : dlsym(RTLD_DEFAULT, symbol);
        memcpy(c.data, started.data, bytes(&c));
        MPI_Barrier(MPI_COMM_WORLD);
        double begun = MPI_Wtime();
        run((void (*)())routine, name, &a, &b, &c);
        double seconds = largest(MPI_Wtime() - begun);
        if (rank == 0) printf("%s%s %.9f\n", theirs ? "theirs" : "", turn < 2 ? "first" : theirs ? "" : "round", seconds);
        if (turn < 2 || turn > 2 * rounds) wrong = worse(wrong, error_of(name, &a, &b, &c, &started));
    }
    block = own;
    return wrong;
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
    int program = !strcmp(words[1], "lu") || !strcmp(words[1], "cholesky") || !strcmp(words[1], "rotation") ||
                  !strcmp(words[1], "scf");
    if (!program) worst = both(words[1], rounds, rank);
    for (int round = -1; program && round < rounds; round++) {
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
