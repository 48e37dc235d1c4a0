"""The measurement of a machine in sections, and the tables of its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from mpi4py import MPI
from rich.console import Console

from ...arrays.blas_choice import blas_here
from ...comm import Grid, key_of
from ...model.machine import available_memory, cpu
from ...model.machines import Group, Machine
from ...model.machines.figures import Measured
from ...model.machines.laws import DEFAULT
from ...text import counted, in_bytes, in_flops
from ..output import FigureTable, facts
from ..timing import Sampler, core_share
from . import collectives, rates, steps
from .fitting import fitted

WHERE = {"inside": "inside a node", "across": "across nodes"}
Tell = Callable[[str, int], None]


class Nodes(NamedTuple):
    """The placement of the ranks, equal on all ranks.

    number          number of nodes
    ranks_per_node  largest number of ranks on a node
    hosts           node of each rank
    memory          bytes of free memory per rank, on the node with the least
    """

    number: int
    ranks_per_node: int
    hosts: list[str]
    memory: int


class Report(NamedTuple):
    """The measured machine.

    hosts      node of each rank
    left_out   number of points for which there was no time
    unlike     nodes of another kind than the first; jobs that start there do not find the machine
    unsteady   largest ratio of the times of the same step in two turns
    """

    machine: Machine
    hosts: list[str]
    left_out: int
    unlike: list[str]
    unsteady: float = 1.0


def stages(ranks: int, dtypes: list[str]) -> int:
    return rates.count(dtypes) + collectives.count(ranks) + steps.count(ranks)


def nodes_of(comm: MPI.Intracomm) -> Nodes:
    """Return the placement of the ranks. Collective."""
    with Grid(comm, (comm.size, 1, 1)) as grid:
        hosts = [grid._host_of(rank) for rank in range(comm.size)]
    memory = min(comm.allgather(available_memory() // hosts.count(hosts[comm.rank])))
    return Nodes(len(set(hosts)), max(map(hosts.count, set(hosts))), hosts, memory)


def measure(comm: MPI.Intracomm, dtypes: list[str], budget: float, tell: Tell) -> Report:
    """Measure all sections in turn. The report is equal on all ranks. Collective.

    budget   share of its longest time that a section gets
    tell     tell(what, points done)
    """
    nodes = nodes_of(comm)
    sampler = Sampler(comm, budget, core_share(comm, blas_here().threads))
    gemms = rates.measured_gemms(sampler, dtypes, tell)
    keys = comm.allgather(key_of(nodes.ranks_per_node, nodes.number))
    copy = rates.measured_copy(sampler, tell)
    rows, groups = collectives.measured_collectives(sampler, tell)
    machine = Machine(
        name=f"{cpu().name or 'unknown CPU'}, {counted(nodes.ranks_per_node, 'rank')} a node",
        memory=nodes.memory,
        key=keys[0],
        ranks_per_node=nodes.ranks_per_node,
        sources=_sources(nodes),
        gemms=gemms,
        passes={DEFAULT: copy, rates.COPY: copy},
        peak={dtype: max(max(points.flops) for points in by_form.forms.values()) for dtype, by_form in gemms.items()},
        collectives=tuple(even(rows, groups)),
        laws=fitted(rows, groups),
        hidden=collectives.measured_hidden(sampler, dtypes[0], tell),
    )
    measured = steps.measured_steps(sampler, nodes.ranks_per_node, tell)
    unlike = sorted({host for host, key in zip(nodes.hosts, keys) if key != keys[0]})
    return Report(
        steps.calibrated(measured, machine), nodes.hosts, sampler.left_out, unlike, steps.unsteadiness(measured)
    )


def even(rows: Iterable[Measured], groups: Mapping[tuple[int, int], Group]) -> list[Measured]:
    """Return the rows of groups with the same number of ranks on each node. Other rows are only used for the laws,
    because a row of a machine is for inside * nodes ranks."""
    return [row for row in rows if groups[row.inside, row.nodes].size == row.inside * row.nodes]


def _sources(nodes: Nodes) -> dict[str, str]:
    here = (
        f"measured by pmm3d tune machine on {counted(len(nodes.hosts), 'rank')}, {counted(nodes.number, 'node')}, "
        "all ranks at once"
    )
    unknown = "across nodes" if nodes.number == 1 else "inside a node" if nodes.ranks_per_node == 1 else ""
    nominal = f"; figures {unknown} are those of the nominal machine" if unknown else ""
    return {
        "gemm": f"{here}; larger ones, above 4096 or 2**20 elements, have the rate of the nearest measured one",
        "peak": "the best GEMM",
        "passes": f"copies {here}; others fitted to steps",
        "collectives": here,
        "laws": f"fitted to the collectives{nominal}",
        "hidden": here,
        "in_steps": f"fitted to steps, {here}",
        "memory": "available on the node at the time, shared by its ranks",
    }


def print_report(report: Report, console: Console) -> None:
    """Print a summary. The file of the machine contains all figures."""
    machine, copy = report.machine, report.machine.passes[rates.COPY]
    action, inside, across = (
        f"{abs(1e6 * seconds):.1f} us {'less' if seconds < 0 else 'longer'}" for seconds in machine.in_steps
    )
    source = machine.sources["in_steps"]
    rows = {
        "ranks": f"{len(report.hosts)} on {counted(len(set(report.hosts)), 'node')}",
        "memory": f"{in_bytes(machine.memory)} a rank",
        **{f"GEMM {dtype}": f"at best {in_flops(peak)} a rank" for dtype, peak in machine.peak.items()},
        "copies": f"{copy.rate / 1e9:.2f} GB/s and {1e6 * copy.overhead:.1f} us a copy on each rank",
        **{
            f"hidden {place}": f"{share:.0%} of an all-reduce {WHERE[place]} runs under GEMMs"
            for place, share in machine.hidden.items()
        },
        "in a step": source
        if source in (steps.USELESS, steps.NOT_MEASURED)
        else f"compared with a loop of one action, a GEMM or pass takes {action}, a collective inside a "
        f"node {inside}, a collective across nodes {across}",
    }
    console.print(facts(f"\n[bold]{machine.name}[/]", rows))
    if machine.collectives:
        table = FigureTable(
            "[bold]Collectives[/], all groups at once",
            ("operation", "ranks a node", "nodes", "latency us", "largest", "GB/s", "law's misfit"),
        )
        for row in machine.collectives:
            table.add_row(
                row.operation,
                str(row.inside),
                str(row.nodes),
                f"{1e6 * row.seconds[0]:.1f}",
                in_bytes(row.nbytes[-1]),
                f"{row.nbytes[-1] / row.seconds[-1] / 1e9:.3f}",
                f"{machine.laws[row.operation].misfit:.0%}",
            )
        console.print(table)
    if report.unsteady > steps.UNSTEADY:
        console.print(
            f"[yellow]The same step took {report.unsteady:.1f} times as long in another turn, so other "
            'programs used the cores and the figures "in a step" may be wrong. Measure again on a quiet '
            "machine[/]"
        )
    if report.left_out:
        console.print(
            f"[yellow]The time was up before {counted(report.left_out, 'point')} could be measured. A larger "
            "--budget measures more[/]"
        )
    if report.unlike:
        console.print(f"[yellow]unlike the first host, in CPU, MPI, BLAS or settings: {', '.join(report.unlike)}[/]")
