"""Low precision: arrays in float32, memory, and overflow in float16."""

from contextlib import nullcontext

import numpy as np
import pytest
from loops import given
from networks import INPUT, on_each_grid, spread, weights_of
from samples import integers, to_library, to_numpy

from pmm3d import DistMatrix, Grid, matmul, nn
from pmm3d.io import Checkpoints
from pmm3d.layout import Layout, batch_layout
from pmm3d.nn import Precision, optim
from pmm3d.nn.dry import bytes_a_parameter, dry_grid, memory
from pmm3d.nn.exchange import export_torch, load_weights

SIZES = (16, 24, 8)
LOW = [("bfloat16", "torch"), ("float16", "numpy")]
GRIDS = {1: [("1x1x1", 1)], 2: [("ddp", 1), ("fsdp", 1), ("1x2x1", 1)], 4: [("hsdp", 2), ("2x2x1", 1)]}
pytestmark = pytest.mark.deadline(240)


def batch(grid, library, rows=32):
    random = np.random.default_rng(3)
    x, y = random.standard_normal((rows, SIZES[0])), random.standard_normal((rows, SIZES[-1]))
    return spread(grid, x, INPUT, library, "float32"), spread(grid, y, batch_layout(None), library, "float32")


def whole(matrix):
    return np.asarray(matrix.library.to_numpy(matrix.gather()))


@pytest.mark.parallel([4], thorough=[1, 2])
def test_small_changes_are_not_lost(comm):
    """Without master weights, 86 of 100 bfloat16 weights would not change at all. The master weights contain their
    changes."""
    for dtype, library in LOW:
        with given(dtype=dtype, library=library):

            def check(grid):
                net = nn.MLP(grid, SIZES, nn.gelu, dtype=dtype, library=library)
                optimizer = optim.AdamW(net.parameters(), lr=1e-4, shard_over_data=True)
                before, (x, y) = weights_of(net)["0.weight"], batch(grid, library)
                for _ in range(20):
                    nn.mse(net(x), y).backward()
                    optimizer.step()
                after, kept = weights_of(net)["0.weight"], optimizer.matrices()
                names = "optimizer/0.weight/mean", "optimizer/0.weight/square", "0.weight"
                assert {kept[name].dtype for name in names} == {"float32"}
                assert {kept[name].layout for name in names} == {optimizer._layout(net.named_parameters()["0.weight"])}
                assert net.matrices()["0.weight"].local is kept["0.weight"].local
                master = whole(kept["0.weight"])
                assert np.array_equal(after, rounded(master, library, dtype))
                assert np.mean(master == before) < 0.05 and np.mean(after == before) < 0.5
                assert np.abs(master - after).max() <= 2.0**-9 * np.abs(master).max()

            on_each_grid(comm, check, GRIDS[comm.size])


@pytest.mark.parallel([1])
def test_a_weight_of_1_moves(comm):
    """By changes of 2^-20, exactly. When they are large enough, the weight in low precision changes too."""
    for dtype, library in LOW:
        with given(dtype=dtype, library=library):
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
                    master = optimizer.matrices()["weight"]
                    assert master.dtype == "float32"
                    return master.local.item()

                assert (total(64), float(weight.local[0, 0])) == (1 - 64 * change, 1)
                optimizer.matrices()["weight"].local[...] = 1 - spacing / 2
                assert total(64) == 1 - spacing / 2 - 64 * change
                assert float(weight.local[0, 0]) == 1 - spacing


def rounded(values, library, dtype):
    """The values, rounded to the type of a weight."""
    return to_numpy(to_library(values, library, dtype), library)


@pytest.mark.parallel([4], thorough=[1, 2])
def test_what_is_written_to_a_weight_is_taken_over(comm):
    """By the next step and by a checkpoint. All writes to torch arrays are detected; writes to numpy arrays are
    counted."""
    for dtype, library in LOW:
        with given(dtype=dtype, library=library):

            def check(grid):
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
                    nn.mse(layer(x), zeros).backward()
                    optimizer.step()
                    master = whole(optimizer.matrices()["weight"])
                    assert 0 < np.abs(master - value).max() < 0.5
                    assert np.array_equal(weights_of(layer)["weight"], rounded(master, library, dtype))

            on_each_grid(comm, check, GRIDS[comm.size])


