"""The calls of a C or Fortran program: `embed/` starts Python, and `host.Host` handles each call of libpmm3d.so."""
