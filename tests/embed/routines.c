/* Each routine with descriptors beside ScaLAPACK's, on matrices with offsets: routines s|d|c|z ROWS COLUMNS. All
   elements of the arrays are compared, also those that a routine must not write. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <math.h>
#include <pmm3d.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIZE = 17, BLOCK = 3, M = 9, N = 11, K = 7 };
void Cblacs_get(int context, int request, int *value);
void Cblacs_gridinit(int *context, const char *order, int rows, int columns);
void Cblacs_gridinfo(int context, int *rows, int *columns, int *row, int *column);
int numroc_(const int *n, const int *block, const int *row, const int *source, const int *rows);

static char kind;
static int is_complex, width, context, blacs, rows, columns, row, column, local_rows, local_columns, lld;
static int io4[3], jo4[3], desc4[9], m4 = M, n4 = N, k4 = K;
static pmm3d_int io[3], jo[3], desc[9];
static char *ours[3], *theirs[3], alpha[16], beta[16], real_alpha[16], real_beta[16];
static double worst;
static int calls;

static void check(int code) {
    char text[2000];
    if (code == PMM3D_OK) return;
    pmm3d_last_error(text, sizeof text);
    fprintf(stderr, "code %d: %s\n", code, text);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static int is_single(void) { return kind == 's' || kind == 'c'; }

static void set(char *to, double real, double imaginary) {
    if (is_single()) ((float *)to)[0] = (float)real;
    else ((double *)to)[0] = real;
    if (is_complex && is_single()) ((float *)to)[1] = (float)imaginary;
    if (is_complex && !is_single()) ((double *)to)[1] = imaginary;
}

static int global(int local, int place, int parts) { return (local / BLOCK * parts + place) * BLOCK + local % BLOCK; }

/* Matrices that are Hermitian, or symmetric, and positive definite from any place on the diagonal; the second has
   arbitrary elements. */
static void fill(char *const arrays[3], int symmetric) {
    for (int which = 0; which < 3; which++)
        for (int j = 0; j < local_columns; j++)
            for (int i = 0; i < local_rows; i++) {
                int gi = global(i, row, rows), gj = global(j, column, columns), low = gi < gj ? gi : gj;
                double value = which == 0 ? (low * 5 + (gi + gj) * 3) % 7 / 8.0 : (gi * 5 + gj * 3 + which) % 7 - 3;
                double other = which == 0 ? (symmetric ? 1 : (gi > gj) - (gi < gj)) * 0.25 : (gi + 2 * gj) % 3 - 1;
                if (which == 0 && gi == gj) value += SIZE, other = 0;
                set(arrays[which] + ((size_t)j * lld + i) * width, value, other);
            }
}

static void offsets(int a, int b, int c, int aj, int bj, int cj) {
    const int all[6] = {a, b, c, aj, bj, cj};
    for (int i = 0; i < 3; i++) io4[i] = all[i], jo4[i] = all[3 + i], io[i] = all[i], jo[i] = all[3 + i];
}

static void compare(const char *name) {
    double most = 0;
    for (int which = 0; which < 3; which++)
        for (size_t i = 0; i < (size_t)lld * local_columns * (1 + is_complex); i++) {
            double one = is_single() ? ((float *)ours[which])[i] : ((double *)ours[which])[i];
            double two = is_single() ? ((float *)theirs[which])[i] : ((double *)theirs[which])[i];
            double difference = fabs(one - two) / (1 + fabs(two));
            if (!(difference <= most)) most = isnan(difference) ? INFINITY : difference;
        }
    most /= is_single() ? 1.2e-7 : 2.2e-16;
    if (most > 5000) printf("%s differs by %g roundings\n", name, most);
    worst = most > worst ? most : worst;
    calls++;
}

typedef void routine();

/* ScaLAPACK's routine of this type. Real types have no Hermitian ones. */
static routine *found(const char *name) {
    static const char *real[][2] = {{"tranu", "tran"}, {"tranc", "tran"}, {"herk", "syrk"}, {"her2k", "syr2k"},
                                    {"hemm", "symm"}};
    char full[32];
    for (int i = 0; i < 5; i++)
        if (!is_complex && !strcmp(name, real[i][0])) name = real[i][1];
    if (is_complex && !strcmp(name, "tran")) name = "tranu";
    snprintf(full, sizeof full, "p%c%s_", kind, name);
    routine *there = (routine *)dlsym(RTLD_DEFAULT, full);
    if (!there) printf("no %s\n", full), exit(1);
    return there;
}

