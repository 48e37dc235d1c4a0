"""Low precision: arrays in float32, memory, and overflow in float16."""

from contextlib import nullcontext
from math import inf, nan

import numpy as np
import pytest
from loops import looped
from networks import INPUT, bits, over_grids, spread, weights_of
from samples import TESTED, integers, to_library, to_numpy

from pmm3d import DisagreementError, DistMatrix, DTypeError, Grid, Pmm3dError, matmul, nn
from pmm3d.io import Checkpoints
from pmm3d.layout import Layout, batch_layout
from pmm3d.nn import Precision, optim
from pmm3d.nn.dry import bytes_a_parameter, dry_grid, memory
from pmm3d.nn.exchange import export_torch, load_weights
from pmm3d.nn.parallel import BackwardSync
from pmm3d.nn.training.step import step_agreement

SIZES = (16, 24, 8)
LOW = [("bfloat16", "torch"), ("float16", "numpy")]
GRIDS = {1: [("1x1x1", 1)], 2: [("ddp", 1), ("fsdp", 1), ("1x2x1", 1)], 4: [("hsdp", 2), ("2x2x1", 1)]}
WITH_DATA = {1: [("ddp", 1)], 2: [("ddp", 1), ("fsdp", 1)], 4: [("hsdp", 2), ("2x1x1", 2)]}
KINDS = ("weights", "gradients", "state")
pytestmark = pytest.mark.deadline(240)
in_both, four = looped("dtype, library", LOW), pytest.mark.parallel([4], thorough=[1, 2])


def batch(grid, library=TESTED, rows=32):
    random = np.random.default_rng(3)
    x, y = random.standard_normal((rows, SIZES[0])), random.standard_normal((rows, SIZES[-1]))
    return spread(grid, x, INPUT, library, "float32"), spread(grid, y, batch_layout(None), library, "float32")


def step(net, optimizer, x, y):
    nn.mse(net(x), y).backward()
    optimizer.step()


def whole(matrix):
    return np.asarray(matrix.library.to_numpy(matrix.gather()))


def rounded(values, library, dtype):
    """The values, rounded to the type of a weight."""
    return to_numpy(to_library(values, library, dtype), library)


@pytest.mark.parallel([1])
@in_both
def test_a_weight_of_1_moves(comm, dtype, library):
    """By changes of 2^-20, exactly. When they are large enough, the weight in low precision changes too."""
    with Grid(comm) as grid:
        layer = nn.Linear(grid, 1, 1, bias=False, library=library, precision=dtype)
        weight, change, spacing = layer.weight, 2.0**-20, 2.0**-8 if dtype == "bfloat16" else 2.0**-11
        weight.assign(DistMatrix.ones(grid, (1, 1), dtype=dtype, layout=weight.layout, library=library))
        optimizer = optim.SGD(layer.parameters(), lr=change)
        one = spread(grid, np.ones((1, 1)), INPUT, library, "float32")

        def total(steps):
            for _ in range(steps):
                layer(one).backward(spread(grid, np.ones((1, 1)), batch_layout("x"), library, dtype))
                optimizer.step()
            return optimizer.matrices()["weight"].local.item()

        assert (total(64), float(weight.local[0, 0])) == (1 - 64 * change, 1)
        optimizer.matrices()["weight"].local[...] = 1 - spacing / 2
        assert total(64) == 1 - spacing / 2 - 64 * change
        assert float(weight.local[0, 0]) == 1 - spacing


@four
@in_both
@over_grids(GRIDS)
def test_what_is_written_to_a_weight_is_taken_over(grid, dtype, library):
    """By the next step and by a checkpoint. All writes to torch arrays are detected; writes to numpy arrays are
    counted."""
    layer = nn.Linear(grid, 8, 4, bias=False, precision=dtype, library=library)
    optimizer = optim.SGD(layer.parameters(), lr=2.0**-12, shard_over_data=True)
    x = spread(grid, integers((4, 8), seed=1), INPUT, library, "float32")
    zeros = spread(grid, np.zeros((4, 4)), batch_layout(None), library, "float32")
    for value in (1, 3):
        if value == 1:
            layer.weight._stored.local[...] = value
            layer.weight.version += library == "numpy"
        else:
            layer.load_state_dict({"weight": to_library(np.full((8, 4), 3.0), library)})
        assert (whole(layer.matrices()["weight"]) == value).all()
        step(layer, optimizer, x, zeros)
        master = whole(optimizer.matrices()["weight"])
        assert 0 < np.abs(master - value).max() < 0.5 and (whole(layer.state_dict()["weight"]) == master).all()
        assert np.array_equal(weights_of(layer)["weight"], rounded(master, library, dtype))


