/* The functions of routines.c for integers of 8 bytes: pmm3d_NAME_64. */
#define PMM3D_ILP64
#include "routines.c"
