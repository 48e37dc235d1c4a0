"""Replayed training steps have the bits of ordinary ones, and what changes between steps is seen."""

import copy
import gc
import logging
import weakref

import numpy as np
import pytest
from loops import given, looped
from networks import (
    CLASSES,
    GRIDS,
    VECTORS,
    batch_of,
    bits,
    network_of,
    on_grid,
    ordinary,
    over_grids,
    spread,
    weights_of,
)

from pmm3d import Grid, Pmm3dError, nn
from pmm3d.arrays import library_of
from pmm3d.layout import batch_layout
from pmm3d.nn import optim, parallel, recorded_steps
from pmm3d.nn.recorded_steps import Replays
from pmm3d.nn.tape import Tape
from pmm3d.nn.training.step import Agreed, step_agreement, train_step

pytestmark = pytest.mark.deadline(240)
STEPS, FIRST = 8, 5
"""Number of steps, and of those before the first one that is replayed."""
WITH_VECTORS = VECTORS._replace(norm=False)
WITH_CLASSES = CLASSES._replace(norm=False, activation="relu")


def batches_of(grid, case, step, parts=1, dtype="float64"):
    """The batch of a step in `parts` micro-batches."""
    x, y = batch_of(case, step)
    labels = case.loss == "cross_entropy"
    make = lambda whole, layout=None: spread(grid, whole, batch_layout(layout))
    return [
        (make(own.astype(dtype), "y"), make(of_own) if labels else make(of_own.astype(dtype)))
        for own, of_own in zip(np.array_split(x, parts), np.array_split(y, parts))
    ]


class Run:
    """A network in training."""

    def __init__(self, grid, case, network=None, optimizer=None, parts=1, clip=1.0):
        self.grid, self.case, self.parts, self.clip = grid, case, parts, clip
        self.network = network_of(grid, case) if network is None else network(grid)
        make = optimizer or (lambda net: optim.AdamW(net.parameters(), lr=1e-2))
        self.optimizer, self.loss, self.told = make(self.network), getattr(nn, case.loss), []

    def step(self, number):
        batches = batches_of(self.grid, self.case, number, self.parts)
        self.told.append(train_step(self.network, self.optimizer, self.loss, batches, self.clip))

    @property
    def replays(self):
        return Replays.of(self.network)

    @property
    def state(self):
        return (
            self.told,
            bits(weights_of(self.network)),
            bits(
                {name: each.gather() for name, each in self.optimizer.matrices(self.network.named_parameters()).items()}
            ),
        )


def compared(grid, case, change=lambda run, step: None, steps=STEPS, **options):
    """Make steps replayed and ordinary, with change(run, step) before each; check that they are alike to the bit.
    Return the run with replays."""
    runs = []
    for context in (ordinary(), given(replayed=True)):
        run = Run(grid, case, **options)
        with context:
            for step in range(steps):
                change(run, step)
                run.step(step)
        runs.append(run)
    usual, replayed = runs
    assert usual.replays.replayed == 0
    assert usual.told == replayed.told
    assert usual.state == replayed.state
    return replayed


@pytest.mark.parallel([4], thorough=[1, 2, 8])
@over_grids(lambda ranks: GRIDS[ranks])
@looped("case, parts", [(WITH_CLASSES, 1), (WITH_VECTORS, 3)])
def test_replayed_steps_have_the_bits_of_ordinary_steps(grid, case, parts):
    """The first step makes the gradients. Two ordinary ones, one that is recorded and one for the comparison follow."""
    run = compared(grid, case, parts=parts)
    assert run.replays.replayed == STEPS - FIRST and run.replays.problem == ""


@pytest.mark.parallel([2], thorough=[4])
@over_grids(lambda ranks: GRIDS[ranks], most=2)
def test_numbers_that_change_are_arguments(grid):
    """Step count of the bias correction, a scheduled rate, weight decay, and the clip."""

    def change(run, step):
        run.optimizer.groups[0].update(lr=1e-2 / (1 + step), weight_decay=0.1 * (step % 2))
        run.clip = [None, 1.0, 0.5][step % 3]

    assert compared(grid, WITH_VECTORS, change).replays.replayed == STEPS - FIRST