SPLITS = [(False, False), (True, True), (True, False), ("gradients", "gradients"), ("gradients", False)]
"""shard_over_data of an optimizer, and of another one that continues."""


@four
@in_both
@over_grids(GRIDS)
def test_masters_are_split_over_data_and_change_no_bit(grid, dtype, library):
    """Also if gradients are split. Also with another optimizer, whose state has another layout."""
    found, (x, y) = [], batch(grid, library)
    for shards in SPLITS:
        net = nn.MLP(grid, SIZES, precision=dtype, library=library, seed=1)
        for shard in shards:
            optimizer = optim.AdamW(net.parameters(), lr=1e-2, shard_over_data=shard)
            for _ in range(2):
                step(net, optimizer, x, y)
        held, of_weight = {**net.matrices(), **optimizer.matrices()}, net.named_parameters()["0.weight"]
        found.append({name: whole(each).tobytes() for name, each in held.items()})
        assert {each.dtype for each in held.values()} == {"float32"}
        assert net.matrices()["0.weight"].local is optimizer.matrices()["0.weight"].local
        assert net.matrices()["0.weight"].box.size == of_weight.box.size // (grid.data.size if shards[1] else 1)
    assert found == [found[0]] * len(SPLITS) and len(found[0]) == 3 * len(net.parameters())


@pytest.mark.parallel([2], thorough=[1])
def test_a_product_into_a_weight_is_counted(comm):
    """So an optimizer detects the write."""
    with Grid(comm, "fsdp") as grid:
        weight = nn.Linear(grid, 8, 4, bias=False).weight
        before, other = weight._written, DistMatrix.random(grid, (8, 4), dtype="float32", layout=Layout("x"))
        matmul(DistMatrix.random(grid, (8, 8), dtype="float32"), other, out=weight.value)
        assert weight._written != before


@four
@in_both
@over_grids(GRIDS)
def test_gradients_are_added_in_float32(grid, dtype, library):
    """Over rows, batches and ranks, and of a bias, with parts that are sent in float32: no low precision can represent
    2049, or 2048 + 3. On the host, the product of a rank's rows is rounded to bfloat16, to 2048, and nothing else."""
    once = {"float16": 2049, "bfloat16": 2048}[dtype]
    layer = nn.Linear(grid, 2, 2, precision=Precision(dtype, communication="float32"), library=library)
    ranks = grid.shape.z * grid.shape.data
    for value in (683.0, 1.0):
        for sync in (False, True):
            out = layer(spread(grid, np.ones((3 * ranks, 2)), INPUT, library, "float32"))
            with nn.Tape.of(grid).set(syncing=sync):
                out.backward(spread(grid, np.full((3 * ranks, 2), value), batch_layout("x"), library, dtype))
    for parameter in layer.parameters():
        assert parameter.grad.dtype == "float32"
        assert (whole(parameter.grad) == 2 * ranks * (once + 3)).all()


@pytest.mark.parallel([2], thorough=[1])
@in_both
@over_grids(GRIDS)
def test_losses_and_statistics_are_of_float32(grid, dtype, library):
    """For numbers whose sums and squares low precision cannot represent."""
    unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    values = integers((64, 32), seed=2, low=-4, high=4) + 32.0
    x = nn.Tensor(spread(grid, values, INPUT, library, dtype), requires_grad=True)
    zeros = spread(grid, 0 * values, INPUT, library, "float32")
    loss = nn.mse(x, zeros)
    assert (loss.dtype, loss.item(), nn.mae(x, zeros).item()) == ("float32", np.mean(values**2), np.mean(values))
    labels = spread(grid, np.arange(64)[:, None] % 32, batch_layout(None), library)
    shifted = values - values.max(1, keepdims=True)
    wanted = np.mean(np.log(np.exp(shifted).sum(1)) - shifted[np.arange(64), np.arange(64) % 32])
    assert abs(nn.cross_entropy(x, labels).item() - wanted) < 1e-5 * wanted
    normal = (values - values.mean(1, keepdims=True)) / np.sqrt(values.var(1, keepdims=True) + 1e-5)
    norm = nn.LayerNorm(grid, 32, precision=dtype, library=library)
    assert np.abs(whole(norm(x).value) - normal).max() < 4 * unit
    assert np.abs(whole(nn.mean(x, 0).value) - values.mean(0)).max() <= 64 * unit  # roundings of parts and of the sum
    assert np.abs(whole(nn.softmax(x).value).sum(1) - 1).max() < 4 * unit


