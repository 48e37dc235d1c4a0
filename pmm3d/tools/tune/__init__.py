"""The measurement of a machine, for `pmm3d tune machine`."""
