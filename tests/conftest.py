"""Loads the MPI test plugin, see mpi_runner/__init__.py for how tests are written with it, and the common fixtures.

The folders are the rooms of pmm3d, with apps/, slurm/ for jobs/, and project/ for what belongs to no room.
"""

pytest_plugins = ("mpi_runner.plugin", "grids")