@pytest.mark.parallel([4], thorough=[1, 2])
def test_a_state_dict_keeps_the_digits_of_masters(comm):
    """A copy that is loaded again, and the matrices of another network."""
    for dtype, library in LOW:
        with given(dtype=dtype, library=library):

            def check(grid):
                (x, y), made = batch(grid, library), []
                for seed in (1, 2):
                    net = nn.MLP(grid, SIZES, precision=dtype, library=library, seed=seed)
                    optimizer = optim.AdamW(net.parameters(), lr=1e-2, shard_over_data=True)
                    nn.mse(net(x), y).backward()
                    optimizer.step()
                    made.append((net, optimizer))
                (net, optimizer), (other, _) = made
                before = {name: matrix.gather() for name, matrix in net.state_dict().items()}
                other.load_state_dict(net.state_dict())
                nn.mse(net(x), y).backward()
                optimizer.step()
                net.load_state_dict(before)
                for each in (net, other):
                    for name, parameter in each.named_parameters().items():
                        master = whole(each.state_dict()[name])
                        assert np.array_equal(master, to_numpy(before[name], library))
                        assert np.array_equal(whole(parameter.value), rounded(master, library, dtype))

            on_each_grid(comm, check, GRIDS[comm.size])


@pytest.mark.parallel([4], thorough=[1, 2])
def test_masters_are_split_over_data_and_change_no_bit(comm):
    """Also if gradients are split. Also with another optimizer, whose state has another layout."""
    for dtype, library in LOW:
        with given(dtype=dtype, library=library):

            def check(grid):
                found = []
                for shards in (
                    (False, False),
                    (True, True),
                    (True, False),
                    ("gradients", "gradients"),
                    ("gradients", False),
                ):
                    net, (x, y) = nn.MLP(grid, SIZES, precision=dtype, library=library, seed=1), batch(grid, library)
                    for shard in shards:
                        optimizer = optim.AdamW(net.parameters(), lr=1e-2, shard_over_data=shard)
                        for _ in range(2):
                            nn.mse(net(x), y).backward()
                            optimizer.step()
                    found.append(
                        {
                            name: whole(each).tobytes()
                            for name, each in {**net.matrices(), **optimizer.matrices()}.items()
                        }
                    )
                    size = net.named_parameters()["0.weight"].box.size // (grid.data.size if shards[1] else 1)
                    assert net.matrices()["0.weight"].box.size == size
                assert found == [found[0]] * 5 and len(found[0]) == 3 * len(net.parameters())

            on_each_grid(comm, check, GRIDS[comm.size])


@pytest.mark.parallel([2], thorough=[1])
def test_messages_into_a_weight_are_counted(comm):
    """So an optimizer detects the write."""
    with Grid(comm, "fsdp") as grid:
        weight = nn.Linear(grid, 8, 4, bias=False).weight
        seen, other = {weight._written}, DistMatrix.random(grid, (8, 4), dtype="float32", layout=Layout("x"))
        other.redistribute(weight.layout, out=weight.value)
        seen.add(weight._written)
        matmul(DistMatrix.random(grid, (8, 8), dtype="float32"), other, out=weight.value)
        assert len(seen | {weight._written}) == 3


@pytest.mark.parallel([4], thorough=[1, 2])
def test_gradients_are_added_in_float32(comm):
    """Over rows, batches and ranks, and of a bias, with parts that are sent in float32: no low precision can represent
    2049, or 2048 + 3. On the host, the product of a rank's rows is rounded to bfloat16, to 2048, and nothing else."""
    for dtype, library in LOW:
        with given(dtype=dtype, library=library):
            once = {"float16": 2049, "bfloat16": 2048}[dtype]

            def check(grid):
                layer = nn.Linear(grid, 2, 2, precision=Precision(dtype, communication="float32"), library=library)
                ranks = grid.shape.z * grid.shape.data
                for value in (683.0, 1.0):
                    for sync in (False, True):
                        out = layer(spread(grid, np.ones((3 * ranks, 2)), INPUT, library, "float32"))
                        with nn.Tape.of(grid).set(syncing=sync):
                            start = np.full((3 * ranks, 2), value)
                            out.backward(spread(grid, start, batch_layout("x"), library, dtype))
                for parameter in layer.parameters():
                    assert parameter.grad.dtype == "float32"
                    assert (whole(parameter.grad) == 2 * ranks * (once + 3)).all()

            on_each_grid(comm, check, GRIDS[comm.size])


