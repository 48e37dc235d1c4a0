"""The benchmark of one product on one grid: timing, the limit, bytes, memory, verification. `report` prints it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from statistics import median

import numpy as np
from threadpoolctl import threadpool_limits

from ...arrays import Workspace, library_named
from ...arrays.devices import take_device
from ...comm import Grid
from ...comm.hosts import Host, hosts, mpi_name
from ...layout import FIRST, Coords, Layout
from ...model import machine, ranking
from ...product import DistMatrix, matmul, verify
from ...product.multiply import plan_for

CORE_FLOP = 2 * 2048**3
CORE_REPEATS = 5
WARM_UP = 2
TRANSPOSED = {"A": Layout(rows=("y", "x"), cols=("z",)), "B": Layout(rows=("x", "z"), cols=("y",))}


@dataclass(frozen=True)
class Case:
    """What to measure. transpose: which operands are stored transposed, "nn", "tn", "nt" or "tt" as in BLAS."""

    m: int
    n: int
    k: int
    dtype: str = "float64"
    array: str = "numpy"
    transpose: str = "nn"
    repeat: int = 7
    verification: str = "auto"
    panels: int | None = None
    max_workspace: int | None = None

    @property
    def flop(self) -> int:
        return 2 * self.m * self.n * self.k * (4 if self.dtype.startswith("complex") else 1)


@dataclass
class Result:
    """What was measured. seconds: of each repetition, the slowest rank's. Bytes and seconds of phases: of one product,
    bytes of the largest rank, phase seconds as the mean over the ranks. core_gflops: the better of the medians taken
    before and after."""

    m: int
    n: int
    k: int
    dtype: str
    array: str
    transpose: str
    ranks: int
    grid: list[int]
    idle_ranks: int
    seconds: list[float]
    gflops: float
    core_gflops: float
    core_shape: list[int]
    square_core_gflops: float
    cores: int
    ratio: float
    verified: bool
    verification: str
    bytes_sent: dict[str, int]
    bytes_received: dict[str, int]
    bytes_model: dict[str, int]
    lower_bound_bytes: float
    computed_seconds: float
    waited_seconds: float
    phases: dict[str, dict[str, float]]
    blocks: dict[str, list[int]]
    steps: int
    panels: int
    model_memory: int
    workspace_bytes: int
    peak_memory: int
    resident_growth: int
    environment: dict = field(default_factory=dict)

    def as_json(self) -> dict:
        return asdict(self)


def run(case: Case, comm, shape="auto", *, tell=lambda text: None, trace: str | None = None, **options) -> Result:
    """Measure a case on one grid; collective. tell(text) hears of each stage on rank 0. options go to Grid."""
    with Grid(comm, shape, product=(case.m, case.n, case.k), dtype=case.dtype, trace=bool(trace), **options) as grid:
        say = tell if grid.rank == 0 else (lambda text: None)
        take_device(case.array, grid.local_rank)
        grid.ledger.predict("A, B, C and work arrays", ranking.memory((case.m, case.n, case.k), grid.shape, case.dtype))
        say(f"grid {grid.shape}: making A and B")
        a, b = operands(grid, case)
        result = _measure(case, grid, a, b, say)
        if trace:
            grid.write_trace(trace)
        return result


def operands(grid: Grid, case: Case) -> tuple[DistMatrix, DistMatrix]:
    """A and B in the layouts that the product takes as they are."""
    made = []
    for name, flag, shape, layout, seed in (("A", case.transpose[0], (case.m, case.k), Layout.A, 1),
                                            ("B", case.transpose[1], (case.k, case.n), Layout.B, 2)):
        turned = flag == "t"
        matrix = DistMatrix.random(grid, shape[::-1] if turned else shape, seed=seed, dtype=case.dtype,
                                   layout=TRANSPOSED[name] if turned else layout, library=case.array)
        made.append(matrix.T if turned else matrix)
    return made[0], made[1]


def _measure(case: Case, grid: Grid, a: DistMatrix, b: DistMatrix, say) -> Result:
    options = {"panels": case.panels, "max_workspace": case.max_workspace}
    c = matmul(a, b, **options)
    for _ in range(WARM_UP - 1):
        matmul(a, b, out=c, **options)
    say("single-core GEMM")
    core_shape = shrunk(case.m, case.n, case.k, CORE_FLOP)
    core = [core_rate(grid, case, core_shape)]
    square = core_rate(grid, case, (2048, 2048, 2048))
    grid.ledger.reset()
    resident = machine.resident_memory()
    seconds = []
    for index in range(case.repeat):
        say(f"product {index + 1} of {case.repeat}")
        seconds.append(_timed(grid, lambda: matmul(a, b, out=c, **options)))
    growth = machine.resident_memory() - resident
    ledger = _ledger_of_one(grid, case.repeat)
    say("single-core GEMM")
    core.append(core_rate(grid, case, core_shape))
    say("verification")
    verified, verification = _verified(case, a, b, c, options)
    return _result(case, grid, a, b, c, core_shape, core, square, seconds, growth, ledger, verified, verification)


def _timed(grid: Grid, work) -> float:
    grid.comm.Barrier()
    begun = time.perf_counter()
    work()
    return max(grid.comm.allgather(time.perf_counter() - begun))


def shrunk(m: int, n: int, k: int, flop: int) -> tuple[int, int, int]:
    """The product with its largest dim halved until it takes no more than that many operations."""
    dims = [m, n, k]
    while 2 * dims[0] * dims[1] * dims[2] > flop:
        dims[dims.index(max(dims))] //= 2
    return dims[0], dims[1], dims[2]


def core_rate(grid: Grid, case: Case, shape) -> float:
    """Median rate of this BLAS on one core (or of one device), on rank 0 while the others sleep. Collective."""
    rate = 0.0
    if grid.rank == 0:
        m, n, k = shape
        library, work = library_named(case.array), Workspace()
        a, b, c = (library.from_numpy(np.random.default_rng(0).random(size, np.float32) - 0.5, case.dtype)
                   for size in ((m, k), (k, n), (m, n)))
        times = []
        with threadpool_limits(1):
            for _ in range(CORE_REPEATS + 1):
                begun = time.perf_counter()
                library.gemm(a, b, c, 1, 0, work)
                library.synchronize()
                times.append(time.perf_counter() - begun)
        flop = 2 * m * n * k * (4 if case.dtype.startswith("complex") else 1)
        rate = flop / median(times[1:]) / 1e9 if flop else 0.0
    arrival = grid.comm.Ibarrier()
    while not arrival.Test():
        time.sleep(5e-3)
    return grid.comm.bcast(rate)


def _ledger_of_one(grid: Grid, repeat: int) -> dict:
    """Every rank's share of one product, gathered on all: bytes by axis, seconds by phase."""
    ledger = grid.ledger
    mine = {
        "sent": {axis: ledger.total(axis=axis).sent // repeat for axis in "xyz"},
        "received": {axis: ledger.total(axis=axis).received // repeat for axis in "xyz"},
        "phases": {phase or "agreement": (ledger.total(phase=phase).computed / repeat,
                                          ledger.total(phase=phase).waited / repeat) for phase in ledger.phases()},
    }
    ranks = grid.comm.allgather(mine)
    phases: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank["phases"]):
        figures = [rank["phases"].get(name, (0.0, 0.0)) for rank in ranks]
        phases[name] = {
            "computed": sum(computed for computed, _ in figures) / len(ranks),
            "waited": sum(waited for _, waited in figures) / len(ranks),
            "waited_max": max(waited for _, waited in figures),
        }
    largest = lambda kind: {axis: max(rank[kind][axis] for rank in ranks) for axis in "xyz"}
    return {"sent": largest("sent"), "received": largest("received"), "phases": phases}


def _verified(case: Case, a, b, c, options) -> tuple[bool, str]:
    if case.verification == "none":
        return False, "not asked for"
    worst = verify.freivalds(a, b, c)
    text = f"Freivalds, 3 vectors: error {worst:.2g} of the bound"
    fits = verify.exact_fits(case.m, case.n, case.k, case.dtype)
    if case.verification == "freivalds" or (case.verification == "auto" and not fits):
        return worst <= 1, text
    right = verify.exact(a, b, **options)
    return worst <= 1 and right, f"{text}; integers compared exactly: {'equal' if right else 'DIFFERENT'}"


def _result(case, grid, a, b, c, core_shape, core, square, seconds, growth, ledger, verified, verification) -> Result:
    plan = plan_for(a, b, c, case.panels, case.max_workspace)
    everyone = [Coords(x, y, z) for x in range(plan.grid.x) for y in range(plan.grid.y) for z in range(plan.grid.z)]
    model = {axis: max(plan.bytes_sent(coords)[axis] for coords in everyone) for axis in "xyz"}
    library = library_named(case.array)
    blas = machine.loaded_blas()
    nodes = hosts(grid.comm, blas.threads)
    cores = sum(host.cores for host in nodes) if library.on_host else grid.shape.size
    core_gflops = max(core)
    gflops = case.flop / median(seconds) / 1e9
    phases = ledger["phases"]
    local = plan.on_rank(FIRST)
    return Result(
        m=case.m, n=case.n, k=case.k, dtype=case.dtype, array=case.array, transpose=case.transpose, ranks=grid.size,
        grid=list(grid.shape[:3]), idle_ranks=grid.size - grid.shape.size, seconds=seconds, gflops=gflops,
        core_gflops=core_gflops, core_shape=list(core_shape), square_core_gflops=square, cores=cores,
        ratio=gflops / (cores * core_gflops) if core_gflops else 0.0, verified=verified, verification=verification,
        bytes_sent=ledger["sent"], bytes_received=ledger["received"], bytes_model=model,
        lower_bound_bytes=ranking.lower_bound((case.m, case.n, case.k), grid.shape.size, case.dtype),
        computed_seconds=sum(phase["computed"] for phase in phases.values()),
        waited_seconds=sum(phase["waited"] for phase in phases.values()), phases=phases,
        blocks={"A": [local.rows, local.depth], "B": [local.depth, local.cols], "C": [local.rows, local.cols]},
        steps=plan.panels, panels=plan.strips, workspace_bytes=plan.workspace,
        model_memory=plan.memory,
        peak_memory=max(grid.comm.allgather(machine.peak_memory())),
        resident_growth=max(grid.comm.allgather(growth)),
        environment=_environment(blas, nodes),
    )


def _environment(blas: machine.Blas, nodes: list[Host]) -> dict:
    processor = machine.cpu()
    return {
        "mpi": mpi_name(), "cpu": processor.name, "blas": f"{blas.name} {blas.version}", "kernel": blas.kernel,
        "threads": blas.threads, "hosts": [host.name for host in nodes],
        "ranks_per_host": [len(host.ranks) for host in nodes], "cores_per_host": [host.cores for host in nodes],
        "advice": blas.advice(processor),
    }
