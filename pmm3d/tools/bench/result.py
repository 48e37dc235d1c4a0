"""Records of the benchmark of a product, their JSON, and the parts of the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

from ...model.machines import flop_of

PRODUCT = ("m", "n", "k", "dtype", "tf32", "array", "transpose", "order", "shared")
"""Fields that a case and its result have in common."""
COMPUTED = {"multiply": "GEMM"}
WAITED = {
    "agreement": "until all ranks have compared their arguments",
    "redistribute": "relayouts of A, B or C",
    "gather A": "all-gather of A along x",
    "gather B": "all-gather of B along z",
    "reduce C": "reduce-scatter of C along y",
}
"""Phase of the ledger -> name of its computation; meaning of its wait."""
REST = "rest"
COLOURS = {
    "GEMM": "#4477aa",
    "GEMM, no core": "#aaccee",
    "wait: gather A": "#ee6677",
    "wait: gather B": "#ccbb44",
    "wait: reduce C": "#aa3377",
    "wait: redistribute": "#66ccee",
    "wait: agreement": "#228833",
}
"""Colours of the parts of the time in pictures. Other parts are grey."""
NOT_ASKED_FOR = "not asked for"
"""Verification of a result that was not verified."""
TF32 = "tf32"
"""The --dtype of float32 products whose factors a device may round."""


class Case(NamedTuple):
    """A product to measure.

    transpose   storage of A and B, as in BLAS: "nn", "tn", "nt" or "tt"
    reference   library whose own matmul is timed in turns with the product, on one rank; "": none
    order       storage order of the shards of A, B and C, as in DistMatrix
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
        """Return a case. The dtype may be "tf32"."""
        return cls(m, n, k, "float32" if dtype == TF32 else dtype, array, tf32=dtype == TF32, **options)

    @property
    def product(self) -> tuple[int, int, int]:
        return self.m, self.n, self.k

    @property
    def flop(self) -> float:
        return flop_of(*self.product, self.dtype)


class Limit(NamedTuple):
    """Rates of GEMMs without messages, in GFLOP/s.

    core_gflops          of the shape `core_shape` on one core, or one device
    square_core_gflops   of a cube of size `square` on one core, or one device
    at_once_gflops       of `core_shape` on all cores together, which share caches, memory and clock; 0: not measured

    core_gflops and at_once_gflops are the better of two medians, before and after the product.
    """

    core_gflops: float
    core_shape: tuple[int, int, int]
    square_core_gflops: float
    square: int
    at_once_gflops: float

    @property
    def is_cube(self) -> bool:
        """Whether `core_shape` is the cube, so that core_gflops and square_core_gflops are one figure."""
        return self.core_shape == (self.square,) * 3


class Reference(NamedTuple):
    """Timings of another library's matmul, in turns with the product. share: its median time over the product's."""

    name: str
    seconds: list[float]
    gflops: float
    share: float


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


@dataclass(frozen=True, kw_only=True)
class Result:
    """A case on one grid, and its measurement, as `pmm3d bench --json` writes it. Sizes are in bytes.

    limit                the limit. The JSON contains its fields
    blocks               shapes of the first rank's blocks
    panels, overlap      number of panels along k; overlap mode of `matmul`
    orders               storage orders of the shards of A, B and C: "C" by rows, "F" by columns
    in_place             names of the matrices that are read in the memory of other ranks
    auto                 whether "auto" chooses this grid
    seconds              seconds of each repetition on its slowest rank
    cores                number of cores, or of devices if the arrays are there (`unit`)
    ratio                gflops over `cores` times `Limit.core_gflops`
    phases               seconds of one product by phase of the ledger, as the mean over the ranks that took part:
                         "computed", "off_core" (the part of it without a core), "waited", and "waited_max" of the
                         worst rank. `computed_seconds`, `off_core_seconds` and `waited_seconds` are their sums
    bytes_model          modelled bytes sent. Like the bytes sent and received: by axis, on the rank with the most
    lower_bound_bytes    lower bound of the bytes received by any algorithm
    model_memory         matrices and work arrays of the plan; workspace_bytes: work arrays alone
    peak_memory          peak of the resident memory on the fullest rank; node_memory: on the fullest node
    resident_growth      growth of the resident memory during the measurement
    verification         description and result of the check
    """

    m: int
    n: int
    k: int
    dtype: str
    tf32: bool
    array: str
    transpose: str
    order: str
    shared: bool
    ranks: int
    grid: Sequence[int]
    idle_ranks: int
    blocks: dict[str, list[int]]
    panels: int
    overlap: str
    orders: str
    in_place: str
    limit: Limit
    seconds: list[float]
    gflops: float
    cores: int
    unit: str
    ratio: float
    computed_seconds: float
    off_core_seconds: float
    waited_seconds: float
    phases: dict[str, dict[str, float]]
    bytes_sent: dict[str, int]
    bytes_received: dict[str, int]
    bytes_model: dict[str, int]
    lower_bound_bytes: float
    model_memory: int
    workspace_bytes: int
    peak_memory: int
    resident_growth: int
    node_memory: int
    verified: bool
    verification: str
    environment: Environment
    reference: Reference | None = None
    auto: bool = False

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def shape(self) -> str:
        return "x".join(map(str, self.grid))

    @property
    def received(self) -> int:
        return sum(self.bytes_received.values())

    def as_json(self) -> dict[str, Any]:
        """Return the fields, including the fields of the limit. Environment and reference are objects."""
        fields = {name: value for name, value in vars(self).items() if name != "limit"} | self.limit._asdict()
        return fields | {
            "environment": self.environment._asdict(),
            "reference": self.reference and self.reference._asdict(),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Result:
        """Return the result that `as_json` made this object from. Raises KeyError or TypeError for other objects."""
        records = {
            "limit": Limit(*(document[name] for name in Limit._fields)),
            "environment": Environment(**document["environment"]),
            "reference": document["reference"] and Reference(**document["reference"]),
        }
        return cls(**{name: value for name, value in document.items() if name not in Limit._fields} | records)


class TimePart(NamedTuple):
    """A part of the time of a product.

    seconds   mean over the repetitions and over the ranks that took part
    most      seconds of the rank that waited longest; None for a part that is not a wait
    meaning   explanation in the table
    """

    name: str
    seconds: float
    most: float | None
    meaning: str


def time_parts(result: Result) -> list[TimePart]:
    """Return the parts of the time of a product. They add up to the mean time of a repetition on its slowest rank."""
    parts = []
    for phase, sums in result.phases.items():
        name, off_core = COMPUTED.get(phase, f"computing: {phase}"), sums["off_core"]
        for part, seconds, meaning in (
            (name, sums["computed"] - off_core, "with a core"),
            (f"{name}, no core", off_core, "another process or rank has the core"),
        ):
            if seconds:
                parts.append(TimePart(part, seconds, None, meaning))
        if phase in WAITED or sums["waited"]:
            parts.append(TimePart(f"wait: {phase}", sums["waited"], sums["waited_max"], WAITED.get(phase, "")))
    rest = fmean(result.seconds) - sum(part.seconds for part in parts)
    return [
        *parts,
        TimePart(
            REST,
            rest,
            None,
            "copies, sums of C, starting messages; and how much slower the slowest rank is than the mean",
        ),
    ]