@pytest.mark.parallel([2], thorough=[4])
@on_grid("ddp")
@looped(
    "make, options",
    [
        (optim.SGD, {"momentum": 0.9}),
        (optim.Adam, {"weight_decay": 0.1, "shard_over_data": True}),
        (optim.Muon, {"shard_over_data": "gradients"}),
    ],
)
def test_every_optimizer_updates_by_replayed_gradients(grid, make, options):
    """Also groups that change between steps, and layers that are frozen for two steps."""

    def change(run, step):
        run.optimizer.groups[0].update(decay_vectors=step < 6, lr=1e-2 / (1 + step))
        if step in (6, 8):
            run.network.layers[0].requires_grad_(step == 8)

    compared(grid, WITH_VECTORS, change, 10, optimizer=lambda net: make(net.parameters(), lr=1e-2, **options))


@pytest.mark.parallel([2])
@on_grid("1x2x1")
def test_what_changes_is_recorded_again(grid):
    """Frozen layers, another loss, micro-batches, a batch of another size, overlap, a layer, weights that are
    loaded, and evaluations between steps."""
    frozen = lambda run: run.network.layers[0].requires_grad_(False)

    def of_other_size(run):
        run.case = run.case._replace(batch=11)

    changes = {
        "frozen": frozen,
        "loss": lambda run: setattr(run, "loss", nn.mae),
        "parts": lambda run: setattr(run, "parts", 2),
        "size": of_other_size,
        "overlap": lambda run: setattr(Tape.of(run.grid).parallel, "overlap", nn.Overlap.none()),
        "activation": lambda run: run.network.layers.__setitem__(1, nn.gelu),
        "loaded": lambda run: run.network.layers[0].weight.assign(run.network.layers[0].weight.value * 2),
    }
    for name, change in changes.items():
        with given(name=name):
            run = compared(
                grid, WITH_VECTORS, lambda run, step, change=change: change(run) if step == 6 else None, steps=13
            )
            Tape.of(grid).parallel.overlap = nn.Overlap()
            assert run.replays.replayed >= (8 if name == "loaded" else 4), run.replays.problem

    def evaluated(run, step):
        with nn.no_grad(run.grid):
            [(x, y)] = batches_of(run.grid, run.case, 99)
            run.told.append(run.loss(run.network(x), y).item())

    assert compared(grid, WITH_VECTORS, evaluated).replays.replayed == STEPS - FIRST


class Own(nn.Module):
    """Two layers, and a counter of calls."""

    def __init__(self, grid):
        self.grid, self.calls = grid, [0]
        self.first, self.second = (nn.Linear(grid, *sizes, seed=1, dtype="float64") for sizes in ((7, 9), (9, 3)))

    def forward(self, x):
        CALLS.append(self)
        return self.second(nn.tanh(self.first(x)))


CALLS = []


@pytest.mark.parallel([2])
@on_grid("ddp")
def test_a_forward_of_ones_own_is_replayed_on_request(grid):
    run = compared(grid, WITH_VECTORS, network=Own)
    assert run.replays.replayed == 0 and "Own is not recorded; see nn.replay" in run.replays.problem
    CALLS.clear()
    run = compared(grid, WITH_VECTORS, network=lambda grid: nn.replay(Own(grid)))
    assert run.replays.replayed == STEPS - FIRST and len(CALLS) == STEPS + FIRST


class Changing(Own):
    """Its result depends on the number of the call."""

    def forward(self, x):
        CALLS.append(self)
        return self.second(nn.tanh(self.first(x))) * (1.0 + len(CALLS))


@pytest.mark.parallel([2])
@on_grid("ddp")
def test_a_forward_that_changes_is_found_by_the_comparison(grid):
    """Before the first step that would be replayed. The steps are the ordinary ones."""

    def change(run, step):
        if step == 0:
            CALLS.clear()

    run = compared(grid, WITH_VECTORS, change, network=lambda grid: nn.replay(Changing(grid)))
    assert run.replays.replayed == 0 and "a second step gave other bits" in run.replays.problem


@pytest.mark.parallel([2])
def test_with_debug_a_wrong_replay_is_found_later(comm, monkeypatch):
    monkeypatch.setattr(recorded_steps, "CHECKED", 7)
    with Grid(comm, "ddp", debug=True) as grid:
        run, factor = Run(grid, WITH_VECTORS), [2.0]
        run.loss = lambda out, y: nn.mse(out, y) * factor[0]
        nn.replay(run.network)
        for step in range(6):
            run.step(step)
        assert run.replays.replayed == 1
        factor[0] = 3.0
        before = bits(weights_of(run.network))
        with pytest.raises(Pmm3dError, match="a replayed step is wrong: a second step gave other bits: the loss of"):
            run.step(6)
        assert bits(weights_of(run.network)) == before
        run.step(7)


