"""Training with compressed sums of gradients: what is applied and what is left, checkpoints, memory, recorded steps."""

import gc
import weakref

import numpy as np
import pytest
from loops import looped
from networks import (
    CLASSES,
    batch_of,
    bits,
    largest_difference,
    loss_of,
    network_of,
    on_grid,
    ordinary,
    over_grids,
    spread,
    weights_of,
)
from samples import TESTED, to_numpy

from pmm3d import DistMatrix, DTypeError, Grid, Pmm3dError, nn
from pmm3d.io import Checkpoints
from pmm3d.io.shards import own_shards
from pmm3d.layout import Layout, batch_layout, itemsize
from pmm3d.nn import optim
from pmm3d.nn.dry import memory
from pmm3d.nn.feedback import compresses, feedback_matrices
from pmm3d.nn.recorded_steps import Replays
from pmm3d.nn.training import TrainState
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.dry_step import DrySteps
from pmm3d.nn.training.step import train_step

pytestmark = pytest.mark.deadline(240)
NAMES = ("int8", "powersgd:1", "topk:0.1")
GRIDS = {4: [("ddp", 4), ("1x1x2", 2), ("2x1x1", 2)]}


def compress(grid, name):
    nn.Tape.of(grid).parallel.compression = nn.Compression(gradients=name)


def whole(matrix):
    return to_numpy(matrix.gather(), matrix.library)


def linear_loss(net, x, factors):
    """A loss whose gradient, x^T factors, does not depend on the weights."""
    out = net(x)
    factors = spread(net.grid, factors, out.layout, dtype=out.dtype)
    return nn.sum(nn.sum(nn.multiply(out, factors), 0), 1)


@pytest.mark.parallel([4])
@over_grids(GRIDS)
@looped("name", NAMES)
@looped("kind", [False, "states", "gradients"])
def test_what_was_applied_and_what_is_left_add_up(grid, name, kind):
    """To 1e-12 in float64; one sum for several micro-batches, except with ZeRO-2."""
    compress(grid, name)
    net, steps = nn.Linear(grid, 11, 9, seed=1, dtype="float64", library=TESTED), 5
    before, optimizer = weights_of(net), optim.SGD(net.parameters(), 1.0, shard_over_data=kind)
    plain, of_bias, random = 0.0, 0.0, np.random.default_rng(3)
    for _ in range(steps):
        grid.ledger.reset()
        for last in (False, True):
            x, factors = random.standard_normal((13, 11)), random.standard_normal((13, 9))
            plain, of_bias = plain + x.T @ factors, of_bias + factors.sum(0)
            with nn.Tape.of(grid).set(syncing=last):
                linear_loss(net, spread(grid, x, dtype="float64"), factors).backward()
        optimizer.step()
        assert grid.ledger.total(phase="reduce data").calls == (2 if kind == "gradients" else 1)
    matrices = feedback_matrices(net)
    left, moved = whole(matrices["feedback/weight"]), before["weight"] - weights_of(net)["weight"]
    assert np.abs(moved + left - plain).max() < 1e-12 * np.abs(plain).max()
    assert np.abs(left).max() > 1e-3
    moved = before["bias"] - weights_of(net)["bias"]
    left = whole(matrices["feedback/bias"]) if "feedback/bias" in matrices else 0  # PowerSGD does not compress vectors
    assert ("feedback/bias" in matrices) != name.startswith("powersgd")
    assert np.abs(moved + left - of_bias).max() < 1e-12 * np.abs(of_bias).max()


def steps_of(state, first, last):
    for step in range(first, last):
        x, y = batch_of(CLASSES, step)
        loss_of(state.network, CLASSES, x, y).backward()
        state.optimizer.step()


def state_on(grid, name, kind=True):
    compress(grid, name)
    net = network_of(grid, CLASSES, library=TESTED)
    return TrainState(net, optim.AdamW(net.parameters(), 0.05, shard_over_data=kind))


