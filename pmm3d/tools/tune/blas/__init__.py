"""Which BLAS and kernel is fastest for the GEMMs of a job: `pmm3d tune blas`."""
