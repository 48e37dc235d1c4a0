"""Records of the benchmark of a product, the JSON made of them, and the parts of the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from ...model.machines import flop_of

PRODUCT = ("m", "n", "k", "dtype", "tf32", "array", "transpose", "order", "shared")
COMPUTED = {"multiply": "GEMM"}
WAITED = {"agreement": "until all ranks have compared their arguments", "redistribute": "relayouts of A, B or C",
          "gather A": "all-gather of A along x", "gather B": "all-gather of B along z",
          "reduce C": "reduce-scatter of C along y"}
"""Phase of the ledger -> what is computed, or awaited, in it."""
REST = "rest"
TF32 = "tf32"
"""A dtype: float32, whose factors a device may round."""


class Case(NamedTuple):
    """What to measure.

    transpose   which operands are stored transposed, as in BLAS: "nn", "tn", "nt" or "tt"
    reference   library whose own matmul is timed in turns with the product, on one rank; "": none
    order       storage order of A, B and C, as of DistMatrix
    shared      whether A and B are in memory that the ranks of a node share
    """

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
    tf32: bool = False
    reference: str = ""
    overlap: str | None = None
    order: str = "C"
    shared: bool = False

    @classmethod
    def named(cls, m: int, n: int, k: int, dtype: str, array: str, **options: Any) -> Case:
        """Return the case of a dtype that may be "tf32"."""
        return cls(m, n, k, "float32" if dtype == TF32 else dtype, array, tf32=dtype == TF32, **options)

    @property
    def product(self) -> tuple[int, int, int]:
        return self.m, self.n, self.k

    @property
    def flop(self) -> float:
        return flop_of(*self.product, self.dtype)


class Partition(NamedTuple):
    """The grid, and how the matrices are stored on it.

    blocks     of the first rank
    panels     number of panels along k;   overlap   mode of `matmul`
    orders     storage orders of the shards of A, B and C: "C" by rows, "F" by columns
    in_place   which of A, B and C are read in the memory of other ranks
    auto       whether "auto" chooses this grid
    """

    ranks: int
    grid: list[int]
    idle_ranks: int
    blocks: dict[str, list[int]]
    panels: int
    overlap: str = ""
    orders: str = "CCC"
    in_place: str = ""
    auto: bool = False


class Limit(NamedTuple):
    """Rates of GEMMs without messages, in GFLOP/s, each the better of the medians before and after the product.

    core_gflops          of the shape `core_shape` on one core, or one device
    square_core_gflops   of a cube of the size `square` there
    at_once_gflops       of `core_shape` on all cores together, which share caches, memory and clock; 0: not measured
    """

    core_gflops: float
    core_shape: tuple[int, int, int]
    square_core_gflops: float
    square: int
    at_once_gflops: float


class Reference(NamedTuple):
    """Another library's matmul, which ran in turns with the product. share: its median over that of the product."""

    name: str
    seconds: list[float]
    gflops: float
    share: float


class Speed(NamedTuple):
    """The time of the product.

    seconds   of each repetition, on its slowest rank
    cores     number of cores, or of devices (unit) if the arrays are there
    ratio     of gflops to the rate of `Limit.core_gflops` on all of them
    phases    seconds of one product by phase of the ledger, as the mean over the ranks that took part: "computed",
              "off_core" (the part of it without a core), "waited", and "waited_max" of the worst rank
    """

    seconds: list[float]
    gflops: float
    cores: int
    unit: str
    ratio: float
    computed_seconds: float
    off_core_seconds: float
    waited_seconds: float
    phases: dict[str, dict[str, float]]

    @property
    def median(self) -> float:
        return median(self.seconds)


class Traffic(NamedTuple):
    """Bytes of one product by axis, of the rank with the most. bytes_model: sent, by the plan. lower_bound_bytes: the
    least that any algorithm receives."""

    bytes_sent: dict[str, int]
    bytes_received: dict[str, int]
    bytes_model: dict[str, int]
    lower_bound_bytes: float

    @property
    def received(self) -> int:
        return sum(self.bytes_received.values())


class Memory(NamedTuple):
    """Bytes of the fullest rank: matrices and work arrays of the plan, work arrays alone, resident at the peak, and
    growth of the resident memory during the measurement. node_memory: resident at the peak on the fullest node."""

    model_memory: int
    workspace_bytes: int
    peak_memory: int
    resident_growth: int
    node_memory: int = 0


class Check(NamedTuple):
    """Whether the product is right, and by which check."""

    verified: bool
    verification: str


class Environment(NamedTuple):
    """Hardware and software. advice: what to change about the BLAS kernel and the threads, or None."""

    mpi: str
    cpu: str
    blas: str
    kernel: str
    threads: int
    hosts: list[str]
    ranks_per_host: list[int]
    cores_per_host: list[int]
    advice: str | None
    devices: Sequence[str] = ()


class Result(NamedTuple):
    """One case on one grid."""

    case: Case
    partition: Partition
    limit: Limit
    speed: Speed
    traffic: Traffic
    memory: Memory
    check: Check
    environment: Environment
    reference: Reference | None = None

    @property
    def shape(self) -> str:
        return "x".join(map(str, self.partition.grid))

    def as_json(self) -> dict[str, Any]:
        """Return the fields of all records side by side; the environment and the reference are objects of their own."""
        records = (self.partition, self.limit, self.speed, self.traffic, self.memory, self.check)
        return ({name: getattr(self.case, name) for name in PRODUCT}
                | {name: value for record in records for name, value in record._asdict().items()}
                | {"environment": self.environment._asdict(),
                   "reference": self.reference and self.reference._asdict()})


class TimePart(NamedTuple):
    """A part of the time of a product.

    seconds   mean over the repetitions and over the ranks that took part
    most      seconds of the rank that waited longest; None if this is no wait
    meaning   what the rank does in this time
    """

    name: str
    seconds: float
    most: float | None
    meaning: str


def time_parts(result: Mapping[str, Any]) -> list[TimePart]:
    """Return where the time of a product goes, from `Result.as_json`. The seconds of the parts add up to the mean of
    the repetitions, each of which takes as long as its slowest rank."""
    parts = []
    for phase, found in result["phases"].items():
        name, off_core = COMPUTED.get(phase, f"computing: {phase}"), found.get("off_core", 0.0)
        for part, seconds, meaning in ((name, found["computed"] - off_core, "with a core"),
                                       (f"{name}, no core", off_core, "another process has the core")):
            if seconds:
                parts.append(TimePart(part, seconds, None, meaning))
        if phase in WAITED or found["waited"]:
            parts.append(TimePart(f"wait: {phase}", found["waited"], found.get("waited_max"), WAITED.get(phase, "")))
    rest = fmean(result["seconds"]) - sum(part.seconds for part in parts)
    return [*parts, TimePart(REST, rest, None, "copies, sums of C, starting messages; and by how much the slowest rank "
                                               "is slower than the mean")]
