"""Small networks, their batches, and the grids that train them."""

from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from loops import given
from mpi4py import MPI
from mpi_runner import plugin
from samples import TESTED, bits_of, grids_of, integers, to_library, to_numpy

from pmm3d import DistMatrix, Grid, nn
from pmm3d.layout import Layout, batch_layout
from pmm3d.nn import optim

GRIDS = {
    1: [("1x1x1", 1)],
    2: [("ddp", 1), ("fsdp", 1), ("megatron", 1), ("1x2x1", 1)],
    4: [*[("ddp", 1), ("fsdp", 1)] * plugin.all_tests, ("hsdp", 2), ("megatron", 2), ("2x2x1", 1), ("1x2x2", 1)],
    6: [("hsdp", 3), ("megatron", 3), ("1x2x3", 1), ("3x2x1", 1)],
    8: [("hsdp", 2), ("2x2x2", 1), ("2x1x2", 2), ("1x2x2", 2), ("1x8x1", 1)],
}
"""(shape, data) of grids on which each axis, and most pairs of axes, have more than one rank somewhere. On 4 ranks one
axis alone is split only with --all."""
WIDEST = {1: ("1x1x1", 1), 2: ("1x2x1", 1), 4: ("2x1x1", 2), 6: ("3x1x2", 1), 8: ("2x2x2", 1)}
"""One grid of that many ranks."""
ALL_GRIDS = {count: grids_of(count, (1, 2, 4, 8)) for count in (1, 2, 4, 8)}
if not plugin.all_tests:
    ALL_GRIDS[4] = [((1, 4, 1), 1), ((2, 1, 2), 1), ((1, 2, 2), 1), ((1, 1, 2), 2), ((2, 1, 1), 2)]
"""Every grid of that many ranks. Of 4 without --all: the canonical ones, and two with a data axis."""
MANY_GRIDS = {count: grids[:: 1 if count < 8 else 3] for count, grids in ALL_GRIDS.items()}
"""Each third of those of 8 ranks: what all grids of 4 do is repeated there with longer axes."""
INPUT = batch_layout("y")


def on_each_grid(comm, body, grids=None, **options):
    """body(grid) on each of the grids of that many ranks, or on those named."""
    for shape, data in GRIDS[comm.size] if grids is None else grids:
        with given(grid=shape, data=data), Grid(comm, shape, data, device_transport="direct", **options) as grid:
            body(grid)


@contextmanager
def alone():
    """A grid of this rank only: what a network gives without parallelism."""
    with Grid(MPI.COMM_SELF, (1, 1, 1), device_transport="direct") as grid:
        yield grid


class Case(NamedTuple):
    """A network and what it learns: classes with cross_entropy, vectors with mse and mae."""

    sizes: tuple
    batch: int
    activation: str = "gelu"
    norm: bool = True
    loss: str = "cross_entropy"


CLASSES = Case((7, 13, 11, 5), 23)
EVEN = Case((8, 16, 16, 8), 16)
VECTORS = Case((7, 12, 9, 3), 19, "relu", False, "mse")


def network_of(grid, case: Case, dtype="float64", **options):
    options = {"seed": 5, "dtype": dtype, "norm": case.norm, **options}
    return nn.MLP(grid, case.sizes, getattr(nn, case.activation), **options)


def whole_numbers(net):
    """The same network with integers for weights, so that sums are exact."""
    for seed, parameter in enumerate(net.parameters()):
        parameter.assign(spread(net.grid, integers(parameter.shape, seed=seed, low=-2, high=2), parameter.layout))
    return net


def batch_of(case: Case, step: int, rows: int | None = None):
    """(x, y) of a step, the whole of them in numpy; labels are (rows, 1)."""
    random = np.random.default_rng([step, *case.sizes])
    rows = case.batch if rows is None else rows
    x = random.standard_normal((rows, case.sizes[0]))
    if case.loss == "cross_entropy":
        return x, random.integers(0, case.sizes[-1], (rows, 1))
    return x, random.standard_normal((rows, case.sizes[-1]))


def spread(grid, whole, layout=INPUT, library=TESTED, dtype=None) -> DistMatrix:
    """A DistMatrix of a whole numpy array; dtype: of floats. No message: the methods of DistMatrix ask all ranks."""
    r0, r1, c0, c1 = layout.summed.box(whole.shape, grid.shape, grid.coords)
    local = to_library(whole[r0:r1, c0:c1], library, dtype if whole.dtype.kind == "f" else None)
    return DistMatrix(grid, local, whole.shape, layout).keep_one()


