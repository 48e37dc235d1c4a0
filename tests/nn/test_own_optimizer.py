"""Optimizers of the user: states of other shapes and types on every grid, and `optimizer.build = "lion.py:Lion"`."""

import re
import shutil
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest
from array_api_compat import array_namespace
from loops import given
from networks import bits, weights_of
from samples import TESTED, to_library, to_numpy

from pmm3d import DistMatrix, DTypeError, Grid, Pmm3dError, nn
from pmm3d.action import UPDATE, Action
from pmm3d.io import Checkpoints
from pmm3d.layout import GridShape, batch_layout
from pmm3d.model.ranking import nominal
from pmm3d.nn import Precision, optim
from pmm3d.nn.dry import dry_grid
from pmm3d.nn.training import TrainState, build
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.dry_step import DrySteps, Step
from pmm3d.nn.training.scaled_step import ScaledStep
from pmm3d.nn.training.step import train_step

pytestmark = pytest.mark.deadline(240)
PAGE = Path(__file__).parents[2] / "docs" / "training.md"
LION, FACTORED = re.findall(r"^```python\n((?:# lion.py|class Factored).*?)^```$", PAGE.read_text(), re.M | re.S)


class EightBit(optim.Optimizer):
    """A row factor, a column factor, a scalar and an int8 state. On integers, all sums are exact, so the bits do not
    depend on the grid."""

    state_names = ("rows", "columns", "largest", "momentum")

    def state_forms(self, parameter, options):
        forms = {
            "rows": optim.StateForm(cols=1),
            "columns": optim.StateForm(rows=1),
            "largest": optim.StateForm(1, 1),
            "momentum": optim.StateForm(dtype="int8"),
        }
        if parameter.is_vector:
            del forms["rows"]
        return forms

    def update_shard(self, shard):
        xp, state, gradient = array_namespace(shard.weight), shard.state, shard.gradient
        momentum = state["momentum"] * state["largest"] / 256 + gradient
        state["largest"][...] = shard.max(xp.abs(momentum))
        state["momentum"][...] = xp.round(momentum * 64 / (state["largest"] + 1))
        for name, dim in (("rows", 1), ("columns", 0)):
            if name in state:
                state[name][...] = state[name] / 2 + shard.sum(gradient * gradient, dim)
        scale = state["columns"] + 1
        if "rows" in state:
            scale = scale * state["rows"] / (shard.sum(state["rows"], 0) + 1)
        shard.weight -= shard.options["lr"] * momentum / (scale + 1)


def step_of(net, optimizer, number, precision):
    """A step whose gradients do not depend on the weights: integers, with a sum over 16 rows."""
    grid, dtype = net.grid, precision.compute
    numbers = lambda cols: DistMatrix.from_function(
        grid,
        (16, cols),
        lambda i, j: (3 * i + 5 * j + number) % 7 - 3,
        dtype=dtype,
        layout=batch_layout("y" if cols == 6 else "x"),
        library="torch" if precision.compute == "bfloat16" else TESTED,
    )
    net(numbers(6)).backward(numbers(5))
    optimizer.step()


GRIDS = [((1, 1, 1), 4), ((2, 1, 2), 1), ((1, 2, 1), 2), ((1, 1, 2), 2), ((4, 1, 1), 1)]


