"""The command `pmm3d plan`: which grid, how many ranks, will it fit, how long."""
