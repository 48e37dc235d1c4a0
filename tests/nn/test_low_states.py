"""States of optimizers in 8 and 16 bits: codes, bytes, checkpoints on every grid, refusals."""

import re
import runpy
import tomllib
from contextlib import contextmanager
from itertools import combinations, product
from pathlib import Path

import h5py
import numpy as np
import pytest
from loops import given, looped
from networks import ALL_GRIDS, alone, bits, on_grid
from samples import TESTED, to_library, to_numpy

from pmm3d import DistMatrix, DTypeError, Grid, Pmm3dError, nn
from pmm3d.arrays import NumpyLibrary
from pmm3d.io import Checkpoints
from pmm3d.layout import GridShape, batch_layout
from pmm3d.nn import optim
from pmm3d.nn.dry import dry_grid, memory
from pmm3d.nn.low_states import BlockState, LowState
from pmm3d.nn.training import TrainState, build, evaluate
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.dry_step import DrySteps

pytestmark = pytest.mark.deadline(240)
FORMS = "int8", "bfloat16"
ROOT = Path(__file__).parents[2]


class Sum(optim.Optimizer):
    """An optimizer of a user. Its state is the sum of the gradients."""

    state_names = ("sum",)

    def update(self, weight, gradient, state, options):
        state[0] += gradient


@contextmanager
def state_of(shape, states, library=TESTED):
    """The state of a weight of this shape, on one rank."""
    with alone() as grid:
        net = nn.Linear(grid, *shape, bias=False, library=library)
        optimizer = Sum(net.parameters(), 1.0, states=states)
        optimizer.matrices()
        yield optimizer._state[net.weight]["sum"]


def put(state, values):
    state.opened()[...] = state.library.from_numpy(values.astype("float32"), "float32")
    state.close()
    return np.array(state.library.to_numpy(state.opened()))


def samples(rows=16, cols=300):
    random = np.random.default_rng(0)
    normal = random.standard_normal((rows, cols))
    wide = normal * np.exp(3 * random.standard_normal((rows, cols)))
    return {
        "normal": normal,
        "outliers": wide,
        "squares": wide**2,
        "with zeros": wide * (random.random((rows, cols)) < 0.5),
        "large": normal * 1e37,
        "small": normal * 1e-30,
        "smallest": normal * 1e-44,
        "none": 0 * normal,
    }


@pytest.mark.parallel([1])
@pytest.mark.parametrize("library", ["numpy", pytest.param("torch", marks=pytest.mark.thorough)])
def test_codes_of_8_bits_are_near_never_zero_and_encode_to_themselves(comm, library):
    """bitsandbytes: a linear code of the mean squares gives 0 for small ones, and the training diverges."""
    with state_of((16, 300), "int8", library) as state:
        for name, values in samples().items():
            with given(values=name):
                values = values.astype("float32")
                decoded = put(state, values)
                codes, scales = (np.array(state.library.to_numpy(each)) for each in (state.codes, state.scales))
                assert (np.sign(decoded) == np.sign(values)).all()
                for block in (slice(0, 256), slice(256, 300)):
                    exact, near = values[:, block].astype("float64"), decoded[:, block].astype("float64")
                    largest = np.maximum(np.abs(exact).max(1, keepdims=True), 2.0**-94)
                    codes_above_0 = np.where((exact < 0).any(1, keepdims=True), 127, 255)
                    steps = (np.abs(each / largest) ** 0.25 * codes_above_0 for each in (exact, near))
                    before, after = steps
                    far = np.abs(before - after) > np.where(after < 1.5, 1, 0.501)
                    assert not far.any()
                    if largest.min() > 2.0**-94:
                        at = np.abs(exact).argmax(1)[:, None]
                        assert (np.take_along_axis(near, at, 1) == np.take_along_axis(exact, at, 1)).all()
                assert put(state, decoded).tobytes() == decoded.tobytes()
                if name != "none":
                    for before, now in ((codes, state.codes), (scales, state.scales)):
                        assert (state.library.to_numpy(now) == before).all()


