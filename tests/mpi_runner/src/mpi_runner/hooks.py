"""Hooks by which a project adapts the plugin (README.md)."""

from __future__ import annotations

import pytest

from mpi_runner.launcher import Launcher


@pytest.hookspec(firstresult=True)
def pytest_mpi_launcher(config: pytest.Config) -> Launcher | None:
    """Return the launcher of the ranks. Default: `Launcher`, with the option `mpiexec` of pytest's configuration."""


@pytest.hookspec(firstresult=True)
def pytest_mpi_parametrize(metafunc: pytest.Metafunc, counts: list[int]) -> bool | None:
    """Parametrize a test over `nranks` together with further arguments. Return True if it was done.

    counts   the numbers of ranks on which the test runs
    """
