"""The measurement of one product on one grid: time, the limit, bytes, memory, verification."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from ...arrays import NumpyLibrary, check_matrix_dtype, library_here, library_named, take_device
from ...arrays.blas_choice import KERNEL_VARIABLE, is_measured
from ...comm import Grid, Host, free_memory, hosts, mpi_name
from ...errors import DTypeError, OutOfMemoryError, Pmm3dError
from ...layout import Layout
from ...model import ProductPlan, lower_bound, machine
from ...model.machine import lack_of_memory
from ...model.machines import flop_of
from ...product import DistMatrix, matmul, verify
from ...product.multiply import plan_for
from ...text import counted
from ..timing import GemmOperands, Timer, Work, core_share, gemm_rate
from .result import NOT_ASKED_FOR, PRODUCT, Case, Environment, Limit, Reference, Result

SQUARE, DEVICE_SQUARE = 2048, 8192
"""Size of the cube whose GEMM is timed on one core, and on one device, which a smaller cube does not fill. A GEMM of
the product's proportions has at most as many operations as the host's cube: a second on a slow core."""
WARM_UP = 2
"""Products before the first timed one. The first product allocates, plans and starts the BLAS."""
TRANSPOSED = {"A": Layout(rows=("y", "x"), cols=("z",)), "B": Layout(rows=("x", "z"), cols=("y",))}
AXES = ("x", "y", "z")

Tell = Callable[[str], None]


def run(
    case: Case,
    comm: MPI.Intracomm,
    shape: Any = "auto",
    *,
    tell: Tell = lambda text: None,
    trace: Path | None = None,
    limit: Limit | None = None,
) -> Result:
    """Measure a case on one grid. Collective.

    tell    a function that rank 0 calls with the name of each stage
    limit   the limit, if it was measured before
    """
    check_reference(case, comm.size)
    with Grid(comm, shape, product=case.product, dtype=case.dtype, trace=bool(trace)) as grid:
        say = tell if grid.rank == 0 else (lambda text: None)
        take_device(case.array, grid.local_rank)
        _check_memory(case, grid)
        say(f"grid {grid.shape}: making A and B")
        result = _measure(case, grid, *operands(grid, case), say, limit)
        if trace:
            grid.write_trace(trace)
        return result


def _check_memory(case: Case, grid: Grid) -> None:
    """Store the predicted memory for the message of an OutOfMemoryError. Raise one, on all ranks, if the hosts have
    less. With panels, a limit of the work arrays or shared operands, only the matrices are counted. Collective."""
    plan = ProductPlan(*case.product, case.dtype, grid.shape)
    fixed = plan.memory - plan.workspace * bool(case.panels or case.max_workspace or case.shared)
    grid.ledger.predict("A, B, C and work arrays", lambda: plan.memory)
    free, host = free_memory(grid)
    with grid.collective_call("bench: memory", always=True):
        if library_named(case.array).on_host and (lack := lack_of_memory("the product", fixed, free, host)):
            raise OutOfMemoryError(f"{lack}. Use more nodes, smaller --m, --n and --k, or a --dtype of fewer bytes")


def operands(grid: Grid, case: Case) -> tuple[DistMatrix, DistMatrix]:
    """Return random A (m, k) and B (k, n) in the layouts that the product uses without a relayout."""
    made = []
    for name, flag, shape, layout, seed in (
        ("A", case.transpose[0], (case.m, case.k), Layout.A, 1),
        ("B", case.transpose[1], (case.k, case.n), Layout.B, 2),
    ):
        turned = flag == "t"
        stored, layout = (shape[::-1], TRANSPOSED[name]) if turned else (shape, layout)
        matrix = DistMatrix.random(
            grid,
            stored,
            seed=seed,
            dtype=case.dtype,
            layout=layout,
            library=case.array,
            order=case.order,
            shared=case.shared,
        )
        made.append(matrix.T if turned else matrix)
    return made[0], made[1]


def _measure(case: Case, grid: Grid, a: DistMatrix, b: DistMatrix, say: Tell, known: Limit | None) -> Result:
    multiply = partial(matmul, a, b, **_options(case))
    c, timer = multiply(order=case.order), Timer(grid, a.library)
    for _ in range(WARM_UP - 1):
        multiply(out=c)
    timer.warm_up(lambda: multiply(out=c))
    say("the GEMM alone")
    limit = known or _limit(grid, case)
    grid.ledger.reset()
    resident = machine.resident_memory()
    seconds, reference = _timed(grid, case, timer, lambda: multiply(out=c), say)
    growth = machine.resident_memory() - resident
    sent, received, phases = _of_one_product(grid, case.repeat * timer.times)
    say("the GEMM alone")
    if not known:
        core = max(limit.core_gflops, core_rate(grid, case, limit.core_shape))
        limit = limit._replace(
            core_gflops=core,
            square_core_gflops=core if limit.is_cube else limit.square_core_gflops,
            at_once_gflops=max(limit.at_once_gflops, rate_at_once(grid, case, limit.core_shape)),
        )
    say("verification")
    verified, verification = _verified(case, a, b, c)
    plan, blas = plan_for(a, b, c, case.panels, case.max_workspace, case.overlap), machine.blas_of(a.library)
    nodes = hosts(grid.comm, map(grid._host_of, range(grid.size)), blas.threads)
    devices = _devices(grid, a.library)
    cores = len(devices) or sum(host.cores for host in nodes)
    rate, core = case.flop / median(seconds) / 1e9, limit.core_gflops
    computed, off_core, waited = (
        sum(phase[what] for phase in phases.values()) for what in ("computed", "off_core", "waited")
    )
    return Result(
        **{name: getattr(case, name) for name in PRODUCT},
        limit=limit,
        reference=reference,
        ranks=grid.size,
        grid=list(grid.shape[:3]),
        idle_ranks=grid.size - grid.shape.size,
        panels=plan.panels,
        overlap=plan.overlap,
        **_stored(plan, a.order + b.order + c.order),
        seconds=seconds,
        gflops=rate,
        cores=cores,
        unit="devices" if devices else "cores",
        ratio=rate / (cores * core) if core else 0.0,
        computed_seconds=computed,
        off_core_seconds=off_core,
        waited_seconds=waited,
        phases=phases,
        bytes_sent=sent,
        bytes_received=received,
        bytes_model={axis: max(rank.bytes_sent[axis] for rank in plan.fullest) for axis in AXES},
        lower_bound_bytes=lower_bound(case.product, grid.shape.size, case.dtype),
        model_memory=plan.memory,
        workspace_bytes=plan.workspace,
        peak_memory=int(grid.comm.largest(machine.peak_memory())),
        resident_growth=int(grid.comm.largest(growth)),
        node_memory=_of_the_fullest_node(grid),
        verified=verified,
        verification=verification,
        environment=_environment(blas, nodes, devices),
    )


def _of_the_fullest_node(grid: Grid) -> int:
    """Return the bytes of peak memory of the node with the most. Collective."""
    _, node_of = np.unique([grid._host_of(rank) for rank in range(grid.size)], return_inverse=True)
    return int(np.bincount(node_of, weights=grid.comm.allgather(machine.peak_share())).max())


def _options(case: Case) -> dict[str, Any]:
    return {"panels": case.panels, "max_workspace": case.max_workspace, "tf32": case.tf32, "overlap": case.overlap}


def _limit(grid: Grid, case: Case) -> Limit:
    square = SQUARE if library_named(case.array).on_host else DEVICE_SQUARE
    cube = square, square, square
    shape = shrunk(*case.product, flop_of(*cube, "float64"))
    rate = core_rate(grid, case, shape)
    return Limit(
        rate, shape, rate if shape == cube else core_rate(grid, case, cube), square, rate_at_once(grid, case, shape)
    )


def _devices(grid: Grid, library: NumpyLibrary) -> list[str]:
    """Return the name of each device that ranks use; [] if the arrays are on the host. Collective."""
    names = {(row["host"], row["pci"]): row["name"] for row in grid.devices(library)}
    return [] if library.on_host else grid.comm.bcast(list(names.values()))


def _timed(
    grid: Grid, case: Case, timer: Timer, work: Callable[[], Any], say: Tell
) -> tuple[list[float], Reference | None]:
    """Return the seconds of each timing of the product, and the reference, timed in turns, or None. Collective."""
    kinds, seconds = [(timer, work)], [list[float](), list[float]()]
    if case.reference:
        name, library, plain = reference_of(case)
        kinds.append((Timer(grid, library), plain))
        kinds[1][0].warm_up(plain)
    for index in range(case.repeat):
        say(f"product {index + 1} of {case.repeat}")
        for kind in range(len(kinds)) if index % 2 else reversed(range(len(kinds))):
            seconds[kind].append(kinds[kind][0].seconds(kinds[kind][1]))
    if not case.reference:
        return seconds[0], None
    ours, theirs = map(median, seconds)
    return seconds[0], Reference(name, seconds[1], case.flop / theirs / 1e9, theirs / ours)


def reference_of(case: Case) -> tuple[str, NumpyLibrary, Work]:
    """Return the name of the reference's matmul, its library, and a function that multiplies with it.

    Raises DTypeError if the library cannot multiply the dtype, Pmm3dError if the library is not installed.
    """
    library = library_here(case.reference)
    check_matrix_dtype(case.dtype, library)
    if case.tf32 and library.kind != "torch:cuda":
        raise DTypeError(f"--reference {case.reference}: only torch:cuda rounds to tf32")
    a, b, c = GemmOperands(library, case.dtype, [case.product]).matrices(case.product)
    matmul = library.xp.matmul

    def multiply() -> None:
        matmul(a, b, out=c)

    name = f"{library.xp.__name__}.matmul"
    return name, library, _rounded(library, multiply) if case.tf32 else multiply


def _rounded(library: Any, multiply: Work) -> Work:
    """Return the function with tf32 switched on during each call."""
    rounding = library.xp.backends.cuda.matmul

    def multiply_rounded() -> None:
        before, rounding.fp32_precision = rounding.fp32_precision, "tf32"
        try:
            multiply()
        finally:
            rounding.fp32_precision = before

    return multiply_rounded


def check_reference(case: Case, ranks: int) -> None:
    """Raise Pmm3dError if a reference is asked for on several ranks."""
    if case.reference and ranks > 1:
        raise Pmm3dError(f"--reference needs one rank, but this job has {ranks}: start one rank, or leave it out")


def shrunk(m: int, n: int, k: int, most: float) -> tuple[int, int, int]:
    """Return the product (m, n, k), its largest dim halved until the product takes at most `most` operations."""
    dims = [m, n, k]
    while flop_of(dims[0], dims[1], dims[2], "float64") > most:
        dims[dims.index(max(dims))] //= 2
    return dims[0], dims[1], dims[2]


def core_rate(grid: Grid, case: Case, shape: tuple[int, int, int]) -> float:
    """Return the median GFLOP/s of one core or device, measured on rank 0 while the other ranks sleep. Collective."""
    rate = 0.0
    if grid.rank == 0:
        with threadpool_limits(1):
            rate = _gemm_rate(case, shape)
    _asleep(grid)
    return grid.comm.bcast(rate)


def rate_at_once(grid: Grid, case: Case, shape: tuple[int, int, int]) -> float:
    """Return the sum of the ranks' median GFLOP/s while all cores multiply. Collective.

    The ranks that have their own cores multiply, each with all its threads and its own arrays. The other ranks sleep.
    0 for devices, which share neither memory nor clock.
    """
    library = library_named(case.array)
    if not library.on_host:
        return 0.0
    works = core_share(grid.comm, machine.blas_of(library).threads).works
    grid.comm.Barrier()
    rate = _gemm_rate(case, shape) if works else 0.0
    _asleep(grid)
    return sum(grid.comm.allgather(rate))


def _gemm_rate(case: Case, shape: tuple[int, int, int]) -> float:
    return gemm_rate(library_named(case.array), case.dtype, shape, tf32=case.tf32) / 1e9


def _asleep(grid: Grid) -> None:
    """Wait for all ranks without taking a core from the ranks that multiply."""
    arrival = grid.comm.Ibarrier()
    while not arrival.Test():
        time.sleep(5e-3)


def _of_one_product(grid: Grid, repeat: int) -> tuple[dict[str, int], dict[str, int], dict[str, dict[str, float]]]:
    """Return bytes sent and received by axis, and seconds by phase, of one product. Collective."""
    ledger = grid.ledger
    everyones = grid.comm.gather(
        (
            {axis: ledger.total(axis=axis) for axis in AXES},
            {phase or "agreement": ledger.total(phase=phase) for phase in ledger.phases()},
        )
    )
    return grid.comm.bcast(_together(everyones, grid.shape.size, repeat) if everyones else None)


def _together(
    everyones: list[Any], at_work: int, repeat: int
) -> tuple[dict[str, int], dict[str, int], dict[str, dict[str, float]]]:
    """Return the result of `_of_one_product` from the (totals by axis, totals by phase) of all ranks. The seconds leave
    out idle ranks, which are last."""
    axes, ranks_phases = zip(*everyones)
    ranks_phases = ranks_phases[:at_work]
    sent = {axis: max(rank[axis].sent for rank in axes) // repeat for axis in AXES}
    received = {axis: max(rank[axis].received for rank in axes) // repeat for axis in AXES}
    phases = {}
    for name in dict.fromkeys(name for rank in ranks_phases for name in rank):
        entries = [rank[name] for rank in ranks_phases if name in rank]
        phases[name] = {
            "computed": sum(entry.computed for entry in entries) / repeat / at_work,
            "off_core": sum(entry.off_core for entry in entries) / repeat / at_work,
            "waited": sum(entry.waited for entry in entries) / repeat / at_work,
            "waited_max": max(entry.waited for entry in entries) / repeat,
        }
    return sent, received, phases


def _verified(case: Case, a: DistMatrix, b: DistMatrix, c: DistMatrix) -> tuple[bool, str]:
    """Return whether the product is correct, and a description of the check."""
    if case.verification == "none":
        return False, NOT_ASKED_FOR
    worst = verify.freivalds(a, b, c, unit=2.0**-11 if case.tf32 else None)
    text = f"Freivalds, 3 vectors: error {worst:.2g} of the bound"
    fits = case.verification == "exact" or verify.exact_fits(*case.product, case.dtype)
    if case.verification == "freivalds" or not fits:
        return worst <= 1, text
    right = verify.exact(a, b, **_options(case))
    return worst <= 1 and right, f"{text}; integers compared exactly: {'equal' if right else 'DIFFERENT'}"


def _stored(plan: ProductPlan, orders: str) -> dict[str, Any]:
    """Return the fields of a result about the storage of the matrices."""
    first = plan.first
    of_a, of_b = first.a.in_place, first.b.in_place
    rows, cols = first.rows, first.cols
    if orders[2] == "F":  # as C^T = B^T A^T
        rows, cols, of_a, of_b = cols, rows, of_b, of_a
    blocks = {"A": [rows, first.depth], "B": [first.depth, cols], "C": [rows, cols]}
    in_place = "".join(name for name, so in zip("ABC", (of_a, of_b, plan.sums_in_place)) if so)
    return {"blocks": blocks, "orders": orders, "in_place": in_place}


def _environment(blas: machine.Blas, nodes: list[Host], devices: list[str]) -> Environment:
    processor = machine.cpu()
    return Environment(
        mpi_name(),
        processor.name,
        f"{blas.name} {blas.version}",
        blas.kernel,
        blas.threads,
        [host.name for host in nodes],
        [len(host.ranks) for host in nodes],
        [host.cores for host in nodes],
        _advice(blas, processor, nodes),
        devices,
    )


def _advice(blas: machine.Blas, processor: machine.Cpu, nodes: list[Host]) -> str | None:
    """Return remedies for a slow BLAS kernel that no measurement chose, and for more threads than cores; or None."""
    told = [None if is_measured() else blas.advice(processor, os.environ.get(KERNEL_VARIABLE, ""))]
    crowded = [host for host in nodes if blas.threads > 1 and len(host.ranks) * blas.threads > host.cores]
    for host in crowded[:1]:
        threads, ranks = len(host.ranks) * blas.threads, len(host.ranks)
        told.append(
            f"{threads} BLAS threads of {counted(ranks, 'rank')} take turns on {counted(host.cores, 'core')} "
            f"({host.name}): set {', '.join(machine.THREAD_COUNTS)} to {max(1, host.cores // ranks)}"
        )
    return "\n".join(filter(None, told)) or None
