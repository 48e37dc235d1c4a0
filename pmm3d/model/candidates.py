"""Candidates: grids for a job, with their time, memory and bytes. All planners return candidates."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..layout import PIPE, SEQ, ULYSSES, GridShape
from ..text import in_short

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


LOWER, MEMORY = "ranked lower", "too much memory"
"""Reasons why a priced grid is not shown: others are better; it does not fit."""
SLOWER, LARGER = (f"{why} by a rough estimate, not priced" for why in ("slower", "too much memory"))
"""Reasons why a grid is not priced."""


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
    settings   keys of the configuration that were chosen with the grid, such as "network.recompute"
    why_not    reason why the grid was dropped, with its figures; "" if it was not dropped
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
        """Return the grid, the schedule of its pipeline, and the `settings` that are not off, as one text."""
        return " ".join(filter(None, [str(self.grid), self.schedule, in_short(self.settings)]))


def cause_of(candidate: Candidate) -> str:
    """Return the reason why a candidate is not shown, without figures. Grids that are not shown are counted by it.

    >>> cause_of(Candidate(GridShape(16, 1, 1), 0.0, why_not="8 heads are fewer than x = 16"))
    'heads are fewer than x'
    """
    if not candidate.why_not:
        return LOWER
    return MEMORY if candidate.memory else re.sub(r"( =)? ?[\d,]*\d", "", candidate.why_not.split(":")[0]).strip()


@dataclass(frozen=True)
class Ranking:
    """Candidates, the best first, and dropped candidates.

    what         the job in words: "4096 x 4096 x 4096 float64", "a step of digits.toml"
    flop         flop of all ranks together
    dtype        type of the job's GEMMs, for `share_of_peak`
    considered   number of grids that were considered, also those that were not priced
    unpriced     number of grids that were not priced, by reason. Default: `SLOWER` for all of them
    """

    what: str
    ranks: int
    candidates: list[Candidate]
    dropped: list[Candidate]
    flop: float
    dtype: str
    considered: int
    unpriced: Mapping[str, int] = field(default_factory=dict)

    def not_among(self, shown: Collection[Candidate]) -> dict[str, list[Candidate]]:
        """Return the priced grids of which no candidate is in `shown`, by reason. Each grid is listed once."""
        listed, found = {each.grid for each in shown}, dict[str, list[Candidate]]()
        for each in [*self.candidates, *self.dropped]:
            if each.grid not in listed:
                listed.add(each.grid)
                found.setdefault(cause_of(each), []).append(each)
        return found

    def without_price(self) -> dict[str, int]:
        """Return the numbers of grids that were not priced, by reason."""
        priced = {each.grid for each in [*self.candidates, *self.dropped]}
        rest = self.considered - len(priced) - sum(self.unpriced.values())
        return {**self.unpriced, **({SLOWER: rest} if rest else {})}

    def share_of_peak(self, candidate: Candidate, peak: float) -> float:
        """Return the flop/s of the candidate divided by those of all ranks at `peak` flop/s each; 0 if unknown."""
        return self.flop / (candidate.seconds * self.ranks * peak) if candidate.seconds and peak else 0.0
