/* Functions that the libraries have for each other. embed/build.py builds them all. */
#ifndef PMM3D_EMBEDDED_H
#define PMM3D_EMBEDDED_H

#include <mpi.h>
#include <stdint.h>

/* For libpmm3d_scalapack.so: as pmm3d_context with order 'R', but the caller is no user, and the context is freed by
   MPI_Finalize only. */
int pmm3d_lasting_context(MPI_Comm comm, int rows, int columns, int *context);

/* The functions below are those of libpmm3d_python.so for libpmm3d.so.
   Start the Python of this executable. Returns 0, or 1 and the error as a text. */
typedef int pmm3d_python_start_type(const char *executable, char *text, int size);

/* Return whether Python is running. */
typedef int pmm3d_python_runs_type(void);

/* Call a method of pmm3d.embedding.host.Host. Addresses and characters are passed as integers. The method returns up to
   4 results, or an error: its code, whether all ranks have the error, and a text. This function returns 1, or 0 if
   Python failed before the call. */
typedef int pmm3d_python_call_type(const char *name, const int64_t *arguments, int count, int64_t *results, int *code,
                                   int *everywhere, char *text, int size);

#endif
