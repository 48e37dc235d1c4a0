"""Ranks that are killed while checkpoints are written, at once or in the background, with any number of stages. The
next job finds the last complete checkpoint or a newer one."""

import re

import pytest

TRAIN = """
    import os, random, signal, sys, threading, time
    import numpy as np
    from pmm3d import DistMatrix, Grid, Layout
    from pmm3d.io import Checkpoints

    folder, victim, moment, call = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    shapes = {"0.weight": (300, 200), "0.bias": (1, 200), "adamw/m": (61, 7)}
    layouts = [Layout.A, Layout(cols="y"), Layout(rows=("x", "y"))]

    def values(step, shape):
        return np.arange(shape[0] * shape[1], dtype="float32").reshape(shape) % 97 + step

    def at(grid, step, layouts=layouts):  # matrices of this rank's stage; all stages share the last one
        stages, index = grid.shape.stages, grid.coords.pipe if grid._has_stages else 0
        return {name: DistMatrix.from_global(grid.stage, values(step, shape), layout=layout)
                for number, ((name, shape), layout) in enumerate(zip(shapes.items(), layouts))
                if number % stages == index or number == 2}

    def die():
        print("killed", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def die_at(call, number):
        done, seen = getattr(os, call), iter(range(int(number)))
        def counted(*args, **options):
            return done(*args, **options) if next(seen, None) is not None else die()
        setattr(os, call, counted)

    shape, _, pipe = sys.argv[5].partition(" in ")
    with Grid(shape=shape, pipe=int(pipe or 1)) as grid:
        keeper = Checkpoints(grid, folder, keep=2, background=sys.argv[6] == "True")
        matrices = at(grid, -1, layouts[::-1])
        found = keeper.load_latest(matrices)
        step = found[1]["step"] if found else 0
        for name, matrix in matrices.items():
            if found and not np.array_equal(matrix.gather(), values(step, matrix.shape)):
                raise SystemExit(f"{found[0]}: {name} is not what was saved")
        if grid.rank == 0:
            print("found", step, flush=True)
            print("left", *sorted(os.listdir(folder)) if found else (), flush=True)
        if grid.rank == victim:
            if call == "any":
                threading.Thread(target=lambda: (time.sleep(moment), die()), daemon=True).start()
            else:
                die_at(call, moment)
        while victim >= 0:
            step += 1
            keeper.save(step - step % 2, at(grid, step), {"step": step})  # odd steps replace a checkpoint
            while keeper.background and keeper.poll() is None:
                time.sleep(0.001)
            if grid.rank == 0:
                print("saved", step, flush=True)
"""

KILLS = [
    ("fsync", 0, 4),
    ("fsync", 3, 0),
    ("unlink", 0, 1),
    ("rmdir", 0, 1),
    ("rename", 0, 3),
    ("mkdir", 0, 1),
    ("any", 1, 0.013),
    ("any", 0, 0.031),
    ("any", 2, 0.057),
]
GRIDS = "1x2x1 in 2", "1x1x4", "1x1x1 in 4"


@pytest.fixture
def trains(job, tmp_path):
    """trains(victim, moment, call, grid, background) runs two jobs in one folder. Returns (step found, last step
    saved)."""

    def run(victim, moment=0, call="any", grid="2x2x1", background=False):
        done = job(4, TRAIN, tmp_path / "checkpoints", victim, moment, call, grid, background, timeout=60)
        found = re.search(r"^found (\d+)", done.stdout, re.M)
        assert found and "passed over" not in done.stderr, done.stdout + done.stderr
        assert (done.returncode == 0) == (victim < 0) and ("killed" in done.stdout) == (victim >= 0), done.stderr
        saved = [int(step) for step in re.findall(r"^saved (\d+)", done.stdout, re.M)]
        return int(found[1]), max(saved, default=int(found[1]))

    return run


@pytest.mark.nightly
@pytest.mark.parametrize(
    "kills", [KILLS[1:8:3], pytest.param(KILLS, marks=pytest.mark.thorough("ten jobs"))], ids=["some", "all"]
)
def test_a_kill_at_any_moment_leaves_the_last_complete_checkpoint(trains, kills):
    known = 0
    for number, (call, victim, moment) in enumerate(kills):
        for background in (False, True):
            found, saved = trains(victim, moment, call, GRIDS[number % 3], background)
            assert known <= found <= known + 1, (call, victim, moment)
            known = saved
    found, _ = trains(-1, grid="1x4x1")
    assert known <= found <= known + 1 and found > 0
