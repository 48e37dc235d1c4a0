"""`pmm3d train` with a pipeline in its configuration, compared with the same configuration without one."""

import signal

import h5py
import numpy as np
import pytest
from loops import given, looped
from training_runs import fails, signal_at

from pmm3d import Grid, Pmm3dError
from pmm3d.layout import GridShape
from pmm3d.nn.pipeline import one_f_one_b, schedule_names
from pmm3d.nn.training import Trainer, build
from pmm3d.nn.training.config import checked, load
from pmm3d.nn.training.samples import SampleSizes

pytestmark = pytest.mark.deadline(240)
four = pytest.mark.parallel([4])

OPTIONS = {
    "hidden": (16, 12, 10, 8),
    "batch_size": 100,
    "training": "epochs = 2",
    "network": "dtype = 'float64'\nnorm = true",
    "optimizer": "clip = 1.0",
}
ONE = 'shape = "1x1x1"\nmicro_batches = 4\n'
CUTS = {
    "1f1b on 2": (2, ONE + "pipe = 2"),
    "zb-h1 on 4": (4, ONE + 'pipe = 4\nschedule = "zb-h1"'),
    "interleaved on 2": (2, ONE + 'pipe = 2\nschedule = "interleaved-2"'),
    "uneven on 2, and data": (4, 'micro_batches = 4\npipe = 2\ncut = [2, 7]\nschedule = "gpipe"'),
    "with z and more micro-batches": (4, 'shape = "1x1x2"\npipe = 2\nmicro_batches = 7'),
    "one rank": (1, ONE + 'schedule = "zb-h1"'),
}


def lines(here, name, key="loss"):
    return [line[key] for line in here.metrics(name) if key in line]