@pytest.mark.parallel([2], thorough=[1])
def test_losses_and_statistics_are_of_float32(comm):
    """For numbers whose sums and squares low precision cannot represent."""
    for dtype, library in LOW:
        with given(dtype=dtype, library=library):
            unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-11

            def check(grid):
                values = integers((64, 32), seed=2, low=-4, high=4) + 32.0
                x = nn.Tensor(spread(grid, values, INPUT, library, dtype), requires_grad=True)
                zeros = spread(grid, 0 * values, INPUT, library, "float32")
                loss = nn.mse(x, zeros)
                assert (loss.dtype, loss.item()) == ("float32", np.mean(values**2))
                assert nn.mae(x, zeros).item() == np.mean(values)
                labels = spread(grid, np.arange(64)[:, None] % 32, batch_layout(None), library)
                shifted = values - values.max(1, keepdims=True)
                wanted = np.mean(np.log(np.exp(shifted).sum(1)) - shifted[np.arange(64), np.arange(64) % 32])
                assert abs(nn.cross_entropy(x, labels).item() - wanted) < 1e-5 * wanted
                normal = nn.LayerNorm(grid, 32, precision=dtype, library=library)(x)
                wanted = (values - values.mean(1, keepdims=True)) / np.sqrt(values.var(1, keepdims=True) + 1e-5)
                assert np.abs(whole(normal.value) - wanted).max() < 4 * unit
                assert np.abs(whole(nn.softmax(x).value).sum(1) - 1).max() < 4 * unit
                total = whole(nn.mean(x, 0).value)
                assert np.abs(total - values.mean(0)).max() <= 64 * unit  # roundings of the parts and of the sum

            on_each_grid(comm, check, GRIDS[comm.size])


BYTES = {"float32": (4, 4, 8), "bfloat16": (2, 4, 12), "float16": (2, 4, 12), "all of 16 bits": (2, 2, 12)}


@pytest.mark.parallel([4], thorough=[1, 2])
def test_bytes_a_parameter(comm):
    """2 + 4 + 12 with a float32 gradient, 2 + 2 + 12 without; 6 + 12/d if d ranks share the state. On the grid, in its
    record and in a dry run."""
    for name in BYTES:
        with given(name=name):

            def check(grid):
                for shard in (False, True):
                    with dry_grid(grid) as dry:
                        shared = grid.data.size if shard else 1
                        held, (weights, gradients, state) = held_by(dry, name, shard), BYTES[name]
                        count = 16 * 16 * 4 // (grid.size // grid.data.size)
                        assert held == {
                            "weights": weights * count,
                            "gradients": gradients * count,
                            "state": state * count // shared,
                        }
                    assert held_by(grid, name, shard) == held

            on_each_grid(comm, check, [("ddp", 1), ("fsdp", 1)] if comm.size < 4 else [("hsdp", 2), ("2x1x1", 2)])


def held_by(grid, name, shard):
    precision = Precision("bfloat16", gradient="bfloat16") if name.startswith("all") else Precision.named(name)
    net = nn.MLP(grid, [16] * 5, bias=False, precision=precision, library="torch")
    optimizer = optim.AdamW(net.parameters(), shard_over_data=shard)
    x = DistMatrix.random(grid, (8, 16), dtype="float32", layout=INPUT, library=grid.library("torch"))
    nn.mse(net(x), x).backward()
    optimizer.step()
    if grid.dry_run is None:
        return {kind: grid.ledger.memory[kind] for kind in ("weights", "gradients", "state")}
    held, count = memory(grid), sum(each.box.size for each in net.parameters())
    assert bytes_a_parameter(grid, net) == {kind: held[kind] / count for kind in ("weights", "gradients", "state")}
    return {kind: size for kind, size in held.items() if kind != "work"}