#define OUR(x) ours[x], io[x], jo[x], desc
#define THEIR(x) theirs[x], io4 + x, jo4 + x, desc4
#define SAME(name, symmetric, call, ...)                                                                               \
    do {                                                                                                               \
        fill(ours, symmetric), fill(theirs, symmetric);                                                                \
        check(call);                                                                                                   \
        if (row >= 0) found(name)(__VA_ARGS__);                                                                        \
        compare(name);                                                                                                 \
    } while (0)
#define MOVED(name)                                                                                                    \
    SAME(#name, 1, pmm3d_p##name(context, kind, M, N, alpha, OUR(1), beta, OUR(2)), &m4, &n4, alpha, THEIR(1), beta,      \
         THEIR(2))

static void moves(void) {
    offsets(3, 2, 4, 1, 5, 3);
    MOVED(tran);
    MOVED(tranu);
    MOVED(tranc);
    for (const char *trans = "NTC"; *trans; trans++)
        SAME("geadd", 1, pmm3d_pgeadd(context, kind, *trans, M, N, alpha, OUR(1), beta, OUR(2)), trans, &m4, &n4, alpha,
             THEIR(1), beta, THEIR(2));
    SAME("gemr2d", 1, pmm3d_pgemr2d(kind, M, N, OUR(1), context, OUR(2), context), &m4, &n4, THEIR(1), THEIR(2),
         &blacs);
    SAME("gemm", 1, pmm3d_pgemm(context, kind, 'N', 'T', M, N, K, alpha, OUR(0), OUR(1), beta, OUR(2)), "N", "T", &m4,
         &n4, &k4, alpha, THEIR(0), THEIR(1), beta, THEIR(2));
}

static void products(char uplo, char side, char op) {
    const char *u = uplo == 'L' ? "L" : "U", *s = side == 'L' ? "L" : "R", *h = op == 'N' ? "N" : is_complex ? "C" : "T";
    const char *t = op == 'N' ? "N" : "T";
    offsets(3, 2, 4, 1, 5, 3);
    SAME("syrk", 1, pmm3d_psyrk(context, kind, uplo, *t, N, K, alpha, OUR(1), beta, OUR(2)), u, t, &n4, &k4, alpha,
         THEIR(1), beta, THEIR(2));
    SAME("syr2k", 1, pmm3d_psyr2k(context, kind, uplo, *t, N, K, alpha, OUR(0), OUR(1), beta, OUR(2)), u, t, &n4, &k4,
         alpha, THEIR(0), THEIR(1), beta, THEIR(2));
    offsets(3, 2, 4, 3, 5, 4);
    SAME("symm", 1, pmm3d_psymm(context, kind, side, uplo, M, N, alpha, OUR(0), OUR(1), beta, OUR(2)), s, u, &m4, &n4,
         alpha, THEIR(0), THEIR(1), beta, THEIR(2));
    SAME("herk", 0, pmm3d_pherk(context, kind, uplo, *h, N, K, real_alpha, OUR(1), real_beta, OUR(0)), u, h, &n4, &k4,
         real_alpha, THEIR(1), real_beta, THEIR(0));
    SAME("her2k", 0, pmm3d_pher2k(context, kind, uplo, *h, N, K, alpha, OUR(1), OUR(2), real_beta, OUR(0)), u, h, &n4,
         &k4, alpha, THEIR(1), THEIR(2), real_beta, THEIR(0));
    SAME("hemm", 0, pmm3d_phemm(context, kind, side, uplo, M, N, alpha, OUR(0), OUR(1), beta, OUR(2)), s, u, &m4, &n4,
         alpha, THEIR(0), THEIR(1), beta, THEIR(2));
    for (const char *diag = "NU"; *diag; diag++) {
        SAME("trmm", 1, pmm3d_ptrmm(context, kind, side, uplo, *h, *diag, M, N, alpha, OUR(0), OUR(1)), s, u, h, diag,
             &m4, &n4, alpha, THEIR(0), THEIR(1));
        if (*diag == 'N')
            SAME("trsm", 1, pmm3d_ptrsm(context, kind, side, uplo, *h, *diag, M, N, alpha, OUR(0), OUR(1)), s, u, h,
                 diag, &m4, &n4, alpha, THEIR(0), THEIR(1));
    }
}