@pytest.mark.parallel([2])
@on_grid("fsdp")
def test_an_error_in_a_replay_changes_no_weight(grid):
    run = Run(grid, WITH_VECTORS)
    for step in range(6):
        run.step(step)
    before = run.state[1:]
    instructions = run.replays._all[0].program.instructions
    kernel = [each for each in instructions if getattr(each, "what", "") == "gemm"][-1]
    action, kernel.action = kernel.action, lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run.step(6)
    assert run.state[1:] == before and not run.replays._all[0].checked
    kernel.action = action
    with ordinary():
        usual = Run(grid, WITH_VECTORS)
        for step in [*range(6), *range(6, 10)]:
            usual.step(step)
    for step in range(6, 10):
        run.step(step)
    assert run.state[1:] == usual.state[1:]


@pytest.mark.parallel([2])
@on_grid("ddp")
def test_batches_may_be_one_matrix_or_change_in_place(grid):
    """x and the target are the same matrix; the caller writes to it between steps; the program is not the batch's
    owner."""
    case = WITH_VECTORS._replace(sizes=(6, 5, 6))
    results = []
    for context in (ordinary(), given(replayed=True)):
        run = Run(grid, case)
        x = batches_of(grid, case, 0)[0][0]
        with context:
            for step in range(STEPS):
                x.local[...] *= -0.5 + 0.1 * step
                held = np.array(x.gather())
                run.told.append(train_step(run.network, run.optimizer, nn.mse, [(x, x)]))
                assert bits({"x": x.gather()}) == bits({"x": held})
        results.append(run.state)
    assert results[0] == results[1]


@pytest.mark.parallel([2])
@on_grid("megatron")
def test_memory_of_replayed_steps_is_constant(grid):
    """Two programs share an arena, which is no larger than the work memory of ordinary steps."""
    with ordinary():
        usual = Run(grid, WITH_VECTORS._replace(batch=4000, sizes=(64, 64, 64, 64)))
        for step in range(3):
            usual.step(step)
        before = grid.workspace.allocated
    run = Run(grid, usual.case)
    sizes = []
    for step in range(32):
        run.case = run.case._replace(batch=4000 if step % 4 else 3000)
        run.step(step)
        sizes.append(grid.workspace.allocated)
    assert run.replays.replayed > 15 and sizes[-1] == sizes[-3] <= 1.25 * before


@pytest.mark.parallel([2])
@on_grid("ddp")
def test_a_network_is_freed_with_its_programs(grid):
    run = Run(grid, WITH_VECTORS)
    for step in range(STEPS):
        run.step(step)
    assert run.replays.replayed == STEPS - FIRST and copy.deepcopy(run.replays).replayed == 0
    network = weakref.ref(run.network)
    del run
    gc.collect()
    assert network() is None


class Remembering(Own):
    """It keeps its output, which the next step gets as its input."""

    def forward(self, x):
        self.out.clear()
        self.out.append(nn.tanh(self.first(x)))
        return self.second(self.out[0])

    def _facts(self):
        return [self.first, self.second]


@pytest.mark.parallel([1])
def test_an_input_may_be_an_output_of_the_step_before(comm):
    """Its memory is that of work arrays of the program. A replay does not set it: `forward` is not called."""
    case, results = WITH_VECTORS._replace(sizes=(9, 9, 3), batch=64), []
    for context in (ordinary(), given(replayed=True)):
        with Grid(comm, "ddp") as grid:
            net = Remembering(grid)
            net.first, net.out = nn.Linear(grid, 9, 9, seed=1, dtype="float64"), []
            run = Run(grid, case, network=lambda grid, net=net: nn.replay(net))
            [(x, y)] = batches_of(grid, case, 0)
            with context:
                for _ in range(FIRST + 1):
                    run.told.append(train_step(run.network, run.optimizer, nn.mse, [(x, y)]))
                    x = net.out[0].value
            results.append(run.told)
    assert results[0] == results[1]


