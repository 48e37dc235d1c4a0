"""What libpmm3d.so (embed/) calls in the Python that it started in a C or Fortran program: `host.Host`."""