@pytest.mark.parallel([2])
@on_grid("ddp", 2)
@looped("name", NAMES)
@looped("kind", [False, True])
def test_neither_a_save_nor_a_refused_resume_changes_a_bit(grid, shared_path, fails, name, kind):
    """The sum of the errors is a copy, so all trainings have the same bits."""
    checkpoints, found = Checkpoints(grid, shared_path / f"{name.partition(':')[0]}{kind}"), {}
    for what in ("nothing", "save", "refused"):
        state = state_on(grid, name, kind)
        steps_of(state, 0, 2)
        if what == "save":
            state.save(checkpoints)
            assert {each: whole(one).tobytes() for each, one in feedback_matrices(state.network).items()} == {
                each: whole(one).tobytes() for each, one in state.matrices().items() if each.startswith("feedback/")
            }
        elif what == "refused":
            state.optimizer = Renamed(state.network.parameters(), 0.05, shard_over_data=kind)
            before = [to_numpy(each.grad_buffer.feedback.error, each.library).copy() for each in errors_in(state)]
            fails(Pmm3dError, "the checkpoint's optimizer is AdamW", lambda: state.resume(checkpoints))
            now = [to_numpy(each.grad_buffer.feedback.error, each.library) for each in errors_in(state)]
            assert bits(dict(enumerate(before))) == bits(dict(enumerate(now)))
            continue
        steps_of(state, 2, 4)
        found[what] = bits(weights_of(state.network))
    assert found["nothing"] == found["save"]


class Renamed(optim.AdamW):
    """An optimizer of another name."""


def errors_in(state):
    return [each for each in state.network.parameters() if each.grad_buffer.feedback is not None]


@pytest.mark.parallel([2])
@on_grid("ddp", 2)
def test_a_rank_with_a_failed_gradient_takes_part_in_a_save(grid):
    """Its errors are lost with the gradient, and those of the other rank are stored. No rank waits alone."""
    compress(grid, "int8")
    net = nn.Linear(grid, 6, 4, seed=1, dtype="float64", library=TESTED)
    x = spread(grid, np.random.default_rng(0).standard_normal((8, 6)), dtype="float64")
    linear_loss(net, x, np.ones((8, 4))).backward()
    net.weight.grad_buffer.wait()
    own = to_numpy(net.weight.grad_buffer.feedback.error, net.weight.library).reshape(6, 4)
    expected = grid.comm.bcast(own.copy())
    if grid.rank:
        net.weight.grad_buffer.fail()
    found = whole(feedback_matrices(net)["feedback/weight"])
    assert np.array_equal(found, expected) and np.abs(expected).max() > 0
    optim.SGD(net.parameters(), 0.1).zero_grad()


@pytest.mark.parallel([2])
@on_grid("ddp", 2)
def test_a_save_stores_errors_of_compressed_sums_only(grid):
    """Not of vectors with powersgd, and nothing if the codec is not smaller than the messages. No memory is made."""
    compress(grid, "powersgd:1")
    net = nn.Linear(grid, 64, 32, seed=1, dtype="float64", library=TESTED)
    assert [*feedback_matrices(net)] == ["feedback/weight"]
    linear_loss(net, spread(grid, np.ones((8, 64)), dtype="float64"), np.ones((8, 32))).backward()
    assert [*feedback_matrices(net)] == ["feedback/weight"] and net.bias.grad_buffer.feedback is None
    compress(grid, "float16")
    low = nn.Linear(grid, 64, 32, seed=1, precision="float16", library=TESTED)
    assert not feedback_matrices(low) and not compresses(low) and low.weight.grad_buffer.feedback is None