@pytest.mark.parallel([2])
@on_grid("ddp")
def test_why_steps_are_not_replayed_is_said(grid, caplog):
    """A tape that packs, an agreement of one's own, a counter in a network, and more kinds of steps than are kept."""

    def told(change=lambda run, step: None, steps=STEPS, **options):
        caplog.clear()
        with caplog.at_level(logging.INFO, "pmm3d.nn"):
            run = Run(grid, WITH_VECTORS, **options)
            for step in range(steps):
                change(run, step)
                run.step(step)
        return run, [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]

    first = grid.rank == 0
    run, texts = told()
    assert (
        run.replays.replayed
        and texts
        == [f"training steps are replayed: {len(run.replays._all[0].program.instructions)} instructions"] * first
    )
    with Tape.of(grid).set(pack=lambda name, array: library_of(array).copy(array)):
        run, texts = told()
    assert not run.replays.replayed and run.replays.problem == "the tape packs or inspects arrays"
    assert texts == ["training steps are not replayed: the tape packs or inspects arrays"] * first

    def count(run, step):
        run.network.layers[0].number = step

    run, texts = told(count, steps=20)
    assert not run.replays.replayed and run.replays.problem == "18 became 19 since an earlier step"
    assert len(texts) == first and all("training steps differ: 11 became 12 since" in text for text in texts)
    run = Run(grid, WITH_VECTORS)
    for step in range(STEPS):
        agree = lambda loss, square: Agreed(*step_agreement(grid, loss, square)[:2], 0, False)
        own = (lambda loss, square: Agreed(loss, 1.0, 0, False)) if step % 2 else agree
        train_step(run.network, run.optimizer, nn.mse, batches_of(grid, run.case, step), agree=own)
    assert not run.replays.replayed and "a function of your own" in run.replays._all[0].problem


@pytest.mark.parallel([2], thorough=[4])
@over_grids(lambda ranks: GRIDS[ranks], most=2)
@looped("parts", [1, 2])
def test_a_loss_scale_is_an_argument(grid, parts):
    """It is doubled every ninth step, and halved after an overflow, whose step is replayed and changes no weight."""
    results = []
    for context in (ordinary(), given(replayed=True)):
        net = network_of(grid, WITH_VECTORS, "float32", precision="float16")
        optimizer, scale, told = optim.AdamW(net.parameters(), lr=1e-3), optim.LossScale(2.0**10, every=9), []
        with context:
            for step in range(24):
                batches = batches_of(grid, WITH_VECTORS, step, parts, dtype="float32")
                if step == 7:
                    batches[0][0].local[...] *= 1e30
                told.append((*train_step(net, optimizer, nn.mse, batches, scale=scale), scale.value))
        results.append((repr(told), scale.state(), bits(weights_of(net))))
    assert results[0] == results[1] and scale.skipped == 1 and len({value for *_, value in told}) == 2
    assert Replays.of(net).replayed == 24 - FIRST and len(Replays.of(net)._all) == 2


@pytest.mark.parallel([2])
@on_grid("ddp")
def test_the_gradients_of_a_replayed_step_have_its_scale(grid):
    """`LossScale.step` refuses gradients of another scale."""
    net, seen = network_of(grid, WITH_VECTORS), []
    optimizer, scale = optim.AdamW(net.parameters(), lr=1e-3), optim.LossScale(2.0, every=1)

    def agree(own, square):
        seen.append({each for parameter in net.parameters() for each in parameter.grad_buffer.scales})
        return step_agreement(grid, own, square)

    for step in range(STEPS):
        train_step(net, optimizer, nn.mse, batches_of(grid, WITH_VECTORS, step), agree=agree, scale=scale)
    assert Replays.of(net).replayed == STEPS - FIRST and seen == [{2.0**step} for step in range(1, STEPS + 1)]


class Multiplied(nn.Module):
    """A layer whose result depends on the number of the call."""

    def __init__(self, grid):
        self.grid, self.inner = grid, nn.Linear(grid, 9, 9, seed=2, dtype="float64")

    def forward(self, x):
        CALLS.append(self)
        return nn.scale(self.inner(x), 1.0 + len(CALLS))


class Containing(Own):
    def __init__(self, grid):
        super().__init__(grid)
        self.middle = Multiplied(grid)

    def forward(self, x):
        return self.second(self.middle(nn.tanh(self.first(x))))


@pytest.mark.parallel([2])
def test_with_debug_the_first_operation_that_differs_is_named(comm):
    """With its layer. Without debug, only gradients and the loss are named."""
    for debug in (True, False):
        with Grid(comm, "ddp", debug=debug) as grid:
            run = Run(grid, WITH_VECTORS, network=lambda grid: nn.replay(Containing(grid)))
            CALLS.clear()
            for step in range(FIRST):
                run.step(step)
            problem = run.replays._all[0].problem
            assert "a second step gave other bits: the loss of micro-batch 0, the gradient of" in problem
            assert ("The first operation whose arrays differ is operation" in problem) == debug
            assert ("scale of layer middle" in problem) == debug, problem


