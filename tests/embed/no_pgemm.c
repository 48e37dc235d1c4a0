/* A program with a BLACS of its own, of one process grid, and no p?gemm but the drop-in's. */
#include <mpi.h>
#include <stdio.h>

void pdgemm_(const char *, const char *, const int *, const int *, const int *, const double *, const double *,
             const int *, const int *, const int *, const double *, const int *, const int *, const int *,
             const double *, double *, const int *, const int *, const int *);

void Cblacs_gridinfo(int context, int *rows, int *columns, int *row, int *column) {
    (void)context;
    MPI_Comm_size(MPI_COMM_WORLD, rows);
    MPI_Comm_rank(MPI_COMM_WORLD, row);
    *columns = 1, *column = 0;
}

void Cblacs_get(int context, int request, int *value) { (void)context, (void)request, *value = 0; }

MPI_Comm Cblacs2sys_handle(int handle) {
    (void)handle;
    return MPI_COMM_WORLD;
}

void Cblacs_abort(int context, int code) {
    fprintf(stderr, "blacs_abort of context %d, code %d\n", context, code);
    MPI_Abort(MPI_COMM_WORLD, code);
}

int main(int count, char **words) {
    const int one = 1, desc[9] = {1, 5, 1, 1, 1, 1, 0, 0, 1};
    double alpha = 1, beta = 0, a = 2, c = 0;
    MPI_Init(&count, &words);
    pdgemm_("N", "N", &one, &one, &one, &alpha, &a, &one, &one, desc, &a, &one, &one, desc, &beta, &c, &one, &one,
            desc);
    printf("not reached\n");
    MPI_Finalize();
    return 0;
}
