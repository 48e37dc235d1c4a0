"""Fixtures: a finished run, for tests of `pmm3d report`."""

import h5py
import numpy as np
import pytest
from run_pages import CONFIG


@pytest.fixture(scope="session")
def trained(tmp_path_factory, command_worlds):
    """Folder of a run on eight ranks that was resumed once."""
    folder = tmp_path_factory.mktemp("trained")
    x = np.random.default_rng(0).standard_normal((330, 12)).astype("float32")
    with h5py.File(folder / "data.h5", "w") as file:
        file["x"], file["y"] = x, x[:, :3].argmax(1)
    for epochs in (1, 2):
        config = folder / "config.toml"
        config.write_text(CONFIG.format(folder=folder, epochs=epochs))
        done = command_worlds(8, "train", config, "--resume", "auto", cwd=folder, timeout=120)
        assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run `trained`, which a test may change."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("metrics.jsonl", "run.json"):
        (folder / name).write_bytes((trained / name).read_bytes())
    return folder


@pytest.fixture
def nothing_measured(tmp_path, monkeypatch):
    """No machine was measured here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
