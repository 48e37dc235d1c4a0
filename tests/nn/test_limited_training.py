"""A network whose plain training does not fit a limit trains under it, to the same loss, with the settings that the
plan names. The kernel enforces the limit."""

import json
import subprocess
import sys

import pytest

from pmm3d.layout import GridShape
from pmm3d.model.machines import load
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.planning import rank_training

pytestmark = [pytest.mark.deadline(400), pytest.mark.numpy_only("the limit is that of memory of the host")]
FEATURES, ROWS = 256, 8192
SECTIONS = {
    "data": {"file": "nowhere.h5", "batch_size": ROWS, "prefetch": 1},
    "network": {"hidden": [256] * 7, "bias": False},
    "training": {"checkpoint_in_background": False},
}
LOSS_OF = """
import json, resource, sys
from pmm3d import DistMatrix, Grid, nn
from pmm3d.layout import batch_layout
from pmm3d.nn.training import network as made
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.evaluation import loss_named
from pmm3d.nn.training.step import train_step

sections, features, limit = json.loads(sys.argv[1])
config = checked(sections)

def losses(grid, rows):
    own = made.Own.of(config, grid)
    made.set_messages(config, grid)
    network, layout = made.make_network(config, grid, made.layer_sizes(config, features, features), own.network)
    optimizer = made.make_optimizer(config, network, own)
    layouts = batch_layout("y"), batch_layout(layout.cols[0])
    batch = tuple(DistMatrix.random(grid, (rows, features), seed=4, dtype="float32", layout=each) for each in layouts)
    return [train_step(network, optimizer, loss_named("mse"), [batch])[0] for _ in range(3)]

with Grid() as grid:
    losses(grid, 64)  # what Python and the libraries load in the first steps does not count
if limit:
    [now] = [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")]
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * now + limit, resource.RLIM_INFINITY))
with Grid() as grid:
    print(losses(grid, config.data.batch_size))
"""


def trained(settings, limit):
    """What a process says that trains with these settings, and may take `limit` further bytes of memory."""
    sections = {name: dict(section) for name, section in SECTIONS.items()}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    words = [sys.executable, "-c", LOSS_OF, json.dumps([sections, FEATURES, limit])]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)


def test_the_settings_of_a_plan_train_within_a_limit_to_the_same_loss():
    config, grids = checked(SECTIONS), [GridShape(1, 1, 1)]
    options = {"samples": (FEATURES, FEATURES), "grids": grids}
    (plain,) = rank_training(config, 1, load("nominal"), **options).candidates
    limit = 3 * sum(plain.memory.values()) // 4
    (found,) = rank_training(config, 1, load("nominal"), limit=limit, remedies="exact", **options).candidates
    assert found.settings and sum(found.memory.values()) <= limit
    free, refused, fits = trained({}, 0), trained({}, limit), trained(found.settings, limit)
    assert free.returncode == 0, free.stderr
    assert refused.returncode and "MemoryError" in refused.stderr.splitlines()[-1], refused.stderr
    assert fits.returncode == 0, fits.stderr
    assert fits.stdout == free.stdout and fits.stdout.startswith("["), "the same bits"
