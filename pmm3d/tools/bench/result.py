"""What the benchmark of a product measures: small records, and the flat JSON that they make."""

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
"""As a dtype: float32, of which a device may round the factors."""


class Case(NamedTuple):
    """What to measure. transpose: which operands are stored transposed, "nn", "tn", "nt" or "tt" as in BLAS. reference:
    the library whose own matmul is timed in turns with the product, on one rank; empty: none. order: in which A, B and
    C are stored, as of DistMatrix; shared: those of A and B that lie by rows are in memory that the ranks of a node
    share."""

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
        """The case of a dtype that may be "tf32"."""
        return cls(m, n, k, "float32" if dtype == TF32 else dtype, array, tf32=dtype == TF32, **options)

    @property
    def product(self) -> tuple[int, int, int]:
        return self.m, self.n, self.k

    @property
    def flop(self) -> float:
        return flop_of(*self.product, self.dtype)


class Partition(NamedTuple):
    """How the product lies on the ranks. blocks: of the first one; panels: along k; overlap: how its
    communication runs under the GEMM, as of `matmul`; orders: of the shards of A, B and C, "C" by rows, "F" by columns
    (where stored transposed too); in_place: what ranks read where their neighbours have it, of A, B
    and the partial sums of C; auto: whether "auto" chooses this grid."""

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
    """GFLOP/s of the GEMM of a shape on one core, or one device, and of a cube of the size `square` there; at_once:
    those of the shape on all cores together, each with arrays of its own, which share caches, memory and clock."""

    shape: tuple[int, int, int]
    gflops: float
    square_gflops: float
    square: int
    at_once_gflops: float = 0.0


class Reference(NamedTuple):
    """What ran in turns with the product: the medians of both give its share, product / reference."""

    name: str
    seconds: list[float]
    gflops: float
    share: float


class Speed(NamedTuple):
    """seconds: of each repetition, the slowest rank's. core_gflops: of the GEMM of `core_shape` on one core, the better
    of the medians before and after; at_once_gflops: of the same GEMM on all cores together, the better one too;
    ratio: of gflops to the cores' rate. unit: "cores", or the "devices" that take
    their place for arrays on devices. square: the size of the cube of square_core_gflops. Phases: seconds of one
    product as the mean over the ranks that took part, "waited_max" of the worst one; "off_core" is the part of
    "computed" in which the thread had no core."""

    seconds: list[float]
    gflops: float
    core_gflops: float
    core_shape: list[int]
    square_core_gflops: float
    cores: int
    ratio: float
    computed_seconds: float
    off_core_seconds: float
    waited_seconds: float
    phases: dict[str, dict[str, float]]
    unit: str = "cores"
    square: int = 2048
    at_once_gflops: float = 0.0

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def square_ratio(self) -> float:
        """Of gflops to the cores' rate in the cube: not helped by a shape that the BLAS is slow on."""
        return self.gflops / (self.cores * self.square_core_gflops) if self.square_core_gflops else 0.0

    @property
    def limit(self) -> Limit:
        m, n, k = self.core_shape
        return Limit((m, n, k), self.core_gflops, self.square_core_gflops, self.square, self.at_once_gflops)

    @property
    def at_once_ratio(self) -> float:
        """Of gflops to what all cores reach together without a message: what the product itself costs."""
        return self.gflops / self.at_once_gflops if self.at_once_gflops else 0.0


class Traffic(NamedTuple):
    """Bytes of one product by axis, of the rank that has most; the model's of what is sent; the least that any
    algorithm receives."""

    bytes_sent: dict[str, int]
    bytes_received: dict[str, int]
    bytes_model: dict[str, int]
    lower_bound_bytes: float

    @property
    def received(self) -> int:
        return sum(self.bytes_received.values())


class Memory(NamedTuple):
    """Bytes of the fullest rank: of the plan (matrices and work arrays; the latter alone), resident at the peak, and by
    how much the resident memory grew while measuring. node_memory: resident at the peak on the fullest node, of all its
    ranks together; a page that several share counts once."""

    model_memory: int
    workspace_bytes: int
    peak_memory: int
    resident_growth: int
    node_memory: int = 0


class Check(NamedTuple):
    """Whether the product was right, and how that was found out."""

    verified: bool
    verification: str


class Environment(NamedTuple):
    """Where it ran. advice: what to do about a BLAS kernel below the CPU's best, and about threads that
    share cores, if anything. devices: the names of those that the arrays are on."""

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
        """The fields of all records side by side, those of the environment under that name."""
        return ({name: getattr(self.case, name) for name in PRODUCT} | self.partition._asdict() | self.speed._asdict()
                | self.traffic._asdict() | self.memory._asdict() | self.check._asdict()
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
