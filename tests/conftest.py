"""Loads the MPI test plugin; see mpi_runner/__init__.py for how tests are written with it."""

pytest_plugins = ("mpi_runner.plugin",)
