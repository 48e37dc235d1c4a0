"""About what a training step takes on a grid, by formulas: for thousands of grids, too many to try them one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import ceil, prod
from typing import NamedTuple

from ...comm import Grid
from ...layout import GridShape, itemsize
from ...model.machines import Group, Machine, groups_of
from ..overlap import Overlap
from ..parameter import Parameter
from .dry_step import DrySteps, Step

OF_WEIGHTS = ("norm", "sgd", "adam", "adamw", "muon")
"""Passes over gradients, weights and states; all others are over activations."""
AGREED_BYTES = 64
"""What every rank says at the end of a batch."""
LOCAL_ACTIONS = 3
"""Of a product on one rank, its passes over matrices included."""


class Weight(NamedTuple):
    """A matrix (inputs, outputs) that is multiplied in each batch, by the axes that its rows and columns are split
    over besides z; `first`: nothing before it needs the gradient of its input."""

    inputs: int
    outputs: int
    over_rows: tuple[str, ...]
    over_columns: tuple[str, ...]
    dtype: str
    first: bool

    @classmethod
    def of(cls, parameter: Parameter, first: bool) -> Weight:
        rows, columns = (tuple(axis for axis in axes if axis != "z")
                         for axes in (parameter.layout.rows, parameter.layout.cols))
        return cls(*parameter.shape, rows, columns, parameter.dtype, first)

    @property
    def sides(self) -> tuple[int, int]:
        """The smaller and the larger of inputs and outputs."""
        return min(self.inputs, self.outputs), max(self.inputs, self.outputs)

    def local(self, shape: GridShape, rows: int) -> tuple[int, int, int]:
        """m, n, k of the product of a rank that has so many rows of the batch."""
        return (rows, ceil(self.outputs / shape.along(self.over_columns)),
                ceil(self.inputs / shape.along(self.over_rows)))


class Estimate(NamedTuple):
    """terms    seconds of a step, as those of a `Candidate`;   memory   bytes by kind, as those of a `Step`"""

    terms: dict[str, float]
    memory: dict[str, int]

    @property
    def seconds(self) -> float:
        return sum(self.terms.values())

    @property
    def held(self) -> int:
        return sum(self.memory.values())


@dataclass
class _Spent:
    """In a batch so far: seconds of GEMMs, of them of the backward pass, seconds waited by axis."""

    gemm: float = 0.0
    backward: float = 0.0
    waited: dict[str, float] = field(default_factory=dict)


class Estimates:
    """Of a configuration's steps on a machine.

    steps       of one batch;   reference   that on one rank;   batches   that make a step
    """

    def __init__(self, steps: DrySteps, reference: Step, machine: Machine, batches: int = 1):
        self.batches = batches
        self.config, self.machine, self.reference = steps.config, machine, reference
        self.samples, self.rows, self.keep = steps.samples, steps.rows, steps.keep
        self.overlap = Overlap(**self.config.overlap.model_dump())
        with Grid.dry((1, 1, 1)) as alone:
            parameters = steps.network(alone).parameters()
            matrices = [parameter for parameter in parameters if not parameter.is_vector]
            self.weights = Counter(Weight.of(each, each is matrices[0]) for each in matrices)
            self.size = sum(prod(each.shape) for each in parameters)
        self.wide = sum(weight.outputs * count for weight, count in self.weights.items())
        self.passes = Counter[tuple[str, int]]()
        for action in reference.actions:
            if action.what == "pass":
                self.passes[action.operation, action.nbytes] += 1
        self.calls = len(reference.actions)
        self.biases = any(action.what == "gemm" and action.m == 1 for action in reference.actions)

    def of(self, shape: GridShape, ranks_per_node: int, run: int | None = None) -> Estimate:
        return Estimate(self.terms(shape, groups_of(shape, ranks_per_node, run)), self.memory(shape))

    def _rows(self, shape: GridShape) -> int:
        """Of a batch, on the rank with the most."""
        return ceil(self.rows / (shape.z * shape.data))

    def terms(self, shape: GridShape, groups: dict[str, Group]) -> dict[str, float]:
        spent, rows, kept = _Spent(), self._rows(shape), self._kept(shape)
        for weight, count in self.weights.items():
            self._add(spent, weight, count, shape, groups, rows, kept)
        agreed = self.machine.collective_in_step("all_reduce", groups["all"], AGREED_BYTES)
        overhead = self.calls * self.machine.overhead_in_step
        batch = {"gemm": spent.gemm, "passes": self._passes(shape, rows, of_weights=False), "overhead": overhead,
                 **spent.waited, "all": agreed}
        step = {name: self.batches * seconds for name, seconds in batch.items()}
        step["passes"] += self._passes(shape, rows, of_weights=True)
        if shape.data > 1:
            step["data"] = step.get("data", 0.0) + self._data(shape, groups, spent.backward)
        if self.config.optimizer.kind == "muon":
            for name, seconds in self._orthogonal(shape, groups).items():
                step[name] = step.get(name, 0.0) + seconds
        return step

    def _orthogonal(self, shape: GridShape, groups: dict[str, Group]) -> dict[str, float]:
        """Of the products of Muon's Newton-Schulz steps, which all ranks along data do."""
        spent = dict.fromkeys(("gemm", "overhead", "x", "y", "z"), 0.0)
        steps, machine = self.config.optimizer.ns_steps, self.machine
        actions = LOCAL_ACTIONS + 2 * sum(getattr(shape, axis) > 1 for axis in "xyz")
        for (m, n, k, dtype), times in self._products().items():
            rows, cols, depth = _local(shape, m, n, k)
            size = itemsize(dtype)
            spent["gemm"] += steps * times * machine.gemm_seconds(rows, cols, depth, dtype, "nn")
            spent["overhead"] += steps * times * actions * machine.overhead_in_step
            for axis, operation, nbytes in (("x", "all_gather", rows * depth), ("z", "all_gather", depth * cols),
                                            ("y", "reduce_scatter", rows * cols)):
                spent[axis] += steps * times * self._collective(operation, groups[axis], size * nbytes)[0]
        return {name: seconds for name, seconds in spent.items() if seconds}

    def _orthogonal_work(self, shape: GridShape) -> float:
        """Bytes of matrices in work memory, and of the blocks that the largest product takes."""
        most = 0.0
        for m, n, k, dtype in self._products():
            rows, cols, depth = _local(shape, m, n, k)
            blocks = rows * depth * (shape.x > 1) + depth * cols * (shape.z > 1) + 2 * rows * cols * (shape.y > 1)
            most = max(most, itemsize(dtype) * ((2 * m * k + 6 * k * n) * self._share(shape) + blocks))
        return most

    def _products(self) -> Counter[tuple[int, int, int, str]]:
        """m, n, k and type of the products of a Newton-Schulz step of all weights."""
        found = Counter[tuple[int, int, int, str]]()
        for weight, count in self.weights.items():
            small, large = weight.sides
            dtype = "float64" if weight.dtype == "float64" else "float32"
            for m, n, k in ((small, small, large), (small, small, small), (large, small, small)):
                found[m, n, k, dtype] += count
        return found

    def _add(self, spent: _Spent, weight: Weight, count: int, shape: GridShape, groups: dict[str, Group], rows: int,
             kept: bool) -> None:
        """The products of a weight, and what is sent for them beside products and Python."""
        m, n, k = weight.local(shape, rows)
        size, machine, overlap = itemsize(weight.dtype), self.machine, self.overlap
        across = shape.along(weight.over_columns) > 1 and not weight.first
        forward = machine.gemm_seconds(m, n, k, weight.dtype, "nn")
        gradient = machine.gemm_seconds(k, n, m, weight.dtype, "tn")
        inputs = 0.0 if weight.first else machine.gemm_seconds(m, k, n, weight.dtype, "nt")
        sums = machine.gemm_seconds(1, n, m, weight.dtype, "nn") if self.biases else 0.0
        spent.gemm += count * (forward + gradient + inputs + sums)
        spent.backward += count * (gradient + inputs)
        beside = 2 * machine.overhead_in_step
        for operation, axes, nbytes, under in (
                ("all_gather", ("z",), size * k * n, (forward + beside) * overlap.oag),
                ("all_gather", ("z",), 0 if kept else size * k * n, (inputs + beside) * overlap.oag),
                ("reduce_scatter", ("z",), size * k * n, (inputs and inputs + sums + beside) * overlap.ors),
                ("all_reduce", weight.over_rows, 2 * size * m * n, 0.0),
                ("all_reduce", weight.over_columns, 2 * size * m * k * across, (gradient + beside) * overlap.oar)):
            for axis in axes:
                seconds, hidden = self._collective(operation, groups[axis], nbytes)
                waited = count * (seconds - hidden + max(0.0, hidden - under))
                if seconds:
                    spent.waited[axis] = spent.waited.get(axis, 0.0) + waited

    def _collective(self, operation: str, group: Group, nbytes: int) -> tuple[float, float]:
        """(seconds of a collective on an array of so many bytes, those of them that pass under computation)."""
        if operation == "all_gather" and self.overlap.shared_weights:
            nbytes //= group.inside
            group = group._replace(size=group.nodes, inside=1, sharers=group.sharers * group.inside)
        received = nbytes * (group.size - 1) // group.size
        seconds = self.machine.collective_in_step(operation, group, received) if received else 0.0
        return seconds, seconds * self.machine.hidden_share(group)

    def _data(self, shape: GridShape, groups: dict[str, Group], backward: float) -> float:
        """Of the sums of gradients over data, once a step, beside a backward pass of so many seconds: bucket by bucket,
        of which the last is waited for."""
        nbytes = self.reference.memory["gradients"] // (shape.x * shape.y * shape.z)
        buckets = max(1, ceil(nbytes / self.overlap.bucket_bytes)) if self.overlap.buckets else len(self.weights)
        seconds, hidden = self._collective("all_reduce", groups["data"], 2 * nbytes // buckets)
        under = backward * (buckets - 1) / buckets * self.overlap.buckets
        return buckets * (seconds - hidden) + max(hidden, buckets * hidden - under)

    def _passes(self, shape: GridShape, rows: int, of_weights: bool) -> float:
        share = self._share(shape) if of_weights else self._active(shape, rows)
        if of_weights and self.config.optimizer.shard_over_data:
            share /= shape.data
        return sum((count * self.machine.pass_seconds(name, int(nbytes * share))
                    for (name, nbytes), count in self.passes.items() if (name in OF_WEIGHTS) == of_weights), 0.0)

    @staticmethod
    def _share(shape: GridShape) -> float:
        """Of all weights, on a rank."""
        return 1 / (shape.x * shape.y * shape.z)

    def _active(self, shape: GridShape, rows: int) -> float:
        """Of all activations, on a rank that has so many rows."""
        own = sum(count * rows * weight.local(shape, rows)[1] for weight, count in self.weights.items())
        return own / (self.rows * self.wide)

    def _kept(self, shape: GridShape) -> bool:
        """Whether gathered weights are kept after the forward pass."""
        if self.overlap.shared_weights:
            return True
        if self.overlap.reshard_after_forward is not None or shape.z == 1:
            return not self.overlap.reshard_after_forward or shape.z == 1
        return sum(self._gathered(shape)) <= self.keep

    def _gathered(self, shape: GridShape) -> list[int]:
        found = list[int]()
        for weight, count in self.weights.items():
            _, n, k = weight.local(shape, 1)
            found += [itemsize(weight.dtype) * n * k] * count
        return found

    def memory(self, shape: GridShape) -> dict[str, int]:
        """Bytes by kind of the fullest rank."""
        known, share, rows = self.reference.memory, self._share(shape), self._rows(shape)
        state = share / shape.data if self.config.optimizer.shard_over_data else share
        work = known["work"] * self._active(shape, rows)
        if shape.z > 1:
            gathered = sorted(self._gathered(shape))
            kept = sum(gathered) if self._kept(shape) else sum(gathered[-2:])
            if self.overlap.shared_weights:
                kept //= groups_of(shape, self.machine.ranks_per_node)["z"].inside
            work += kept + 2 * sum(gathered[-2:])
        work += 2 * known["gradients"] * share if shape.data > 1 else 0
        batch = rows * itemsize(self.config.network.dtype) * (
            ceil(self.samples.features / shape.y) + (2 if self.samples.classes else self.samples.outputs))
        if self.config.optimizer.kind == "muon":
            work = max(work, self._orthogonal_work(shape))
        found: dict[str, float] = {"weights": known["weights"] * share, "gradients": known["gradients"] * share,
                                   "state": known["state"] * state, "work": work,
                                   "batches": (self.config.data.prefetch + 2) * batch}
        return {kind: ceil(nbytes) for kind, nbytes in found.items()}


def _local(shape: GridShape, m: int, n: int, k: int) -> tuple[int, int, int]:
    """Rows and columns of C, and of k, that a rank multiplies."""
    return ceil(m / shape.z), ceil(n / shape.x), ceil(k / shape.y)
