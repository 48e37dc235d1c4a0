"""The step of a GPT as tables for the simulation: what the library would do for its layers, priced by a machine.

The schedule is that of `pmm3d.nn`: the next weight is gathered under this layer's GEMM (OAG), the sum of an input's
gradient is under way during the GEMM of the weight's (OAR), and the sums of gradients over z and data are awaited at
the end of the pass (ORS). One rank stands for all, since they are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from ..layout import GridShape
from .gpt import BYTES, FACTORS, GPT
from .gpt_table import Begun, Prices, Table
from .machines import groups_of
from .simulation import simulate

DTYPE = "bfloat16"
"""Of the products."""
ELEMENT = 2
"""Bytes of it."""
FEW = 2
"""Blocks that are simulated, and as many again: what a further one takes is told from the two."""
SLACK = 1 + 1e-9
"""By which rounding may pass a bound."""
UPDATE = 32
"""Bytes of a parameter that AdamW reads and writes: weight, gradient, float32 weight and two moments."""
NORM = 5
"""Elements read and written for each of width H: a sum of two, then a norm."""


class Step(NamedTuple):
    """terms: where the seconds go, as in `Candidate`; received: bytes on a rank."""

    terms: dict[str, float]
    received: int

    @property
    def seconds(self) -> float:
        return sum(self.terms.values())


class Part(NamedTuple):
    """What a rank has of a layer, k x n; the axis over which the result is summed, which splits k, and that which
    splits n; for people its name."""

    k: int
    n: int
    sums: str
    splits: str
    name: str


def gpt_step(gpt: GPT, grid: GridShape, prices: Prices) -> Step:
    """A step on a grid: some blocks are simulated, and the others take what each further one took."""
    last = _pass_of_all(gpt, grid, prices, True)
    terms, received = last.terms, last.received
    if gpt.accumulate > 1:
        earlier = _pass_of_all(gpt, grid, prices, False)
        received += (gpt.accumulate - 1) * earlier.received
        terms = {name: terms.get(name, 0.0) + (gpt.accumulate - 1) * earlier.terms.get(name, 0.0)
                 for name in {**terms, **earlier.terms}}
    return Step({**terms, "passes": terms.get("passes", 0.0) + _update(gpt, grid, prices)}, received)


def least_seconds(gpt: GPT, grid: GridShape, prices: Prices) -> float:
    """That the step takes at least: as if no collective had to wait for another, and without the logits."""
    return gpt.accumulate * gpt.layers * _least_of_block(gpt, grid, prices) + _update(gpt, grid, prices)


def _least_of_block(gpt: GPT, grid: GridShape, prices: Prices) -> float:
    """What a further block adds to a pass at least. The sums of its gradients may go on under those of others."""
    writer = _Writer(gpt, grid, prices, over_data=gpt.accumulate == 1)
    table = writer.table
    writer.forward(writer.block)
    alone = table.least
    writer.forward(writer.block * 2)
    writer.blocks_backward(1)
    return table.least - 2 * alone + sum(begun.rest for begun in writer.sums if begun)


def parts_of(gpt: GPT, grid: GridShape) -> list[Part]:
    """The layers of a block as a rank of the grid has them.

        >>> parts_of(GPT(1, 1024, 128, 8), GridShape(4, 2, 1))[1]
        Part(k=256, n=512, sums='x', splits='y', name='projection')
    """
    parts = []
    for (factor, transposed), name in zip(FACTORS, ("qkv", "projection", "up", "down")):
        inner = factor * gpt.hidden
        parts.append(_part(inner, gpt.hidden, "x", "y", grid, name) if transposed else
                     _part(gpt.hidden, inner, "y", "x", grid, name))
    return parts


def _part(k: int, n: int, sums: str, splits: str, grid: GridShape, name: str) -> Part:
    return Part(ceil(k / getattr(grid, sums)), ceil(n / getattr(grid, splits)), sums, splits, name)


def _update(gpt: GPT, grid: GridShape, prices: Prices) -> float:
    return prices.sweep("adam", UPDATE * gpt.parameters // (grid.x * grid.y * grid.z))


def _pass_of_all(gpt: GPT, grid: GridShape, prices: Prices, over_data: bool) -> Step:
    """One pass forward and backward; over_data: gradients are summed over data in it.

    Of so many blocks that a further one takes no less than it must: else it still went under what comes once in a pass.
    """
    few, least = FEW, _least_of_block(gpt, grid, prices)
    first = _simulated(_pass(gpt, grid, prices, min(few, gpt.layers), over_data))
    while few < gpt.layers:
        more = min(2 * few, gpt.layers)
        last = _simulated(_pass(gpt, grid, prices, more, over_data))
        if last.seconds - first.seconds >= (more - few) * least / SLACK:
            return _further(first, last, (gpt.layers - more) / (more - few))
        few, first = more, last
    return first


def _further(first: Step, last: Step, times: float) -> Step:
    """With as many blocks again, so many times, as the last has more than the first."""
    terms = {name: max(0.0, seconds + times * (seconds - first.terms.get(name, 0.0)))
             for name, seconds in last.terms.items()}
    return Step(terms, round(last.received + times * (last.received - first.received)))


def _simulated(table: Table) -> Step:
    return Step(simulate([table.tasks]).terms(0), table.received)


def _pass(gpt: GPT, grid: GridShape, prices: Prices, blocks: int, over_data: bool) -> Table:
    writer = _Writer(gpt, grid, prices, over_data)
    writer.forward(writer.block * blocks + writer.logits)
    writer.backward(writer.logits, gather=True)
    writer.blocks_backward(blocks)
    writer.end()
    return writer.table


class _Writer:
    """Writes the layers of a pass into a table; over_data: gradients are summed over data in it."""

    def __init__(self, gpt: GPT, grid: GridShape, prices: Prices, over_data: bool):
        self.gpt, self.grid, self.over_data = gpt, grid, over_data
        self.table = Table(prices, groups_of(grid, prices.machine.ranks_per_node), DTYPE)
        self.block = parts_of(gpt, grid)
        self.logits = [_part(gpt.hidden, gpt.vocabulary, "y", "x", grid, "logits")] if gpt.vocabulary else []
        self.rows = gpt.tokens // (gpt.accumulate * grid.data * grid.z)
        self.sums: list[Begun | None] = []

    def forward(self, parts: Sequence[Part]) -> None:
        table, gathered = self.table, self._gather(parts[0])
        for part, upcoming in zip(parts, [*parts[1:], None]):
            table.wait(gathered)
            gathered = self._gather(upcoming)
            table.gemm(self.rows, part.n, part.k, "nn", part.name)
            table.wait(table.begin("all_reduce", part.sums, ELEMENT * self.rows * part.n, f"sum {part.name}"))
            self._between(part, 1)

    def blocks_backward(self, blocks: int) -> None:
        for _ in range(blocks):
            if self.gpt.recompute:
                self.forward(self.block)
            self.backward(self.block, gather=not self.gpt.recompute)

    def backward(self, parts: Sequence[Part], gather: bool) -> None:
        """gather: the weights are gathered again; else they are there from the recomputation."""
        table = self.table
        for part in reversed(parts):
            if gather:
                table.wait(self._gather(part))
            self._between(part, 2)
            table.gemm(self.rows, part.k, part.n, "nt", f"dI of {part.name}")
            over = table.begin("all_reduce", part.splits, ELEMENT * self.rows * part.k, f"sum dI of {part.name}")
            table.gemm(part.k, part.n, self.rows, "tn", f"dW of {part.name}")
            weight = part.k * part.n
            self.sums.append(table.begin("reduce_scatter", "z", ELEMENT * weight, f"sum dW of {part.name}"))
            if self.over_data:
                self.sums.append(table.begin("all_reduce", "data", BYTES["gradients"] * weight / self.grid.z,
                                             f"sum dW of {part.name} over data", self.sums[-1]))
            table.wait(over)

    def end(self) -> None:
        for begun in self.sums:
            self.table.wait(begun)
        self.sums = []

    def _gather(self, part: Part | None) -> Begun | None:
        if part is None:
            return None
        return self.table.begin("all_gather", "z", ELEMENT * part.k * part.n, f"gather {part.name}")

    def _between(self, part: Part, times: int) -> None:
        """What follows a layer: attention, GELU, or a sum and a norm. Backward: twice as much."""
        if part.name == "qkv":
            inner = ceil(self.gpt.hidden / self.grid.x)
            for _ in range(times):
                self.table.gemm(self.rows, self.gpt.sequence, inner, "nt", "scores")
                self.table.gemm(self.rows, inner, self.gpt.sequence, "nn", "attention")
        elif part.name == "up":
            self.table.sweep("gelu", times * 2 * ELEMENT * self.rows * part.n)
        elif part.name != "logits":
            self.table.sweep("norm", times * NORM * ELEMENT * self.rows * part.n)
