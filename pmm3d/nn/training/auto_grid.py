"""`grid.shape = "auto"`: the grid of a training run is chosen by a model of the machine that it runs on."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from ...arrays import library_named
from ...comm import Grid, Processes, machine_here
from ...errors import GridError
from ...model import machine as host
from ...model.candidates import Candidate
from ...model.machines import Machine
from ...model.ranking import nominal
from .config import Config
from .samples import sizes_in_file

UNMEASURED = "nominal"


@dataclass(frozen=True)
class Choice:
    """The grid that was chosen, and the second best; None on one rank.

    machine    name of the machine of the model
    measured   whether its figures were measured by `pmm3d tune machine`; those of the library's machines were not
    on_host    whether the arrays are in host memory
    slower     how many times as long ranks compute because they share cores; 1 if the machine's figures include it
    """

    chosen: Candidate
    runner_up: Candidate | None
    machine: str
    measured: bool
    on_host: bool
    slower: float = 1.0

    def said(self) -> str:
        """In a line. Both times count ranks that share cores."""
        next_one = f"; next {self._timed(self.runner_up)}" if self.runner_up is not None else ""
        shared = f"; ranks share cores, so they compute {self.slower:.3g} times as long" if self.slower > 1 else ""
        remedy = "pmm3d tune machine measures" if self.on_host else "not of these devices: PMM3D_MACHINE names another"
        known = (f"of a {self.machine} machine ({remedy})" if self.machine == UNMEASURED
                 else f"of {self.machine}" + " (not measured by pmm3d tune machine)" * (not self.measured))
        return f"grid.shape = auto: {self._timed(self.chosen)} a step by the model {known}{next_one}{shared}"

    def _timed(self, candidate: Candidate) -> str:
        named = f" ({candidate.preset})" if candidate.preset else ""
        computed = sum(candidate.terms.get(name, 0.0) for name in ("gemm", "passes", "overhead"))
        return f"{candidate}{named}, {1e3 * (candidate.seconds + (self.slower - 1) * computed):.3g} ms"

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {"machine": self.machine, "measured": self.measured, "chosen": _document(self.chosen),
                "next": None if self.runner_up is None else _document(self.runner_up)}


def chosen_grid(config: Config, comm: MPI.Intracomm) -> Choice:
    """The best grid of all ranks of comm for a configuration that leaves it open. Collective. Rank 0 reads the sizes of
    the data and ranks the grids; the result is the same on all ranks.

    Raises Pmm3dError, on every rank, if grid.data is given, grid.pipe does not divide the ranks, the data cannot be
    read or does not fit the configuration, grid.schedule cannot be planned, no grid fits the memory, or the user's
    network does not run without data.
    """
    if config.grid.data > 1:
        raise GridError(f"grid.data = {config.grid.data}, but grid.shape = \"auto\" chooses the ranks along data too: "
                        "leave it out, or name the shape")
    with Grid(comm, "ddp") as grid:
        processes = grid.transport.processes
        assert processes is not None
        on_host = library_named(config.network.library).on_host
        known = machine_here(grid.comm, processes.per_node(), grid.hosts, on_host=on_host)
        limit = room(grid)[0] or None if on_host else None
        choice: Choice | None = None
        with grid.collective_call("grid.shape", always=True):
            if grid.rank == 0:
                choice = _choice(config, processes, known, limit, on_host)
        choice = grid.comm.bcast(choice)
        assert choice is not None
        return choice


def room(grid: Grid) -> tuple[int, str]:
    """(Bytes for each rank on the host with the least memory a rank, name of the host); 0 if unknown. Collective."""
    answers = grid.comm.allgather((host.available_memory() // grid.local_size, platform.node()))
    return min([answer for answer in answers if answer[0]], default=(0, ""))


def _choice(config: Config, processes: Processes, known: Machine | None, limit: int | None, on_host: bool) -> Choice:
    from .planning import rank_training  # loaded by one rank only

    per_node = processes.per_node()
    machine = (known or nominal(per_node)).with_ranks_per_node(per_node)
    best, *others = rank_training(config, len(processes), machine, limit=limit, samples=sizes_in_file(config),
                                  run=processes.run(), pipes=(config.grid.pipe,),
                                  seqs=(config.grid.seq * config.grid.ulysses,)).candidates
    slower = max(1.0, per_node / host.usable_cores()) if on_host and not machine.key else 1.0
    return Choice(best, others[0] if others else None, machine.name, bool(machine.key), on_host, slower)


def _document(candidate: Candidate) -> dict[str, Any]:
    return {"grid": candidate.grid._asdict(), "seconds": candidate.seconds, "terms": dict(candidate.terms),
            "memory": dict(candidate.memory), "preset": candidate.preset, "schedule": candidate.schedule}