@pytest.mark.parallel([4])
@looped("name", NAMES)
def test_a_resumed_training_continues_from_the_sum_of_the_errors(comm, tmp_path_factory, caplog, name):
    """Nothing of what was not sent is lost, on any grid, unless it compresses nothing. Rank 0 then says so."""
    folder = comm.bcast(tmp_path_factory.mktemp("compressed"))
    with Grid(comm, (1, 1, 2), 2) as grid:
        state, checkpoints = state_on(grid, name), Checkpoints(grid, folder)
        steps_of(state, 0, 3)
        state.save(checkpoints)
        left, on = {path: whole(matrix) for path, matrix in feedback_matrices(state.network).items()}, []
        assert all(np.abs(left[f"feedback/{path}"]).max() > 0 for path in ("0.weight", "3.weight"))
        for steps in (0, 1):
            other = state_on(grid, name)
            steps_of(other, 0, steps)
            other.resume(checkpoints, folder / "step-00000003")
            now = feedback_matrices(other.network)
            assert all((whole(now[path]) == values).all() for path, values in left.items())
            steps_of(other, 3, 6)
            on.append(bits(weights_of(other.network)))
        assert on[0] == on[1]
    for shape, data in (((1, 1, 1), 4), ((2, 1, 1), 2), ((2, 2, 1), 1)):
        with Grid(comm, shape, data) as grid:
            state, checkpoints = state_on(grid, name), Checkpoints(grid, folder)
            caplog.clear()
            state.resume(checkpoints, folder / "step-00000003")
            assert ("has error feedback of gradients, which is dropped" in caplog.text) == (data == 1 and not comm.rank)
            now = feedback_matrices(state.network)
            assert data == 1 or all((whole(now[path]) == values).all() for path, values in left.items())
            steps_of(state, 3, 5)
            if data == 1:
                state.save(Checkpoints(grid, folder / "without"))
    for used, path, text in (("", folder, "which is dropped"), (name, folder / "without", "begins with zeros")):
        with Grid(comm, (1, 1, 1), 4) as grid:
            state = state_on(grid, used)
            caplog.clear()
            state.resume(Checkpoints(grid, path), None if used else path / "step-00000003")
            assert (text in caplog.text) == (not comm.rank)
            assert bool(feedback_matrices(state.network)) == bool(used)


@pytest.mark.parallel([2])
@on_grid("ddp", 2)
@looped("name", NAMES)
def test_bits_do_not_depend_on_buckets_or_on_recorded_steps(grid, name):
    """Errors belong to parameters: a bucket may change between steps (pytorch 51427, powersgd 17)."""
    compress(grid, name)

    def trained(sizes):
        net = network_of(grid, CLASSES, dtype="float32", library=TESTED)
        optimizer = optim.SGD(net.parameters(), 0.05)
        x, y = batch_of(CLASSES, 1)
        batch = spread(grid, x, dtype="float32"), spread(grid, y, batch_layout(None))
        for size in sizes:
            nn.Tape.of(grid).parallel.overlap = nn.Overlap(bucket_bytes=size)
            train_step(net, optimizer, nn.cross_entropy, [batch])
        return bits(weights_of(net)), Replays.of(net).replayed

    same, replayed = trained([2**24] * 9)
    assert replayed == 4
    with ordinary():
        assert trained([2**24] * 9) == (same, 0)
        assert trained([1, 2**24, 400, 1, 2**20, 300, 2**24, 1, 50]) == (same, 0)


@pytest.mark.parallel([4])
@looped("kind", [False, "states", "gradients"])
def test_sums_over_data_and_sequences_lose_nothing_either(comm, kind):
    """In one sum over both axes; with ZeRO in two sums, of which the second is compressed."""
    with Grid(comm, (1, 1, 1), 2, axes={"seq": 2}) as grid:
        compress(grid, "topk:0.1")
        net, random, plain = nn.Linear(grid, 11, 9, dtype="float64", library=TESTED), np.random.default_rng(0), 0.0
        before, optimizer = weights_of(net)["weight"], optim.SGD(net.parameters(), 1.0, shard_over_data=kind)
        for step in range(4):
            x, factors = random.standard_normal((13, 11)), random.standard_normal((13, 9))
            plain = plain + x.T @ factors
            linear_loss(net, spread(grid, x, Layout(("z", "data", "seq"), "y"), dtype="float64"), factors).backward()
            optimizer.step()
            if step == 1:
                feedback_matrices(net)
        assert net.weight.grad_buffer.feedback.axis.name == ("data" if kind else "data+seq")
        left = whole(feedback_matrices(net)["feedback/weight"])
        assert np.abs(before - weights_of(net)["weight"] + left - plain).max() < 1e-12 < np.abs(left).max()