@pytest.mark.parallel([4])
@pytest.mark.parametrize("low", [False, True], ids=["float64", "bfloat16"])
def test_states_of_any_shape_and_type_continue_on_any_grid(comm, shared_path, low):
    pytest.importorskip("torch")
    precision = Precision.named("bfloat16" if low else "float64")

    def begun(grid, shard):
        net = nn.Linear(
            grid, 6, 5, seed=1, precision="bfloat16" if low else None, dtype="bfloat16" if low else "float64",
            library="torch" if low else TESTED,
        )  # fmt: skip
        return TrainState(net, EightBit(net.parameters(), lr=0.25, shard_over_data=shard))

    expected = None
    for number, (shape, data) in enumerate(GRIDS):
        shard = [False, "states", "gradients"][number % 3]
        with given(shape=shape, data=data, shard=shard), Grid(comm, shape, data) as grid:
            state = begun(grid, shard)
            kept = Checkpoints(grid, shared_path / "runs")
            if not number:
                for step in range(3):
                    step_of(state.network, state.optimizer, step, precision)
                state.save(kept)
                shapes = {name: (each.shape, each.dtype) for name, each in state.optimizer.matrices().items()}
                assert shapes["optimizer/weight/rows"][0] == (6, 1)
                assert shapes["optimizer/weight/columns"][0] == shapes["optimizer/bias/columns"][0] == (1, 5)
                assert shapes["optimizer/weight/largest"][0] == (1, 1)
                assert shapes["optimizer/weight/momentum"] == ((6, 5), "int8")
                assert "optimizer/bias/rows" not in shapes
            else:
                assert state.resume(kept)["step"] == 3
            for step in range(3, 6):
                step_of(state.network, state.optimizer, step, precision)
            found = {name: np.asarray(each.gather()) for name, each in state.matrices().items()}
            expected = expected or found
            assert all(np.abs(each.astype("float64")).max() > 0 for each in found.values())
            assert bits(found) == bits(expected)


@pytest.mark.parallel([2])
def test_states_of_a_pipeline_load_without_stages(comm, shared_path):
    def begun(grid):
        make = lambda grid: nn.MLP(grid, [6, 8, 4], seed=1, dtype="float64")
        net = nn.Pipeline(grid, make) if grid._has_stages else make(grid)
        return TrainState(net, EightBit(net.parameters(), lr=0.01))

    def steps(state, numbers):
        for number in numbers:
            stage = state.network.grid
            x, y = (
                DistMatrix.random(stage, (16, cols), dtype="float64", seed=number + cols, layout=batch_layout("y"))
                for cols in (6, 4)
            )
            train_step(state.network, state.optimizer, nn.mse, [(x, y)] * 2)

    with Grid(comm, (1, 1, 1), axes={"pipe": 2}) as grid:
        state = begun(grid)
        steps(state, range(2))
        state.save(Checkpoints(grid, shared_path / "runs"))
        steps(state, range(2, 4))
        state.save(Checkpoints(grid, shared_path / "expected"))
    with Grid(comm, (1, 2, 1)) as grid:
        state, expected = begun(grid), begun(grid)
        state.resume(Checkpoints(grid, shared_path / "runs"))
        steps(state, range(2, 4))
        expected.resume(Checkpoints(grid, shared_path / "expected"))
        for name, matrix in state.matrices().items():
            one, other = (to_numpy(each.local).astype("float64") for each in (matrix, expected.matrices()[name]))
            difference = np.abs(one - other).max(initial=0)
            assert difference <= (1 if matrix.dtype == "int8" else 1e-9), name


@pytest.mark.parallel([1])
def test_a_class_that_does_not_fit_its_states_is_refused(comm, fails):
    class NoName(optim.Optimizer):
        def state_forms(self, parameter, options):
            return {"rows": optim.StateForm(cols=1)}

        def update(self, weight, gradient, state, options):
            pass

    class Flat(NoName):
        state_names = ("rows",)

    class Text(NoName):
        state_names = "rows"

    class NoType(Flat):
        def state_forms(self, parameter, options):
            return {"rows": optim.StateForm(dtype="int3")}

    class Wrong(EightBit):
        def update_shard(self, shard):
            shard.sum(shard.state["rows"])

    with Grid(comm) as grid:
        net = nn.Linear(grid, 3, 2, dtype="float64")
        for kind, text in (
            (NoName, "state_forms has rows: add the name to state_names"),
            (Text, r'state_names is one text: write a tuple, \("rows",\)'),
            (Flat, "the state rows has not the shape of the weight: define update_shard"),
        ):
            fails(Pmm3dError, text, kind(net.parameters(), 0.1).matrices)
        fails(DTypeError, "'int3' names no element type", NoType(net.parameters(), 0.1).matrices)
        x, y = (
            DistMatrix.from_global(grid, to_library(np.ones((2, cols))), layout=batch_layout(None)) for cols in (3, 2)
        )
        nn.mse(net(x), y).backward()
        fails(Pmm3dError, "needs a dim: 0", Wrong([net.weight], 0.1).step)


