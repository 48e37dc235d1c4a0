"""Optimizers of the user: states of other shapes and types on every grid, and `optimizer.build = "lion.py:Lion"`."""

import re
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from array_api_compat import array_namespace
from loops import given, looped
from networks import bits, on_grid, over_grids
from samples import TESTED, to_library

from pmm3d import DistMatrix, DTypeError, Grid, Pmm3dError, nn
from pmm3d.action import UPDATE, Action
from pmm3d.io import Checkpoints
from pmm3d.layout import GridShape, batch_layout
from pmm3d.model.ranking import nominal
from pmm3d.nn import optim
from pmm3d.nn.training import TrainState, build
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.dry_step import DrySteps, Step
from pmm3d.nn.training.scaled_step import ScaledStep

pytestmark = pytest.mark.deadline(240)
PAGE = Path(__file__).parents[2] / "docs" / "networks.md"
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


def step_of(net, optimizer, number):
    """A step whose gradients do not depend on the weights: integers, with a sum over 16 rows."""
    layouts = {6: batch_layout("y"), 5: batch_layout("x")}
    numbers = lambda cols: DistMatrix.from_function(
        net.grid,
        (16, cols),
        lambda i, j: (3 * i + 5 * j + number) % 7 - 3,
        dtype=net.weight.dtype,
        layout=layouts[cols],
        library=net.weight.library.kind,
    )
    net(numbers(6)).backward(numbers(5))
    optimizer.step()


GRIDS = [((1, 1, 1), 4), ((2, 1, 2), 1), ((1, 2, 1), 2), ((1, 1, 2), 2), ((4, 1, 1), 1)]
PRECISIONS = {
    "float64": {"dtype": "float64", "library": TESTED},
    "bfloat16": {"dtype": "bfloat16", "precision": "bfloat16", "library": "torch"},
}
FORMS = {
    "weight/rows": (6, 1), "weight/columns": (1, 5), "weight/largest": (1, 1), "weight/momentum": (6, 5),
    "bias/columns": (1, 5),
}  # fmt: skip
"""Name -> shape of some states."""


@pytest.mark.parallel([4])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_states_of_any_shape_and_type_continue_on_any_grid(comm, shared_path, precision):
    pytest.importorskip("torch")
    expected = None
    for number, (shape, data) in enumerate(GRIDS):
        shard = [False, "states", "gradients"][number % 3]
        with given(shape=shape, data=data, shard=shard), Grid(comm, shape, data) as grid:
            net = nn.Linear(grid, 6, 5, seed=1, **PRECISIONS[precision])
            state = TrainState(net, EightBit(net.parameters(), lr=0.25, shard_over_data=shard))
            kept = Checkpoints(grid, shared_path / "runs")
            if not number:
                for step in range(3):
                    step_of(net, state.optimizer, step)
                state.save(kept)
                made = state.optimizer.matrices()
                forms = {name.removeprefix("optimizer/"): each.shape for name, each in made.items()}
                assert FORMS.items() <= forms.items() and "bias/rows" not in forms
                assert made["optimizer/weight/momentum"].dtype == "int8"
            else:
                assert state.resume(kept)["step"] == 3
            for step in range(3, 6):
                step_of(net, state.optimizer, step)
            found = {name: np.asarray(each.gather()) for name, each in state.matrices().items()}
            expected = expected or found
            assert all(np.abs(each.astype("float64")).max() > 0 for each in found.values())
            assert bits(found) == bits(expected)


class Nothing(optim.Optimizer):
    pass


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


class NoDim(EightBit):
    def update_shard(self, shard):
        shard.sum(shard.state["rows"])


class NewWeight(EightBit):
    def update_shard(self, shard):
        shard.weight = shard.weight - shard.gradient


class NewState(EightBit):
    def update_shard(self, shard):
        shard.state["rows"] = shard.state["rows"] + 1


