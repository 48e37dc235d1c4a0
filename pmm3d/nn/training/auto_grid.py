"""`grid.shape = "auto"`: the grid of a training run, by the machine that it runs on."""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from typing import Any

from mpi4py import MPI

from ...arrays import library_named
from ...comm import Grid, Processes, machine_here
from ...errors import Pmm3dError
from ...layout import GridShape
from ...model import machine as host
from ...model.candidates import Candidate
from ...model.machines import Machine
from ...model.ranking import nominal
from .config import Config
from .dry_step import sizes_in_file

AUTO = "auto"
UNMEASURED = "nominal"


@dataclass(frozen=True)
class Choice:
    """The grid that was chosen, and the second best, which none is on one rank; by the model of which machine.

    measured   whether its figures are of `pmm3d tune machine`: not those of a machine that comes with the library
    """

    chosen: Candidate
    runner_up: Candidate | None
    machine: str
    measured: bool
    on_host: bool = True

    @property
    def shape(self) -> GridShape:
        return self.chosen.grid

    def said(self) -> str:
        """In a line."""
        next_one = f"; next {_said(self.runner_up)}" if self.runner_up is not None else ""
        remedy = "pmm3d tune machine measures" if self.on_host else "not of these devices: PMM3D_MACHINE names another"
        known = f"of a {self.machine} machine ({remedy})" if self.machine == UNMEASURED else f"of {self.machine}"
        return f"grid.shape = auto: {_said(self.chosen)} a step by the model {known}{next_one}"

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {"machine": self.machine, "measured": self.measured, "chosen": _document(self.chosen),
                "next": None if self.runner_up is None else _document(self.runner_up)}


def grid_of(config: Config, comm: MPI.Intracomm) -> tuple[tuple[Any, int], Choice | None]:
    """(shape and data of a Grid over comm, how they were chosen if they were). Collective; errors as `chosen_grid`."""
    if config.grid.shape != AUTO:
        return (config.grid.shape, config.grid.data), None
    choice = chosen_grid(config, comm)
    return ("ddp", 1) if choice is None else (choice.shape[:3], choice.shape.data), choice


def chosen_grid(config: Config, comm: MPI.Intracomm) -> Choice | None:
    """The best grid of all ranks of comm for a configuration that leaves it open. Rank 0 ranks them, and tells all
    others: collective, and the same on all ranks. None where the data does not fit the configuration, or cannot be
    read: the run says so.

    Raises Pmm3dError, on every rank, if no grid keeps the memory, or a network of one's own does not run without data.
    """
    with Grid(comm, "ddp") as grid:
        processes = grid.transport.processes
        assert processes is not None
        on_host = library_named(config.network.library).on_host
        machine = machine_here(grid.comm, processes.per_node(), grid.hosts, on_host=on_host)
        limit = room(grid)[0] or None if on_host else None
        choice: Choice | None = None
        with grid.collective_call("grid.shape", always=True):
            if grid.rank == 0:
                choice = _choice(config, processes, machine, limit)
                choice = choice and replace(choice, on_host=on_host)
        return grid.comm.bcast(choice)


def room(grid: Grid) -> tuple[int, str]:
    """(Bytes that each rank has on the host that has least for its own, that host); 0 if no host says. Collective."""
    answers = grid.comm.allgather((host.available_memory() // grid.local_size, platform.node()))
    return min([answer for answer in answers if answer[0]], default=(0, ""))


def _choice(config: Config, processes: Processes, known: Machine | None, limit: int | None) -> Choice | None:
    from .planning import rank_training  # only where it is needed: by one rank

    per_node = processes.per_node()
    machine = (known or nominal(per_node)).with_ranks_per_node(per_node)
    try:
        samples = sizes_in_file(config)
    except Pmm3dError:
        return None
    best, *others = rank_training(config, len(processes), machine, limit=limit, samples=samples,
                                  run=processes.run()).candidates
    return Choice(best, others[0] if others else None, machine.name, bool(machine.key))


def _said(candidate: Candidate) -> str:
    named = f" ({candidate.preset})" if candidate.preset else ""
    return f"{candidate.grid}{named}, {1e3 * candidate.seconds:.3g} ms"


def _document(candidate: Candidate) -> dict[str, Any]:
    return {"grid": candidate.grid._asdict(), "seconds": candidate.seconds, "terms": dict(candidate.terms),
            "memory": dict(candidate.memory), "preset": candidate.preset, "estimated": candidate.estimated}