@pytest.mark.parallel([2])
def test_a_wrong_sum_of_one_rank_is_an_error_on_all(comm, fails):
    """The rank with one column of the weight cannot see that a column is no matrix."""

    class Wrong(EightBit):
        def update_shard(self, shard):
            shard.sum(shard.state["rows"])

    for shape in ((2, 1, 1), (1, 2, 1)):
        with given(shape=shape), Grid(comm, shape) as grid:
            net = nn.Linear(grid, 3, 3, dtype="float64", bias=False)
            x = DistMatrix.from_global(grid, to_library(np.ones((2, 3))), layout=batch_layout(None))
            nn.mse(net(x), x).backward()
            fails(Pmm3dError, "needs a dim: 0", Wrong([net.weight], 0.1).step)


@pytest.mark.parallel([1])
def test_a_change_that_would_be_lost_is_refused(comm, fails):
    class NewWeight(EightBit):
        def update_shard(self, shard):
            shard.weight = shard.weight - shard.gradient

    class NewState(EightBit):
        def update_shard(self, shard):
            shard.state["rows"] = shard.state["rows"] + 1

    with Grid(comm) as grid:
        for kind, text in ((NewWeight, "array weight was replaced"), (NewState, "array rows was replaced")):
            net = nn.Linear(grid, 3, 3, dtype="float64", bias=False)
            x = DistMatrix.from_global(grid, to_library(np.ones((2, 3))), layout=batch_layout(None))
            nn.mse(net(x), x).backward()
            fails(Pmm3dError, f"{kind.__name__}.update_shard: the {text}, .* in place", kind([net.weight], 0.1).step)


@pytest.mark.parallel([1])
def test_a_class_without_an_update_and_flags_that_are_none_are_refused(comm, fails):
    class Nothing(optim.Optimizer):
        pass

    with Grid(comm) as grid:
        parameters = nn.Linear(grid, 3, 3).parameters()
        for make, text in (
            (lambda: Nothing(parameters, 0.1), "Nothing has no method update: define it, or update_shard"),
            (lambda: optim.SGD(parameters, 0.1, 0.9, nesterov="no"), "nesterov = 'no': needed is True or False"),
            (lambda: optim.SGD(parameters, 0.1, decay_vectors="no"), "decay_vectors = 'no': needed is True or False"),
            (lambda: optim.Muon(parameters, use_muon=None), "use_muon = None: needed is True or False"),
            (lambda: optim.Muon(parameters, ns_coefficients=(1, 2, np.nan)), "needed is a list of 3 finite numbers"),
        ):
            fails(Pmm3dError, text, make)


RAISING = """

class Raising(Factored):
    def __init__(self, parameters, **options):
        raise KeyError(1)
"""


@pytest.fixture
def folder(comm, shared_path):
    if comm.rank == 0:
        x = np.random.default_rng(0).standard_normal((60, 6)).astype("float32")
        with h5py.File(shared_path / "data.h5", "w") as file:
            file["x"], file["y"] = x, np.arange(60) % 3
        (shared_path / "lion.py").write_text(LION)
        factored = "from pmm3d.nn import optim\n\n" + FACTORED
        (shared_path / "factored.py").write_text(factored + RAISING)
    comm.barrier()
    return shared_path


def configured(folder, name, options=None, epochs=2, **sections):
    return checked(
        {
            "data": {"file": str(folder / "data.h5"), "batch_size": 20, "validation": 0.0},
            "training": {"folder": str(folder / "run"), "epochs": epochs, "log_every": 1},
            "network": {"hidden": [8], "library": TESTED},
            "optimizer": {"build": f"{folder}/{name}", "options": options or {}, "lr": 0.01},
            **sections,
        }
    )


