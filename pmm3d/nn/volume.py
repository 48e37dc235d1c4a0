"""How many bytes training moves, by axis, phase and operation: plain arithmetic for any rank of any grid, no MPI.

The keys are those of the ledger, so that both can be compared number by number.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

from ..comm.ledger import Entry, Key
from ..layout import FIRST, Coords, GridShape, Layout, batch_layout, itemsize, part_sizes
from ..model.volumes import all_reduce_counts
from .layers import MLP, OTHER, LayerNorm, Linear, Recompute
from .parallel import LEAST_STRIP_BYTES, STRIPS_ACROSS_HOSTS, Overlap
from .tensor import Tape

Volume = dict[Key, Entry]
WISH_BYTES, NORM_BYTES = 16, 8
"""Of the all-reduces over all ranks that tell of signals and of the gradient's norm."""


def total(*volumes: Volume) -> Volume:
    """Their sum, key by key."""
    found: Volume = {}
    for volume in volumes:
        for key, entry in volume.items():
            found.setdefault(key, Entry()).__iadd__(entry)
    return found


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

    trained: Counter = field(default_factory=Counter)
    evaluated: Counter = field(default_factory=Counter)
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
    def of(cls, network, optimizer, loss: str, **others) -> MLPVolume | None:
        """Of a network on its grid, after a step of it; None if it is no `MLP`, which alone is modelled."""
        if type(network) is not MLP:
            return None
        parallel = Tape.of(network.grid).parallel
        overlap, budget = parallel.overlap, parallel.overlap.keep_bytes
        modules, grid = [module for _, module in network.named_modules()], network.grid
        layers = [module for module in modules if isinstance(module, Linear)]
        has = lambda kind: any(isinstance(module, kind) for module in modules)
        sizes = (layers[0].weight.shape[0], *(layer.weight.shape[1] for layer in layers))
        return cls(sizes, grid.shape, grid.coords, has(LayerNorm), layers[0].bias is not None, has(Recompute),
                   layers[0].weight.dtype, loss, optimizer.shard_over_data, overlap=overlap, hosts=grid.hosts,
                   keep_bytes=(parallel.weights.budget or 0) if budget is None else budget, **others)

    @cached_property
    def layers(self) -> list[tuple[int, int, str, str]]:
        """(inputs, outputs, axis that splits the inputs, axis that splits the outputs) of each."""
        found, cols = [], "y"
        for inputs, outputs in zip(self.sizes, self.sizes[1:]):
            found.append((inputs, outputs, cols, OTHER[cols]))
            cols = OTHER[cols]
        return found

    def training(self, passes: Passes) -> Volume:
        """Of everything that the passes say, as the ledger counts it."""
        whole = [times(count, self.batch(rows)) for rows, count in passes.trained.items()]
        whole += [times(count, self.evaluated_batch(rows)) for rows, count in passes.evaluated.items()]
        whole += [times(passes.evaluations, self.evaluation()), times(passes.asked, self._everyone("", WISH_BYTES))]
        if passes.steps:
            whole += [self.step(first=True), times(passes.steps - 1, self.step())]
        return total(*whole, *self._gathers(passes))

    def batch(self, rows: int) -> Volume:
        """Forward and backward pass of a batch of so many rows, without the gathers of weights."""
        hidden, first = self.layers[:-1], self.layers[1:]
        parts = [self._forward(layer, rows) for layer in self.layers]
        parts += [self._norm(layer, rows, backward=False) for layer in hidden]
        if self.recompute:
            parts += [self._forward(layer, rows) for layer in hidden]
            parts += [self._norm(layer, rows, backward=False) for layer in hidden]
        parts += [self._norm(layer, rows, backward=True) for layer in hidden]
        parts += [self._reduced("reduce dI", rows, inputs, axis, other) for inputs, _, axis, other in first]
        return total(*parts, *map(self._scattered, self.layers), self._loss(rows))

    def evaluated_batch(self, rows: int) -> Volume:
        parts = [self._forward(layer, rows) for layer in self.layers]
        parts += [self._norm(layer, rows, backward=False) for layer in self.layers[:-1]]
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
        vectors = [size for kind, size, _ in self._parameters() if kind == "vector"]
        parts = [self._all_reduce("z", "reduce vectors", sum(vectors))] if vectors else []
        parts += [self._along_data(bucket) for bucket in self._buckets(first)]
        if self.split_over_data and self.grid.data > 1:
            parts += [self._gathered_again(rows, cols) for _, rows, cols in self._parameters(split=True)]
        if self.clip:
            parts.append(self._everyone("optimizer", NORM_BYTES))
        return total(*parts)

    def _forward(self, layer, rows: int) -> Volume:
        _, outputs, axis, other = layer
        return self._reduced("reduce O", rows, outputs, other, axis)

    def _reduced(self, phase: str, rows: int, columns: int, split: str, axis: str) -> Volume:
        """The all-reduces over an axis of a block whose columns another one splits, in its strips of rows."""
        if getattr(self.grid, axis) == 1:
            return {}
        m, n = batch_layout(split).box((rows, columns), self.grid, self.coords).shape
        strips = self.overlap.strips or (1 if self.hosts == 1 else STRIPS_ACROSS_HOSTS)
        strips = max(1, min(strips, m * n * itemsize(self.dtype) // LEAST_STRIP_BYTES))
        return total(*(self._all_reduce(axis, phase, part * n) for part in part_sizes(m, strips)))

    def _rows(self, rows: int) -> int:
        return batch_layout(None).box((rows, 1), self.grid, self.coords).size

    def _part(self, size: int, axis: str) -> int:
        return part_sizes(size, getattr(self.grid, axis))[getattr(self.coords, axis)]

    def _norm(self, layer, rows: int, backward: bool) -> Volume:
        if not self.norm:
            return {}
        *_, axis = layer
        numbers = 2 * self._rows(rows)
        if backward:
            return self._all_reduce(axis, "layer norm", numbers)
        return self._all_gather(axis, "layer norm", numbers, numbers * getattr(self.grid, axis))

    def _loss(self, rows: int) -> Volume:
        columns = () if self.loss == "cross_entropy" else (self.layers[-1][3],)
        means = [self._all_reduce(axis, "loss", 1) for axis in ("data", "z", *columns)]
        return total(*means, self._label_exchange(rows) if self.loss == "cross_entropy" else {})

    def _label_exchange(self, rows: int) -> Volume:
        """What `loss.cross_entropy`, and `loss.accuracy` again, exchange along the axis of the classes."""
        axis, numbers = self.layers[-1][3], 3 * self._rows(rows)
        return self._all_gather(axis, "loss", numbers, numbers * getattr(self.grid, axis))

    def _block(self, layer) -> tuple[list[int], int]:
        """(rows of each shard, columns) of a layer's gathered weight."""
        inputs, outputs, axis, other = layer
        rows, cols = Layout(axis, other).box((inputs, outputs), self.grid, self.coords).shape
        return part_sizes(rows, self.grid.z), cols

    def _scattered(self, layer) -> Volume:
        counts, cols = self._block(layer)
        own = counts[self.coords.z] * cols
        return self._moved("z", "reduce dW", "reduce_scatter", sum(counts) * cols - own, (self.grid.z - 1) * own)

    def _gathers(self, passes: Passes) -> list[Volume]:
        """A weight that is kept is gathered once for all passes between two steps. One that is not: for each pass, and
        the first one also at the end of an evaluation, for a next batch that does not come."""
        if self.grid.z == 1:
            return []
        found, trained, evaluated = [], passes.trained.total(), passes.evaluated.total()
        ahead = passes.evaluated_last and self.overlap.oag and evaluated > passes.evaluations and len(self.layers) > 1
        for index, (layer, kept) in enumerate(zip(self.layers, self.kept())):
            counts, cols = self._block(layer)
            again = 2 + (self.recompute and index < len(self.layers) - 1)
            number = again * trained + evaluated + (ahead and index == 0)
            if kept:
                number = passes.steps + passes.evaluated_last
            own, whole = counts[self.coords.z] * cols, sum(counts) * cols
            found.append(times(number, self._all_gather("z", "gather W", own, whole)))
        return found

    def kept(self) -> list[bool]:
        """Which gathered weights stay: decided by sizes of the first rank, in the order of their use."""
        if self.overlap.reshard_after_forward is not None:
            return [not self.overlap.reshard_after_forward] * len(self.layers)
        kept, taken = [], 0
        for inputs, outputs, axis, other in self.layers:
            size = Layout(axis, other).box((inputs, outputs), self.grid, FIRST).size * itemsize(self.dtype)
            kept.append(taken + size <= self.keep_bytes)
            taken += size * kept[-1]
        return kept

    def _parameters(self, split: bool = False, coords: Coords | None = None) -> list[tuple]:
        """("matrix" or "vector", elements here, their shape), in the order in which a backward pass uses them; with
        split, ("matrix", rows, columns) as the data axis splits them: vectors as columns of one."""
        here, found = coords or self.coords, []
        for index, (inputs, outputs, axis, other) in reversed(list(enumerate(self.layers))):
            wide = Layout((), other).box((1, outputs), self.grid, here).size
            rows, cols = Layout((axis, "z"), other).box((inputs, outputs), self.grid, here).shape
            vectors = 2 * (self.norm and index < len(self.layers) - 1)
            shapes = [(wide, 1)] * vectors + [(rows, cols)] + [(wide, 1)] * self.bias
            kinds = ["vector"] * vectors + ["matrix"] + ["vector"] * self.bias
            if split:
                found += [(kind, *shape) for kind, shape in zip(kinds, shapes)]
            else:
                found += [(kind, shape[0] * shape[1], shape) for kind, shape in zip(kinds, shapes)]
        return found

    def _buckets(self, first: bool) -> list[list[tuple[int, int]]]:
        """The shapes of the gradients that are summed over data together."""
        if self.grid.data == 1:
            return []
        members = list(zip(self._parameters(), self._parameters(coords=FIRST)))
        in_order = not self.overlap.buckets or (first and self.accumulate == 1)
        if self.grid.z > 1 and not in_order:
            members.sort(key=lambda pair: pair[0][0] == "vector")
        buckets, bucket, size = [], [], 0
        for (_, _, shape), (_, stored, _) in members:
            bucket, size = [*bucket, shape], size + stored * itemsize(self.dtype)
            if size >= self.overlap.bucket_bytes:
                buckets, bucket, size = [*buckets, bucket], [], 0
        return buckets + [bucket] * bool(bucket)

    def _along_data(self, bucket) -> Volume:
        if not self.split_over_data:
            return self._all_reduce("data", "reduce data", sum(rows * cols for rows, cols in bucket))
        own = sum(self._part(rows, "data") * cols for rows, cols in bucket)
        whole = sum(rows * cols for rows, cols in bucket)
        return self._moved("data", "reduce data", "reduce_scatter", whole - own, (self.grid.data - 1) * own)

    def _gathered_again(self, rows: int, cols: int) -> Volume:
        return self._all_gather("data", "optimizer", self._part(rows, "data") * cols, rows * cols)

    def _all_reduce(self, axis: str, phase: str, elements: int, dtype: str | None = None) -> Volume:
        ranks, index = getattr(self.grid, axis), getattr(self.coords, axis)
        moved = _all_reduced(elements, dtype or self.dtype, ranks, index)
        return self._moved(axis, phase, "all_reduce", moved, moved, dtype)

    def _all_gather(self, axis: str, phase: str, own: int, whole: int) -> Volume:
        return self._moved(axis, phase, "all_gather", (getattr(self.grid, axis) - 1) * own, whole - own)

    def _moved(self, axis: str, phase: str, operation: str, sent: int, received: int, dtype=None) -> Volume:
        if getattr(self.grid, axis) == 1:
            return {}
        size = itemsize(dtype or self.dtype)
        return {Key(axis, phase, operation): Entry(1, size * sent, size * received)}

    def _everyone(self, phase: str, nbytes: int) -> Volume:
        ranks = self.grid.size
        if ranks == 1:
            return {}
        moved = 8 * _all_reduced(nbytes // 8, "float64", ranks, self.grid.rank(self.coords))
        return {Key("all", phase, "all_reduce"): Entry(1, moved, moved)}


def _all_reduced(elements: int, dtype: str, ranks: int, index: int) -> int:
    """Elements that a rank sends, and receives, in an all-reduce."""
    counts = all_reduce_counts(elements, dtype, ranks)
    if counts[-1] == elements:
        return (ranks - 1) * elements
    return (ranks - 1) * counts[index] + elements - counts[index]
