"""The measurement of a machine, section by section."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from mpi4py import MPI

from ...arrays.blas_choice import blas_here
from ...comm import Grid, key_of
from ...model.machine import available_memory, cores, cpu
from ...model.machines import Group, Machine
from ...model.machines.figures import Measured
from . import collectives, gemms, passes
from .fitting import Fitted, fitted
from .hidden import PLACES, measured_hidden
from .sampling import Sampler, Share, SlowRank, slow_ranks
from .whole_steps import in_steps_of, measured_steps

Tell = Callable[[str, int], None]


class Nodes(NamedTuple):
    """Where the ranks are, the same on all of them.

    number          of nodes
    ranks_per_node  the most of any
    hosts           the node of each rank
    memory          bytes that a rank may have, on the node with the least for each
    """

    number: int
    ranks_per_node: int
    hosts: list[str]
    memory: int


class Report(NamedTuple):
    """What was found.

    machine     to be written
    fit         its laws and how well they fit
    slow        ranks that were slow in a section
    thrown      samples that were jumps of the clock, of all ranks
    left_out    points that there was no time for
    hosts       the node of each rank
    unlike      nodes of another kind than the first: what is kept is not found by jobs that begin there
    """

    machine: Machine
    fit: Fitted
    slow: list[SlowRank]
    thrown: int
    left_out: int
    hosts: list[str]
    unlike: list[str]


def stages(ranks: int, dtypes: list[str]) -> int:
    """What `tell` counts up to, about."""
    return gemms.count(dtypes) + passes.count() + collectives.count(ranks) + len(PLACES)


def nodes_of(comm: MPI.Intracomm) -> Nodes:
    """Collective. Memory: what the node could still give now, shared by its ranks; what they hold is not part of it."""
    with Grid(comm, (comm.size, 1, 1)) as grid:
        hosts = [grid.host_of(rank) for rank in range(comm.size)]
    here = hosts.count(hosts[comm.rank])
    memory = min(comm.allgather(available_memory() // here))
    most = max(map(hosts.count, set(hosts)))
    return Nodes(len(set(hosts)), most, hosts, memory)


def share_of(comm: MPI.Intracomm) -> Share:
    """How this rank's node shares its cores. Collective."""
    host = socket.gethostname()
    everyones = comm.allgather((host, cores()))
    here = [rank for rank, (name, _) in enumerate(everyones) if name == host]
    working = workers([everyones[rank][1] for rank in here], max(1, blas_here().threads))
    return Share(len(here) / max(1, len(working)), here.index(comm.rank) in working)


def workers(usable: Sequence[frozenset[int]], threads: int) -> set[int]:
    """Ranks that can compute at once with so many threads each, none on a core of another; at least the first one.

    usable   the cores that each rank of a node may use

        >>> workers([frozenset({0})] * 2 + [frozenset({1})] * 2, 1), workers([frozenset({0, 1})] * 3, 1)
        ({0, 2}, {0, 1})
    """
    free, found = frozenset().union(*usable), {0}
    for rank, cores_of_rank in enumerate(usable):
        own = sorted(cores_of_rank & free)[:threads]
        if len(own) == threads:
            found.add(rank)
            free -= set(own)
    return found


def measure(comm: MPI.Intracomm, dtypes: list[str], budget: float, tell: Tell) -> Report:
    """All sections, one after the other. Collective; the report is the same on all ranks.

    budget   time that sections may take, as a share of what they take at most without it
    tell     tell(what, points done)
    """
    nodes = nodes_of(comm)
    sampler = Sampler(comm, budget, share=share_of(comm))
    rates = gemms.measured_gemms(sampler, dtypes, tell)
    keys = comm.allgather(key_of(nodes.ranks_per_node, nodes.number))
    unlike = sorted({host for host, key in zip(nodes.hosts, keys) if key != keys[0]})
    peak = {dtype: max(max(points.flops) for points in found.forms.values()) for dtype, found in rates.items()}
    machine = Machine(name=f"{cpu().name or 'unknown CPU'}, {nodes.ranks_per_node} ranks a node", memory=nodes.memory,
                      ranks_per_node=nodes.ranks_per_node, peak=peak, sources=_sources(nodes), gemms=rates,
                      key=keys[0])
    machine = replace(machine, passes=passes.measured_passes(sampler, machine, tell))
    rows, groups = collectives.measured_collectives(sampler, tell)
    fit = fitted(rows, groups)
    machine = replace(machine, collectives=tuple(even(rows, groups)), laws=fit.laws,
                      hidden=measured_hidden(sampler, dtypes[0], tell))
    machine = replace(machine, in_steps=in_steps_of(measured_steps(sampler, comm, nodes.ranks_per_node), machine))
    everyones = comm.allgather((sampler.thrown, sampler.medians))
    thrown, medians = zip(*everyones)
    slow = [found for section in sampler.medians for found in slow_ranks(section, [each[section] for each in medians])]
    return Report(machine, fit, slow, sum(thrown), sampler.left_out, nodes.hosts, unlike)


def even(rows: Iterable[Measured], groups: Mapping[tuple[int, int], Group]) -> list[Measured]:
    """The rows of groups with as many ranks on each node. Those of others go into the laws alone: a row stands for
    inside * nodes ranks."""
    return [row for row in rows if groups[row.inside, row.nodes].size == row.inside * row.nodes]


def _sources(nodes: Nodes) -> dict[str, str]:
    here = f"measured by pmm3d tune machine on {len(nodes.hosts)} ranks, {nodes.number} node(s), all ranks at once"
    unknown = "across nodes" if nodes.number == 1 else "inside a node" if nodes.ranks_per_node == 1 else ""
    nominal = f"; figures {unknown} are those of the nominal machine" if unknown else ""
    return {"gemm": f"{here}; what is larger than 4096, or than 2**20 elements, has the rate of the nearest measured",
            "peak": "the best GEMM", "passes": here, "collectives": here,
            "laws": f"fitted to the collectives{nominal}", "hidden": here, "in_steps": f"fitted to steps, {here}",
            "memory": "available on the node at the time, shared by its ranks"}
