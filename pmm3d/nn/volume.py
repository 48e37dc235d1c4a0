"""How many bytes training moves, by axis, phase and operation: plain arithmetic for any rank of any grid, no MPI.

The keys are those of the ledger, so that both can be compared number by number.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..comm.ledger import Entry, Key
from ..layout import FIRST, Coords, GridShape, Layout, batch_layout, itemsize, part_sizes
from ..model.volumes import all_reduce_moved
from .layers import MLP, LayerNorm, Linear, Module, Recompute
from .memory import layers_of
from .optim import Optimizer
from .parallel import LEAST_STRIP_BYTES, STRIPS_ACROSS_HOSTS, Overlap
from .tensor import Tape

Volume = dict[Key, Entry]
Layer = tuple[int, int, str, str]
"""(inputs, outputs, axis that splits the inputs, axis that splits the outputs)."""


def total(*volumes: Volume) -> Volume:
    """Their sum, key by key."""
    summed: Volume = {}
    for volume in volumes:
        for key, entry in volume.items():
            summed.setdefault(key, Entry()).__iadd__(entry)
    return summed


def times(count: int, volume: Volume) -> Volume:
    return {key: Entry(count * entry.calls, count * entry.sent, count * entry.received)
            for key, entry in volume.items() if count}


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
        whole = [times(count, self.batch(rows)) for rows, count in passes.trained.items()]
        whole += [times(count, self.evaluated_batch(rows)) for rows, count in passes.evaluated.items()]
        whole += [times(passes.evaluations, self.evaluation()), times(passes.asked, self._everyone("", 2))]
        if passes.steps:
            whole += [self.step(first=True), times(passes.steps - 1, self.step())]
        return total(*whole, *self._gathers(passes))

    def batch(self, rows: int) -> Volume:
        """Forward and backward pass of a batch of so many rows, without the gathers of weights."""
        hidden, later = self.layers[:-1], self.layers[1:]
        again = hidden * self.recompute
        parts = [self._forward(layer, rows) for layer in self.layers + again]
        parts += [self._norm(layer, rows) for layer in hidden + again]
        parts += [self._norm(layer, rows, backward=True) for layer in hidden]
        parts += [self._reduced("reduce dI", rows, inputs, axis, other) for inputs, _, axis, other in later]
        return total(*parts, *map(self._scattered, self.layers), self._loss(rows))

    def evaluated_batch(self, rows: int) -> Volume:
        parts = [self._forward(layer, rows) for layer in self.layers]
        parts += [self._norm(layer, rows) for layer in self.layers[:-1]]
        if self.loss == "cross_entropy":
            parts += [self._label_exchange(rows), *(self._all_reduce(axis, "", 1, "float64") for axis in ("data", "z"))]
        return total(*parts, self._loss(rows))

    def evaluation(self) -> Volume:
        """Of its end: the sums of R2."""
        if self.loss == "cross_entropy":
            return {}
        _, outputs, _, axis = self.layers[-1]
        sums = 3 * self._part(outputs, axis)
        return total(*(self._all_reduce(name, "", sums, "float64") for name in ("data", "z")),
                     self._all_reduce(axis, "", 2, "float64"))

    def step(self, first: bool = False) -> Volume:
        """Of a step, beside its batches. In the first one gradients come together in another order."""
        parameters = self._parameters(self.coords)
        vectors = sum(rows for is_vector, rows, _ in parameters if is_vector)
        parts = [self._all_reduce("z", "reduce vectors", vectors)] if vectors else []
        parts += [self._along_data(bucket) for bucket in self._buckets(first)]
        if self.split_over_data and self.grid.data > 1:
            parts += [self._all_gather("data", "optimizer", self._part(rows, "data") * cols, rows * cols)
                      for _, rows, cols in parameters]
        if self.clip:
            parts.append(self._everyone("optimizer", 1))
        return total(*parts)

    def _forward(self, layer: Layer, rows: int) -> Volume:
        _, outputs, axis, other = layer
        return self._reduced("reduce O", rows, outputs, other, axis)

    def _reduced(self, phase: str, rows: int, columns: int, split: str, axis: str) -> Volume:
        """The all-reduces over an axis of a block whose columns another one splits, in its strips of rows."""
        m, n = batch_layout(split).box((rows, columns), self.grid, self.coords).shape
        strips = self.overlap.strips or (1 if self.hosts == 1 else STRIPS_ACROSS_HOSTS)
        strips = max(1, min(strips, m * n * itemsize(self.dtype) // LEAST_STRIP_BYTES))
        return total(*(self._all_reduce(axis, phase, part * n) for part in part_sizes(m, strips)))

    def _part(self, size: int, axis: str) -> int:
        return part_sizes(size, getattr(self.grid, axis))[getattr(self.coords, axis)]

    def _norm(self, layer: Layer, rows: int, backward: bool = False) -> Volume:
        if not self.norm:
            return {}
        if backward:
            return self._all_reduce(layer[3], "layer norm", 2 * self._rows(rows))
        return self._exchange(layer[3], "layer norm", 2 * self._rows(rows))

    def _loss(self, rows: int) -> Volume:
        columns = () if self.loss == "cross_entropy" else (self.layers[-1][3],)
        means = [self._all_reduce(axis, "loss", 1) for axis in ("data", "z", *columns)]
        return total(*means, self._label_exchange(rows) if self.loss == "cross_entropy" else {})

    def _label_exchange(self, rows: int) -> Volume:
        """What `loss.cross_entropy`, and `loss.accuracy` again, exchange along the axis of the classes."""
        return self._exchange(self.layers[-1][3], "loss", 3 * self._rows(rows))

    def _exchange(self, axis: str, phase: str, numbers: int) -> Volume:
        return self._all_gather(axis, phase, numbers, numbers * getattr(self.grid, axis))

    def _rows(self, rows: int) -> int:
        return batch_layout(None).box((rows, 1), self.grid, self.coords).size

    def _sharded(self, layer: Layer) -> tuple[int, int]:
        """Elements of this rank's shard of a layer's weight, and of its gathered block."""
        inputs, outputs, axis, other = layer
        rows, cols = Layout(axis, other).box((inputs, outputs), self.grid, self.coords).shape
        return self._part(rows, "z") * cols, rows * cols

    def _scattered(self, layer: Layer) -> Volume:
        own, whole = self._sharded(layer)
        return self._moved("z", "reduce dW", "reduce_scatter", whole - own, (self.grid.z - 1) * own)

    def _gathers(self, passes: Passes) -> list[Volume]:
        """A weight that is kept is gathered once for all passes between two steps. One that is not: for each pass, and
        the first one also at the end of an evaluation, for a next batch that does not come."""
        gathers, trained, evaluated = [], passes.trained.total(), passes.evaluated.total()
        ahead = passes.evaluated_last and self.overlap.oag and evaluated > passes.evaluations and len(self.layers) > 1
        for index, (layer, kept) in enumerate(zip(self.layers, self.kept())):
            again = 2 + (self.recompute and index < len(self.layers) - 1)
            number = again * trained + evaluated + (ahead and index == 0)
            if kept:
                number = passes.steps + passes.evaluated_last
            gathers.append(times(number, self._all_gather("z", "gather W", *self._sharded(layer))))
        return gathers

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

    def _buckets(self, first: bool) -> list[list[tuple[int, int]]]:
        """The shapes of the gradients that are summed over data together."""
        if self.grid.data == 1:
            return []
        members = list(zip(self._parameters(self.coords), self._parameters(FIRST)))
        in_order = not self.overlap.buckets or (first and self.accumulate == 1)
        if self.grid.z > 1 and not in_order:
            members.sort(key=lambda pair: pair[0][0])
        buckets, bucket, size = list[list[tuple[int, int]]](), list[tuple[int, int]](), 0
        for (_, rows, cols), (_, most_rows, most_cols) in members:
            bucket, size = [*bucket, (rows, cols)], size + most_rows * most_cols * itemsize(self.dtype)
            if size >= self.overlap.bucket_bytes:
                buckets, bucket, size = [*buckets, bucket], [], 0
        return buckets + [bucket] * bool(bucket)

    def _along_data(self, bucket: list[tuple[int, int]]) -> Volume:
        whole = sum(rows * cols for rows, cols in bucket)
        if not self.split_over_data:
            return self._all_reduce("data", "reduce data", whole)
        own = sum(self._part(rows, "data") * cols for rows, cols in bucket)
        return self._moved("data", "reduce data", "reduce_scatter", whole - own, (self.grid.data - 1) * own)

    def _all_reduce(self, axis: str, phase: str, elements: int, dtype: str | None = None) -> Volume:
        ranks, index = getattr(self.grid, axis), getattr(self.coords, axis)
        moved = all_reduce_moved(elements, dtype or self.dtype, ranks, index)
        return self._moved(axis, phase, "all_reduce", moved, moved, dtype)

    def _all_gather(self, axis: str, phase: str, own: int, whole: int) -> Volume:
        return self._moved(axis, phase, "all_gather", (getattr(self.grid, axis) - 1) * own, whole - own)

    def _moved(self, axis: str, phase: str, operation: str, sent: int, received: int,
               dtype: str | None = None) -> Volume:
        if getattr(self.grid, axis) == 1:
            return {}
        size = itemsize(dtype or self.dtype)
        return {Key(axis, phase, operation): Entry(1, size * sent, size * received)}

    def _everyone(self, phase: str, numbers: int) -> Volume:
        """An all-reduce of so many 8-byte numbers over all ranks."""
        if self.grid.size == 1:
            return {}
        moved = 8 * all_reduce_moved(numbers, "float64", self.grid.size, self.grid.rank(self.coords))
        return {Key("all", phase, "all_reduce"): Entry(1, moved, moved)}
