"""Links in a run's folder in place of files of the run: their targets do not change."""

import h5py
import numpy as np
import pytest
from training_runs import run_here

from pmm3d.tools.page import write_page

pytestmark = pytest.mark.parallel([2])

WRITTEN = ("metrics.jsonl", "run.json", "report.html")
TEMPORARY = tuple(f".{name}.tmp" for name in WRITTEN)


@pytest.fixture
def config(shared_path, comm):
    if comm.rank == 0:
        with h5py.File(shared_path / "data.h5", "w") as file:
            file["x"], file["y"] = np.random.default_rng(0).standard_normal((20, 3)), np.arange(20) % 2
        (shared_path / "run.toml").write_text(
            f'[data]\nfile = "{shared_path}/data.h5"\nbatch_size = 10\n[network]\nhidden = [4]\n'
            f'[training]\nfolder = "{shared_path}/run"\nepochs = 2\n'
        )
        (shared_path / "run").mkdir()
    comm.barrier()
    return shared_path / "run.toml"


def test_links_in_the_place_of_files_that_a_run_writes_are_replaced(comm, config, shared_path):
    if comm.rank == 0:
        for name in (*WRITTEN, *TEMPORARY):
            (shared_path / f"precious{name}").write_text("the only copy")
            (shared_path / "run" / name).symlink_to(shared_path / f"precious{name}")
    comm.barrier()
    done = run_here(comm, "train", str(config))
    assert done.returncode == 0, done.stderr
    if comm.rank == 0:
        write_page(shared_path / "run")
    comm.barrier()
    for name in (*WRITTEN, *TEMPORARY):
        assert (shared_path / f"precious{name}").read_text() == "the only copy", name
    for name in WRITTEN:
        assert not (shared_path / "run" / name).is_symlink() and (shared_path / "run" / name).stat().st_size > 100


def test_a_lock_that_is_a_link_is_refused_and_its_target_stays(comm, config, shared_path):
    if comm.rank == 0:
        (shared_path / "precious").write_text("the only copy")
        (shared_path / "run" / "lock").symlink_to(shared_path / "precious")
    comm.barrier()
    done = run_here(comm, "train", str(config))
    assert done.returncode == 2 and done.stderr.count("its lock does not say which") == 1, done.stderr
    assert "If that job has ended, remove " in done.stderr
    assert (shared_path / "precious").read_text() == "the only copy"
