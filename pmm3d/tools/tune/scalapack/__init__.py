"""The comparison of the routines of the drop-in with ScaLAPACK's, for `pmm3d tune scalapack`."""
