"""Small networks, their batches, and the grids that train them."""

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from inspect import Parameter
from typing import NamedTuple
from zlib import crc32

import numpy as np
from loops import given
from mpi4py import MPI
from mpi_runner import plugin
from samples import TESTED, bits_of, grids_of, integers, to_library, to_numpy

from pmm3d import DistMatrix, Grid, nn
from pmm3d.layout import Layout, batch_layout, order_of
from pmm3d.nn import optim, recorded_passes, recorded_steps

GRIDS = {
    1: [("1x1x1", 1)],
    2: [("ddp", 1), ("fsdp", 1), ("megatron", 1), ("1x2x1", 1)],
    4: [*[("ddp", 1), ("fsdp", 1)] * plugin.all_tests, ("hsdp", 2), ("megatron", 2), ("2x2x1", 1), ("1x2x2", 1)],
    6: [("hsdp", 3), ("megatron", 3), ("1x2x3", 1), ("3x2x1", 1)],
    8: [("hsdp", 2), ("2x2x2", 1), ("2x1x2", 2), ("1x2x2", 2), ("1x8x1", 1)],
}
"""Number of ranks -> (shape, data) of grids. Together they have several ranks along each axis, and along most pairs of
axes. On 4 ranks, ddp and fsdp are used only with --all."""
WIDEST = {1: ("1x1x1", 1), 2: ("1x2x1", 1), 4: ("2x1x1", 2), 6: ("3x1x2", 1), 8: ("2x2x2", 1)}
"""Number of ranks -> (shape, data) of the grid with the most axes of several ranks."""
ALL_GRIDS = {count: grids_of(count, (1, 2, 4, 8)) for count in (1, 2, 4, 8)}
if not plugin.all_tests:
    ALL_GRIDS[4] = [((1, 4, 1), 1), ((2, 1, 2), 1), ((1, 2, 2), 1), ((1, 1, 2), 2), ((2, 1, 1), 2)]
"""Number of ranks -> all grids. On 4 ranks without --all: the canonical ones, and two with a data axis."""
MANY_GRIDS = {count: grids[:: 1 if count < 8 else 3] for count, grids in ALL_GRIDS.items()}
if not plugin.all_tests:
    MANY_GRIDS[4] = ALL_GRIDS[4][::2]
"""The same, but on 8 ranks every third grid, because these only repeat the grids of 4 ranks with longer axes. On 4
ranks without --all: three grids, which have each axis."""
INPUT = batch_layout("y")


def on_each_grid(comm, body, grids=None, most=None, **options):
    """Call body(grid) for each (shape, data) in `grids`, by default in GRIDS; for the first `most` of them, if given.

    On 4 ranks without --all, the default is half of the grids, of which one has a data axis. The name of the test
    chooses the half, so each grid is used by half of the tests.
    """
    if grids is None:
        grids = GRIDS[comm.size]
        if comm.size == 4 and not plugin.all_tests:
            grids = grids[crc32(body.__qualname__.encode()) % 2 :: 2]
    assert grids, "no grid"
    for shape, data in grids[:most]:
        with given(grid=shape, data=data), Grid(comm, shape, data, device_transport="direct", **options) as grid:
            body(grid)


def over_grids(grids=lambda ranks: None, most=None, **options) -> Callable:
    """Decorator: `on_each_grid` with the test as the body. The argument `grid` of the test is the open grid.

    For networks, which need (shape, data), and a choice of grids for each test. Tests of products and of collectives
    use `each_grid`: all process grids of the number of ranks, without data.

    grids     number of ranks -> list of (shape, data): a dict or a function; default: as `on_each_grid`
    most      number of these grids that are used; default: all
    options   of each Grid
    """
    chosen = grids if callable(grids) else grids.__getitem__

    def decorate(test):
        wanted = inspect.signature(test).parameters

        @functools.wraps(test)
        def looped(comm, **fixtures):
            if "comm" in wanted:
                fixtures["comm"] = comm
            body = functools.wraps(test)(lambda grid: test(grid=grid, **fixtures))
            on_each_grid(comm, body, chosen(comm.size), most, **options)

        names = dict.fromkeys(["comm", *(name for name in wanted if name != "grid")])
        looped.__signature__ = inspect.Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names])
        return looped

    return decorate


def on_grid(shape, data=1, **options) -> Callable:
    """Decorator: the argument `grid` of the test is this grid."""
    return over_grids(lambda ranks: [(shape, data)], **options)


@contextmanager
def alone():
    """As a context: a grid of this rank only, for the results of a network without parallelism."""
    with Grid(MPI.COMM_SELF, (1, 1, 1), device_transport="direct") as grid:
        yield grid


@contextmanager
def ordinary():
    """As a context: no step and no pass is recorded, and no rank votes on it."""
    before = recorded_steps.ORDINARY, recorded_passes.VOTES
    recorded_steps.ORDINARY, recorded_passes.VOTES = 10**9, 0
    try:
        yield
    finally:
        recorded_steps.ORDINARY, recorded_passes.VOTES = before


class Case(NamedTuple):
    """A network and its targets: classes for cross_entropy, vectors for mse and mae."""

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
    """Set the weights of a network to integers, so that sums are exact. Return the network."""
    for seed, parameter in enumerate(net.parameters()):
        parameter.assign(spread(net.grid, integers(parameter.shape, seed=seed, low=-2, high=2), parameter.layout))
    return net


