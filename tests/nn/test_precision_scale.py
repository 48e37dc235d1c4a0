"""Loss scale of float16: skipped steps, comparison among ranks, several optimizers, refused settings."""

from math import inf, nan

import numpy as np
import pytest
from networks import INPUT, on_each_grid, spread, weights_of

from pmm3d import DisagreementError, DistMatrix, DTypeError, Grid, Pmm3dError, nn
from pmm3d.layout import batch_layout
from pmm3d.nn import optim
from pmm3d.nn.parallel import BackwardSync
from pmm3d.nn.training.step import step_agreement

SIZES = (16, 24, 8)
GRIDS = {1: [("1x1x1", 1)], 2: [("ddp", 1), ("fsdp", 1)]}
pytestmark = pytest.mark.deadline(180)


def batch(grid, rows=32):
    random = np.random.default_rng(3)
    x, y = random.standard_normal((rows, SIZES[0])), random.standard_normal((rows, SIZES[-1]))
    return spread(grid, x, INPUT, dtype="float32"), spread(grid, y, batch_layout(None), dtype="float32")


def whole(matrix):
    return np.asarray(matrix.gather())


@pytest.mark.parallel([2], thorough=[1])
def test_a_step_that_overflows_is_skipped_by_all_ranks(comm):
    """One rank's gradient is infinite. No rank changes anything, and the next step is as if this one had not
    existed."""

    def check(grid):
        net = nn.MLP(grid, SIZES, nn.relu, precision="float16")
        optimizer, scale = optim.AdamW(net.parameters()), optim.LossScale(start=2.0**8, every=2)
        x, y = batch(grid)
        for wrong, value, skipped in ((False, 2**8, 0), (True, 2**7, 1), (False, 2**7, 1), (False, 2**8, 1)):
            before = {**weights_of(net), **{name: whole(each) for name, each in optimizer.matrices().items()}}
            nn.mse(net(x), y).backward(scale=scale.value)
            if wrong and grid.rank == 0:
                net.parameters()[0].grad.local[...] = inf
            assert scale.step(optimizer, clip=1.0) is not wrong
            after = {**weights_of(net), **{name: whole(each) for name, each in optimizer.matrices().items()}}
            assert all((before[name].tobytes() == after[name].tobytes()) is wrong for name in before)
            assert (scale.value, scale.skipped) == (value, skipped)
        assert optimizer.steps == 4 and set(optimizer.steps_without_grad.values()) == {1}

    on_each_grid(comm, check, GRIDS[comm.size])


@pytest.mark.parallel([2], thorough=[1])
def test_fifty_skipped_steps_name_the_parameter(comm, fails):
    def check(grid):
        net = nn.MLP(grid, SIZES, nn.relu, precision="float16")
        optimizer, scale = optim.SGD(net.parameters(), lr=0.1), optim.LossScale(least=0.5)
        before, (x, y) = weights_of(net), batch(grid)
        for step in range(50):
            nn.mse(net(x), y).backward(scale=scale.value)
            if grid.rank == 0:
                net.parameters()[2].grad.local[...] = np.nan
            if step < 49:
                assert not scale.step(optimizer)
        fails(
            optim.NonFiniteGradientError,
            "50 steps in a row .* the gradient of 2.weight is not finite",
            lambda: scale.step(optimizer),
        )
        assert (
            scale.value == 0.5
            and scale.skipped == optimizer.steps == 50
            and set(optimizer.steps_without_grad.values()) == {50}
        )
        assert all(before[name].tobytes() == after.tobytes() for name, after in weights_of(net).items())

    on_each_grid(comm, check, GRIDS[comm.size][:1])


@pytest.mark.parallel([1])
def test_a_scaled_step_is_the_same(comm):
    """For scales that are powers of two, with clipping: equal bits, if nothing overflows or underflows."""
    with Grid(comm) as grid:
        found = []
        for start, clip in ((2.0**10, 0.25), (2.0**13, 0.25), (2.0**13, None)):
            net = nn.MLP(grid, SIZES, nn.relu, seed=0, precision="float16")
            scale = optim.LossScale(start=start)
            optimizer, (x, y) = optim.SGD(net.parameters(), lr=0.1, momentum=0.9), batch(grid)
            for _ in range(3):
                nn.mse(net(x), y).backward(scale=scale.value)
                assert clip is None or optimizer.gradient_norm() / scale.value > clip
                assert scale.step(optimizer, clip=clip)
            found.append({name: whole(value).tobytes() for name, value in optimizer.matrices().items()})
        assert found[0] == found[1] != found[2]