def loss_of(net, case: Case, x, y, library=TESTED, dtype="float64"):
    """The loss of whole numpy arrays; targets come split by rows only."""
    grid = net.grid
    out = net(spread(grid, x, INPUT, library, dtype))
    return getattr(nn, case.loss)(out, spread(grid, y, batch_layout(None), library, dtype))


def adamw(parameters, **options):
    return optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, **options)


def train(grid, case: Case, steps: int, make=adamw, schedule=None, clip=None, rows=None, dtype="float64",
          library=TESTED, net=None, **options):
    """(losses, the network) after some steps, each on another batch. net: one of one's own."""
    net = net or network_of(grid, case, dtype, library=library, **options)
    optimizer, losses = make(net.parameters()), []
    schedule = schedule(optimizer) if schedule else None
    for step in range(steps):
        loss = loss_of(net, case, *batch_of(case, step, rows), library, dtype)
        loss.backward()
        losses.append(loss.item())
        if clip:
            losses.append(optimizer.clip(clip))
        optimizer.step()
        if schedule:
            schedule.step()
    return np.array(losses), net


def weights_of(net) -> dict[str, np.ndarray]:
    """Name -> the whole parameter, on every rank. One message for all of them: `gather` asks all ranks for each."""
    stored = {name: parameter.stored for name, parameter in net.named_parameters().items()}
    shards = {name: (value.box, to_numpy(value.local, value.library)) for name, value in stored.items()}
    wholes = {name: np.empty(value.shape, shards[name][1].dtype) for name, value in stored.items()}
    for parts in net.grid.comm.allgather(shards):
        for name, ((r0, r1, c0, c1), shard) in parts.items():
            wholes[name][r0:r1, c0:c1] = shard
    return wholes


def gradients_of(net) -> dict[str, np.ndarray]:
    return {name: np.asarray(parameter.library.to_numpy(parameter.grad.gather()))
            for name, parameter in net.named_parameters().items()}


def bits(arrays: dict) -> dict[str, bytes]:
    return {name: bits_of(array) for name, array in arrays.items()}


def largest_difference(one: dict, other: dict) -> float:
    assert one.keys() == other.keys()
    return max(np.abs(one[name] - other[name]).max(initial=0) for name in one)


def inner(x, weights: np.ndarray):
    """The tensor sum(x * weights), 1 x 1: a backward pass from it brings `weights` to x."""
    weights = spread(x.grid, weights, x.layout, x.library)
    products = x.library.to_numpy(x.local) * x.library.to_numpy(weights.local)
    mine = np.array([products.sum() / x.layout.replicas(x.grid.shape)])
    total = x.library.from_numpy(x.grid.everyone.all_reduce(mine, agreed=True).wait().reshape(1, 1), x.dtype)
    return x.made(total, (x,), lambda gradient: (weights.local * gradient[0, 0],), shape=(1, 1), layout=Layout())


def assert_replicas_agree(grid, values) -> None:
    """Ranks that hold the same block of a matrix hold the same bits. values: name -> DistMatrix."""
    mine = {name: (value.box, value.library.to_numpy(value.local).tobytes()) for name, value in values.items()}
    for name in mine:
        copies = {}
        for box, held in grid.comm.allgather(mine[name]):
            assert copies.setdefault(box, held) == held, name


class Tied(nn.Module):
    """x W, for a W that other layers have too."""

    def __init__(self, weight):
        self.grid, self.weight = weight.grid, weight

    def forward(self, x):
        return nn.linear(x, self.weight, None)


class Fork(nn.Module):
    """Two tensors from one."""

    def __init__(self, grid, features):
        self.grid, self.layer = grid, nn.Linear(grid, features, features, seed=5, dtype="float64")

    def forward(self, x):
        return self.layer(x), x


class Join(nn.Module):
    def __init__(self, grid, features):
        self.grid, self.layer = grid, nn.Linear(grid, features, features, seed=6, cols="x", dtype="float64")

    def forward(self, x, skipped):
        return nn.relayout(self.layer(x), skipped.layout) + skipped
