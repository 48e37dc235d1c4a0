"""Lion, Adafactor and SM3 on every grid: the steps of the references, checkpoints, 16-bit weights, plans."""

from functools import partial
from itertools import product

import numpy as np
import pytest
from loops import given, looped
from networks import (
    CLASSES,
    GRIDS,
    INPUT,
    alone,
    batch_of,
    largest_difference,
    loss_of,
    network_of,
    on_grid,
    over_grids,
    weights_of,
)
from samples import TESTED, to_library, to_numpy
from test_nn_torch import torch_network
from test_recorded_steps import FIRST, STEPS, WITH_CLASSES, compared
from torch_reference import by_rank_0, torch_loss

from pmm3d import DistMatrix, DTypeError, Grid, Layout, Pmm3dError, nn
from pmm3d.io import Checkpoints
from pmm3d.layout import GridShape
from pmm3d.nn import Precision, optim
from pmm3d.nn.dry import dry_grid
from pmm3d.nn.training import TrainState
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.dry_step import DrySteps

pytestmark = pytest.mark.deadline(240)


def lion(state, w, g, lr, betas=(0.9, 0.99), weight_decay=0.0):
    """Algorithm 2 of arXiv 2302.06675."""
    mean = state.setdefault("momentum", np.zeros_like(w))
    change = np.sign(betas[0] * mean + (1 - betas[0]) * g)
    w -= lr * (change + weight_decay * w)
    mean[...] = betas[1] * mean + (1 - betas[1]) * g


def sm3(state, w, g, lr, momentum=0.0, weight_decay=0.0):
    """SM3-II of arXiv 1901.11150, whose sets are rows and columns; of a vector, single elements."""
    covers = [(i,) for i in range(w.ndim)]
    others = [tuple(j for j in range(w.ndim) if j != i) for i in range(w.ndim)]
    before = [state.get(cover, np.zeros([n if i in cover else 1 for i, n in enumerate(w.shape)])) for cover in covers]
    total = np.minimum.reduce(np.broadcast_arrays(*before)) + g**2
    state.update((cover, total.max(axis=other, keepdims=True)) for cover, other in zip(covers, others))
    scaled = np.divide(g, np.sqrt(total), out=np.zeros_like(g), where=total > 0)
    state["momentum"] = momentum * state.get("momentum", 0) + (1 - momentum) * scaled
    w -= lr * (state["momentum"] + weight_decay * w)


class Written:
    """Optimizer of torch parameters by one of the functions above."""

    def __init__(self, parameters, rule, **options):
        self.rule, self.options, self.parameters = rule, options, [(each, {}) for each in parameters]

    def step(self):
        for each, state in self.parameters:
            self.rule(state, each.detach().numpy(), each.grad.numpy(), **self.options)


KINDS = {
    "Adafactor": (
        partial(optim.Adafactor, lr=0.1, weight_decay=0.1, eps=(0, 1e-3), d=1.5),
        lambda torch, given: torch.optim.Adafactor(given, lr=0.1, weight_decay=0.1, d=1.5),
    ),
    "Adafactor, other options": (
        partial(optim.Adafactor, beta2_decay=-0.5, eps=(0.05, 0.5)),
        lambda torch, given: torch.optim.Adafactor(given, beta2_decay=-0.5, eps=(0.05, 0.5)),
    ),
    "SM3": (
        partial(optim.SM3, momentum=0.9, weight_decay=0.1),
        lambda torch, given: Written(given, sm3, lr=0.1, momentum=0.9, weight_decay=0.1),
    ),
    "SM3 without momentum": (partial(optim.SM3, lr=0.05), lambda torch, given: Written(given, sm3, lr=0.05)),
    "Lion": (
        partial(optim.Lion, lr=1e-3, betas=(0.8, 0.9), weight_decay=0.1),
        lambda torch, given: Written(given, lion, lr=1e-3, betas=(0.8, 0.9), weight_decay=0.1),
    ),
}
SAVED, LAST = 2, 4
"""Steps at the checkpoint, and at the end."""