@pytest.mark.parallel([1])
def test_a_number_that_is_not_finite_makes_its_block_nan_and_no_other(comm):
    for number in (np.nan, np.inf, -np.inf, np.uint32(2**31 - 1).view("float32")):  # the last is the largest NaN
        values = np.ones((16, 512), "float32")
        values[3, 260] = number
        for states, where in (("int8", (3, slice(256, 512))), ("bfloat16", (3, 260))):
            with state_of(values.shape, states) as state, given(number=number, states=states):
                expected = values.copy()
                expected[where] = np.nan if states == "int8" else number
                assert np.array_equal(put(state, values), expected, equal_nan=True)


@pytest.mark.parallel([1])
@pytest.mark.numpy_only("the test compares the libraries")
def test_codes_have_the_same_bits_in_all_libraries(comm):
    pytest.importorskip("torch")
    for states, library in product(FORMS, ("torch", "standin")):
        with state_of((16, 300), states, "numpy") as one, state_of((16, 300), states, library) as other:
            for name, values in samples().items():
                with given(values=name, states=states, library=library):
                    assert put(one, values).tobytes() == put(other, values).tobytes()


@pytest.mark.parallel([1])
def test_changes_below_half_a_unit_add_up_in_bfloat16(comm):
    """Rounding to the nearest number would leave 1: the distance of numbers of bfloat16 above 1 is 1/128."""
    with alone() as grid:
        net = nn.Linear(grid, 64, 128, bias=False, library=TESTED)
        optimizer = Sum(net.parameters(), 1.0, states="bfloat16")
        optimizer.matrices()["optimizer/weight/sum"].local[...] = 1
        for _ in range(128):
            give(net.weight, np.full(net.weight.shape, 2.0**-10))
            optimizer.step()
        found = to_numpy(optimizer.matrices()["optimizer/weight/sum"].local)
    assert 1 < found.min() < found.max() < 1.5
    # A step has a variance of at most (1/128)^2 / 4. There are 128 steps, and 8192 elements.
    assert abs(found.mean() - 1.125) < 5 * (128**0.5 / 256) / 8192**0.5


class Many(Sum):
    state_names = tuple("abcdef")

    def update(self, weight, gradient, state, options):
        for each in state:
            each += gradient


@pytest.mark.parallel([1])
def test_each_of_many_states_has_random_bits_of_its_own(comm):
    """A word has the bits of four states."""
    with alone() as grid:
        net = nn.Linear(grid, 64, 128, bias=False, library=TESTED)
        optimizer = Many(net.parameters(), 1.0, states="bfloat16")
        for _ in range(64):
            give(net.weight, np.full(net.weight.shape, 1.001))
            optimizer.step()
        found = [to_numpy(each.local).copy() for each in optimizer.matrices().values()]
    assert np.allclose([each.mean() for each in found], 64 * 1.001, rtol=3e-4)
    assert all((one == other).mean() < 0.9 for one, other in combinations(found, 2))


def give(parameter, gradient, library=TESTED):
    """Set the gradient of a parameter on one rank."""
    buffer = parameter.grad_buffer
    buffer.array, buffer.layout = to_library(gradient, library, parameter.precision.gradient), parameter.layout


@pytest.mark.parallel([1])
@looped("states", FORMS)
def test_gradients_of_many_magnitudes_do_not_diverge(comm, states):
    """bitsandbytes: the mean square of a small gradient, beside large ones in its block, must not become 0."""
    for small, near in ((1e-3, 0.05), (1e-6, 0.21)):  # below 1e-5 in a block, mean squares are too large
        random = np.random.default_rng(1)
        magnitudes = np.where(random.random((32, 256)) < 0.02, 1.0, small)
        with alone() as grid:
            nets = [nn.Linear(grid, 32, 256, bias=False, seed=0, library=TESTED) for _ in range(2)]
            optimizers = [optim.AdamW(net.parameters(), 0.01, states=each) for net, each in zip(nets, ("", states))]
            before = to_numpy(nets[0].weight.gather()).copy()
            for _ in range(20):
                gradient = magnitudes * (1 + 0.5 * random.standard_normal(magnitudes.shape))
                for net, optimizer in zip(nets, optimizers):
                    give(net.weight, gradient)
                    optimizer.step()
            exact, found = (to_numpy(net.weight.gather()) - before for net in nets)
        with given(small=small):
            # In 20 steps of 0.01, a weight moves by 0.2. With a linear code, it moves by more than 1000.
            assert np.abs(found).max() < 0.3
            assert np.abs(found - exact)[magnitudes == 1].max() < 0.02
            assert np.median(np.abs(found - exact)) < near


