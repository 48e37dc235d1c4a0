"""grid.shape = "auto": the run trains as with the chosen grid, logs the choice, and resumes with it."""

from dataclasses import replace
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from loops import looped
from networks import bits
from training_runs import Runs, fails

from pmm3d.comm.nodes import Process, Processes, row
from pmm3d.layout import GridShape
from pmm3d.model.candidates import Candidate
from pmm3d.model.machines import load
from pmm3d.nn.training import auto_grid, planning
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.predict import _shape

pytestmark = pytest.mark.deadline(240)

AUTO = {"grid": 'shape = "auto"', "training": "epochs = 2"}


@pytest.mark.parallel([4])
@looped("ranks", [1, 4])
def test_the_weights_are_those_of_the_grid_named(here, ranks):
    done = here.finish(here.config(f"auto{ranks}", **AUTO), ranks=ranks)
    shape = GridShape(**here.record(f"auto{ranks}")["grid"])
    assert shape.size == ranks and done.stderr.count("grid.shape = auto: ") == 1
    assert f"grid.shape = auto: {shape}" in done.stderr and ("; next " in done.stderr) == (ranks > 1)
    auto = here.record(f"auto{ranks}")["starts"][-1]["auto"]
    assert GridShape(**auto["chosen"]["grid"]) == shape and auto["chosen"]["seconds"] > 0
    assert auto["next"] is None or auto["next"]["grid"] != auto["chosen"]["grid"]
    named = f'shape = "{shape.x}x{shape.y}x{shape.z}"\ndata = {shape.data}'
    here.finish(here.config(f"named{ranks}", **AUTO | {"grid": named}), ranks=ranks)
    assert bits(here.weights(f"auto{ranks}")) == bits(here.weights(f"named{ranks}"))


@pytest.mark.nightly
@pytest.mark.parallel([4])
def test_a_resumed_run_takes_the_grid_of_its_ranks_and_is_predicted_with(here, comm):
    here.finish(here.config(**AUTO))
    done = here.finish(here.config(**(AUTO | {"training": "epochs = 3"})), "--resume", "auto", ranks=3)
    chosen = [GridShape(**start["auto"]["chosen"]["grid"]) for start in here.record()["starts"]]
    assert [grid.size for grid in chosen] == [4, 3]
    assert ". The run continues on this grid from step 12" in done.stderr, done.stderr
    new = here.folder / "new.h5"
    if comm.rank == 0:
        with h5py.File(new, "w") as file:
            file["x"] = np.ones((5, 12), "float32")
    comm.barrier()
    for ranks in (3, 1):
        done = here.run(
            "predict", str(here.folder / "run"), str(new), "--out", f"{new.parent}/out{ranks}.h5", ranks=ranks
        )
        assert done.returncode == 0 and (ranks == 1 or str(chosen[1]) in done.stdout), done.stderr


@pytest.mark.parallel([2])
def test_what_is_wrong_is_said_as_without_it(here, comm, monkeypatch):
    """For example, a missing file, and a memory limit that no grid keeps."""
    config = here.config(**AUTO)
    if comm.rank == 0:
        path = here.folder / "run.toml"
        path.write_text(path.read_text().replace("data.h5", "nowhere.h5"))
    comm.barrier()
    fails(here.train(config), "cannot open")
    monkeypatch.setattr("pmm3d.model.machine.available_memory", lambda *file: 2**24)
    fails(
        here.train(here.config(hidden=[2000, 2000], **AUTO)),
        "no grid of 2 ranks holds a training step of 12-2000-2000-3",
    )


def on_hosts(hosts):
    return Processes(np.concatenate([row(Process(host, 1), False) for host in hosts]), [*dict.fromkeys(hosts)])


def test_where_ranks_run_counts(tmp_path):
    """The same ranks on the same two nodes, in order, and assigned in turns."""
    file = str(Runs(tmp_path, None).folder / "data.h5")
    settings = checked({"grid": {"shape": "auto"}, "data": {"file": file}, "network": {"hidden": [200, 200]}})
    in_order, in_turn = (
        auto_grid._choice(settings, on_hosts(hosts), None, None, True) for hosts in ("aaaabbbb", "abababab")
    )
    assert in_order.chosen.seconds < in_turn.chosen.seconds


@pytest.fixture
def chosen(monkeypatch):
    """chosen(hosts, machine, *candidates): the choice among candidates with invented times."""

    def chosen(hosts, machine, *candidates):
        ranking = SimpleNamespace(candidates=candidates)
        monkeypatch.setattr(planning, "rank_training", lambda *rest, **options: ranking)
        return auto_grid._choice(checked({"data": {"file": "x.h5"}}), on_hosts(hosts), machine, None, True)

    monkeypatch.setattr(auto_grid.host, "usable_cores", lambda: 2)
    monkeypatch.setattr(auto_grid, "sizes_in_file", lambda config: None)
    return chosen


@pytest.mark.parametrize(
    "name, key, measured, said",
    [
        (None, {}, False, "of a nominal machine (pmm3d tune machine measures this one)"),
        ("perlmutter", {}, False, "of perlmutter (not measured by pmm3d tune machine)"),
        ("perlmutter", {"cpu": "here"}, True, "of perlmutter"),
    ],
)
def test_only_what_was_measured_is_called_so(chosen, name, key, measured, said):
    machine = None if name is None else replace(load(name), key=key)
    choice = chosen("aa", machine, Candidate(GridShape(2, 1, 1), seconds=1.0))
    assert choice.measured is choice.document()["measured"] is measured
    assert choice.line().endswith(f"by the model {said}")


@pytest.mark.parametrize("key, first", [({}, "1.5e+03 ms"), ({"cpu": "here"}, "1e+03 ms")])
def test_both_times_count_ranks_that_share_cores(chosen, key, first):
    """The times of a measured machine include shared cores, because all ranks are measured at the same time."""
    candidates = [
        Candidate(GridShape(1, 1, 4), 1.0, {"gemm": 0.5, "z": 0.5}),
        Candidate(GridShape(4, 1, 1), 1.2, {"x": 1.2}),
    ]
    said = chosen("aaaa", replace(load("nominal"), key=key), *candidates).line()
    assert first in said and "1.2e+03 ms" in said and ("compute 2 times as long" in said) == (not key), said


def test_a_prediction_shares_the_experts_like_the_checkpoint():
    """The number of ranks of an automatic grid is that of the checkpoint, which a resumed run may have chosen anew."""
    tokens = {"data": {"file": "a.h5", "sequence": 4}, "network": {"kind": "gpt", "experts": 8}}
    config = checked(tokens | {"grid": {"shape": "auto", "expert": 2}})
    saved = {"x": 1, "y": 1, "z": 2, "data": 2}
    assert _shape(config, saved | {"expert": 4}, 4) == ("1x1x2", 2, {"axes": {}, "expert": 4})
    assert _shape(config, saved, 4) == ("1x1x2", 2, {"axes": {}, "expert": 1})
    assert _shape(config, saved | {"expert": 4}, 8) == ("ddp", 1, {})
    named = checked(tokens | {"grid": {"shape": "1x1x4", "expert": 4}})
    assert _shape(named, saved, 4) == ("1x1x4", 1, {"axes": {}, "expert": 4})
