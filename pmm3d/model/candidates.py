"""Grids that could serve a job, with what each would take: what every planner returns and every table shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..layout import LOW_PRECISION, GridShape

PRESETS = ("ddp", "fsdp", "hsdp", "megatron")
"""Families of parallel training, whose grids `Grid(shape=)` makes by these names."""


def saved_in_checkpoint(memory: Mapping[str, int], dtype: str) -> dict[str, int]:
    """Return bytes by kind of what a checkpoint holds, of the memory of a training. In low precision the optimizer's
    state contains the master weights, which are stored in place of the weights.

        >>> saved_in_checkpoint({"weights": 2, "gradients": 4, "state": 12}, "bfloat16")
        {'state': 12}
    """
    kinds = ("state",) if dtype in LOW_PRECISION else ("weights", "state")
    return {kind: memory[kind] for kind in kinds}


def preset_of(grid: GridShape) -> str:
    """The family of parallel training whose grid it is, as `Grid(shape=)` names them; "" if of none.

        >>> [preset_of(GridShape(*sizes)) for sizes in ((1, 1, 1, 8), (1, 1, 8), (1, 1, 4, 2), (8, 1, 1), (2, 2, 2))]
        ['ddp', 'fsdp', 'hsdp', 'megatron', '']
    """
    if grid.stages > 1:
        return ""
    if grid.x == grid.y == grid.z == 1:
        return "ddp"
    if grid.x == grid.y == 1:
        return "fsdp" if grid.data == 1 else "hsdp"
    return "megatron" if grid.y == grid.z == 1 else ""


@dataclass(frozen=True)
class Candidate:
    """A grid, and what the job takes on it.

    seconds   of the product or of the step, on the slowest rank
    terms     what of the seconds goes where; they add up: "gemm", "passes", "overhead", and by axis ("x", "y", "z",
              "data", "all") what is waited for its collectives; "pipe": the bubble, and messages between stages
    memory    bytes by kind on the fullest rank; they add up
    bytes     that the busiest rank receives
    preset    "ddp", "fsdp", "hsdp", "megatron" if it is the grid of one
    schedule  of a pipeline, by its name; "" without one
    why_not   what speaks against it, if it was dropped
    estimated   of a product: whether seconds and memory are by formulas only, as there are too many grids
    """

    grid: GridShape
    seconds: float
    terms: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    bytes: int = 0
    preset: str = ""
    why_not: str = ""
    estimated: bool = False
    schedule: str = ""

    def __str__(self) -> str:
        """The grid, and the schedule of its pipeline."""
        return f"{self.grid}{f' {self.schedule}' * bool(self.schedule)}"


@dataclass(frozen=True)
class Ranking:
    """Candidates, the best first, and those that were dropped.

    what         that they are for, in words: "4096 x 4096 x 4096 float64", "a step of digits.toml"
    flop         of all ranks together
    dtype        whose peak the share is of
    considered   grids looked at, of how many ranks
    saved        bytes by kind that a checkpoint has, on whatever grid
    """

    what: str
    ranks: int
    candidates: list[Candidate]
    dropped: list[Candidate]
    flop: float
    dtype: str
    considered: int
    saved: Mapping[str, int] = field(default_factory=dict)

    def seconds_to_save(self, candidate: Candidate, ranks_per_node: int, rate: float) -> float:
        """Of a checkpoint, where each node writes so many bytes/s: what the first holds, and nothing twice."""
        return sum(min(nbytes, candidate.memory.get(kind, 0) * ranks_per_node)
                   for kind, nbytes in self.saved.items()) / rate

    def share_of_peak(self, candidate: Candidate, peak: float) -> float:
        """Of so many flop/s a rank."""
        return self.flop / (candidate.seconds * self.ranks * peak) if candidate.seconds and peak else 0.0
