"""The commands `pmm3d plan ...`: grids, numbers of ranks, memory, times, and schedules of pipelines."""
