// The stand-in driver, but that a context is a thread's own, as in CUDA: a new thread has none, and a copy without one
// ends the process.
#define _GNU_SOURCE
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static __thread CUcontext stack[64];
static __thread int depth;
static void *copied(void *to, const void *from, size_t size) {
  if (!stack[depth]) { fprintf(stderr, "a copy in a thread without a context\n"); abort(); }
  return memmove(to, from, size);
}
#define memmove copied
#define cuCtxGetCurrent any_cuCtxGetCurrent
#define cuCtxSetCurrent any_cuCtxSetCurrent
#define cuCtxPushCurrent_v2 any_cuCtxPushCurrent
#define cuCtxPopCurrent_v2 any_cuCtxPopCurrent
#include "fakecuda.c"
#undef cuCtxGetCurrent
#undef cuCtxSetCurrent
#undef cuCtxPushCurrent_v2
#undef cuCtxPopCurrent_v2
API CUresult cuCtxGetCurrent(CUcontext *found) { *found = stack[depth]; return 0; }
API CUresult cuCtxSetCurrent(CUcontext given) { stack[depth] = given; return 0; }
API CUresult cuCtxPushCurrent_v2(CUcontext given) { stack[++depth] = given; return 0; }
API CUresult cuCtxPopCurrent_v2(CUcontext *found) { if (found) *found = stack[depth]; depth--; return 0; }
