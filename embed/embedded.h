/* What libpmm3d_python.so offers to libpmm3d.so; embed/build.py makes it. */
#ifndef PMM3D_EMBEDDED_H
#define PMM3D_EMBEDDED_H

#include <stdint.h>

/* Starts the Python whose program is at that path. 0, or 1 and a text. */
typedef int pmm3d_python_start_type(const char *executable, char *text, int size);

/* Whether it runs. */
typedef int pmm3d_python_runs_type(void);

/* A method of pmm3d.embedding.host.Host with these arguments; addresses and characters are integers too. It gives
   up to 4 results, or a code, whether all ranks have it, and a text. 1, or 0 if Python failed before the call. */
typedef int pmm3d_python_call_type(const char *name, const int64_t *arguments, int count, int64_t *results, int *code,
                                   int *everywhere, char *text, int size);

#endif