@pytest.mark.parallel([1])
def test_no_bit_depends_on_the_slices(comm, monkeypatch):
    """Also with rows that are longer than a slice."""
    found = {}
    for slices in (NumpyLibrary.slice_elements, 700):
        monkeypatch.setattr(NumpyLibrary, "slice_elements", slices)
        for states in FORMS:
            with alone() as grid:
                net = nn.Linear(grid, 6, 1100, bias=False, seed=0, library=TESTED)
                optimizer = optim.AdamW(net.parameters(), 0.01, states=states)
                for step in range(3):
                    give(net.weight, np.random.default_rng(step).standard_normal((6, 1100)))
                    optimizer.step(factor=0.5)
                values = {"weight": net.weight.gather(), **{n: m.gather() for n, m in optimizer.matrices().items()}}
                assert found.setdefault(states, bits(values)) == bits(values), states


SIZES = 24, 600
"""Sizes that some axes do not divide. Blocks of the states are cut where columns are split."""


def step_of(net, number):
    """A backward pass whose gradients do not depend on the weights, and are exact: sums of integers over 8 rows."""
    layouts = {SIZES[0]: batch_layout("y"), SIZES[1]: batch_layout("x")}
    numbers = lambda cols: DistMatrix.from_function(
        net.grid,
        (8, cols),
        lambda i, j: (3 * i + 5 * j + number) % 7 - 3,
        dtype=net.weight.dtype,
        layout=layouts[cols],
        library=net.weight.library.kind,
    )
    net(numbers(SIZES[0])).backward(numbers(SIZES[1]))


def trainer(grid, states, shard=False, kind=optim.AdamW, **options):
    net = nn.Linear(grid, *SIZES, seed=1, library=TESTED, **options)
    return TrainState(net, kind(net.parameters(), lr=0.01, states=states, shard_over_data=shard))


def advance(state, first, last):
    for step in range(first, last):
        step_of(state.network, step)
        state.optimizer.step()


def values_of(state):
    return {name: to_numpy(each.gather(), TESTED).copy() for name, each in state.matrices().items()}


OTHERS = [((1, 1, 1), 4), ((2, 1, 1), 2), ((1, 1, 2), 2)]


@pytest.mark.parallel([4])
def test_bits_are_equal_on_every_grid_and_with_zero(comm, shared_path):
    """bfloat16 on each grid; int8 if no block is cut. A run continues on any grid, also from or to plain states."""
    expected = {}
    for number, (shape, data) in enumerate([((1, 1, 1), 4), *ALL_GRIDS[4], *OTHERS]):
        shard = ["states", False, "gradients"][number % 3]
        for states in FORMS:
            with given(shape=shape, data=data, shard=shard, states=states), Grid(comm, shape, data) as grid:
                state = trainer(grid, states, shard)
                advance(state, 0, 3)
                found = values_of(state)
                before = expected.setdefault(states, found)
                if states == "bfloat16" or shape[0] == 1:
                    assert bits(found) == bits(before)
                assert all(np.allclose(found[name], before[name], rtol=0.3, atol=0.02) for name in before)


