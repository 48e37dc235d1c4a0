"""Links in a run's folder, in the place of what a run writes: what they lead to stays as it was."""

import h5py
import numpy as np
import pytest

COMMAND = """
import os, sys
from pmm3d.tools.cli import main
sys.argv = ["pmm3d", *sys.argv[1:]]
main()
"""
WRITTEN = ("metrics.jsonl", "run.json", "curves.png", "report.html")
TEMPORARY = tuple(f".{name}.tmp" for name in WRITTEN)


@pytest.fixture
def config(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"], file["y"] = np.random.default_rng(0).standard_normal((20, 3)), np.arange(20) % 2
    (tmp_path / "run.toml").write_text(
        f'[data]\nfile = "{tmp_path}/data.h5"\nbatch_size = 10\n[network]\nhidden = [4]\n'
        f'[training]\nfolder = "{tmp_path}/run"\nepochs = 2\n')
    (tmp_path / "run").mkdir()
    return tmp_path / "run.toml"


def test_links_in_the_place_of_files_that_a_run_writes_are_replaced(job, config, tmp_path):
    for name in (*WRITTEN, *TEMPORARY):
        (tmp_path / f"precious{name}").write_text("the only copy")
        (tmp_path / "run" / name).symlink_to(tmp_path / f"precious{name}")
    done = job(2, COMMAND, "train", config, timeout=60)
    assert done.returncode == 0, done.stderr
    assert job(1, COMMAND, "report", tmp_path / "run", timeout=60).returncode == 0
    for name in (*WRITTEN, *TEMPORARY):
        assert (tmp_path / f"precious{name}").read_text() == "the only copy", name
    for name in WRITTEN:
        assert not (tmp_path / "run" / name).is_symlink() and (tmp_path / "run" / name).stat().st_size > 100


def test_a_lock_that_is_a_link_is_refused_and_its_target_stays(job, config, tmp_path):
    (tmp_path / "precious").write_text("the only copy")
    (tmp_path / "run" / "lock").symlink_to(tmp_path / "precious")
    done = job(2, COMMAND, "train", config, timeout=60)
    assert done.returncode == 2 and done.stderr.count("lock is a symbolic link to ") == 1, done.stderr
    assert "remove it, or choose another folder" in done.stderr
    assert (tmp_path / "precious").read_text() == "the only copy"
