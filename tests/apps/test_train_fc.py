"""apps/train_fc.py, the loop to copy: a second start goes on."""

import re
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

APP = Path(__file__).parents[2] / "apps" / "train_fc.py"


def weights(checkpoint):
    found = {}
    with h5py.File(checkpoint / "checkpoint.h5") as file:
        file.visititems(lambda key, item: found.update({key: item[...]}) if isinstance(item, h5py.Dataset)
                        and item.dtype.kind == "f" else None)
    return found


@pytest.fixture
def start(job, tmp_path):
    """start("folder", 2): the program on two ranks, for two epochs in all."""
    random = np.random.default_rng(0)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"], file["y"] = random.standard_normal((160, 6)).astype("float32"), np.arange(160) % 3

    def run(folder, epochs):
        arguments = [tmp_path / "data.h5", "--data", "2", "--epochs", epochs, "--checkpoints", tmp_path / folder]
        done = job(2, "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')",
                   APP, *arguments, timeout=60)
        assert done.returncode == 0, done.stderr
        return [int(epoch) for epoch in re.findall(r"^epoch (\d+): ", done.stdout, re.MULTILINE)], done.stdout

    return run


def test_a_second_start_goes_on_to_the_same_bits(start, tmp_path):
    epochs, _ = start("whole", 2)
    assert epochs == [1, 2]
    first, last = sorted((tmp_path / "whole").iterdir())
    shutil.copytree(first, tmp_path / "resumed" / first.name)
    epochs, said = start("resumed", 2)
    assert epochs == [2] and f"resumed {tmp_path / 'resumed' / first.name}, after epoch 1" in said
    expected, found = weights(last), weights(tmp_path / "resumed" / last.name)
    assert len(expected) == 30 and expected.keys() == found.keys()
    assert all(np.array_equal(expected[name], found[name]) for name in expected)
    assert start("resumed", 2)[0] == [] and start("resumed", 3)[0] == [3]