@pytest.mark.parallel([4])
def test_checkpoints_move_between_forms_and_grids(comm, shared_path, monkeypatch):
    """A save makes no whole float32 state, and a load one at a time."""
    opened, most = set(), [0]
    plain_opened, plain_close = LowState.opened, LowState.close
    monkeypatch.setattr(LowState, "opened", lambda self: (opened.add(self), plain_opened(self))[1])

    def close(self):
        most[0] = max(most[0], len(opened))
        opened.discard(self)
        plain_close(self)

    monkeypatch.setattr(LowState, "close", close)
    shape, data = (1, 2, 1), 2
    for states in FORMS:
        opened.clear()
        with Grid(comm, shape, data) as grid, given(states=states):
            kept = Checkpoints(grid, shared_path / states)
            whole = trainer(grid, states, "states")
            advance(whole, 0, 2)
            whole.save(kept)
            assert not opened
            saved = values_of(whole)
            contents = kept.contents(kept.latest())
            assert contents["optimizer/weight/square"] == (SIZES, "float32")
            advance(whole, 2, 4)
            most[0] = 0
            again = trainer(grid, states, "states")
            opened.clear()
            assert again.resume(kept)["step"] == 2
            assert most[0] == 1 and not opened
            assert bits(values_of(again)) == bits(saved)
            advance(again, 2, 4)
            assert bits(values_of(again)) == bits(values_of(whole))
        for (other, copies), into in zip([((2, 1, 1), 2), ((4, 1, 1), 1), ((1, 1, 2), 2)], ("", *FORMS)):
            with Grid(comm, other, copies) as grid, given(states=states, into=into):
                moved, kept = trainer(grid, into), Checkpoints(grid, shared_path / states)
                moved.resume(kept, kept.candidates()[-1])
                if into == "int8":  # a block is of columns of the whole matrix
                    *_, c0, c1 = moved.network.weight.box
                    scales = moved.optimizer._state[moved.network.weight]["mean"].scales
                    assert scales.shape[1] == len({column // 256 for column in range(c0, c1)})
                found = values_of(moved)
                tight = 0 if into in ("", states) and not (into == "int8" and other[0] > 1) else 0.05
                for name, value in saved.items():
                    assert np.allclose(found[name], value, rtol=tight, atol=tight * np.abs(value).max()), name
                advance(moved, 2, 3)
        with Grid(comm, (1, 1, 1), 4) as grid:  # plain states are rounded when they are loaded
            plain, low, kept = trainer(grid, ""), trainer(grid, states), Checkpoints(grid, shared_path / f"of {states}")
            advance(plain, 0, 2)
            plain.save(kept)
            low.resume(kept)
            exact, found = values_of(plain), values_of(low)
            for name, value in exact.items():
                assert np.allclose(found[name], value, rtol=0.02, atol=0.02 * np.abs(value).max()), name


@pytest.mark.parallel([1, 4])
def test_bytes_are_those_of_the_formula_and_of_a_dry_run(comm):
    """n (1 + 4/256) bytes of a state of n elements in blocks of 256 columns, and 2 n in bfloat16."""
    cases = [((1, 1, 1), 1)] if comm.size == 1 else [((2, 1, 1), 2), ((1, 1, 2), 2), ((1, 1, 1), 4)]
    for shape, data in cases:
        for states, each in (("int8", 1 + 4 / 256), ("bfloat16", 2), ("", 4)):
            with Grid(comm, shape, data) as grid, given(shape=shape, data=data, states=states):
                held = []
                for here in (grid, dry_grid(grid)):
                    net = nn.Linear(here, 64, 1024, bias=False, seed=0, library=TESTED)
                    optimizer = optim.AdamW(net.parameters(), 0.01, states=states, shard_over_data=True)
                    x = DistMatrix.random(here, (8, 64), dtype="float32", layout=batch_layout("y"), library=TESTED)
                    nn.mse(net(x), net(x).value).backward()
                    optimizer.step()
                    held.append(here.ledger.memory["state"])
                    optimizer.matrices()
                    if here is not grid:
                        assert memory(here)["state"] == held[0]
                own = 64 * 1024 // comm.size
                assert held == [2 * own * each] * 2


@pytest.mark.parallel([1])
@looped("states", FORMS)
def test_a_state_of_float32_is_counted_until_the_next_step(comm, states):
    """`gather()` makes it, and its writes count."""
    with alone() as one:
        for grid in (one, dry_grid(one)):
            net = nn.Linear(grid, 64, 64, bias=False, library=TESTED)
            optimizer = optim.AdamW(net.parameters(), 0.01, states=states)
            x = DistMatrix.random(grid, (8, 64), dtype="float32", layout=batch_layout("y"), library=TESTED)
            held = []
            for _ in range(2):
                nn.mse(net(x), x).backward()
                optimizer.step()
                held.append(grid.ledger.memory["state"])
                optimizer.matrices()["optimizer/weight/mean"].gather()
                held.append(grid.ledger.memory["state"])
                assert grid is one or memory(grid)["state"] == held[-1]
            assert held == held[:2] * 2 and held[1] - held[0] == 4 * 64 * 64


@pytest.mark.parallel([1])
def test_small_parameters_and_vectors_keep_float32(comm):
    with alone() as grid:
        net = nn.MLP(grid, [64, 63, 64, 64], seed=0, library=TESTED)  # 4032 and 4032, then 4096 elements
        optimizer = optim.Lion(net.parameters(), states="int8")
        optimizer.matrices()
        kinds = {name: type(optimizer._state[each]["momentum"]) for name, each in net.named_parameters().items()}
    assert [name for name, kind in kinds.items() if kind is BlockState] == ["4.weight"]


class Typed(Sum):
    def state_forms(self, parameter, options):
        return {"sum": optim.StateForm(dtype="int8")}


@pytest.mark.parallel([2])
@on_grid("ddp")
def test_what_cannot_be_done_is_refused_on_every_rank(grid, fails):
    net = nn.Linear(grid, 64, 64, library=TESTED)
    wide = nn.Linear(grid, 64, 64, dtype="float64", library=TESTED)
    of = lambda kind, states="int8", weights=net: lambda: kind(weights.parameters(), 0.1, states=states)
    rows = "for optimizers that change each element by itself, such as AdamW.* leave states out"
    for kind, text, call in (
        (Pmm3dError, 'AdamW: states is "int8" or "bfloat16", or "" .*; got \'int4\'', of(optim.AdamW, "int4")),
        (Pmm3dError, f"Muon: states = 'int8' is {rows}", of(optim.Muon)),
        (Pmm3dError, f"Adafactor: states = 'bfloat16' is {rows}", of(optim.Adafactor, "bfloat16")),
        (Pmm3dError, f"SM3: states = 'int8' is {rows}", of(optim.SM3)),
        (DTypeError, "SGD: states = 'int8' .* weight is float64: leave states out", of(optim.SGD, weights=wide)),
        (Pmm3dError, "the state sum has a type of its own: leave", lambda: of(Typed)().matrices()),
    ):
        with given(text=text):
            fails(kind, text, call)


@pytest.mark.parallel([1])
@looped("states", FORMS)
def test_factors_skipped_steps_groups_and_master_weights(comm, states):
    with alone() as grid:
        found = []
        for factor in (1.0, 0.25):
            net = nn.Linear(grid, 64, 64, seed=0, library=TESTED)
            groups = [{"params": [net.weight], "lr": 0.1}, {"params": [net.bias]}]
            optimizer = optim.SGD(groups, 0.01, momentum=0.9, states=states)
            for step in range(3):
                gradient = np.random.default_rng(step).standard_normal((64, 64))
                give(net.weight, gradient / factor)
                if step == 1:
                    before = optimizer._state[net.weight]["momentum"].codes.copy() if TESTED == "numpy" else None
                    optimizer._skip()
                    if before is not None:
                        assert (optimizer._state[net.weight]["momentum"].codes == before).all()
                    continue
                optimizer.step(factor=factor, keep_gradients=step == 2)
            found.append(bits({"weight": net.weight.gather()}))
        assert found[0] == found[1]
        pytest.importorskip("torch")
        net = nn.Linear(grid, 64, 64, seed=0, precision="bfloat16", library="torch", bias=False)
        optimizer = optim.AdamW(net.parameters(), 1e-3, states=states)
        give(net.weight, np.ones((64, 64)), "torch")
        optimizer.step()
        assert net.weight.master.dtype == "float32" and to_numpy(net.weight.master.local).std() > 0
        assert (to_numpy(net.weight.shard.float()) != 0).any()


@pytest.mark.parallel([1])
@looped("states, each", [("int8", 1), ("bfloat16", 2)])
def test_a_plan_counts_the_states_of_a_configuration(comm, states, each):
    config = lambda **keys: checked(
        {
            "data": {"file": "nowhere.h5", "batch_size": 8},
            "network": {"hidden": [512], "bias": False, "library": TESTED},
            "optimizer": keys,
        }
    )
    shape = GridShape(1, 1, 1)
    plain, low = (DrySteps(config(**keys), (512, 512)).of(shape, 1) for keys in ({}, {"states": states}))
    elements = 2 * 2 * 512 * 512
    assert plain.memory["state"] == 4 * elements
    assert low.memory["state"] == each * elements + (elements // 64 if states == "int8" else 0)
    with pytest.raises(Pmm3dError, match="optimizer.states"):
        config(states="int4")


@pytest.mark.parallel([2])
def test_a_configuration_trains_and_resumes_with_another_form(comm, shared_path, caplog):
    """The record of the run has the bytes of the plan, and a change of the form is told."""
    if comm.rank == 0:
        x = np.random.default_rng(0).standard_normal((60, 64)).astype("float32")
        with h5py.File(shared_path / "data.h5", "w") as file:
            file["x"], file["y"] = x, np.arange(60) % 3
    comm.barrier()
    for number, states in enumerate(("int8", "bfloat16", "")):
        tables = {
            "grid": {"shape": "ddp"},
            "data": {"file": str(shared_path / "data.h5"), "batch_size": 20, "validation": 0.0},
            "training": {"folder": str(shared_path / "run"), "epochs": number + 1, "log_every": 1},
            "network": {"hidden": [64], "library": TESTED},
            "optimizer": {"states": states, "shard_over_data": "states"},
        }
        config = checked(tables)
        with build.trainer(config, comm) as run, given(states=states):
            if number:
                assert run.resume() is not None
                if comm.rank == 0:
                    assert f"optimizer.states was '{FORMS[number - 1]}', is '{states}'" in caplog.text
            assert run.run()
            said = DrySteps(config, (64, 3, True, 60)).of(run.grid.shape, 2, comm.rank).memory["state"]
            assert run.state.network.grid.ledger.memory["state"] == said


@pytest.mark.parallel([1])
def test_the_program_of_the_page_runs(comm, capsys):
    section = (ROOT / "docs" / "memory.md").read_text().partition("## States of optimizers")[2]
    program = re.search(r"^```python\n(.*?)^```$", section, re.M | re.S)[1]
    exec(program.replace("MPI.COMM_WORLD", "comm"), {"comm": comm})
    assert capsys.readouterr().out == "2.05 bytes a parameter\n"


@pytest.mark.nightly("three trainings of some seconds")
@pytest.mark.parallel([1])
@pytest.mark.deadline(900)
def test_the_digits_are_as_right_as_with_float32(comm, shared_path):
    """With the configuration of `make run`, on one rank."""
    runpy.run_path(str(ROOT / "apps" / "digits.py"))["main"](str(shared_path / "digits.h5"))
    tables = tomllib.loads((ROOT / "apps" / "digits.toml").read_text()) | {"grid": {}}
    tables["data"]["file"] = str(shared_path / "digits.h5")
    found = {}
    for states in ("", *FORMS):
        limits = {"folder": f"{shared_path}/{states}", "evaluate_every": 10**6, "checkpoint_every": 10**6}
        tables["optimizer"]["states"], tables["training"] = states, tables["training"] | limits
        with build.trainer(checked(tables), comm) as run:
            assert run.run()
            found[states] = evaluate(run.state.network, run.validation, nn.cross_entropy)["accuracy"]
    assert max(abs(found[states] - found[""]) for states in FORMS) <= 0.005, found