BYTES = {"float32": (4, 4, 8), "bfloat16": (2, 4, 12), "float16": (2, 4, 12), "all of 16 bits": (2, 2, 12)}


@four
@looped("name", BYTES)
@over_grids(WITH_DATA)
def test_bytes_a_parameter(grid, name):
    """2 + 4 + 12 with a float32 gradient, 2 + 2 + 12 without; 6 + 12/d if d ranks share the state. On the grid, in its
    record and in a dry run."""
    count = 16 * 16 * 4 // (grid.size // grid.data.size)
    for shard, shared in ((False, 1), (True, grid.data.size)):
        wanted = {kind: size * count for kind, size in zip(KINDS, BYTES[name])}
        wanted["state"] //= shared
        with dry_grid(grid) as dry:
            assert held_by(dry, name, shard) == held_by(grid, name, shard) == wanted


def held_by(grid, name, shard):
    precision = Precision("bfloat16", gradient="bfloat16") if name.startswith("all") else Precision.named(name)
    net = nn.MLP(grid, [16] * 5, bias=False, precision=precision, library="torch")
    x = DistMatrix.random(grid, (8, 16), dtype="float32", layout=INPUT, library=grid.library("torch"))
    step(net, optim.AdamW(net.parameters(), shard_over_data=shard), x, x)
    if grid.dry_run is None:
        return {kind: grid.ledger.memory[kind] for kind in KINDS}
    held, count = memory(grid), sum(each.box.size for each in net.parameters())
    assert bytes_a_parameter(grid, net) == {kind: held[kind] / count for kind in KINDS}
    return {kind: size for kind, size in held.items() if kind != "work"}


@pytest.mark.parallel([4], thorough=[2])
@over_grids(WITH_DATA)
def test_gradients_travel_in_the_communication_type(grid):
    """Half the bytes of float32 over z and over data, and the full number on request."""

    def moved(**options):
        net = nn.MLP(grid, [16] * 3, precision=Precision("float16", **options))
        x = DistMatrix.random(grid, (8, 16), dtype="float32", layout=INPUT)
        loss = nn.mse(net(x), x)
        grid.ledger.reset()
        loss.backward()
        assert all(parameter.grad is not None for parameter in net.parameters())  # waits for the sums
        return sum(grid.ledger.total(phase=phase).received for phase in ("reduce dW", "reduce data"))

    assert 2 * moved() == moved(communication="float32") > 0


@pytest.mark.parallel([2], thorough=[1])
def test_a_cast_is_rounded_and_its_gradient_comes_back(comm):
    with Grid(comm, "ddp") as grid:
        x = nn.Tensor(spread(grid, np.array([[1 + 2.0**-12, 3.0]]), Layout(), dtype="float32"), requires_grad=True)
        low = nn.cast(x, "float16")
        assert (low.dtype, low.gather().tolist()) == ("float16", [[1.0, 3.0]])
        assert nn.cast(low, "float16") is low
        nn.mse(low, spread(grid, np.zeros((1, 2)), dtype="float32", layout=Layout())).backward()
        assert (x.grad.dtype, x.grad.gather().tolist()) == ("float32", [[1.0, 3.0]])


def by_state_dict(net, source, folder):
    net.load_state_dict({name: matrix.gather() for name, matrix in source.state_dict().items()})


def by_assignment(net, source, folder):
    for name, value in source.state_dict().items():
        parameter = net.named_parameters()[name]
        array = to_library(whole(value), parameter.library)
        parameter.assign(DistMatrix.from_global(net.grid, array, layout=value.layout))


def by_checkpoint(net, source, folder):
    load_weights(net, Checkpoints(net.grid, folder).save(1, source.state_dict()))


def by_safetensors(net, source, folder):
    export_torch(source, path := folder / "net.safetensors")
    load_weights(net, path)


