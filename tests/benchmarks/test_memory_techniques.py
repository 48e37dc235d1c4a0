"""benchmarks/memory.py: with each technique a rank holds what its dry run says."""

import memory
import pytest
from gates import move_what_is_waited_for
from networks import ordinary

from pmm3d import Grid
from pmm3d.nn.dry import dry_grid

pytestmark = [pytest.mark.numpy_only("networks of a configuration"), pytest.mark.deadline(300)]
SECTIONS = {"data": {"sequence": 32, "batch_size": 8}, "network": memory.GPT | {"hidden": 64, "layers": 2}}
VOCABULARY, ROWS = 512, 16
"""Rows of a tile: a quarter of those of a rank."""


@pytest.mark.parallel([4])
def test_each_technique_holds_what_its_dry_run_says(comm, shared_path):
    """To the byte at the peak, by kind. Each technique that is for one kind of array holds less of it."""
    held = {}
    for name, settings in memory.TECHNIQUES.items():
        tiles = {key: ROWS for key in settings if key.endswith("_tiles")}
        config = memory.configured(SECTIONS, settings | tiles, str(shared_path))
        with Grid(comm, (1, 1, 2), 2, device_transport="direct") as grid:
            move_what_is_waited_for(grid.engine)
            with ordinary(), dry_grid(grid) as dry:
                said = memory.Training(dry, config, VOCABULARY).traced().peak.held
                found = memory.Training(grid, config, VOCABULARY).traced().peak.held
        assert said == found, name
        held[name] = found
    for name, kind in (
        ("recompute full", "activations"),
        ("keep int8", "activations"),
        ("ZeRO-1", "state"),
        ("states int8", "state"),
    ):
        assert held[name][kind] < held[memory.NONE][kind], name
