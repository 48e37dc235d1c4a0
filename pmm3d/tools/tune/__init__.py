"""Measures the machine that the ranks run on: `pmm3d tune machine`."""
