"""The checkpoint with the least validation loss, and runs that end early."""

from math import nan
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from training_runs import fails, signal_at

from pmm3d import Grid
from pmm3d.io import Checkpoints
from pmm3d.nn.training import Trainer

pytestmark = [pytest.mark.deadline(240), pytest.mark.parallel([2])]


def config(here, name, training="patience = 3", data="", lr="0.02"):
    """A run that overfits: its targets are noise."""
    if here.comm.rank == 0:
        with h5py.File(here.folder / "data.h5", "a") as file:
            if "noise" not in file:
                file["noise"] = np.random.default_rng(1).standard_normal((330, 1)).astype("float32")
    here.comm.barrier()
    lines = f"epochs = 30\n{training}"
    return here.config(name, f'targets = "noise"\n{data}', lines, hidden=[32], optimizer=f"lr = {lr}")


def losses_of(here, name):
    return {line["step"]: line["validation"]["loss"] for line in here.metrics(name) if "validation" in line}


def test_a_run_ends_when_the_loss_no_longer_falls_and_keeps_the_best_checkpoint(here, comm):
    done = here.finish(config(here, "whole"))
    losses = losses_of(here, "whole")
    steps = list(losses)
    least = min(steps, key=losses.get)
    assert steps.index(least) == len(steps) - 4 and len(steps) < 30
    assert "no smaller loss in the last 3 validations" in done.stdout and f"at step {least}, in " in done.stdout
    with Grid(comm, "ddp") as grid:
        kept = Checkpoints(grid, here.folder / "whole" / "best")
        assert [path.name for path in kept.candidates()] == [f"step-{least:08d}"]
    said = here.run("predict", f"{here.folder}/whole/best", f"{here.folder}/data.h5", "--out", f"{here.folder}/o.h5")
    assert said.returncode == 0 and f"step-{least:08d}" in said.stdout, said.stderr
    assert f"predict {here.folder}/whole/best FILE" in "".join(done.stdout.split("\n    "))
    assert "nothing left to train" in here.finish(config(here, "whole"), "--resume", "auto").stderr

    with signal_at(comm, Trainer, "_step", steps[1] + 2):
        assert here.train(config(here, "ended")).returncode == 75
    here.finish(config(here, "ended"), "--resume", "auto")
    assert losses_of(here, "ended") == losses
    here.assert_same_weights("whole", "ended")

    each = "patience = 3\nkeep = 50\nevaluate_every = 1\ncheckpoint_every = 1"
    here.finish(config(here, "kept", each, lr="0.005"))
    losses = losses_of(here, "kept")
    least = min(losses, key=losses.get)
    assert least > 1
    earlier = here.folder / "kept" / "checkpoints" / f"step-{least - 1:08d}"
    done = here.finish(config(here, "kept", each, lr="1e-30"), "--resume", str(earlier))
    with Grid(comm, "ddp") as grid:
        [path] = Checkpoints(grid, here.folder / "kept" / "best").candidates()
        assert f"at step {int(path.name[5:])}, in " in done.stdout
    fails(here.train(config(here, "none", data="validation = 0.0")), "training.patience needs validations")
    here.finish(config(here, "long", "best = true\nsteps = 60"))
    assert list(losses_of(here, "long"))[-1] == 60


def test_a_loss_that_is_not_a_number_is_not_the_least(comm):
    run = SimpleNamespace(best=None, recipe=SimpleNamespace(patience=9), least={}, step=0)
    for loss in (nan, 3.0, nan, 2.0, nan, 2.0):
        run.step += 1
        Trainer._compare_with_least(run, loss)
    assert run.least == {"loss": 2.0, "step": 4, "since": 2}
