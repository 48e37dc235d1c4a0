"""How many bytes training moves, by axis, phase and operation: plain arithmetic for any rank of any grid, no MPI.

The keys are those of the ledger, so that both can be compared number by number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..comm.ledger import Entry, Key
from ..layout import FIRST, Coords, GridShape, Layout, batch_layout, itemsize, part_sizes
from ..model.volumes import all_reduce_volume
from .layers import MLP, LayerNorm, Linear, Module, Recompute
from .memory import layers_of
from .optim import Optimizer
from .overlap import Overlap
from .tape import Tape

Volume = dict[Key, Entry]
Calls = Iterator[tuple[Key, int, int]]
"""Collectives: (key, bytes sent, bytes received) of each."""
Layer = tuple[int, int, str, str]
"""(inputs, outputs, axis that splits the inputs, axis that splits the outputs)."""


@dataclass
class Passes:
    """What a trainer did.

    trained, evaluated     rows -> batches of so many rows, forward and backward; forward only
    steps, evaluations     of the optimizer; of the whole validation set
    asked                  how often the ranks told each other of signals
    evaluated_last         whether an evaluation came after the last step
    """

    trained: Counter[int] = field(default_factory=Counter)
    evaluated: Counter[int] = field(default_factory=Counter)
    steps: int = 0
    evaluations: int = 0
    asked: int = 0
    evaluated_last: bool = False


@dataclass(frozen=True)
class MLPVolume:
    """What the rank at `coords` sends and receives while an `MLP` is trained whose batches come in their layouts.

    sizes, norm, bias, recompute, dtype   as of the MLP;   loss   "cross_entropy", "mse" or "mae"
    grid, coords, hosts                   GridShape, this rank's Coords, number of nodes
    split_over_data, clip, accumulate     ZeRO-1; whether gradients are clipped; batches of a step
    overlap                               an Overlap;   keep_bytes   of gathered weights, where it leaves that open

    An all-reduce of n bytes over G ranks moves 2 (G-1)/G n to each of them, up to 64 KiB (G-1) n; an all-gather and a
    reduce-scatter (G-1)/G n, n being the bytes of the whole. Axes of one rank are left out.
    """

    sizes: tuple[int, ...]
    grid: GridShape
    coords: Coords = FIRST
    norm: bool = False
    bias: bool = True
    recompute: bool = False
    dtype: str = "float32"
    loss: str = "cross_entropy"
    split_over_data: bool = False
    clip: bool = False
    accumulate: int = 1
    overlap: Overlap = Overlap()
    keep_bytes: int = 0
    hosts: int = 1

    @classmethod
    def of(cls, network: Module, optimizer: Optimizer, loss: str, **others: Any) -> MLPVolume | None:
        """Of a network on its grid, after a step of it; None if it is no `MLP`, which alone is modelled."""
        if type(network) is not MLP:
            return None
        parallel = Tape.of(network.grid).parallel
        overlap, budget = parallel.overlap, parallel.overlap.keep_bytes
        modules, grid = [module for _, module in network.named_modules()], network.grid
        layers = [module for module in modules if isinstance(module, Linear)]
        kinds, weight = set(map(type, modules)), layers[0].weight
        sizes = (weight.shape[0], *(layer.weight.shape[1] for layer in layers))
        return cls(sizes, grid.shape, grid.shape.position(grid.rank), LayerNorm in kinds, layers[0].bias is not None,
                   Recompute in kinds, weight.dtype, loss, optimizer.shard_over_data, overlap=overlap, hosts=grid.hosts,
                   keep_bytes=(parallel.weights.budget or 0) if budget is None else budget, **others)

    @cached_property
    def layers(self) -> list[Layer]:
        return layers_of(self.sizes)

    def training(self, passes: Passes) -> Volume:
        """Of everything that the passes say, as the ledger counts it."""
        volume: Volume = {}
        for times, calls in self._times(passes):
            for key, sent, received in calls if times else ():
                volume.setdefault(key, Entry()).__iadd__(Entry(times, times * sent, times * received))
        return volume

    def _times(self, passes: Passes) -> Iterator[tuple[int, Calls]]:
        """How often, and what."""
        for rows, batches in passes.trained.items():
            yield batches, self._batch(rows)
        for rows, batches in passes.evaluated.items():
            yield batches, self._evaluated_batch(rows)
        yield passes.evaluations, self._evaluation()
        yield passes.asked, self._everyone("", 2)
        yield min(1, passes.steps), self._step(first=True)
        yield max(0, passes.steps - 1), self._step(first=False)
        yield from self._gathers(passes)

    def _batch(self, rows: int) -> Calls:
        """Forward and backward pass of a batch of so many rows, without the gathers of weights."""
        yield from self._forward(rows)
        for layer in self.layers[:-1]:
            if self.recompute:
                yield from self._hidden(layer, rows)
            if self.norm:
                yield from self._all_reduce(layer[3], "layer norm", 2 * self._rows(rows))
        for inputs, _, axis, other in self.layers[1:]:
            yield from self._product("reduce dI", rows, inputs, other, axis)
        for own, whole in map(self._shard, self.layers):
            yield from self._reduce_scatter("z", "reduce dW", own, whole)

    def _forward(self, rows: int) -> Calls:
        """With the loss."""
        for layer in self.layers[:-1]:
            yield from self._hidden(layer, rows)
        yield from self._product("reduce O", rows, *self.layers[-1][1:])
        yield from self._loss(rows)

    def _evaluated_batch(self, rows: int) -> Calls:
        yield from self._forward(rows)
        if self.loss == "cross_entropy":
            yield from self._label_exchange(rows)
            for axis in ("data", "z"):
                yield from self._all_reduce(axis, "", 1, "float64")

    def _evaluation(self) -> Calls:
        """Of its end: the sums of R2."""
        _, outputs, _, columns = self.layers[-1]
        if self.loss != "cross_entropy":
            for axis in ("data", "z"):
                yield from self._all_reduce(axis, "", 3 * self._part(outputs, columns), "float64")
            yield from self._all_reduce(columns, "", 2, "float64")

    def _step(self, first: bool) -> Calls:
        """Of a step, beside its batches. In the first one gradients come together in another order."""
        parameters = self._parameters(self.coords)
        if vectors := sum(rows for is_vector, rows, _ in parameters if is_vector):
            yield from self._all_reduce("z", "reduce vectors", vectors)
        for bucket in self._buckets(first):
            own, whole = (sum(counts) for counts in zip(*bucket))
            if self.split_over_data:
                yield from self._reduce_scatter("data", "reduce data", own, whole)
            else:
                yield from self._all_reduce("data", "reduce data", whole)
        for _, rows, cols in parameters if self.split_over_data else ():
            yield from self._all_gather("data", "optimizer", self._part(rows, "data") * cols, rows * cols)
        if self.clip:
            yield from self._everyone("optimizer", 1)

    def _hidden(self, layer: Layer, rows: int) -> Calls:
        """Of a hidden layer's forward pass."""
        yield from self._product("reduce O", rows, *layer[1:])
        if self.norm:
            yield from self._exchange(layer[3], "layer norm", 2 * self._rows(rows))

    def _product(self, phase: str, rows: int, columns: int, axis: str, split: str) -> Calls:
        """The all-reduces over an axis of a block whose columns another one splits, in its strips of rows."""
        m, n = batch_layout(split).box((rows, columns), self.grid, self.coords).shape
        for strip in self.overlap.row_strips(m, n, self.dtype, self.hosts):
            yield from self._all_reduce(axis, phase, (strip.stop - strip.start) * n)

    def _loss(self, rows: int) -> Calls:
        classes = self.loss == "cross_entropy"
        for axis in ("data", "z") if classes else ("data", "z", self.layers[-1][3]):
            yield from self._all_reduce(axis, "loss", 1)
        if classes:
            yield from self._label_exchange(rows)

    def _label_exchange(self, rows: int) -> Calls:
        """What `loss.cross_entropy`, and `loss.accuracy` again, exchange along the axis of the classes."""
        return self._exchange(self.layers[-1][3], "loss", 3 * self._rows(rows))

    def _exchange(self, axis: str, phase: str, numbers: int) -> Calls:
        return self._all_gather(axis, phase, numbers, numbers * getattr(self.grid, axis))

    def _rows(self, rows: int) -> int:
        return batch_layout(None).box((rows, 1), self.grid, self.coords).size

    def _part(self, size: int, axis: str) -> int:
        return part_sizes(size, getattr(self.grid, axis))[getattr(self.coords, axis)]

    def _shard(self, layer: Layer) -> tuple[int, int]:
        """Elements of this rank's shard of a layer's weight, and of its gathered block."""
        inputs, outputs, axis, other = layer
        rows, cols = Layout(axis, other).box((inputs, outputs), self.grid, self.coords).shape
        return self._part(rows, "z") * cols, rows * cols

    def _gathers(self, passes: Passes) -> Iterator[tuple[int, Calls]]:
        """A weight that is kept is gathered once for all passes between two steps. One that is not: for each pass, and
        the first one also at the end of an evaluation, for a next batch that does not come."""
        trained, evaluated = passes.trained.total(), passes.evaluated.total()
        ahead = passes.evaluated_last and self.overlap.oag and evaluated > passes.evaluations and len(self.layers) > 1
        for index, (layer, kept) in enumerate(zip(self.layers, self.kept())):
            again = 2 + (self.recompute and index < len(self.layers) - 1)
            number = again * trained + evaluated + (ahead and index == 0)
            if kept:
                number = passes.steps + passes.evaluated_last
            yield number, self._all_gather("z", "gather W", *self._shard(layer))

    def kept(self) -> list[bool]:
        """Which gathered weights stay: decided by sizes of the first rank, in the order of their use."""
        if self.overlap.reshard_after_forward is not None:
            return [not self.overlap.reshard_after_forward] * len(self.layers)
        kept, taken = list[bool](), 0
        for inputs, outputs, axis, other in self.layers:
            size = Layout(axis, other).box((inputs, outputs), self.grid, FIRST).size * itemsize(self.dtype)
            kept.append(taken + size <= self.keep_bytes)
            taken += size * kept[-1]
        return kept

    def _parameters(self, coords: Coords) -> list[tuple[bool, int, int]]:
        """(whether it is a vector, rows, columns) of each shard, in the order in which a backward pass uses them.
        Vectors are columns of one, as the data axis splits them."""
        shards = []
        for index, (inputs, outputs, axis, other) in reversed(list(enumerate(self.layers))):
            vector = True, Layout((), other).box((1, outputs), self.grid, coords).size, 1
            rows, cols = Layout((axis, "z"), other).box((inputs, outputs), self.grid, coords).shape
            norm = self.norm and index < len(self.layers) - 1
            shards += [*[vector] * (2 * norm), (False, rows, cols), *[vector] * self.bias]
        return shards

    def _buckets(self, first: bool) -> Iterator[list[tuple[int, int]]]:
        """Of the gradients that are summed over data together: (this rank's part over data, all) of the elements."""
        members = list(zip(self._parameters(self.coords), self._parameters(FIRST)))
        in_order = not self.overlap.buckets or (first and self.accumulate == 1)
        if self.grid.z > 1 and not in_order:
            members.sort(key=lambda pair: pair[0][0])
        bucket, size = list[tuple[int, int]](), 0
        for index, ((_, rows, cols), (_, most_rows, most_cols)) in enumerate(members):
            bucket.append((self._part(rows, "data") * cols, rows * cols))
            size += most_rows * most_cols * itemsize(self.dtype)
            if size >= self.overlap.bucket_bytes or index == len(members) - 1:
                yield bucket
                bucket, size = [], 0

    def _all_reduce(self, axis: str, phase: str, elements: int, dtype: str | None = None) -> Calls:
        dtype = dtype or self.dtype
        volume = all_reduce_volume(elements, dtype, getattr(self.grid, axis), getattr(self.coords, axis))
        if getattr(self.grid, axis) > 1:
            yield Key(axis, phase, "all_reduce"), volume.sent, volume.received

    def _all_gather(self, axis: str, phase: str, own: int, whole: int) -> Calls:
        return self._moved(axis, phase, "all_gather", (getattr(self.grid, axis) - 1) * own, whole - own, self.dtype)

    def _reduce_scatter(self, axis: str, phase: str, own: int, whole: int) -> Calls:
        return self._moved(axis, phase, "reduce_scatter", whole - own, (getattr(self.grid, axis) - 1) * own, self.dtype)

    def _moved(self, axis: str, phase: str, operation: str, sent: int, received: int, dtype: str) -> Calls:
        if getattr(self.grid, axis) > 1:
            yield Key(axis, phase, operation), itemsize(dtype) * sent, itemsize(dtype) * received

    def _everyone(self, phase: str, numbers: int) -> Calls:
        """An all-reduce of so many 8-byte numbers over all ranks."""
        if self.grid.size > 1:
            volume = all_reduce_volume(numbers, "float64", self.grid.size, self.grid.rank(self.coords))
            yield Key("all", phase, "all_reduce"), volume.sent, volume.received
