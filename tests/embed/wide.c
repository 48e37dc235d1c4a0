/* A program with integers of 8 bytes, as for an ILP64 ScaLAPACK. With LIBRARY, a stand-in for this library, whose BLACS
   ends the program: a caller with integers of 4 bytes would overwrite other variables. */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef LIBRARY
void Cblacs_gridinfo(void) { abort(); }
void Cblacs_get(void) { abort(); }
void Cblacs2sys_handle(void) { abort(); }
void Cblacs_abort(void) { abort(); }

void pdpotrf_(const char *uplo, const int64_t *n, double *a, const int64_t *ia, const int64_t *ja, const int64_t *desca,
              int64_t *info, size_t length) {
    a[0] = desca[8] == *n && *ia == 1 && *ja == 1 && *uplo == 'L' ? 2 : 0;
    *info = ((int64_t)1 << 40) + length;
}
#else
void pdpotrf_(const char *uplo, const int64_t *n, double *a, const int64_t *ia, const int64_t *ja, const int64_t *desca,
              int64_t *info, size_t length);

int main(int count, char **words) {
    int64_t n = 3, one = 1, info;
    double a[9] = {4};
    MPI_Init(&count, &words);
    for (int64_t context = -1; context < 2; context++) { /* -1: not in the process grid */
        int64_t desca[9] = {1, context, n, n, n, n, 0, 0, n};
        pdpotrf_("L", &n, a, &one, &one, desca, &info, 1);
        printf("A %g, INFO %lld\n", a[0], (long long)info);
    }
    MPI_Finalize();
    return 0;
}
#endif
