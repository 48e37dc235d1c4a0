// COSMA's product, timed: the peer of product.py, which compiles and starts it.
//
//     mpirun -n 8 ./cosma m n k d|s rounds
//
// C = A B in COSMA's own layout, with the BLAS of SciPy. Matrices are kept between products. Rank 0 prints the seconds of each
// round, of the slowest rank, after two warm-up products; "wrong" if a checked element of C is wrong.
#include <cosma/multiply.hpp>

#include <algorithm>
#include <complex>
#include <cstdio>
#include <cstdlib>

extern "C" {
#define FORWARD(LETTER, REAL, NUMBER)                                                                                   \
    void scipy_cblas_##LETTER##gemm(int, int, int, int, int, int, NUMBER, const REAL *, int, const REAL *, int, NUMBER, \
                                    REAL *, int);                                                                      \
    void cblas_##LETTER##gemm(int order, int transa, int transb, int m, int n, int k, NUMBER alpha, const REAL *a,     \
                              int lda, const REAL *b, int ldb, NUMBER beta, REAL *c, int ldc) {                        \
        scipy_cblas_##LETTER##gemm(order, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);               \
    }
FORWARD(s, float, float)
FORWARD(d, double, double)
FORWARD(c, void, const void *)
FORWARD(z, void, const void *)
}

// Element (i, j) is a small integer, so products are exact.
static double element(long i, long j, int seed) { return double((i + 2 * j + seed) % 7) - 3; }

template <typename T>
static void fill(cosma::CosmaMatrix<T> &matrix, int seed) {
    for (size_t at = 0; at < matrix.matrix_size(); ++at) {
        auto [i, j] = matrix.global_coordinates(at);
        matrix.matrix_pointer()[at] = T(element(i, j, seed));
    }
}

template <typename T>
static bool right(cosma::CosmaMatrix<T> &c, long k) {
    for (size_t at = 0; at < c.matrix_size(); at += 1 + c.matrix_size() / 50) {
        auto [i, j] = c.global_coordinates(at);
        double sum = 0;
        for (long l = 0; l < k; ++l)
            sum += element(i, l, 0) * element(l, j, 1);
        if (double(c.matrix_pointer()[at]) != sum)
            return false;
    }
    return true;
}

template <typename T>
static void time(int m, int n, int k, int rounds) {
    int rank, ranks;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    const cosma::Strategy strategy(m, n, k, ranks);
    cosma::CosmaMatrix<T> a('A', strategy, rank), b('B', strategy, rank), c('C', strategy, rank);
    fill(a, 0);
    fill(b, 1);
    for (int round = -2; round < rounds; ++round) {
        MPI_Barrier(MPI_COMM_WORLD);
        double seconds = -MPI_Wtime(), slowest;
        cosma::multiply(a, b, c, strategy, MPI_COMM_WORLD, T(1), T(0));
        seconds += MPI_Wtime();
        MPI_Reduce(&seconds, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (!rank && round >= 0)
            std::printf("%.9f\n", slowest);
    }
    int here = right(c, k), everywhere;
    MPI_Reduce(&here, &everywhere, 1, MPI_INT, MPI_MIN, 0, MPI_COMM_WORLD);
    if (!rank && !everywhere)
        std::printf("wrong\n");
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    if (argc != 6) {
        std::fprintf(stderr, "usage: cosma m n k d|s rounds\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    const int m = std::atoi(argv[1]), n = std::atoi(argv[2]), k = std::atoi(argv[3]), rounds = std::atoi(argv[5]);
    if (argv[4][0] == 's')
        time<float>(m, n, k, rounds);
    else
        time<double>(m, n, k, rounds);
    MPI_Finalize();
}
