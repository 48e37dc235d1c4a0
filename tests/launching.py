"""The launcher of the tests' ranks: pmm3d.launcher, with its settings for each MPI (hook of tests/mpi_runner)."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence

from mpi_runner.launcher import Launcher

from pmm3d.tools import launcher


class Pmm3dLauncher(Launcher):
    def describe(self) -> str:
        return f"{shlex.join(launcher.mpiexec_command())} ({launcher.installed_wheel() or 'not from a wheel'})"

    def command(self, ranks: int, argv: Sequence[str]) -> list[str]:
        return launcher.command(ranks, argv)

    def environment(self, ranks: int, base: Mapping[str, str]) -> dict[str, str]:
        return launcher.environment(ranks, base)

    def job(
        self, ranks: int, argv: Sequence[str], base: Mapping[str, str], timeout: float
    ) -> tuple[list[str], dict[str, str]]:
        """The time limit is enforced in a separate process, also if this process is killed."""
        words = [sys.executable, "-m", "pmm3d.launcher", "-n", str(ranks), "--timeout", str(timeout)]
        return [*words, *argv], dict(base)


LAUNCHER = Pmm3dLauncher()