@pytest.mark.parallel([2])
def test_a_configuration_trains_and_resumes_with_it(folder, comm):
    for name, options, states in (
        ("lion.py:Lion", {"betas": [0.5, 0.75]}, ["momentum"]),
        ("factored.py:Factored", {}, ["rows", "columns"]),
    ):
        for shape in ("ddp", "megatron"):
            config = configured(folder, name, options, epochs=2 + (shape == "megatron"), grid={"shape": shape})
            with given(name=name, shape=shape), build.trainer(config, comm) as run:
                if shape == "megatron":  # continues the run on the other grid
                    assert run.resume() is not None
                assert run.run()
                optimizer, meta = run.state.optimizer, run.checkpoints.meta(run.checkpoints.latest())
                assert type(optimizer).__name__ == name.split(":")[1] and optimizer.lr < 0.01
                assert all(optimizer.groups[0][key] == value for key, value in options.items())
                assert meta["optimizer"]["states"] == states
                assert meta["settings"]["optimizer"]["build"] == f"{folder}/{name}"
                assert checked({key: meta["settings"][key] for key in config.settings()}) == config
        if comm.rank == 0:
            shutil.rmtree(folder / "run")
        comm.barrier()


WRONG = [
    ("none.py:Lion", {}, r"optimizer.build: cannot read .*none.py"),
    ("lion.py:Lyon", {}, r"has no class of pmm3d.nn.optim.Optimizer Lyon; it has Lion"),
    ("lion.py:array_namespace", {}, "has no class of pmm3d.nn.optim.Optimizer"),
    ("lion.py:Lion", {"beta": 1}, r"lion.py:Lion: Lion: unknown option beta \(did you mean betas\?\)"),
    ("lion.py:Lion", {"betas": [2, 3]}, r"Lion: betas = \[2, 3\]: needed is two numbers of at least 0 and below 1"),
    ("lion.py:Lion", {"lr": 1}, "options.lr is a key of its own: write lr"),
    ("factored.py:Raising", {}, r"^optimizer.build = \S* raised an error: KeyError: 1 \(.*factored.py, line 2\d\)"),
]


@pytest.mark.parallel([2])
def test_what_is_wrong_with_it_is_said_on_every_rank(folder, comm, fails):
    def make(name, options):
        with build.trainer(configured(folder, name, options), comm):
            pass

    for name, options, text in WRONG:
        with given(name=name, text=text):
            fails(Pmm3dError, text, partial(make, name, options))


@pytest.mark.parallel([1])
def test_a_plan_prices_its_update_as_passes_over_weights(folder):
    for name, arrays in (("lion.py:Lion", 5), ("factored.py:Factored", 3)):
        config = configured(folder, name)
        actions = DrySteps(config, (512, 3)).of(GridShape(1, 1, 1, 1), 1).actions
        kind = name.split(":")[1].lower()
        updates = [each for each in actions if each.what == "pass" and each.operation == UPDATE + kind]
        weights = 4 * (512 * 8 + 8 + 8 * 3 + 3)
        assert sum(each.nbytes for each in updates) >= 0.9 * arrays * weights


def test_a_rough_plan_scales_its_passes_as_those_of_weights():
    """More ranks along data have fewer rows each, and equal weights."""
    seconds = {}
    for name in (UPDATE + "lion", "relu"):
        step = Step([Action("pass", operation=name, nbytes=2**30)], {}, 0.0, 0)
        scaled = ScaledStep(GridShape(1, 1, 1, 1), step, 0, nominal(1), None)
        seconds[name] = scaled.seconds(GridShape(1, 1, 1, 1)) / scaled.seconds(GridShape(1, 1, 1, 4))
    assert seconds[UPDATE + "lion"] == 1 and 3.5 < seconds["relu"] <= 4


@pytest.mark.parallel([2])
def test_a_dry_run_holds_the_states_that_a_run_holds(comm):
    for shape, data, shard in (((2, 1, 1), 1, False), ((1, 1, 1), 2, True)):
        with given(shape=shape), Grid(comm, shape, data) as grid, dry_grid(grid) as dry:
            held = []
            for each in (grid, dry):
                net = nn.Linear(each, 64, 32, seed=1)
                optimizer = EightBit(net.parameters(), 0.1, shard_over_data=shard)
                x = DistMatrix.random(each, (16, 64), dtype="float32", seed=1, layout=batch_layout("y"))
                net(x).backward(DistMatrix.random(each, (16, 32), dtype="float32", seed=1, layout=batch_layout("x")))
                optimizer.step()
                held.append(sum(state.local.nbytes for state in optimizer.matrices().values()))
            assert held[0] == held[1]
            assert bits(weights_of(net)) is not None