@pytest.mark.parallel([4], thorough=[2])
def test_gradients_travel_in_the_communication_type(comm):
    """Half the bytes of float32 over z and over data, and the full number on request."""

    def moved(grid, **options):
        net = nn.MLP(grid, [16] * 3, precision=Precision("float16", **options))
        x = DistMatrix.random(grid, (8, 16), dtype="float32", layout=INPUT)
        loss = nn.mse(net(x), x)
        grid.ledger.reset()
        loss.backward()
        assert all(parameter.grad is not None for parameter in net.parameters())  # waits for the sums
        return sum(
            entry.received for key, entry in grid.ledger.entries.items() if key.phase in ("reduce dW", "reduce data")
        )

    def check(grid):
        assert 2 * moved(grid) == moved(grid, communication="float32") > 0

    on_each_grid(comm, check, [("ddp", 1), ("fsdp", 1)] if comm.size < 4 else [("hsdp", 2)])


@pytest.mark.parallel([2], thorough=[1])
def test_a_cast_is_rounded_and_its_gradient_comes_back(comm):
    with Grid(comm, "ddp") as grid:
        x = nn.Tensor(spread(grid, np.array([[1 + 2.0**-12, 3.0]]), Layout(), dtype="float32"), requires_grad=True)
        low = nn.cast(x, "float16")
        assert (low.dtype, low.gather().tolist()) == ("float16", [[1.0, 3.0]])
        assert nn.cast(low, "float16") is low
        nn.mse(low, spread(grid, np.zeros((1, 2)), dtype="float32", layout=Layout())).backward()
        assert (x.grad.dtype, x.grad.gather().tolist()) == ("float32", [[1.0, 3.0]])


def loaded_with(door, net, source, folder):
    """Load the float32 weights of a network by a door."""
    state = source.state_dict()
    if door == "load_state_dict":
        net.load_state_dict({name: matrix.gather() for name, matrix in state.items()})
    elif door == "assign":
        for name, parameter in net.named_parameters().items():
            value = state[name]
            parameter.assign(
                DistMatrix.from_global(net.grid, to_library(whole(value), parameter.library), layout=value.layout)
            )
    elif door == "checkpoint":
        load_weights(net, Checkpoints(net.grid, folder).save(1, state))
    else:
        export_torch(source, path := folder / "net.safetensors")
        load_weights(net, path)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("door", ["load_state_dict", "assign", "checkpoint", "safetensors"])
def test_values_with_more_digits_are_kept_before_the_first_step(comm, shared_path, door):
    """Also if the network is settled afterwards, and with an optimizer that splits its state. A network that is not
    trained has no master weights."""

    def check(grid):
        source = nn.MLP(grid, SIZES, nn.gelu, seed=1)
        wanted = {name: whole(each) for name, each in source.state_dict().items()}
        low = dict(zip(("dtype", "library"), LOW[0]))
        for split, before in ((False, True), (True, True), (True, False)):
            net = nn.Sequential(
                grid, nn.Linear(grid, 16, 24, seed=2, **low), nn.gelu, nn.Linear(grid, 24, 8, seed=2, **low)
            )
            make = lambda net=net, split=split: optim.AdamW(net.parameters(), shard_over_data=split)
            optimizer = make() if before else None
            loaded_with(door, net, source, shared_path)
            net.settle(16)
            optimizer = optimizer or make()
            found = optimizer.matrices(net.named_parameters())
            for name, value in wanted.items():
                assert (whole(found[name]) == value).all()
                assert (whole(net.named_parameters()[name]) == value.astype("float32")).mean() < 0.1 or not value.any()
        for frozen in (True, False):
            net = nn.MLP(grid, SIZES, nn.gelu, seed=2, **low)
            net.requires_grad_(not frozen)
            with nullcontext() if frozen else nn.no_grad(grid):
                loaded_with(door, net, source, shared_path)
            assert not any(parameter.master for parameter in net.parameters())
            assert abs(whole(net.named_parameters()["0.weight"]) / wanted["0.weight"] - 1).max() < 2**-8

    on_each_grid(comm, check, GRIDS[2][:1])


@pytest.mark.parallel([2])
def test_a_network_from_a_file_keeps_the_digits_of_the_file(comm, shared_path):
    with Grid(comm, "ddp", library="torch") as grid:
        source = nn.GPT(grid, vocabulary=8, positions=4, layers=1, hidden=8, heads=2, seed=1)
        source.export(path := shared_path / "net.safetensors")
        net = nn.GPT.load(grid, path, precision="bfloat16")
        masters = optim.AdamW(net.parameters()).matrices(net.named_parameters())
        for name, each in source.state_dict().items():
            assert (whole(masters[name]) == whole(each)).all()