@pytest.mark.parallel([2])
@looped("name", NAMES)
def test_a_dry_run_predicts_the_memory(comm, name):
    """State, exactly: errors, and factors of PowerSGD. The work memory of messages is not larger than predicted."""

    def step(on):
        compress(on, name)
        net = nn.MLP(on, (64, 96, 32), nn.relu, dtype="float32", **({} if on.dry_run else {"library": TESTED}))
        x, y = (DistMatrix.empty(on, (16, size), dtype="float32", layout=layout, library=net.parameters()[0].library)
                for size, layout in ((64, batch_layout("y")), (32, net.output_layout)))  # fmt: skip
        x.local[...], y.local[...] = 1, 2
        optimizer = optim.SGD(net.parameters(), 0.1)
        for _ in range(2):
            nn.mse(net(x), y).backward()
            optimizer.step()
        return net

    with Grid(comm, (1, 1, 1), 2) as grid, Grid.dry((1, 1, 1), 2) as dry:
        net = step(grid)
        held = sum(
            array.nbytes for each in net.parameters() if (own := each.grad_buffer.feedback) for array in own.arrays
        )
        weights = sum(each.shard.nbytes for each in net.parameters() if name != "powersgd:1" or not each.is_vector)
        factors = 4 * (96 + 32) if name == "powersgd:1" else 0
        dry_net = step(dry)
        assert memory(dry)["state"] == held == weights + factors == grid.ledger.memory["state"]
        assert 0 < grid.workspace.allocated <= dry_net.grid.workspace.allocated


def test_a_dry_run_predicts_the_copies_of_a_checkpoint():
    """Of a checkpoint in the background: shards of the feedback too."""
    for name in ("", "int8"):
        config = checked(
            {
                "data": {"file": "nowhere.h5", "batch_size": 8},
                "network": {"hidden": [19], "norm": True},
                "memory": {"gradients": name},
            }
        )
        for rank in (0, 1):
            with Grid.dry((1, 1, 1), 2, rank) as dry:
                said = DrySteps(config, (7, 5)).on(dry).memory["copies"]
            with Grid.dry((1, 1, 1), 2, rank) as dry:
                compress(dry, name)
                net = nn.MLP(dry, (7, 19, 5), norm=True)
                optimizer = optim.AdamW(net.parameters())
                x, y = (DistMatrix.empty(dry, (8, size), dtype="float32", layout=batch_layout("y")) for size in (7, 5))
                nn.mse(net(x), y).backward()
                optimizer.step()
                shards = own_shards(TrainState(net, optimizer).matrices())
                assert said == sum(each.box.size * itemsize(each.dtype) for each in shards)