@pytest.mark.parallel([2], thorough=[1])
def test_one_scale_for_two_optimizers(comm, fails):
    """They have one norm for clipping, and one decision, as one optimizer of all parameters. In separate steps, the
    gradients of the second would be divided by the scale of the next step."""

    def check(grid):
        found, (x, y) = [], batch(grid)
        for parts in (1, 2):
            net = nn.MLP(grid, SIZES, nn.relu, seed=0, precision="float16")
            scale = optim.LossScale(start=2.0**8, every=1)
            own = net.parameters()
            optimizers = [optim.SGD(own[: 4 // parts], lr=0.1), optim.SGD(own[2:], lr=0.1)][:parts]
            if not found:
                fails(Pmm3dError, "there was no backward pass yet", lambda: scale.step(*optimizers))
            for wrong in (False, True, False):
                nn.mse(net(x), y).backward(scale=scale.value)
                if wrong and grid.rank == 0:
                    own[3].grad.local[...] = nan
                assert scale.step(*optimizers, clip=0.25) is not wrong
            assert (scale.value, scale.skipped) == (2.0**9, 1) and {each.steps for each in optimizers} == {3}
            found.append({name: value.tobytes() for name, value in weights_of(net).items()})
            fails(Pmm3dError, "a second step after one backward pass", lambda: scale.step(*optimizers))
        assert found[0] == found[1]
        nn.mse(net(x), y).backward()
        fails(Pmm3dError, "the gradients have the scale 1, and this scale is 512", lambda: scale.step(*optimizers))
        nn.mse(net(x), y).backward(scale=scale.value)  # added to a gradient that was not scaled
        fails(Pmm3dError, "the gradients have the scale 1, and", lambda: scale.step(*optimizers))
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.mse(net(x), y).backward(scale=scale.value)
        for clip in (0, -1.0):
            fails(Pmm3dError, "clip: the largest norm .* positive number", lambda: scale.step(*optimizers, clip=clip))
        fails(Pmm3dError, "needs at least one optimizer", lambda: scale.step())
        for factor in (0, inf, nan):
            fails(Pmm3dError, "step: the factor is a positive number", lambda: optimizers[0].step(factor=factor))
        assert scale.step(*optimizers)

    on_each_grid(comm, check, GRIDS[comm.size][:1])


@pytest.mark.parallel([2], thorough=[1])
def test_a_scale_is_a_number_and_the_same_on_all_ranks(comm, fails):
    def check(grid):
        net, (x, y) = nn.MLP(grid, SIZES, nn.relu), batch(grid)
        before = weights_of(net)
        for scale in (0.0, -1.0, inf, nan):
            fails(
                Pmm3dError, "backward: the scale is a positive number", lambda: nn.mse(net(x), y).backward(scale=scale)
            )
        if grid.size > 1:
            for scale in (2.0 ** (8 - grid.rank), (nan, 1.0)[grid.rank]):
                fails(DisagreementError, "the loss is scaled by", lambda: nn.mse(net(x), y).backward(scale=scale))
                for parameter in net.parameters():
                    parameter.grad = None
            nn.mse(net(x), y).backward()
            BackwardSync.of(grid).defers_agreement = True
            nn.mse(net(x), y).backward(scale=2.0 ** (8 - grid.rank))
            fails(DisagreementError, "the loss is scaled by", lambda: step_agreement(grid))
        assert all(before[name].tobytes() == after.tobytes() for name, after in weights_of(net).items())

    on_each_grid(comm, check, GRIDS[comm.size])


@pytest.mark.parallel([1])
def test_a_loss_of_16_bits_is_not_scaled(comm):
    """float16 cannot represent 65536."""
    with Grid(comm) as grid:
        layer = nn.Linear(grid, 4, 4, precision="float16")
        out = layer(DistMatrix.random(grid, (8, 4), dtype="float32"))
        with pytest.raises(DTypeError, match=r'a float16 loss with the scale 65536 may overflow.*cast\(x, "float32"\)'):
            nn.mean(nn.mean(out * out, 0), 1).backward(scale=optim.LossScale().value)
        wide = nn.cast(out, "float32")
        nn.mean(nn.mean(wide * wide, 0), 1).backward(scale=2.0**10)
        assert np.isfinite(layer.weight.grad.gather()).all() and layer.weight.grad.gather().any()
