"""Candidates: grids for a job, with their time, memory and bytes. All planners return candidates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..layout import PIPE, SEQ, ULYSSES, GridShape

PRESETS = ("ddp", "fsdp", "hsdp", "megatron")
"""Families of parallel training whose names are values of `Grid(shape=)`."""
FAMILIES = (*PRESETS, "megatron+sp", "cp", "3d", "4d", "5d")
"""All families that `preset_of` returns."""


def preset_of(grid: GridShape, activations: str = "replicated") -> str:
    """Return the family of parallel training that the grid belongs to; "" if it belongs to none.

    If the network's activations are "sharded", tensor parallelism includes Megatron's sequence parallelism.

    | family | axes of several ranks | known from |
    |---|---|---|
    | ddp | data, or none | PyTorch DDP |
    | fsdp | z | PyTorch FSDP, ZeRO-3 |
    | hsdp | z and data | PyTorch HSDP |
    | megatron | x, with data or without | Megatron-LM: tensor parallelism (TP) |
    | megatron+sp | as megatron, and activations are sharded | Megatron-LM: TP and sequence parallelism |
    | cp | seq or ulysses, or both, with z and data or without | context parallelism |
    | 3d | x, pipe, and one of data and z | Megatron-LM, DeepSpeed: tensor, pipeline, data |
    | 4d | x, seq, pipe, and one of data and z | Llama 3: TP, CP, PP, DP |
    | 5d | x, seq, pipe, z and data | torchtitan's mesh: TP, CP, PP, shards and replicas |

        >>> [preset_of(GridShape(*sizes)) for sizes in ((1, 1, 1, 8), (1, 1, 8), (1, 1, 4, 2), (8, 1, 1), (2, 2, 2))]
        ['ddp', 'fsdp', 'hsdp', 'megatron', '']
        >>> preset_of(GridShape(8, 1, 1), "sharded"), preset_of(GridShape(2, 1, 1, 4, pipe=2))
        ('megatron+sp', '3d')
    """
    several = {SEQ if name == ULYSSES else name for name, size in zip(grid.names, grid) if size > 1}
    copies, others = several & {"data", "z"}, several - {"data", "z"}
    if not others:
        return "ddp" if "z" not in copies else "fsdp" if grid.data == 1 else "hsdp"
    if others == {"x"}:
        return "" if grid.z > 1 else "megatron+sp" if activations == "sharded" else "megatron"
    if others == {SEQ}:
        return "cp"
    if len(copies) == 1 and others in ({"x", PIPE}, {"x", PIPE, SEQ}):
        return "3d" if len(others) == 2 else "4d"
    return "5d" if len(copies) == 2 and others == {"x", PIPE, SEQ} else ""


@dataclass(frozen=True)
class Candidate:
    """A grid, and the costs of the job on it.

    seconds    seconds of the product or the step on the slowest rank
    terms      seconds by kind, which add up to `seconds`: "gemm", "passes", "overhead"; "x", "y", "z", "data", "all":
               waits for collectives along the axis; "pipe": bubble, and messages between stages
    memory     bytes by kind on the fullest rank
    bytes      bytes that the busiest rank receives
    preset     family of the grid, one of `FAMILIES`; "" if it has none
    schedule   name of a pipeline's schedule; "" without a pipeline
    settings   keys of the network's configuration that were chosen with the grid: "activations", "recompute"
    why_not    reason why the grid was dropped; "" if it was not dropped
    """

    grid: GridShape
    seconds: float
    terms: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    bytes: int = 0
    preset: str = ""
    why_not: str = ""
    schedule: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the grid, the schedule of its pipeline, and `settings`, as one text."""
        return " ".join(
            [
                str(self.grid),
                *[self.schedule] * bool(self.schedule),
                *(f"{key}={value}" for key, value in self.settings.items()),
            ]
        )


@dataclass(frozen=True)
class Ranking:
    """Candidates, the best first, and dropped candidates.

    what         the job in words: "4096 x 4096 x 4096 float64", "a step of digits.toml"
    flop         flop of all ranks together
    dtype        type of the job's GEMMs, for `share_of_peak`
    considered   number of grids that were considered, also those that were not priced
    """

    what: str
    ranks: int
    candidates: list[Candidate]
    dropped: list[Candidate]
    flop: float
    dtype: str
    considered: int

    def share_of_peak(self, candidate: Candidate, peak: float) -> float:
        """Return the flop/s of the candidate divided by those of all ranks at `peak` flop/s each; 0 if unknown."""
        return self.flop / (candidate.seconds * self.ranks * peak) if candidate.seconds and peak else 0.0
