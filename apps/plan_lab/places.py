"""Where ranks run: on this machine, or on virtual nodes of it; and what is run there."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cluster
from measuring import ProgramError

from pmm3d.tools import launcher

PROGRAM = str(Path(__file__).parents[1] / "plan_bench.py")


class Here:
    """So many ranks of this machine."""

    def __init__(self, ranks: int):
        self.ranks, self.ranks_per_node = ranks, ranks

    def __str__(self) -> str:
        return f"{self.ranks} ranks"

    def status(self, program: Sequence[str]) -> int:
        return launcher.run(launcher.command(self.ranks, program), launcher.environment(self.ranks))

    def run(self, program: Sequence[str]) -> None:
        """Raises ProgramError if it fails."""
        if code := self.status(program):
            raise ProgramError(f"{' '.join(program)} on {self} ended with status {code}")

    def tune(self, folder: Path) -> str:
        """The text of the machine file of this place in a folder; it is measured there if there is none."""
        machine = folder / f"{self}.toml".replace(",", "").replace(" ", "-")
        if not machine.exists():
            folder.mkdir(parents=True, exist_ok=True)
            print(f"measuring the machine on {self}", file=sys.stderr, flush=True)
            self.run(["-m", "pmm3d", "tune", "machine", "--output", str(machine)])
        return machine.read_text()

    def measure(self, kind: str, **asked: Any) -> Any:
        """What `measured.run` finds there."""
        with TemporaryDirectory(prefix="plan-bench-") as folder:
            task, result = Path(folder) / "task.json", Path(folder) / "result.json"
            task.write_text(json.dumps({"kind": kind, **asked}))
            self.run([PROGRAM, "measure", str(task), str(result)])
            return json.loads(result.read_text())


class OnNodes(Here):
    """Ranks spread evenly over virtual nodes, which stand within `with place.standing():`. Raises ClusterError."""

    def __init__(self, ranks: int, nodes: int, rate: str):
        super().__init__(ranks)
        if ranks % nodes or not 1 <= nodes <= cluster.MOST_NODES:
            raise cluster.ClusterError(f"{ranks} ranks do not spread evenly over {nodes} nodes, of which there can be "
                                       f"{cluster.MOST_NODES}: --ranks and --nodes set them")
        cluster.bits_per_second(rate)
        self.nodes, self.rate, self.ranks_per_node = nodes, rate.lower(), ranks // nodes
        self._cluster: cluster.Cluster | None = None

    def __str__(self) -> str:
        return f"{self.ranks} ranks on {self.nodes} nodes, {self.rate}"

    @contextmanager
    def standing(self) -> Iterator[None]:
        cluster.check_machine()
        self._cluster = cluster.Cluster.start(self.nodes, self.rate, stays=False)
        try:
            yield
        finally:
            self._cluster.end()

    def status(self, program: Sequence[str]) -> int:
        wheel = launcher.installed_wheel()
        command = cluster.mpi_command(wheel, self.nodes, self.ranks_per_node, [*program])
        environ = cluster.mpi_environment(wheel, self.ranks, dict(os.environ))
        assert self._cluster is not None
        return launcher.run(self._cluster.enter(["setpriv", "--pdeathsig", "TERM", *command]), environ)