@pytest.mark.parallel([2])
@looped("load", [by_state_dict, by_assignment, by_checkpoint, by_safetensors])
@over_grids(GRIDS, most=1)
def test_values_with_more_digits_are_kept_before_the_first_step(grid, shared_path, load):
    """Also if the network is settled afterwards, and with an optimizer that splits its state. A network that is not
    trained has no master weights."""
    source = nn.MLP(grid, SIZES, nn.gelu, seed=1)
    wanted = {name: whole(each) for name, each in source.state_dict().items()}
    low = dict(zip(("dtype", "library"), LOW[0]))
    for split, before in ((False, True), (True, True), (True, False)):
        layers = [nn.Linear(grid, *sizes, seed=2, **low) for sizes in ((16, 24), (24, 8))]
        net = nn.Sequential(grid, layers[0], nn.gelu, layers[1])
        make = lambda net=net, split=split: optim.AdamW(net.parameters(), shard_over_data=split)
        optimizer = make() if before else None
        load(net, source, shared_path)
        net.settle(16)
        found = (optimizer or make()).matrices(net.named_parameters())
        for name, value in wanted.items():
            assert (whole(found[name]) == value).all()
            assert (whole(net.named_parameters()[name]) == value.astype("float32")).mean() < 0.1 or not value.any()
    for frozen in (True, False):
        net = nn.MLP(grid, SIZES, nn.gelu, seed=2, **low).requires_grad_(not frozen)
        with nullcontext() if frozen else nn.no_grad(grid):
            load(net, source, shared_path)
        assert not any(parameter.master for parameter in net.parameters())
        assert abs(whole(net.named_parameters()["0.weight"]) / wanted["0.weight"] - 1).max() < 2**-8


# Loss scale of float16: skipped steps, comparison among ranks, several optimizers, refused settings


def half(grid, **options):
    return nn.MLP(grid, SIZES, nn.relu, precision="float16", **options)


def state_of(net, optimizer):
    """Bits of the weights and of the optimizer's matrices."""
    return bits({**weights_of(net), **{name: each.gather() for name, each in optimizer.matrices().items()}})


@pytest.mark.parallel([2], thorough=[1])
@over_grids(GRIDS, most=2)
def test_a_step_that_overflows_is_skipped_by_all_ranks(grid):
    """One rank's gradient is infinite. No rank changes anything, and the next step is as if this one had not
    existed."""
    net = half(grid)
    optimizer, scale = optim.AdamW(net.parameters()), optim.LossScale(start=2.0**8, every=2)
    x, y = batch(grid)
    for wrong, value, skipped in ((False, 2**8, 0), (True, 2**7, 1), (False, 2**7, 1), (False, 2**8, 1)):
        before = state_of(net, optimizer)
        nn.mse(net(x), y).backward(scale=scale.value)
        if wrong and grid.rank == 0:
            net.parameters()[0].grad.local[...] = inf
        assert scale.step(optimizer, clip=1.0) is not wrong
        after = state_of(net, optimizer)
        assert all((before[name] == after[name]) is wrong for name in before)
        assert (scale.value, scale.skipped) == (value, skipped)
    assert optimizer.steps == 4 and set(optimizer.steps_without_grad.values()) == {1}


@pytest.mark.parallel([2], thorough=[1])
@over_grids(GRIDS, most=1)
def test_fifty_skipped_steps_name_the_parameter(grid, fails):
    net = half(grid)
    optimizer, scale = optim.SGD(net.parameters(), lr=0.1), optim.LossScale(least=0.5)
    before, (x, y) = bits(weights_of(net)), batch(grid)
    for step in range(50):
        nn.mse(net(x), y).backward(scale=scale.value)
        if grid.rank == 0:
            net.parameters()[2].grad.local[...] = nan
        if step < 49:
            assert not scale.step(optimizer)
    fails(optim.NonFiniteGradientError, "50 .*gradient of 2.weight is not finite", lambda: scale.step(optimizer))
    assert (scale.value, scale.skipped, optimizer.steps) == (0.5, 50, 50)
    assert set(optimizer.steps_without_grad.values()) == {50} and bits(weights_of(net)) == before