static int factorize(char uplo) {
    const char *u = uplo == 'L' ? "L" : "U";
    pmm3d_int info = 7, failed = 7;
    int info4 = 7;
    offsets(4, 4, 4, 4, 1, 4);
    SAME("potrf", 0, pmm3d_ppotrf(context, kind, uplo, N, OUR(0), &info), u, &n4, THEIR(0), &info4);
    int right = info == 0;
    SAME("potrs", 0, pmm3d_ppotrs(context, kind, uplo, N, K, OUR(0), OUR(1), &info), u, &n4, &k4, THEIR(0), THEIR(1),
         &info4);
    SAME("posv", 0, pmm3d_pposv(context, kind, uplo, N, K, OUR(0), OUR(1), &info), u, &n4, &k4, THEIR(0), THEIR(1),
         &info4);
    SAME("trtri", 0, pmm3d_ptrtri(context, kind, uplo, 'N', N, OUR(0), &info), u, "N", &n4, THEIR(0), &info4);
    right &= info == 0;
    fill(ours, 0); /* a matrix that is not positive definite */
    check(pmm3d_ppotrf(context, kind, uplo, M, ours[1], 1, 1, desc, &failed));
    right &= failed > 0;
    info = 5;
    right &= pmm3d_ppotrf(context, kind, 'X', N, OUR(0), &info) == PMM3D_ERROR_ARGUMENT && info == -1;
    return right && pmm3d_ptrtri(context, kind, uplo, 'N', N, OUR(0), NULL) == PMM3D_ERROR_ARGUMENT;
}

int main(int count, char **words) {
    const int zero = 0, size = SIZE, block = BLOCK;
    double all;
    int rank, right = 1, all_right;
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    kind = words[1][0], rows = atoi(words[2]), columns = atoi(words[3]);
    is_complex = kind == 'c' || kind == 'z', width = (is_single() ? 4 : 8) * (1 + is_complex);
    set(alpha, 1.5, 0.5), set(beta, 0.5, -0.25), set(real_alpha, 1.5, 0), set(real_beta, 0.5, 0);
    Cblacs_get(-1, 0, &blacs);
    Cblacs_gridinit(&blacs, "R", rows, columns);
    Cblacs_gridinfo(blacs, &rows, &columns, &row, &column);
    rows = atoi(words[2]), columns = atoi(words[3]);
    local_rows = row < 0 ? 0 : numroc_(&size, &block, &row, &zero, &rows);
    local_columns = row < 0 ? 0 : numroc_(&size, &block, &column, &zero, &columns);
    lld = local_rows + 1; /* rows between columns are not written */
    const int values[9] = {1, blacs, SIZE, SIZE, BLOCK, BLOCK, 0, 0, lld};
    for (int i = 0; i < 9; i++) desc4[i] = values[i], desc[i] = values[i];
    for (int i = 0; i < 3; i++)
        ours[i] = calloc(lld * (local_columns + 1), width), theirs[i] = calloc(lld * (local_columns + 1), width);
    check(pmm3d_context(MPI_COMM_WORLD, rows, columns, 'R', &context));
    moves();
    for (const char *uplo = "LU"; *uplo; uplo++) {
        products(*uplo, 'L', 'N'), products(*uplo, 'R', 'T');
        right &= factorize(*uplo);
    }
    MPI_Reduce(&worst, &all, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    MPI_Reduce(&right, &all_right, 1, MPI_INT, MPI_MIN, 0, MPI_COMM_WORLD);
    if (rank == 0)
        printf("%d calls with integers of %zu bytes: %g roundings, info %d\n", calls, sizeof(pmm3d_int), all, all_right);
    check(pmm3d_finalize());
    MPI_Finalize();
    return 0;
}