def nearly(found, expected):
    """Assert that numbers, or dicts of arrays or numbers, are equal to 1e-10."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        return all(nearly(found[name], expected[name]) for name in expected)
    return np.allclose(found, expected, rtol=0, atol=1e-10)


def finished(here, name, ranks=4, arguments=(), **config):
    """Train to the end, with OPTIONS where `config` has no others."""
    return here.finish(here.config(name, **OPTIONS | config), *arguments, ranks=ranks)


@pytest.mark.nightly
@four
def test_a_run_on_stages_is_that_without(here):
    """Losses, weights, figures; one log, one record, one summary."""
    finished(here, "plain", 1, grid='shape = "1x1x1"')
    for number, (name, (ranks, grid)) in enumerate(CUTS.items()):
        with given(name=name):
            run = f"run{number}"
            done = finished(here, run, ranks, grid=grid)
            assert lines(here, run, "step") == lines(here, "plain", "step")
            for key in ("loss", "gradient_norm"):
                assert nearly(lines(here, run, key), lines(here, "plain", key))
            assert all(map(nearly, lines(here, run, "validation"), lines(here, "plain", "validation")))
            assert nearly(here.weights(run), here.weights("plain"))
            assert done.stdout.count("6 steps, 2 epochs") == 1 and done.stderr.count("training 749 parameters") == 1
            found = here.record(run)
            assert len(found["ranks"]["seconds"]) == ranks and found["network"]["parameters"] == 749
            assert found["network"]["sizes"] == [12, 16, 12, 10, 8, 3] and found["state"] == "finished"


@pytest.mark.nightly
@four
def test_a_run_that_a_signal_ended_goes_on_to_the_same_bits_and_on_other_stages(here, comm):
    """With dropout, whose random numbers are those of the whole network."""
    options = {"network": OPTIONS["network"] + "\ndropout = 0.2", "training": "epochs = 3"}
    two = {**options, "grid": ONE + 'pipe = 2\nschedule = "zb-h1"'}
    finished(here, "whole", 2, **two)
    for stages, grid in ((2, two["grid"]), (4, ONE + "pipe = 4"), (1, ONE)):
        name = f"on{stages}"
        with given(stages=stages):
            with signal_at(comm, Trainer, "_step", 5):
                ended = here.train(here.config(name, **{**OPTIONS, **two}), ranks=2)
            assert ended.returncode == 75 and "SIGTERM stopped the run at step 5 of 9" in ended.stdout, ended.stderr
            done = finished(here, name, stages, ("--resume", "auto"), **{**options, "grid": grid})
            assert done.stderr.count("resumed /") == 1
            weights, others = here.weights(name), here.weights("whole")
            assert nearly(lines(here, name), lines(here, "whole")) and nearly(weights, others)
            if stages == 2:
                assert lines(here, name) == lines(here, "whole")
                assert all(np.array_equal(weights[each], others[each]) for each in others)


@four
def test_a_checkpoint_that_is_asked_for_while_a_stage_validates(here, comm):
    training = "epochs = 1\ncheckpoint_every = 100\nkeep = 9"
    with signal_at(comm, Trainer, "_step", 2, signal.SIGUSR1):
        finished(here, "run", grid=ONE + "pipe = 4", training=training)
    assert here.checkpoints() == ["step-00000002", "step-00000003"]


@four
def test_a_batch_that_one_stage_cannot_read_ends_the_run_on_all(here, comm):
    config = load(here.config(grid=ONE + "pipe = 4", **OPTIONS))
    with build.trainer(config, comm) as run:
        fetch = run.loader.fetch
        run.loader.fetch = lambda: Pmm3dError("gone") if comm.rank == 2 and run.loader.batch == 2 else fetch()
        with pytest.raises(Pmm3dError, match="Loader failed on 1 of 4 ranks. rank 2: Pmm3dError: gone"):
            run.run()
        assert run.step == 2


@four
def test_what_is_not_finite_is_named_as_in_the_whole_network(here):
    wrong = OPTIONS | {"optimizer": "kind = 'sgd'\nlr = 1e160", "network": "dtype = 'float64'\nactivation = 'relu'"}
    said = []
    for ranks, grid in ((1, ONE), (4, ONE + "pipe = 4"), (2, ONE + 'pipe = 2\nschedule = "dualpipe-v"')):
        done = here.train(here.config(f"run{ranks}", grid=grid, **wrong), ranks=ranks)
        assert done.returncode != 0
        [line] = [line for line in done.stderr.splitlines() if line.startswith("pmm3d: ")]
        said.append(line.partition(" The weights are")[0])
    assert "is not finite" in said[0] and said == 3 * said[:1], said


@four
def test_predictions_and_exports_of_a_run_on_stages(here, comm):
    """Whose schedule is a table of the user. The file is not needed after the run."""
    table, found = here.folder / "mine.csv", {}
    if comm.rank == 0:
        table.write_text(str(one_f_one_b(4, 4)))
    comm.barrier()
    for name, ranks, grid in (("plain", 1, ONE), ("staged", 4, ONE + f'pipe = 4\nschedule = "{table}"')):
        finished(here, name, ranks, grid=grid)
    comm.barrier()
    if comm.rank == 0:
        table.unlink()
    comm.barrier()
    for name, ranks in (("plain", 1), ("staged", 4)):
        out = here.folder / f"{name}.h5"
        arguments = f"{here.folder}/{name}", f"{here.folder}/data.h5", "--out", f"{out}"
        done = here.run("predict", *arguments, ranks=ranks)
        assert done.returncode == 0 and ("pipe 4" in done.stdout) == (ranks == 4), done.stderr
        with h5py.File(out) as file:
            found[name] = {key: item[...] for key, item in file.items()}
    assert nearly(found["staged"], found["plain"]) and len(found["plain"]["outputs"]) == 330
    exported = [here.folder / f"{ranks}.safetensors" for ranks in (1, 3)]
    for ranks, path in zip((1, 3), exported):
        done = here.run("export", f"{here.folder}/staged", str(path), ranks=ranks)
        assert done.returncode == 0, done.stderr
    assert exported[0].read_bytes() == exported[1].read_bytes()


@pytest.mark.nightly
@four
def test_auto_shares_out_the_ranks_that_pipe_leaves(here):
    """It also chooses the schedule, if none is named."""
    auto = 'shape = "auto"\nmicro_batches = 4\npipe = '
    finished(here, "plain", 1, grid=ONE)
    for name, grid in (("any", auto + "2"), ("named", auto + '2\nschedule = "gpipe"')):
        with given(name=name):
            done = finished(here, name, grid=grid)
            assert done.stderr.count("grid.shape = auto: ") == 1
            found = here.record(name)
            assert GridShape(**found["grid"]).size == 4 and found["grid"]["pipe"] == 2
            schedule = found["settings"]["grid"]["schedule"]
            assert schedule == "gpipe" if name == "named" else schedule.removesuffix("-2") in schedule_names()
            assert f" {schedule}, " in done.stderr and found["starts"][0]["auto"]["chosen"]["schedule"] == schedule
            assert nearly(lines(here, name), lines(here, "plain"))
    done = here.train(here.config("three", grid=auto + "3", **OPTIONS))
    fails(done, "4 ranks are no multiple of grid.pipe x grid.seq x grid.ulysses = 3: use a multiple of it")


MODEL = """
from pmm3d import nn