def batch_of(case: Case, step: int, rows: int | None = None):
    """(x, y) of a step: numpy arrays of the whole batch. Labels have the shape (rows, 1)."""
    random = np.random.default_rng([step, *case.sizes])
    rows = case.batch if rows is None else rows
    x = random.standard_normal((rows, case.sizes[0]))
    if case.loss == "cross_entropy":
        return x, random.integers(0, case.sizes[-1], (rows, 1))
    return x, random.standard_normal((rows, case.sizes[-1]))


def spread(grid, whole, layout=INPUT, library=TESTED, dtype=None) -> DistMatrix:
    """A DistMatrix of a whole numpy array. dtype: for floats. It is not collective, except in a layout with an order of
    rows."""
    if order_of(layout.units[0]) is not None:
        array = to_library(whole, library, dtype if whole.dtype.kind == "f" else None)
        return DistMatrix.from_global(grid, array, layout=layout)
    r0, r1, c0, c1 = layout.summed.box(whole.shape, grid.shape, grid.coords)
    local = to_library(whole[r0:r1, c0:c1], library, dtype if whole.dtype.kind == "f" else None)
    return DistMatrix(grid, local, whole.shape, layout)._zero_unless_first()


def loss_of(net, case: Case, x, y, library=TESTED, dtype="float64"):
    """The loss of a batch of whole numpy arrays. Only rows of the targets are split."""
    grid = net.grid
    out = net(spread(grid, x, INPUT, library, dtype))
    return getattr(nn, case.loss)(out, spread(grid, y, batch_layout(None), library, dtype))


def adamw(parameters, **options):
    return optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, **options)


def train(
    grid,
    case: Case,
    steps: int,
    make=adamw,
    schedule=None,
    clip=None,
    rows=None,
    dtype="float64",
    library=TESTED,
    net=None,
    **options,
):
    """(losses, network) after some steps, each with a different batch. net: default a new network of the case."""
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
    """Name -> the whole parameter, on every rank. One all-gather for all parameters, because `gather` takes one
    each."""
    stored = {name: parameter._stored for name, parameter in net.named_parameters().items()}
    shards = {name: (value.box, to_numpy(value.local, value.library)) for name, value in stored.items()}
    wholes = {name: np.empty(value.shape, shards[name][1].dtype) for name, value in stored.items()}
    for parts in net.grid.comm.allgather(shards):
        for name, ((r0, r1, c0, c1), shard) in parts.items():
            wholes[name][r0:r1, c0:c1] = shard
    return wholes


def gradients_of(net) -> dict[str, np.ndarray]:
    return {
        name: np.asarray(parameter.library.to_numpy(parameter.grad.gather()))
        for name, parameter in net.named_parameters().items()
    }


def bits(arrays: dict) -> dict[str, bytes]:
    return {name: bits_of(array) for name, array in arrays.items()}


def alike(one: Sequence, other: Sequence) -> bool:
    """Whether arrays have equal bits. On torch arrays, whether they agree to rounding: the products of torch on the CPU
    have other last bits at other addresses (docs/experts.md)."""
    if TESTED == "numpy":
        return [*map(bits_of, one)] == [*map(bits_of, other)]
    pairs = [(to_numpy(a), to_numpy(b)) for a, b in zip(one, other, strict=True)]
    return all(np.allclose(a, b, rtol=1e-9 if a.dtype == "float64" else 1e-4, atol=1e-5) for a, b in pairs)


def largest_difference(one: dict, other: dict) -> float:
    assert one.keys() == other.keys()
    return max(np.abs(one[name] - other[name]).max(initial=0) for name in one)


def inner(x, weights: np.ndarray):
    """The 1 x 1 tensor sum(x * weights). Its gradient by x is `weights`."""
    weights = spread(x.grid, weights, x.layout, x.library)
    products = x.library.to_numpy(x.local) * x.library.to_numpy(weights.local)
    mine = np.array([products.sum() / x.layout.replicas(x.grid.shape)])
    total = x.library.from_numpy(x.grid.everyone.all_reduce(mine, agreed=True).wait().reshape(1, 1), x.dtype)
    return x.from_op(total, (x,), lambda gradient: (weights.local * gradient[0, 0],), shape=(1, 1), layout=Layout())


def failing(x):
    """The tensor x, whose backward rule raises ZeroDivisionError."""

    def rule(gradient):
        raise ZeroDivisionError

    return x.from_op(x.shard, (x,), rule)


def assert_replicas_agree(grid, values) -> None:
    """Assert that ranks with the same shard of a matrix have the same bits. values: name -> DistMatrix."""
    mine = {name: (value.box, value.library.to_numpy(value.local).tobytes()) for name, value in values.items()}
    for name in mine:
        copies = {}
        for box, held in grid.comm.allgather(mine[name]):
            assert copies.setdefault(box, held) == held, name


class Tied(nn.Module):
    """Layer x W with a weight that other layers share."""

    def __init__(self, weight):
        self.grid, self.weight = weight.grid, weight

    def forward(self, x):
        return nn.linear(x, self.weight, None)


class Fork(nn.Module):
    """Layer with one input and two outputs."""

    def __init__(self, grid, features):
        self.grid, self.layer = grid, nn.Linear(grid, features, features, seed=5, dtype="float64")

    def forward(self, x):
        return self.layer(x), x


class Join(nn.Module):
    def __init__(self, grid, features):
        self.grid, self.layer = grid, nn.Linear(grid, features, features, seed=6, cols="x", dtype="float64")

    def forward(self, x, skipped):
        return nn.relayout(self.layer(x), skipped.layout) + skipped
