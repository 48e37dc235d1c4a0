"""Which BLAS, kernel and storage order is fastest for the GEMMs of a job: `pmm3d tune blas`."""
