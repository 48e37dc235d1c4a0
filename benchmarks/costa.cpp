// COSTA's transform, for redistribute.py, which compiles this file to a library and calls it in its own processes.
#include <costa/grid2grid/transform.hpp>
#include <costa/layout.hpp>

using Layout = costa::grid_layout<double>;

// A block-cyclic layout of an m x n matrix over the column-major array of this rank. Processes are numbered by rows.
extern "C" void *costa_layout(int m, int n, int mb, int nb, int rows, int cols, double *array, int lld, int rank) {
    return new Layout(costa::block_cyclic_layout<double>(m, n, mb, nb, 1, 1, m, n, rows, cols, 'R', 0, 0, array, lld,
                                                         'C', rank));
}

// target = beta target + alpha op(source). op: N, T or C. comm: a communicator as an integer of Fortran.
extern "C" void costa_transform(void *source, void *target, char op, double alpha, double beta, int comm) {
    costa::transform(*static_cast<Layout *>(source), *static_cast<Layout *>(target), op, alpha, beta,
                     MPI_Comm_f2c(comm));
}

extern "C" void costa_free(void *layout) { delete static_cast<Layout *>(layout); }
