/* Each operation planned once and run with other elements, also by pmm3d_begin and pmm3d_wait, compared bit by bit with
   the same call. */
#include <pmm3d.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { M = 23, N = 17, K = 11, MOST = M * M * 16, TYPES = 4 };
static const char *kinds = "sdcz";
static int rank, size, grid, other, context, second, wrong, runs;
static char kind;
static int width; /* real numbers in an element */

static void check(int code) {
    char text[2000];
    if (code == PMM3D_OK) return;
    pmm3d_last_error(text, sizeof text);
    fprintf(stderr, "code %d: %s\n", code, text);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static void *fresh(void) { return calloc(MOST, 1); }

/* Small whole numbers, so that sums are exact. */
static void fill(void *memory, int seed) {
    for (int i = 0; i < M * M * width; i++) {
        double value = (i * 7 + seed * 5 + rank) % 11 - 5;
        if (strchr("sc", kind)) ((float *)memory)[i] = (float)value;
        else ((double *)memory)[i] = value;
    }
}

/* A factor, whose imaginary part is 0. */
static void set(char factor[16], double value) {
    float low = (float)value;
    memset(factor, 0, 16);
    memcpy(factor, strchr("sc", kind) ? (void *)&low : (void *)&value, strchr("sc", kind) ? sizeof low : sizeof value);
}

static int matrix(int on, int64_t rows, int64_t columns, const char *layout, char order, void *shard) {
    int made;
    check(pmm3d_matrix(on, kind, rows, columns, layout, order, shard, &made));
    return made;
}

/* Compare two runs of a plan, which writes to `by_plan`, with the calls, which write to `by_call`. Other elements of
   `source` for each. */
#define COMPARE(source, by_plan, by_call, plan, call)                   \
    for (int seed = 1, request; seed < 3; seed++, runs++) {             \
        fill(source, seed), fill(by_plan, 9), fill(by_call, 9);         \
        if (seed == 1) check(pmm3d_run(plan));                          \
        else check(pmm3d_begin(plan, &request));                        \
        if (seed > 1) check(pmm3d_wait(&request)), wrong += request;    \
        check(call);                                                    \
        wrong += memcmp(by_plan, by_call, MOST) != 0;               \
    }                                                                   \
    check(pmm3d_free(&plan));

static void products(void) {
    char alpha[16], beta[16];
    char *a = fresh(), *b = fresh(), *c = fresh(), *d = fresh();
    int plan, in_a = matrix(grid, M, K, "A", 'F', a), in_b = matrix(grid, K, N, "zy/x", 'C', b);
    int in_c = matrix(grid, M, N, "C", 'F', c), in_d = matrix(grid, M, N, "C", 'F', d);
    set(alpha, 2), set(beta, 3), fill(b, 4);
    check(pmm3d_plan_matmul('n', 'N', alpha, in_a, in_b, beta, in_d, &plan));
    fill(a, 5), fill(c, 9), fill(d, 9);
    check(pmm3d_run_matmul(plan, beta, in_a, in_b, alpha, in_c));
    check(pmm3d_matmul('N', 'N', beta, in_a, in_b, alpha, in_d));
    wrong += memcmp(c, d, MOST) != 0, runs++;
    check(pmm3d_free(&plan));
    check(pmm3d_plan_matmul('n', 'N', alpha, in_a, in_b, beta, in_c, &plan));
    COMPARE(a, c, d, plan, pmm3d_matmul('N', 'N', alpha, in_a, in_b, beta, in_d))
    const int desca[9] = {1, 0, M, K, 3, 2, 0, 0, M}, descb[9] = {1, 0, K, N, 2, 5, 0, 0, M},
              descc[9] = {1, 0, M, N, 4, 4, 0, 0, M};
    check(pmm3d_plan_pgemm(context, kind, 'N', 'N', M - 1, N, K, alpha, b, 2, 1, desca, a, 1, 1, descb, beta, d, 1, 1,
                           descc, &plan));
    fill(a, 5), fill(c, 9), fill(d, 9);
    check(pmm3d_run_pgemm(plan, beta, a, b, alpha, c));
    check(pmm3d_pgemm(context, kind, 'N', 'N', M - 1, N, K, beta, a, 2, 1, desca, b, 1, 1, descb, alpha, d, 1, 1,
                      descc));
    wrong += memcmp(c, d, MOST) != 0, runs++;
    check(pmm3d_free(&plan)), check(pmm3d_context_trim(context));
    check(pmm3d_plan_pgemm(context, kind, 'N', 'N', M - 1, N, K, alpha, a, 2, 1, desca, b, 1, 1, descb, beta, c, 1, 1,
                           descc, &plan));
    COMPARE(a, c, d, plan, pmm3d_pgemm(context, kind, 'N', 'N', M - 1, N, K, alpha, a, 2, 1, desca, b, 1, 1, descb,
                                       beta, d, 1, 1, descc))
}

static void moves(void) {
    static const char *layouts[] = {"A", "b", "/", "Y/ZX"};
    char *a = fresh(), *c = fresh(), *d = fresh();
    const int desca[9] = {1, 0, M, N, 3, 2, 0, 0, M}, descb[9] = {1, 0, M, N, 4, 4, 0, 0, M};
    int plan;
    for (int from = 0; from < 4; from++)
        for (int to = 0; to < 4; to++)
            for (int form = 0; form < 4; form++) {
                int on = form < 2 ? grid : other;
                char order = "CF"[form % 2];
                int source = matrix(grid, M, N, layouts[from], 'C', a);
                int target = matrix(on, M, N, layouts[to], order, c), again = matrix(on, M, N, layouts[to], order, d);
                check(pmm3d_plan_redistribute(source, target, &plan));
                COMPARE(a, c, d, plan, pmm3d_redistribute(source, again))
                check(pmm3d_free(&source)), check(pmm3d_free(&target)), check(pmm3d_free(&again));
            }
    int in_a = matrix(grid, M, N, "A", 'C', a), in_c = matrix(grid, M, N, "B", 'F', c),
        in_d = matrix(grid, M, N, "B", 'F', d);
    check(pmm3d_plan_from_block_cyclic(context, a, desca, in_c, &plan));
    COMPARE(a, c, d, plan, pmm3d_from_block_cyclic(context, a, desca, in_d))
    check(pmm3d_plan_to_block_cyclic(in_a, context, c, desca, &plan));
    COMPARE(a, c, d, plan, pmm3d_to_block_cyclic(in_a, context, d, desca))
    check(pmm3d_plan_pgemr2d(kind, M - 2, N, a, 1, 1, desca, context, c, 3, 1, descb, second, &plan));
    COMPARE(a, c, d, plan, pmm3d_pgemr2d(kind, M - 2, N, a, 1, 1, desca, context, d, 3, 1, descb, second))
    const int descd[9] = {1, 0, N, M, 2, 3, 0, 0, M};
    char alpha[16], beta[16];
    set(alpha, 2), set(beta, 3);
    check(pmm3d_plan_ptran(context, kind, N, M, alpha, a, 1, 1, desca, beta, c, 1, 1, descd, &plan));
    COMPARE(a, c, d, plan, pmm3d_ptran(context, kind, N, M, alpha, a, 1, 1, desca, beta, d, 1, 1, descd))
    check(pmm3d_plan_pgeadd(context, kind, 'N', M, N, alpha, a, 1, 1, desca, beta, c, 1, 1, descb, &plan));
    COMPARE(a, c, d, plan, pmm3d_pgeadd(context, kind, 'N', M, N, alpha, a, 1, 1, desca, beta, d, 1, 1, descb))
    int64_t slab[4] = {M * rank / size, M * (rank + 1) / size, 0, N};
    check(pmm3d_plan_from_blocks(a, slab, 'F', in_c, &plan));
    COMPARE(a, c, d, plan, pmm3d_from_blocks(a, slab, 'F', in_d))
    check(pmm3d_plan_to_blocks(in_a, c, slab, 'C', &plan));
    COMPARE(a, c, d, plan, pmm3d_to_blocks(in_a, d, slab, 'C'))
}

/* Limits of work memory: code 3 on all ranks for a limit of 1 byte, 0 for a larger one or none. */
static void limits(void) {
    enum { L = 400 };
    static double a[L * L], b[L * L], c[L * L];
    const double one = 1;
    const int desc[9] = {1, 0, L, L, 32, 32, 0, 0, L};
    int in_a = matrix(grid, L, L, "z/x", 'F', a), in_b = matrix(grid, L, L, "z/x", 'F', b),
        in_c = matrix(grid, L, L, "x/z", 'F', c), codes[7], plan;
    check(pmm3d_max_workspace(grid, 1)), check(pmm3d_max_workspace(context, 1));
    codes[0] = pmm3d_matmul('N', 'N', &one, in_a, in_b, &one, in_c);
    codes[1] = pmm3d_plan_matmul('N', 'N', &one, in_a, in_b, &one, in_c, &plan);
    codes[2] = pmm3d_pgemm(context, kind, 'N', 'N', L, L, L, &one, a, 1, 1, desc, b, 1, 1, desc, &one, c, 1, 1, desc);
    int everywhere = pmm3d_error_everywhere();
    check(pmm3d_max_workspace(grid, 0)), check(pmm3d_max_workspace(context, 1 << 20));
    codes[3] = pmm3d_matmul('N', 'N', &one, in_a, in_b, &one, in_c);
    codes[4] = pmm3d_pgemm(context, kind, 'N', 'N', L, L, L, &one, a, 1, 1, desc, b, 1, 1, desc, &one, c, 1, 1, desc);
    codes[5] = pmm3d_max_workspace(grid, -1), codes[6] = pmm3d_max_workspace(in_a, 0);
    if (rank == size - 1)
        printf("limits: %d%d%d %d%d %d%d, everywhere %d\n", codes[0], codes[1], codes[2], codes[3], codes[4], codes[5],
               codes[6], everywhere);
}

int main(int count, char **words) {
    int all, shapes[2][3], best;
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    check(pmm3d_grid(MPI_COMM_WORLD, 0, 0, 0, &grid));
    check(pmm3d_grid(MPI_COMM_WORLD, 1, size, 1, &other));
    check(pmm3d_context(MPI_COMM_WORLD, size, 1, 'R', &context));
    check(pmm3d_context(MPI_COMM_WORLD, 1, size, 'R', &second));
    for (int which = 0; which < TYPES; which++) {
        kind = kinds[which], width = which < 2 ? 1 : 2;
        products(), moves();
    }
    kind = 'd', width = 1;
    limits();
    check(pmm3d_grid_for(MPI_COMM_WORLD, 'd', 4000, 4000, 4000, &best)), check(pmm3d_grid_shape(best, shapes[0]));
    check(pmm3d_grid_for(MPI_COMM_WORLD, 'z', 4000, 4, 4, &best)), check(pmm3d_grid_shape(best, shapes[1]));
    grid = best; /* with idle ranks */
    products(), moves();
    MPI_Reduce(&wrong, &all, 1, MPI_INT, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0)
        printf("%d runs, %d wrong; grids %dx%dx%d and %dx%dx%d\n", runs, all, shapes[0][0], shapes[0][1], shapes[0][2],
               shapes[1][0], shapes[1][1], shapes[1][2]);
    check(pmm3d_finalize());
    MPI_Finalize();
    return 0;
}
