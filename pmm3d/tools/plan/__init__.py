"""The commands `pmm3d plan ...`: which grid, how many ranks, will it fit, how long; and the schedules of pipelines."""
