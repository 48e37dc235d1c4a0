/* Calls of methods of pmm3d.embedding.host.Host, for the files of libpmm3d.so. */
#ifndef PMM3D_CALLS_H
#define PMM3D_CALLS_H

#include <stdint.h>

enum { AT_ONCE = -1 }; /* in place of the address of a plan: run the operation */

/* Call a method with `count` arguments. The Fortran module calls this function for most of its functions. */
int pmm3d_call(const char *name, const int64_t *arguments, int count, int64_t results[4]);

/* Store the number of an object that was made, or 0, and return the code. */
int pmm3d_made(int code, const int64_t *results, int *object);

#define ADDRESS(pointer) ((int64_t)(intptr_t)(pointer))
#define CALL(name, results, ...)                                                                                       \
    pmm3d_call(name, (const int64_t[]){__VA_ARGS__}, sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t), results)

#endif
