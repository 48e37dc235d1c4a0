"""Choice of the grid of a training run by a model of the machine (`grid.shape = "auto"`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from ...arrays import library_named
from ...comm import Grid, Processes, free_memory, machine_here
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
    """The chosen grid, and the runner-up if there is one.

    machine    name of the modelled machine
    measured   whether `pmm3d tune machine` measured its figures
    on_host    whether the arrays are in host memory
    slower     factor of the compute time because ranks share cores; 1 if the machine's figures include it
    """

    chosen: Candidate
    runner_up: Candidate | None
    machine: str
    measured: bool
    on_host: bool
    slower: float = 1.0

    def line(self) -> str:
        """Return the choice as a line of text. Both times include `slower`."""
        next_one = f"; next {self._timed(self.runner_up)}" if self.runner_up is not None else ""
        shared = f"; ranks share cores, so they compute {self.slower:.3g} times as long" if self.slower > 1 else ""
        remedy = (
            "pmm3d tune machine measures this one"
            if self.on_host
            else "without these devices; PMM3D_MACHINE selects another"
        )
        known = (
            f"of a {self.machine} machine ({remedy})"
            if self.machine == UNMEASURED
            else f"of {self.machine}" + " (not measured by pmm3d tune machine)" * (not self.measured)
        )
        return f"grid.shape = auto: {self._timed(self.chosen)} a step by the model {known}{next_one}{shared}"

    def _timed(self, candidate: Candidate) -> str:
        named = f" ({candidate.preset})" if candidate.preset else ""
        computed = sum(candidate.terms.get(name, 0.0) for name in ("gemm", "passes", "overhead"))
        return f"{candidate}{named}, {1e3 * (candidate.seconds + (self.slower - 1) * computed):.3g} ms"

    def document(self) -> dict[str, Any]:
        """Return the choice for JSON."""
        return {
            "machine": self.machine,
            "measured": self.measured,
            "chosen": _document(self.chosen),
            "next": None if self.runner_up is None else _document(self.runner_up),
        }


def chosen_grid(config: Config, comm: MPI.Intracomm) -> Choice:
    """Return the best grid of all ranks of comm, as found by rank 0. Collective.

    Raises Pmm3dError, on every rank, if grid.data is given, grid.pipe does not divide the ranks, the data cannot be
    read or does not fit the configuration, grid.schedule cannot be planned, no grid fits the memory, or the user's
    network does not run without data.
    """
    if config.grid.data > 1:
        raise GridError(
            f'grid.data = {config.grid.data}, but grid.shape = "auto" chooses the ranks along data too: '
            "leave it out, or name the shape"
        )
    with Grid(comm, "ddp") as grid:
        processes = grid.transport.processes
        assert processes is not None
        on_host = library_named(config.network.library).on_host
        known = machine_here(grid.comm, processes.per_node(), grid.hosts, on_host=on_host)
        limit = free_memory(grid)[0] or None if on_host else None
        choice: Choice | None = None
        with grid.collective_call("grid.shape", always=True):
            if grid.rank == 0:
                choice = _choice(config, processes, known, limit, on_host)
        choice = grid.comm.bcast(choice)
        assert choice is not None
        return choice


def _choice(config: Config, processes: Processes, known: Machine | None, limit: int | None, on_host: bool) -> Choice:
    from .planning import experts_of, rank_training  # only rank 0 needs it

    per_node = processes.per_node()
    machine = (known or nominal(per_node)).with_ranks_per_node(per_node)
    best, *others = rank_training(
        config,
        len(processes),
        machine,
        limit=limit,
        samples=sizes_in_file(config),
        run=processes.run(),
        pipes=(config.grid.pipe,),
        seqs=(config.grid.seq * config.grid.ulysses,),
        experts=experts_of(config),
    ).candidates
    slower = max(1.0, per_node / host.usable_cores()) if on_host and not machine.key else 1.0
    return Choice(best, others[0] if others else None, machine.name, bool(machine.key), on_host, slower)


def _document(candidate: Candidate) -> dict[str, Any]:
    return {
        "grid": candidate.grid._asdict(),
        "seconds": candidate.seconds,
        "terms": dict(candidate.terms),
        "memory": dict(candidate.memory),
        "preset": candidate.preset,
        "schedule": candidate.schedule,
    }
