"""Arrays that the tape keeps in 16 or 8 bits, by name, and masks as bits: bytes by formula, and gradients that differ
by rounding only."""

import numpy as np
import pytest
from gates import move_what_is_waited_for
from loops import looped
from networks import (
    INPUT,
    Case,
    adamw,
    alone,
    batch_of,
    bits,
    gradients_of,
    loss_of,
    network_of,
    ordinary,
    spread,
    weights_of,
)

from pmm3d import DistMatrix, Grid, Pmm3dError, nn
from pmm3d.layout import batch_layout
from pmm3d.nn.dry import Facts, dry_grid
from pmm3d.nn.recorded_steps import Replays
from pmm3d.nn.tape import Tape, reachable
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.network import set_messages
from pmm3d.nn.training.step import train_step
from pmm3d.nn.transformer import token_layout

pytestmark = [pytest.mark.parallel([1]), pytest.mark.deadline(240)]
RELU = Case((9, 13, 11, 5), 23, "relu", False)
CODECS = {
    "bfloat16": lambda size: 4 * -(-2 * size // 4),
    "float16": lambda size: 4 * -(-2 * size // 4),
    "int8": lambda size: 4 * -(-(size + 4 * -(-size // 256)) // 4),
    "int8:32": lambda size: 4 * -(-(size + 4 * -(-size // 32)) // 4),
}
"""Codec -> bytes of so many numbers."""


def saved_bytes(out):
    """Name -> bytes of each kept array, in the order of the forward pass. An array that is kept twice counts once."""
    seen = {id(saved): saved for node in reachable(out.node) for saved in node.saved}
    return sorted((saved.name, saved.packed.nbytes) for saved in seen.values())


def gradients_with(grid, forms, case=RELU, **options):
    """(loss, gradients, bytes of kept arrays) of one pass with these forms."""
    nn.keep_as(grid, forms)
    net = network_of(grid, case, **options)
    loss = loss_of(net, case, *batch_of(case, 0), dtype=options.get("dtype", "float64"))
    kept = saved_bytes(loss)
    loss.backward()
    nn.keep_as(grid, {})
    return loss.item(), gradients_of(net), kept


@looped("codec", CODECS)
def test_bytes_are_those_of_the_formula_and_gradients_differ_by_rounding(codec):
    """The forward pass has the same bits. Sizes are odd (DeepSpeed 4386), and one row has less than a block."""
    with alone() as grid:
        plain, exact, before = gradients_with(grid, {}, dropout=0.3)
        loss, rounded, kept = gradients_with(grid, {"linear.*": codec}, dropout=0.3)
        assert loss == plain
        inputs = [columns * RELU.batch for columns in RELU.sizes[:-1]]
        assert [nbytes for name, nbytes in kept if name == "linear.input"] == sorted(map(CODECS[codec], inputs))
        others = [each for each in before if each[0] != "linear.input"]
        assert [each for each in kept if each[0] != "linear.input"] == others
        for name in exact:
            error = np.abs(rounded[name] - exact[name]).max()
            assert error <= 0.02 * np.abs(exact[name]).max() and (error > 0) == name.endswith("weight"), name
        assert bits(gradients_with(grid, {}, dropout=0.3)[1]) == bits(exact)  # off again


def test_masks_take_a_bit_for_each_element():
    """Gist (Jain et al. 2018): the mask of dropout always, that of relu by name. Gradients have the same bits."""
    with alone() as grid:
        sizes = [columns * RELU.batch for columns in RELU.sizes[1:-1]]
        _, exact, before = gradients_with(grid, {}, dropout=0.3)
        _, with_bits, kept = gradients_with(grid, {"relu.output": "bits"}, dropout=0.3)
        wanted = sorted(-(-size // 8) for size in sizes)
        assert [nbytes for name, nbytes in before if name == "dropout.mask"] == wanted
        assert [nbytes for name, nbytes in before if name == "relu.output"] == sorted(8 * size for size in sizes)
        assert [nbytes for name, nbytes in kept if name == "relu.output"] == wanted
        assert bits(with_bits) == bits(exact)


def test_an_array_of_several_operations_is_kept_once():
    """relu keeps its result before the next layer does. The form of the later name is used, and the earlier array is
    let go. Bits are kept beside it, because the layer needs the values."""
    with alone() as grid:
        size = 11 * RELU.batch
        find = lambda forms: [each for each in gradients_with(grid, forms)[2] if each[0].endswith(("input", "output"))]
        inputs = {"linear.input": "int8"}
        alike = [(name, nbytes) for name, nbytes in find(inputs)]
        assert len(alike) == len(find({})) and max(nbytes for _, nbytes in alike) <= CODECS["int8"](13 * RELU.batch)
        x = nn.Tensor(spread(grid, np.ones((40, 30)), INPUT), requires_grad=True)
        for forms, nbytes in (({}, 8 * 1200), (inputs, CODECS["int8"](1200))):
            nn.keep_as(grid, forms)
            same = nn.relayout(nn.relu(x), batch_layout("x"))  # nothing is sent, so it is the same array
            assert [each.nbytes for each in nn.Linear(grid, 30, 8, dtype="float64", cols="x")(same).kept()] == [nbytes]
        beside = find(inputs | {"relu.output": "bits"})
        assert ("relu.output", -(-size // 8)) in beside and ("linear.input", CODECS["int8"](size)) in beside


def test_the_first_name_that_matches_is_used():
    with alone() as grid:
        x = nn.Tensor(spread(grid, np.ones((40, 30)), INPUT), requires_grad=True)
        for forms in ({"tanh.output": "int8", "*": "bfloat16"}, {"*": "int8", "tanh.output": "bfloat16"}):
            nn.keep_as(grid, forms)
            assert [each.nbytes for each in nn.tanh(x).kept()] == [CODECS["int8"](1200)]


@looped("given, kept_as", [("float16", "bfloat16"), ("float16", "float16"), ("float32", "int8:1")])
def test_arrays_that_would_not_be_smaller_are_kept_as_they_are(given, kept_as):
    with alone() as grid:
        nn.keep_as(grid, {"tanh.output": kept_as})
        x = nn.Tensor(DistMatrix.random(grid, (8, 8), dtype=given, layout=INPUT), requires_grad=True)
        (array,) = nn.tanh(x).kept()
        assert array.nbytes == {"float32": 4, "float16": 2}[given] * 64
        if given == "float16":
            nn.sum(nn.tanh(x)).backward()  # the name counts as found


def test_parameters_and_integers_are_never_encoded():
    with alone() as grid:
        nn.keep_as(grid, {"*": "int8"})
        net = nn.Sequential(grid, nn.LayerNorm(grid, 32), nn.Linear(grid, 32, 8), nn.LayerNorm(grid, 8))
        x = nn.Tensor(DistMatrix.random(grid, (16, 32), dtype="float32", layout=INPUT), requires_grad=True)
        labels = DistMatrix.from_global(grid, np.zeros((16, 1), int), layout=batch_layout(None))
        loss = nn.cross_entropy(net(x), labels)
        held = {id(each.shard) for each in net.parameters()}
        kept = [(saved.name, saved.packed) for node in reachable(loss.node) for saved in node.saved]
        assert any(id(array) in held for _, array in kept)
        assert all(name.endswith((".gain", ".bias", ".weight")) for name, array in kept if id(array) in held)
        assert {"cross_entropy.rows", "cross_entropy.columns"} <= {
            each for each, array in kept if "int" in str(array.dtype)
        }
        loss.backward()


def test_pack_gets_the_encoded_array():
    """So a store holds the bytes of the codec (`Tape.pack`); what it returns is waited for, and then decoded."""

    class Fetched:
        def __init__(self, array):
            self.wait = lambda: array

    with alone() as grid:
        exact = gradients_with(grid, {"linear.input": "int8"})[1]
        names = {}

        def pack(name, array):
            names.setdefault(name, set()).add(str(array.dtype).removeprefix("torch."))
            return (array,)

        with Tape.of(grid).set(pack=pack, unpack=lambda held: Fetched(*held)):
            nn.keep_as(grid, {"linear.input": "int8"})
            net = network_of(grid, RELU)
            loss_of(net, RELU, *batch_of(RELU, 0)).backward()
        assert bits(gradients_of(net)) == bits(exact)
        assert names["linear.input"] == {"uint8"} and names["relu.output"] == {"float64"}


@looped("forms, whole", [({"linear.input": "int8"}, 2), ({"linear.input": "int8", "relu.output": "bits"}, 0)])
def test_an_array_with_two_names_is_packed_whole_unless_both_have_codecs(forms, whole):
    """relu packs its output before the next layer names a codec for it, so a store would write it twice."""
    with alone() as grid:
        packed = []
        with Tape.of(grid).set(pack=lambda name, array: packed.append((name, array.nbytes)) or array):
            nn.keep_as(grid, forms)
            loss_of(network_of(grid, RELU), RELU, *batch_of(RELU, 0))
        assert [name for name, nbytes in packed if nbytes in (8 * 23 * 13, 8 * 23 * 11)] == ["relu.output"] * whole


def test_a_name_that_matches_nothing_is_refused_in_each_pass():
    with alone() as grid:
        nn.keep_as(grid, {"gelu.input": "int8"})
        for _ in range(2):
            with pytest.raises(Pmm3dError, match="named 'gelu.input'"):
                loss_of(network_of(grid, RELU), RELU, *batch_of(RELU, 0)).backward()


def test_a_recomputed_part_encodes_in_its_second_pass():
    with alone() as grid:
        _, plain, _ = gradients_with(grid, {"linear.input": "bfloat16"})
        _, again, kept = gradients_with(grid, {"linear.input": "bfloat16"}, recompute=True)
        assert bits(plain) == bits(again)
        assert [name for name, _ in kept].count("linear.input") == 1  # of the layer that is not recomputed


def test_an_empty_matrix():
    with alone() as grid:
        nn.keep_as(grid, {"linear.input": "int8", "relu.output": "bits"})
        net = network_of(grid, RELU)
        loss = nn.sum(net(spread(grid, np.zeros((0, 9)), INPUT)))
        loss.backward()
        assert not any(np.any(gradient) for gradient in gradients_of(net).values())


@looped(
    "forms, words",
    [
        ({"linear.inputs": "int8"}, r"named 'linear.inputs'. Names are .*linear.input, relu.output"),
        ({"linear.input": "int8", "dropout.*": "int8"}, r"named 'dropout.\*'. .* masks are kept as they are"),
        ({"linear.input": "int4"}, 'codecs are "bfloat16"'),
        ({"relu.*": "bits"}, r"enough for relu.output; got 'relu.\*'"),
    ],
)
def test_what_cannot_be_kept_so_is_refused(forms, words):
    with alone() as grid, pytest.raises(Pmm3dError, match=words):
        gradients_with(grid, forms, dropout=0.3)


def test_a_name_of_statistics_of_rows_is_refused():
    """They are never encoded, so the form would do nothing. The message lists what can be encoded."""
    with alone() as grid:
        nn.keep_as(grid, {"attention.lse": "int8"})
        x = nn.Tensor(
            DistMatrix.random(grid, (8, 8), dtype="float32", layout=token_layout(grid, 4)), requires_grad=True
        )
        loss = nn.sum(nn.Attention(grid, 8, 2)(x))
        with pytest.raises(Pmm3dError, match=r"named 'attention.lse'. Names are (?!.*lse).*attention.output"):
            loss.backward()


@pytest.mark.parallel([2])
def test_names_are_looked_for_in_all_stages(comm):
    """Only the last stage has a softmax. A name that no stage has is refused on every rank, after the first step."""
    with Grid(comm, (1, 1, 1), pipe=2) as grid:
        make = lambda stage: nn.Sequential(stage, nn.Linear(stage, 6, 6), nn.tanh, nn.Linear(stage, 6, 6), nn.relu)
        net = nn.Pipeline(grid, make, schedule="1f1b")
        optimizer, stage = adamw(net.parameters()), grid.stage
        batch = lambda seed: tuple(
            DistMatrix.random(stage, (8, 6), seed=seed + k, dtype="float32", layout=INPUT) for k in (0, 1)
        )
        nn.keep_as(grid, {"tanh.output": "bfloat16", "relu.output": "bits"})
        train_step(net, optimizer, nn.mse, [batch(0), batch(2)])
        nn.keep_as(grid, {"tanh.output": "bfloat16", "gelu.input": "int8"})
        with pytest.raises(Pmm3dError, match=r"named 'gelu.input'"):
            train_step(net, optimizer, nn.mse, [batch(0), batch(2)])


@pytest.mark.parallel([2])
def test_replayed_steps_and_dry_runs_encode_too(comm):
    """Replayed steps have the bits of ordinary ones. The bytes of a dry run are those of a run."""
    forms = {"linear.input": "int8", "relu.output": "bits", "*": "bfloat16"}
    found = []
    for ordinary_steps in (False, True):
        with Grid(comm, "ddp") as grid:
            nn.keep_as(grid, forms)
            net = network_of(grid, RELU, dropout=0.3)
            optimizer, held = adamw(net.parameters()), []
            for step in range(8):
                x, y = batch_of(RELU, step)
                pair = spread(grid, x, INPUT), spread(grid, y, batch_layout(None))
                tape = Tape.of(grid)
                with tape.set(**{"pack": lambda name, array: array} if ordinary_steps else {}):
                    held.append(train_step(net, optimizer, nn.cross_entropy, [pair]))
            assert (Replays.of(net).replayed > 0) != ordinary_steps
            found.append(held)
            with dry_grid(grid) as dry:
                nn.keep_as(dry, forms)
                bytes_held = []
                for where in (grid, dry):
                    own = network_of(where, RELU, dropout=0.3)
                    made = lambda matrix: matrix if where is grid else Facts.of(matrix).on(where)
                    bytes_held.append(saved_bytes(nn.cross_entropy(own(made(pair[0])), made(pair[1]))))
                assert bytes_held[0] == bytes_held[1]
    assert found[0] == found[1]


def test_a_torch_module_refuses_forms(comm):
    torch = pytest.importorskip("torch")
    from pmm3d.torch import Linear3D

    with Grid(comm) as grid:
        layer = Linear3D(grid, 4, 4)
        nn.keep_as(grid, {"linear.input": "int8"})
        with pytest.raises(Pmm3dError, match="saved_tensors_hooks"):
            layer(torch.ones(2, 4))
        nn.keep_as(grid, {})
        layer(torch.ones(2, 4))


@pytest.mark.parallel([2])
@pytest.mark.numpy_only("a plain step of torch arrays takes 128 bytes less than its dry run")
def test_the_peak_is_that_of_a_dry_run(comm):
    """Largest bytes of saved arrays and of all work memory, with encoded gathers too, to the byte."""
    case, found = Case((96, 320, 256, 128), 512, "relu", False), []
    with Grid(comm, "fsdp") as grid, dry_grid(grid) as dry, ordinary():
        move_what_is_waited_for(grid.engine)
        batch = [spread(grid, x, layout) for x, layout in zip(batch_of(case, 0), (INPUT, batch_layout(None)))]
        for forms, weights in (({}, ""), ({"linear.input": "int8", "relu.output": "bits"}, "int8")):
            for where in (grid, dry):
                Tape.of(where).parallel.compression = nn.Compression(weights=weights)
                nn.keep_as(where, forms)
                net = network_of(where, case, dropout=0.3)
                optimizer = adamw(net.parameters())
                own = batch if where is grid else [Facts.of(each).on(where) for each in batch]
                where.workspace.clear()
                where.workspace.most_lent = where.workspace.in_use()
                for _ in range(2):
                    train_step(net, optimizer, nn.cross_entropy, [tuple(own)])
                found.append((where.workspace.most_lent, where.workspace.allocated))
                del net, optimizer
    plain, of_dry, encoded, encoded_of_dry = found
    assert plain == of_dry and encoded == encoded_of_dry
    assert encoded[0] < plain[0]


def test_a_configuration_sets_what_is_in_fewer_bits(comm):
    """[memory] of a file: keep, weights and stages. What cannot be done is refused when the file is read."""
    read = lambda **memory: checked({"data": {"file": "nowhere.h5", "batch_size": 8}, "memory": memory})
    with Grid(comm) as grid:
        set_messages(read(keep={"relu.output": "bits", "linear.*": "int8:64"}, weights="int8", stages="float16"), grid)
        tape, array = Tape.of(grid), np.ones((64, 64))
        assert tape.parallel.compression == nn.Compression(weights="int8", stages="float16")
        assert [tape.forms.of(name, array).codec.name for name in ("relu.output", "linear.input")] == ["bits", "int8"]
        set_messages(read(), grid)
        assert tape.forms is None and tape.parallel.compression == nn.Compression()
    for wrong in ({"keep": {"linear.input": "bits"}}, {"keep": {"*": "int4"}}, {"weights": "powersgd:4"}):
        with pytest.raises(Pmm3dError, match="memory"):
            read(**wrong)


@pytest.mark.parallel([2])
@pytest.mark.numpy_only("a store moves the bytes of all arrays alike")
def test_a_store_holds_the_encoded_arrays(comm, shared_path):
    """First the codec, then the store: the store gets as many bytes as arrays in memory would have, and no bit
    changes."""
    case, found = Case((64, 96, 80, 48), 256, "relu", False), []
    with Grid(comm, "ddp") as grid:
        store = nn.Store(grid, shared_path)
        batch = tuple(spread(grid, x, layout) for x, layout in zip(batch_of(case, 0), (INPUT, batch_layout(None))))
        for stored in (False, True):
            nn.keep_as(grid, {"linear.input": "int8", "relu.output": "bits"})
            nn.offload(grid, store if stored else None, least=4096, leaving=0, ahead=0)
            net = network_of(grid, case, dropout=0.3)
            optimizer = adamw(net.parameters())
            told = [train_step(net, optimizer, nn.cross_entropy, [batch]) for _ in range(6)]
            found.append((told, bits(weights_of(net)), Replays.of(net).replayed))
        nn.offload(grid, None)
        rows = 256 // comm.size
        of_inputs = [CODECS["int8"](rows * columns) for columns in (64, 96, 80)]
        assert found[0] == found[1] and found[0][2] > 0
        a_pass = sum([*of_inputs, 8 * rows * 48])  # with the logits; masks are below `least`
        assert store.written == 7 * a_pass  # of 6 steps; one runs twice, because its program is compared