@pytest.mark.parallel([2], thorough=[4])
@over_grids(lambda ranks: GRIDS[ranks])
@looped("case, parts", [(WITH_CLASSES, 1), (WITH_VECTORS, 2)])
def test_operations_of_a_replay_have_the_digests_of_the_passes(grid, case, parts, monkeypatch):
    """Of all arrays that they read and wrote."""
    run, traces = Run(grid, case, parts=parts), []
    made = recorded_steps.Trace.__init__
    monkeypatch.setattr(recorded_steps.Trace, "__init__", lambda self: (made(self), traces.append(self))[0])
    monkeypatch.setattr(grid, "debug", True)
    for step in range(FIRST):
        run.step(step)
    replayed, usual = traces
    assert run.replays._all[0].trusted and replayed.difference(usual) == ""
    assert len(replayed._noted) >= len(usual._noted) > 10


@pytest.mark.parallel([2, 4])
def test_a_rank_that_changes_an_attribute_alone_is_named_on_all_ranks(comm, caplog):
    """The others replay that step. Then all ranks record again. The bits are those of ordinary steps."""

    def change(run, step):
        if run.grid.rank == 1 and step == 7:
            run.network.layers[0].number = 5
        elif run.grid.rank == 1 and step == 14:
            del run.network.layers[0].number

    with Grid(comm, "ddp") as grid:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "pmm3d.nn"):
            run = compared(grid, WITH_VECTORS, change, 22)
        texts = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
        assert len(texts) == 2
        for number, text in zip((8, 15), texts):
            assert f"step {number} was not the same program on all ranks: rank 1 ran it as usual" in text
        assert "an attribute of a module was added or removed" in texts[0]
        assert run.replays.replayed == (11 if grid.rank != 1 else 9) and run.replays.problem == ""


@pytest.mark.parallel([2])
@on_grid("fsdp")
def test_a_rank_that_changes_alone_after_many_replays_gathers_with_the_others(grid):
    """Replays count as uses of weights, so an ordinary step prefetches the same ones."""
    Tape.of(grid).parallel.overlap = nn.Overlap(reshard_after_forward=True)

    def change(run, step):
        if grid.rank == 0 and step == 20:
            run.network.number = 5

    assert compared(grid, WITH_VECTORS, change, 28).replays.problem == ""


@pytest.mark.parallel([2])
def test_pipelines_that_train_in_turn_keep_their_agreements(comm, monkeypatch):
    made, create = [], parallel.RepeatedSum
    monkeypatch.setattr(parallel, "RepeatedSum", lambda *given: made.append(given) or create(*given))
    with Grid(comm, (1, 1, 1), pipe=2) as grid:
        runs = []
        for layers in (2, 3):
            net = nn.Pipeline(grid, lambda stage, layers=layers: nn.MLP(stage, [4] * (layers + 1), seed=0))
            runs.append((net, optim.SGD(net.parameters(), lr=0.1)))
        batch = tuple(spread(grid.stage, np.ones((4, 4), "float32"), batch_layout(split)) for split in ("y", None))
        for _ in range(4):
            for net, optimizer in runs:
                train_step(net, optimizer, nn.mse, [batch])
    assert len(made) == 2


class Multiplying(Own):
    """A product of matrices outside of the tape, which is not recorded."""

    def forward(self, x):
        factor = float((x.value.H @ x.value).norm())
        return self.second(nn.tanh(self.first(x)) * factor)


@pytest.mark.parallel([2])
@looped("check", [True, False])
def test_a_product_of_matrices_in_a_forward_is_not_recorded(comm, check):
    with Grid(comm, "ddp", check=check) as grid:
        run = compared(grid, WITH_VECTORS, network=lambda grid: nn.replay(Multiplying(grid)))
        assert run.replays.replayed == 0 and "is called in a step" in run.replays.problem


@pytest.mark.parallel([2])
@on_grid("fsdp")
def test_networks_that_train_in_turn_do_not_share_memory(grid):
    """A larger network takes larger arrays for its contributions, and then both are replayed."""
    small, large = (WITH_VECTORS._replace(sizes=sizes, batch=64) for sizes in ((96, 64, 48), (160, 160, 160)))
    results = []
    for context in (ordinary(), given(replayed=True)):
        with context:
            first, second = Run(grid, small), None
            for step in range(18):
                first.step(step)
                if step >= STEPS:
                    second = second or Run(grid, large)
                    second.step(step)
        results.append((first.state, second.state))
    assert results[0] == results[1] and first.replays.replayed == 18 - FIRST and second.replays.replayed == 10 - FIRST