@pytest.mark.parallel([2])
@on_grid("ddp", 2)
def test_a_scaled_loss_that_overflows_is_skipped_by_all_ranks(grid):
    """DeepSpeed 4886, 6926: the scale falls, the errors stay finite and follow the scale, and the training goes on. A
    skipped step changes no error, also with several backward passes: what it had sent is not lost."""
    compress(grid, "int8")
    net = nn.Linear(grid, 6, 4, seed=1, precision="float16", library=TESTED)
    optimizer, scale = optim.SGD(net.parameters(), 0.1), optim.LossScale(start=2.0**20, most=2.0**20, every=2)
    x, losses = spread(grid, np.random.default_rng(1).standard_normal((8, 6)), dtype="float16"), []
    y = spread(grid, np.random.default_rng(2).standard_normal((8, 4)), batch_layout(None), dtype="float32")
    skipped_with_errors = 0
    for step in range(30):
        before = {name: whole(each) for name, each in feedback_matrices(net).items()}
        for _ in range(1 + step % 2):
            loss = nn.mse(net(x), y)
            loss.backward(scale=scale.value)
        taken = scale.step(optimizer)
        losses.append(loss.item())
        if not taken:
            assert all((before[name] == whole(each)).all() for name, each in feedback_matrices(net).items())
            skipped_with_errors += np.abs(before["feedback/weight"]).max() > 0
    assert skipped_with_errors > 0
    feedback = net.weight.grad_buffer.feedback
    error = to_numpy(feedback.error, net.weight.library)
    assert 1 < scale.skipped < 15 and losses[-1] < 0.8 * losses[0]
    assert np.isfinite(error).all() and 0 < np.abs(error).max() < 0.01 * feedback.scale


@pytest.mark.parallel([2])
@on_grid("ddp", 2)
def test_without_compression_no_errors_are_held(grid):
    """They are freed when it is switched off, also by replayed steps. A codec that sends no fewer bytes is not used."""
    net = nn.Linear(grid, 64, 32, seed=1, dtype="float32", library=TESTED)
    optimizer, x = optim.SGD(net.parameters(), 0.1), spread(grid, np.ones((8, 64)), dtype="float32")
    y, found = spread(grid, np.ones((8, 32)), batch_layout(None), dtype="float32"), []
    weight, bias = (each.grad_buffer for each in (net.weight, net.bias))
    for name in ("int8", "", "int8"):
        compress(grid, name)
        for _ in range(9):
            train_step(net, optimizer, nn.mse, [(x, y)])
        assert (weight.feedback is None) == (bias.feedback is None) == (not name)
        if name:
            errors = [weakref.ref(each.feedback.error) for each in (weight, bias)]
        gc.collect()
        assert [each() is None for each in errors] == [not name] * 2
    compress(grid, "powersgd:1")  # which sums vectors as usual
    train_step(net, optimizer, nn.mse, [(x, y)])
    assert weight.feedback is not None and bias.feedback is None
    for name in ("", "bfloat16", "float16"):
        compress(grid, name)
        net = nn.Linear(grid, 64, 32, seed=1, precision="float16", library=TESTED)
        grid.ledger.reset()
        nn.mean(net(spread(grid, np.ones((8, 64)), dtype="float16"))).backward()
        for each in net.parameters():
            each.grad_buffer.wait()
        found.append((grid.ledger.total(phase="reduce data").received, net.weight.grad_buffer.feedback))
    assert found == [found[0]] * 3 and found[0][1] is None


@pytest.mark.parallel([2])
@on_grid("ddp", 2)
def test_complex_gradients_are_refused(grid):
    compress(grid, "int8")
    net = nn.Linear(grid, 3, 2, dtype="complex64", library=TESTED)
    x = spread(grid, np.ones((4, 3)), dtype="complex64")
    with pytest.raises(DTypeError, match="complex gradients are not compressed: leave out Compression"):
        linear_loss(net, x, np.ones((4, 2))).backward()


@pytest.mark.parallel([1])
def test_one_rank_along_data_sends_nothing_and_keeps_nothing(comm):
    with Grid(comm) as grid:
        compress(grid, "topk:0.01")
        net = network_of(grid, CLASSES, library=TESTED)
        loss_of(net, CLASSES, *batch_of(CLASSES, 0)).backward()
        optim.SGD(net.parameters(), 0.1).step()
        assert not feedback_matrices(net) and all(each.grad_buffer.feedback is None for each in net.parameters())
        plain = network_of(grid, CLASSES, library=TESTED)
        compress(grid, "")
        loss_of(plain, CLASSES, *batch_of(CLASSES, 0)).backward()
        optim.SGD(plain.parameters(), 0.1).step()
        assert largest_difference(weights_of(net), weights_of(plain)) == 0