def reference(kind):
    """Name -> weight after `LAST` steps from the initial weights of pmm3d, in float64."""
    import torch
    from mpi4py import MPI

    torch.set_num_threads(1)
    with Grid(MPI.COMM_SELF, (1, 1, 1)) as grid:
        start = weights_of(network_of(grid, CLASSES))
    net = torch_network(torch, CLASSES, start)
    optimizer, parameters = KINDS[kind][1](torch, list(net.parameters())), list(net.parameters())
    for step in range(LAST):
        x, y = map(torch.from_numpy, batch_of(CLASSES, step))
        net.zero_grad()
        torch_loss(torch, CLASSES, net(x), y).backward()
        optimizer.step()
    values = [value.detach().numpy() for value in parameters]
    return dict(zip(start, (value.T if value.ndim == 2 else value[None] for value in values), strict=True))


@pytest.mark.parallel([4], thorough=[1, 2, 8])
def test_steps_are_those_of_the_reference_on_every_grid_also_from_a_checkpoint(comm, shared_path):
    """Each grid continues from the checkpoint of the first one. Sizes do not divide, so shards are uneven, or empty."""
    expected = by_rank_0(comm, lambda: {kind: reference(kind) for kind in KINDS})
    for number, (shape, data) in enumerate([*GRIDS[comm.size], *[((1, 1, 2), 2)] * (comm.size == 4)]):
        shard = ["states", False, "gradients"][number % 3]
        with Grid(comm, shape, data) as grid:
            for kind, (make, _) in KINDS.items():
                net, kept = network_of(grid, CLASSES), Checkpoints(grid, shared_path / kind)
                net.settle(CLASSES.sizes[0], dtype="float64")
                state = TrainState(net, make(net.parameters(), shard_over_data=shard))
                if number:
                    assert state.resume(kept)["step"] == SAVED
                for step in range(SAVED if number else 0, LAST):
                    if step == SAVED and not number:
                        state.save(kept)
                    loss_of(net, CLASSES, *batch_of(CLASSES, step)).backward()
                    state.optimizer.step()
                with given(kind=kind, shape=shape, data=data, shard=shard):
                    assert largest_difference(weights_of(net), expected[kind]) < 1e-10


RULES = {
    "SM3": (partial(optim.SM3, lr=0.1, momentum=0.9), partial(sm3, lr=0.1, momentum=0.9)),
    "Lion": (partial(optim.Lion, lr=0.01), partial(lion, lr=0.01)),
    "Adafactor": (optim.Adafactor, None),
}


TYPES = [("float32", TESTED), ("float16", "numpy"), ("bfloat16", "torch"), ("float32", "standin")]
SHAPES = [(9, 7), (1, 5), (6, 1)]


def stepped(grid, make, shape, dtype="float64", library="numpy"):
    """(weight or its master after three steps, initial weight, gradients)."""
    drawn = np.random.default_rng([*shape])
    start, *gradients = (drawn.integers(-8, 8, shape) / 8 for _ in range(4))
    on = lambda values: DistMatrix.from_global(
        grid, to_library(values.astype("float32"), library, dtype), layout=Layout(("y", "z"), "x")
    )
    weight = nn.Parameter(on(start), Precision.named(dtype))
    optimizer = make([weight])
    for gradient in gradients:
        (nn.Tensor(on(gradient)) * weight).backward(on(np.ones(shape)))
        optimizer.step(factor=0.5)
    master = weight.value if weight.master is None else weight.master
    return to_numpy(master.gather(), library), start, gradients