def build(grid, features, outputs):
    return nn.Sequential(grid, *(nn.Residual(nn.Sequential(grid, nn.Linear(grid, features, features, dtype="float64"),
                                                           nn.relu)) for _ in range(4)),
                         nn.Linear(grid, features, outputs, dtype="float64"))
"""


@four
def test_a_network_of_ones_own_in_stages(here, comm):
    if comm.rank == 0:
        (here.folder / "model.py").write_text(MODEL)
    comm.barrier()

    for name, grid in (("plain", "micro_batches = 4"), ("staged", "pipe = 2\nmicro_batches = 4")):
        settings = load(here.config(name, grid=grid, **OPTIONS)).settings()
        settings["network"] = {"build": f"{here.folder}/model.py:build", "dtype": "float64"}
        with build.trainer(checked(settings), comm) as run:
            assert run.run()
        figures = comm.allgather(run.figures)
        assert figures == 4 * figures[:1] and figures[0].keys() == {"loss", "accuracy"}
    assert nearly(here.weights("staged"), here.weights("plain")) and len(here.weights("plain")) > 9


MISTAKES = [
    ('pipe = 4\nschedule = "zb-h"', "no schedule is named 'zb-h' (did you mean "),
    ("pipe = 3", "3"),
    ("pipe = 4\ncut = [2, 2, 1]", 'the cut [2, 2, 1] is neither "cost" nor 4 numbers of at least 1 with the sum 9'),
    ("pipe = 4\ncut = [2, 2, 1, 0]", "grid.cut = [2, 2, 1, 0]: needed is a list of whole numbers of at least 1, or "),
    ("pipe = 4\nmicro_batches = 101", "micro_batches = 101, but a batch has 100 rows: at most 100"),
    ('pipe = 4\nschedule = "nowhere.csv"', "cannot read the schedule nowhere.csv"),
    ('pipe = 4\nschedule = "dualpipe-v"\nmicro_batches = 4', "dualpipe-v needs at least two micro-batches for each"),
]


@four
@looped("grid, text", MISTAKES)
def test_mistakes_are_told_once_before_the_first_step(here, grid, text):
    fails(here.train(here.config(grid=grid, **OPTIONS)), text)
    assert not here.checkpoints()


@pytest.mark.parallel([2])
@looped("schedule", ["1f1b", "zb-h2", "interleaved", "v-min", "gpipe"])
def test_memory_of_many_micro_batches_is_that_of_as_many_as_a_rank_holds(here, comm, monkeypatch, schedule):
    options = OPTIONS | {"batch_size": 96, "hidden": (8, 8, 64, 64)}
    grid = f'shape = "1x1x1"\npipe = 2\nschedule = "{schedule}"\nmicro_batches = 48'
    config = load(here.config(grid=grid, **options))
    with Grid(comm, "1x1x1", 1, axes={"pipe": 2}) as grid:
        few = build.predicted_memory(config, grid, SampleSizes(12, 3, True, 297))
        assert (build._fullest(config.grid) == 48) == (schedule == "gpipe")
        monkeypatch.setattr(build, "_fullest", lambda grid: grid.micro_batches)
        assert few == build.predicted_memory(config, grid, SampleSizes(12, 3, True, 297))


@four
def test_memory_is_predicted_for_each_stage(here, comm):
    """By a dry run of the stage. The second stage has the layers of 512 columns."""
    config = load(here.config(grid=ONE + "data = 2\npipe = 2\ncut = [5, 4]", **OPTIONS | {"hidden": (8, 8, 512, 512)}))
    with Grid(comm, "1x1x1", 2, axes={"pipe": 2}) as grid:
        own = build.predicted_memory(config, grid, SampleSizes(12, 3, True, 297))
        first, second = (
            {each for pipe, each in comm.allgather((grid.coords.pipe, own)) if pipe == stage} for stage in range(2)
        )
    assert len(first) == len(second) == 1 and min(second) - min(first) > 4 * 8 * 512 * 512
