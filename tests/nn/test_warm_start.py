"""`training.weights`, a warm start from weights only, and `training.steps`, a limit of steps, in `pmm3d train`."""

import h5py
import numpy as np
import pytest
from training_runs import RunsHere, fails

from pmm3d import Grid, nn

STILL = {"optimizer": "kind = 'sgd'\nlr = 1e-300", "schedule": "kind = 'constant'"}
"""Settings with which weights do not change."""


@pytest.fixture
def here(shared_path, comm):
    """Runs on the ranks of the test."""
    return RunsHere(shared_path, comm)


@pytest.mark.parallel([3])
def test_a_run_begins_with_the_weights_of_another_and_goes_on_with_its_own(here):
    assert here.train(here.config("first", training="steps = 3"), ranks=2).returncode == 0
    warm = f"weights = '{here.folder}/first'\n"
    done = here.train(here.config("second", training=warm + "steps = 2", **STILL))
    assert done.returncode == 0, done.stderr
    assert f"training.weights = {here.folder}/first: loaded" in done.stderr
    first, second = here.weights("first"), here.weights("second")
    names = [name for name in second if "/" not in name and name in first]
    assert len(names) >= 6 and all(np.array_equal(first[name], second[name]) for name in names)
    assert [line["step"] for line in here.metrics("second") if "loss" in line] == [1, 2]
    again = here.train(here.config("second", training=warm + "steps = 4", **STILL), "--resume", "auto", ranks=2)
    assert again.returncode == 0, again.stderr
    assert "not used, because the run continues from step 2" in again.stderr
    assert [line["step"] for line in here.metrics("second") if "loss" in line] == [1, 2, 3, 4]


@pytest.mark.parallel([2])
def test_a_run_begins_with_the_weights_of_a_folder_of_the_transformers_package(here, comm):
    """From a folder written by `nn.GPT.export` and by save_pretrained."""
    sizes = {"vocabulary": 16, "positions": 8, "layers": 1, "hidden": 8, "heads": 2}
    with Grid(comm, "ddp") as grid:
        net = nn.GPT(grid, seed=5, **sizes)
        net.export(here.folder / "published", names="gpt2")
        expected = {name: matrix.gather() for name, matrix in net.matrices().items()}
    if comm.rank == 0:
        with h5py.File(here.folder / "text.h5", "w") as file:
            file["tokens"] = np.arange(200, dtype="uint8") % 16
            file["tokens"].attrs["vocabulary"] = 16
        (here.folder / "warm.toml").write_text(
            f'[data]\nfile = "{here.folder}/text.h5"\nsequence = 8\nbatch_size = 4\n[network]\nkind = "gpt"\n'
            'layers = 1\nhidden = 8\nheads = 2\n[optimizer]\nkind = "sgd"\nlr = 1e-300\n'
            f'[training]\nfolder = "{here.folder}/warm"\nsteps = 1\nweights = "{here.folder}/published"\n'
        )
    comm.barrier()
    done = here.train(here.folder / "warm.toml")
    assert done.returncode == 0 and f"training.weights = {here.folder}/published: loaded" in done.stderr, done.stderr
    found = here.weights("warm")
    assert all(np.array_equal(found[name], value) for name, value in expected.items())


@pytest.mark.parallel([2])
def test_weights_that_are_not_there_or_of_another_network_are_refused(here):
    fails(here.train(here.config("x", training=f"weights = '{here.folder}/nowhere'")), "nowhere")
    assert here.train(here.config("first", training="steps = 1")).returncode == 0
    other = here.config("other", hidden=(5,), training=f"weights = '{here.folder}/first'")
    fails(here.train(other), "is the checkpoint of another network. It also has '4.bias', '4.weight'")
    assert not here.checkpoints("other")