@pytest.mark.parallel([2], thorough=[4])
def test_a_weight_of_each_precision_changes_as_in_float64(comm):
    """Its master weight, if it has one. On some ranks, a shard has no rows or columns."""
    pytest.importorskip("torch")
    expected = {}
    with alone() as single:
        for kind, shape in product(RULES, SHAPES):
            make, rule = RULES[kind]
            expected[kind, shape], written, gradients = stepped(single, make, shape)
            state = {}
            for gradient in gradients if rule else ():
                rule(state, written, gradient / 2)
            assert not rule or np.abs(expected[kind, shape] - written).max() < 1e-12
    for axes in ((2, 1, 1), (1, 2, 1)):
        with Grid(comm, axes, comm.size // 2) as grid:
            for kind, shape, (dtype, library) in product(RULES, SHAPES, TYPES):
                with given(kind=kind, shape=shape, axes=axes, dtype=dtype, library=library):
                    found = stepped(grid, RULES[kind][0], shape, dtype, library)[0]
                    assert np.abs(found - expected[kind, shape]).max() < 2e-5


@pytest.mark.parallel([2], thorough=[4])
@looped("kind, shard", [("Adafactor", "states"), ("SM3", False), ("Lion", "gradients")])
@on_grid("ddp")
def test_replayed_steps_have_the_bits_of_ordinary_steps(grid, kind, shard):
    make = partial(KINDS[kind][0], shard_over_data=shard)
    run = compared(grid, WITH_CLASSES, optimizer=lambda net: make(net.parameters()))
    assert run.replays.replayed == STEPS - FIRST and run.replays.problem == ""


@pytest.mark.parallel([2], thorough=[4])
@looped("kind", ["Adafactor", "SM3"])
@over_grids(lambda ranks: [("2x1x1", ranks // 2), ("fsdp", 1)])
def test_a_dry_run_sends_the_messages_of_a_step_and_has_its_states(grid, kind):
    def moved(grid):
        net = nn.MLP(grid, [16, 32, 24])
        optimizer = KINDS[kind][0](net.parameters())
        x, y = (
            DistMatrix.random(grid, (8, columns), dtype="float32", layout=layout)
            for columns, layout in ((16, INPUT), (24, net.output_layout))
        )
        nn.mse(net(x), y).backward()
        assert all(parameter.grad is not None for parameter in net.parameters())  # waits
        grid.ledger.reset()
        optimizer.step()
        entries = grid.ledger.entries.items()
        return grid.ledger.memory, {key: (each.sent, each.received) for key, each in entries if key.axis}

    found = moved(grid)
    with dry_grid(grid) as dry:
        assert moved(dry) == found


@looped("kind, elements", [("adafactor", 542), ("sm3", 542), ("lion", 4131)])
def test_a_plan_counts_its_states(kind, elements):
    """Of 512 x 8 + 8 + 8 x 3 + 3 elements, with a row and a column for each matrix."""
    config = checked({"data": {"file": "x.h5"}, "network": {"hidden": [8]}, "optimizer": {"kind": kind}})
    assert config.optimizer.eps == ([0.0, 1e-3] if kind == "adafactor" else None)
    assert DrySteps(config, (512, 3)).of(GridShape(1, 1, 1, 1), 1).memory["state"] == 4 * elements


@pytest.mark.parallel([1])
@on_grid("1x1x1")
def test_options_and_complex_weights_that_do_not_fit_are_refused(grid, fails):
    parameters = nn.Linear(grid, 3, 2).parameters()
    for text, call in (
        ("eps = 0.001: needed is a list of 2 numbers", lambda: optim.Adafactor(parameters, eps=1e-3)),
        ("d = 0.5: needed is a number of at least 1", lambda: optim.Adafactor(parameters, d=0.5)),
        ("beta2_decay = 0.8: needed is a number of at most 0", lambda: optim.Adafactor(parameters, beta2_decay=0.8)),
        (r"betas = \(0.9, 1\): needed is a list of 2", lambda: optim.Lion(parameters, betas=(0.9, 1))),
        ("momentum = 1: needed is a number", lambda: optim.SM3(parameters, momentum=1)),
    ):
        with given(text=text):
            fails(Pmm3dError, text, call)
    weight = nn.Parameter(DistMatrix.random(grid, (4, 4), dtype="complex64"))
    for kind in (optim.Adafactor, optim.SM3, optim.Lion):
        fails(DTypeError, f"{kind.__name__} needs real parameters: give complex", lambda: kind([weight]))