@pytest.mark.parallel([1])
def test_a_scaled_step_is_the_same(comm):
    """For scales that are powers of two, with clipping: equal bits, if nothing overflows or underflows."""
    with Grid(comm) as grid:
        found = []
        for start, clip in ((2.0**10, 0.25), (2.0**13, 0.25), (2.0**13, None)):
            net, scale = half(grid, seed=0), optim.LossScale(start=start)
            optimizer, (x, y) = optim.SGD(net.parameters(), lr=0.1, momentum=0.9), batch(grid)
            for _ in range(3):
                nn.mse(net(x), y).backward(scale=scale.value)
                assert clip is None or optimizer.gradient_norm() / scale.value > clip
                assert scale.step(optimizer, clip=clip)
            found.append(state_of(net, optimizer))
        assert found[0] == found[1] != found[2]


@pytest.mark.parallel([2], thorough=[1])
@over_grids(GRIDS, most=1)
def test_one_scale_for_two_optimizers(grid, fails):
    """They have one norm for clipping, and one decision, as one optimizer of all parameters. In separate steps, the
    gradients of the second would be divided by the scale of the next step."""
    found, (x, y) = [], batch(grid)
    for parts in (1, 2):
        net, scale = half(grid, seed=0), optim.LossScale(start=2.0**8, every=1)
        own = net.parameters()
        optimizers = [optim.SGD(own[: 4 // parts], lr=0.1), optim.SGD(own[2:], lr=0.1)][:parts]
        step = lambda **options: scale.step(*optimizers, **options)
        if not found:
            fails(Pmm3dError, "no backward pass yet", step)
        for wrong in (False, True, False):
            nn.mse(net(x), y).backward(scale=scale.value)
            if wrong and grid.rank == 0:
                own[3].grad.local[...] = nan
            assert step(clip=0.25) is not wrong
        assert (scale.value, scale.skipped) == (2.0**9, 1) and {each.steps for each in optimizers} == {3}
        found.append(bits(weights_of(net)))
        fails(Pmm3dError, "second step", step)
    assert found[0] == found[1]
    for scaled in (1.0, scale.value):  # the second is added to a gradient that was not scaled
        nn.mse(net(x), y).backward(scale=scaled)
        fails(Pmm3dError, "the gradients have the scale 1, and .*512", step)
    for optimizer in optimizers:
        optimizer.zero_grad()
    nn.mse(net(x), y).backward(scale=scale.value)
    for refused, text in (
        *((lambda clip=clip: step(clip=clip), "clip: .* positive number") for clip in (0, -1.0)),
        (scale.step, "at least one optimizer"),
        *((lambda factor=factor: optimizer.step(factor=factor), "factor") for factor in (0, inf, nan)),
    ):
        fails(Pmm3dError, text, refused)
    assert step()


@pytest.mark.parallel([2], thorough=[1])
@over_grids(GRIDS, most=2)
def test_a_scale_is_a_number_and_the_same_on_all_ranks(grid, fails):
    net, (x, y) = nn.MLP(grid, SIZES, nn.relu), batch(grid)
    before, back = bits(weights_of(net)), lambda scale: nn.mse(net(x), y).backward(scale=scale)
    for scale in (0.0, -1.0, inf, nan):
        fails(Pmm3dError, "backward: the scale is a positive number", lambda: back(scale))
    if grid.size > 1:
        for scale in (2.0 ** (8 - grid.rank), (nan, 1.0)[grid.rank]):
            fails(DisagreementError, "the loss is scaled by", lambda: back(scale))
            for parameter in net.parameters():
                parameter.grad = None
        back(1.0)
        BackwardSync.of(grid).defers_agreement = True
        back(2.0 ** (8 - grid.rank))
        fails(DisagreementError, "the loss is scaled by", lambda: step_agreement(grid))
    assert bits(weights_of(net)) == before


@pytest.mark.parallel([1])
def test_a_loss_of_16_bits_is_not_scaled(comm):
    """float16 cannot represent 65536."""
    with Grid(comm) as grid:
        layer = nn.Linear(grid, 4, 4, precision="float16")
        out = layer(DistMatrix.random(grid, (8, 4), dtype="float32"))
        with pytest.raises(DTypeError, match=r'float16 loss with the scale 65536 .*cast\(x, "float32"\)'):
            nn.mean(out * out).backward(scale=optim.LossScale().value)
        wide = nn.cast(out, "float32")
        nn.mean(wide * wide).backward(scale=2.0**10)
        assert np.isfinite(layer.weight.grad.gather()).all() and layer.weight.grad.gather().any()