@pytest.mark.parallel([1])
@on_grid("1x1x1")
def test_a_class_or_an_option_that_does_not_fit_is_refused(grid, fails):
    parameters = nn.Linear(grid, 3, 2, dtype="float64").parameters()
    for kind, text, call in (
        (Pmm3dError, "state_forms has rows: add the name to state_names", NoName(parameters, 0.1).matrices),
        (Pmm3dError, r'state_names is one text: write a tuple, \("rows",\)', Text(parameters, 0.1).matrices),
        (Pmm3dError, "rows has not the shape of the weight: define update_shard", Flat(parameters, 0.1).matrices),
        (DTypeError, "'int3' names no element type", NoType(parameters, 0.1).matrices),
        (Pmm3dError, "Nothing has no method update: define it, or update_shard", lambda: Nothing(parameters, 0.1)),
        (Pmm3dError, "nesterov = 'no': needed is True", lambda: optim.SGD(parameters, 0.1, 0.9, nesterov="no")),
        (Pmm3dError, "decay_vectors = 'no': needed is", lambda: optim.SGD(parameters, 0.1, decay_vectors="no")),
        (Pmm3dError, "use_muon = None: needed is True or", lambda: optim.Muon(parameters, use_muon=None)),
        (Pmm3dError, "list of 3 finite", lambda: optim.Muon(parameters, ns_coefficients=(1, 2, np.nan))),
    ):
        with given(text=text):
            fails(kind, text, call)


@pytest.mark.parallel([2])
@looped(
    "kind, text",
    [
        (NoDim, "needs a dim: 0"),
        (NewWeight, "NewWeight.update_shard: the array weight was replaced, .* in place"),
        (NewState, "NewState.update_shard: the array rows was replaced, .* in place"),
    ],
)
@over_grids(lambda ranks: [("2x1x1", 1), ("1x2x1", 1)])
def test_a_wrong_update_of_one_rank_is_an_error_on_all(grid, fails, kind, text):
    """The rank with one column of the weight cannot see that a column is no matrix."""
    net = nn.Linear(grid, 3, 3, dtype="float64", bias=False)
    x = DistMatrix.from_global(grid, to_library(np.ones((2, 3))), layout=batch_layout(None))
    nn.mse(net(x), x).backward()
    fails(Pmm3dError, text, kind([net.weight], 0.1).step)


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
        (shared_path / "factored.py").write_text("from pmm3d.nn import optim\n\n" + FACTORED + RAISING)
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
@looped(
    "name, options, states",
    [("lion.py:Lion", {"betas": [0.5, 0.75]}, ["momentum"]), ("factored.py:Factored", {}, ["rows", "columns"])],
)
def test_a_configuration_trains_and_resumes_with_it(folder, comm, name, options, states):
    for shape in ("ddp", "megatron"):
        config = configured(folder, name, options, epochs=2 + (shape == "megatron"), grid={"shape": shape})
        with given(shape=shape), build.trainer(config, comm) as run:
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
@looped("name, options, text", WRONG)
def test_what_is_wrong_with_it_is_said_on_every_rank(folder, comm, fails, name, options, text):
    def make():
        with build.trainer(configured(folder, name, options), comm):
            pass

    fails(Pmm3dError, text, make)


@pytest.mark.parallel([1])
@looped("name, arrays, elements", [("lion.py:Lion", 5, 4131), ("factored.py:Factored", 3, 544)])
def test_a_plan_prices_its_update_as_passes_over_weights_and_counts_its_states(folder, name, arrays, elements):
    step, kind = DrySteps(configured(folder, name), (512, 3)).of(GridShape(1, 1, 1, 1), 1), name.split(":")[1]
    assert step.memory["state"] == 4 * elements
    passes = [each for each in step.actions if each.what == "pass" and each.operation == UPDATE + kind.lower()]
    assert sum(each.nbytes for each in passes) >= 0.9 * arrays * 4 * (512 * 8 + 8 + 8 * 3 + 3)


@looped("name, low, high", [(UPDATE + "lion", 1, 1), ("relu", 3.5, 4)])
def test_a_rough_plan_scales_its_passes_as_those_of_weights(name, low, high):
    """More ranks along data have fewer rows each, and equal weights."""
    step = Step([Action("pass", operation=name, nbytes=2**30)], {}, 0.0, 0)
    scaled = ScaledStep(GridShape(1, 1, 1, 1), step, 0, nominal(1), None)
    assert low <= scaled.seconds(GridShape(1, 1, 1, 1)) / scaled.seconds(GridShape(1, 1, 1, 4)) <= high
