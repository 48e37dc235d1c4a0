"""The comparison of pgemm with ScaLAPACK's p?gemm, for `pmm3d tune scalapack`."""
