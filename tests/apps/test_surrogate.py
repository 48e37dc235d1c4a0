"""apps/surrogate: the equation, the data set, the baselines, the training program."""

import importlib
import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from loops import looped

APP = Path(__file__).parents[2] / "apps" / "surrogate"


@pytest.fixture
def app(monkeypatch):
    """app("pde"): this module of the app."""
    monkeypatch.syspath_prepend(APP)
    return importlib.import_module


@pytest.fixture
def mesh(app):
    return app("pde").AdvectionDiffusion


RUNS = """
import importlib, sys, json
from mpi4py import MPI
for program, *arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = map(str, arguments)
    try:
        importlib.import_module(program).main()
    except SystemExit as end:
        if MPI.COMM_WORLD.rank == 0:
            print("ended with", end.code, flush=True)
"""


@pytest.fixture
def runs(app, job):
    """runs(2, ("generate", "--samples", 5), ...): programs of the app, one after the other on 2 ranks."""
    return lambda ranks, *programs, before="": job(ranks, before + RUNS, json.dumps(programs, default=str))


SMALL = "generate", "--points", 6, "--refine", 1


def swirling(x, y):
    """A wind without divergence."""
    return 0.8 - 2 * (y - 0.5), -0.5 + 2 * (x - 0.5)


def test_second_order_against_a_known_solution(mesh):
    """u = sin(pi x) sin(2 pi y)."""
    kappa, errors = 0.1, []
    for points in (15, 31, 63):
        equation = mesh(points)
        x, y = equation.nodes[None, :], equation.nodes[:, None]
        right = np.sin(np.pi * x) * np.sin(2 * np.pi * y)

        def release(x, y):
            wind_x, wind_y = swirling(x, y)
            along_x = np.pi * np.cos(np.pi * x) * np.sin(2 * np.pi * y)
            along_y = 2 * np.pi * np.sin(np.pi * x) * np.cos(2 * np.pi * y)
            return (
                5 * np.pi**2 * kappa * np.sin(np.pi * x) * np.sin(2 * np.pi * y) + wind_x * along_x + wind_y * along_y
            )

        errors.append(abs(equation.solve(kappa, swirling, release) - right).max())
    orders = np.log2(errors[:-1]) - np.log2(errors[1:])
    assert errors[-1] < 2e-3 and (orders > 1.9).all(), (errors, orders)


@looped("kappa", [1.0, 1e-2, 1e-6])
def test_the_operator_is_an_m_matrix_that_loses_nothing_but_at_the_walls(mesh, kappa):
    operator = mesh(9).operator(kappa, swirling).toarray()
    scale = operator.max()
    assert (operator - np.diag(np.diag(operator)) <= 0).all() and (np.linalg.inv(operator) >= 0).all()
    for axis in (0, 1):  # flux is conserved, and a constant field does not change
        assert np.allclose(operator.sum(axis=axis).reshape(9, 9)[1:-1, 1:-1], 0, atol=1e-12 * scale)


def test_a_plume_is_positive_highest_near_its_source_and_mirrors(app):
    pde = app("pde")
    plume = pde.Plume(points=15)
    still = plume.field([-1.0, 0, 0, 0, 0.5, 0.5, 0.1])
    assert np.allclose(still, still.T) and np.allclose(still, still[::-1]) and still.argmax() == still.size // 2
    field = plume.field([-2.0, 0.6, 0.3, -0.8, 0.4, 0.3, 0.08])
    assert (field > 0).all()
    mirrored = plume.field([-2.0, 0.6, -0.3, 0.8, 0.4, 0.7, 0.08])
    assert np.allclose(mirrored, field[::-1])
    row, _ = np.unravel_index(np.argmax(plume.field([-2.0, 0, 1.0, 0, 0.5, 0.3, 0.08])), field.shape)
    assert plume.mesh.nodes[1::2][row] > 0.3  # downwind


def test_refinement_keeps_the_same_points(app):
    coarse, fine = (app("pde").Plume(15, refine).field([-1, 0.2, 0.1, 0.3, 0.5, 0.4, 0.15]) for refine in (1, 4))
    assert 0 < abs(coarse - fine).max() < 0.02 * fine.max()


@pytest.mark.nightly("an app as a user starts it")
def test_two_ranks_write_what_one_writes(app, runs, tmp_path):
    """51 samples, so that the shares differ. The file is read with h5py alone, after the folder was moved."""
    (tmp_path / "two").mkdir()
    for ranks, name in ((1, "one.h5"), (2, "two/set.h5")):
        done = runs(ranks, (*SMALL, "--samples", 51, "--out", tmp_path / name))
        assert done.returncode == 0 and "51 samples of 6 x 6 points" in done.stdout, done.stderr
    (tmp_path / "two").rename(tmp_path / "moved")
    assert {each.name for each in (tmp_path / "moved").iterdir()} == {"set.h5", "set.parts"}
    with h5py.File(tmp_path / "moved" / "set.h5") as two, h5py.File(tmp_path / "one.h5") as one:
        for name, width in (("x", 7), ("y", 36)):
            assert two[name].shape == (51, width) and two[name].dtype == np.float32
            assert np.array_equal(two[name][:], one[name][:])
        assert abs(two["y"][:].mean()) < 1e-6 and abs(two["y"][:].std() - 1) < 1e-6
        kept = [{name: np.array(value).tolist() for name, value in file.attrs.items()} for file in (one, two)]
        assert kept[0] == kept[1] and kept[0]["parameters"][3] == "swirl"
        low, high = kept[0]["low"], kept[0]["high"]
        own = low + (one["x"][50].astype(float) + 1) / 2 * np.subtract(high, low)
        assert np.allclose(own, app("pde").in_units(one["x"][50]))
        field = app("pde").Plume(6, 1).field(own)
        assert np.allclose(kept[0]["mean"] + kept[0]["std"] * one["y"][50], field.ravel(), rtol=1e-4, atol=1e-5)


@pytest.mark.thorough("what the surrogate example refuses")
def test_a_data_set_is_replaced_only_when_asked_and_a_missing_part_is_seen(runs, tmp_path):
    file = tmp_path / "set.h5"
    done = runs(
        2,
        *((*SMALL, "--out", file, "--samples", *more) for more in [(3,), (4,), (5, "--overwrite"), (0,)]),
        (*SMALL, "--out", tmp_path / "nowhere" / "set.h5"),
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    for text in (f"{file} exists already; --overwrite", "0 is less than 1", f"cannot write in {tmp_path}/nowhere"):
        assert done.stderr.count(text) == 1, done.stderr
    assert done.stdout.count("ended with 2") == 3
    assert {each.name for each in tmp_path.glob("*set*")} == {"set.h5", "set.parts"}
    for missing in (5, 3):
        with h5py.File(file) as whole:
            assert np.array_equal(np.isnan(whole["y"][:]).any(axis=1), np.arange(5) >= missing)
        (tmp_path / "set.parts" / "00001.h5").unlink(missing_ok=True)


@pytest.mark.thorough("what the surrogate example refuses")
def test_a_rank_that_fails_leaves_nothing(runs, tmp_path):
    fails = "import pde; from mpi4py import MPI\nif MPI.COMM_WORLD.rank: pde.Plume.field = lambda *_: 1 / 0\n"
    done = runs(2, (*SMALL, "--samples", 8, "--out", tmp_path / "set.h5"), before=fails)
    assert "rank 1: ZeroDivisionError" in done.stderr and "ended with 2" in done.stdout
    assert not list(tmp_path.glob("*set*"))


def test_baselines(app):
    baselines, rng = app("baselines"), np.random.default_rng(0)
    x = rng.uniform(-1, 1, (200, 3)).astype(np.float32)
    y = np.stack([x[:, 0], 1 - x[:, 1] * x[:, 2], x[:, 0] ** 3 + x[:, 2]], axis=1)
    found = {name: predict(x, y, x[:50]) for name, predict in baselines.BASELINES.items()}
    assert np.array_equal(found["nearest neighbour"], y[:50]) and np.allclose(found["mean field"], y.mean(axis=0))
    assert np.allclose(found["cubic regression"], y[:50], atol=1e-4)
    assert np.allclose(found["linear regression"][:, 0], y[:50, 0], atol=1e-4)
    assert not np.allclose(found["linear regression"], y[:50], atol=0.1)
    assert np.allclose(
        baselines.relative_errors(0 * y, y, 2.0, 3.0), np.linalg.norm(3 * y, axis=1) / np.linalg.norm(2 + 3 * y, axis=1)
    )


@pytest.mark.nightly("an app as a user starts it")
def test_training_prints_and_draws(runs, tmp_path):
    file, figure = tmp_path / "set.h5", tmp_path / "figure.png"
    train = "train", file, "--hidden", 24, "--epochs", 10, "--batch", 24, "--figure", figure, "--held-out"
    done = runs(
        2,
        (*SMALL, "--samples", 120, "--out", file),
        (*train, 30, "--grid", "2x1x1"),
        (*train, 120),
        (*train, 30, "--grid", "3x1x1"),
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if ", held out " in line]
    assert len(losses) == 10 and losses[-1] < 0.9 * losses[0], done.stdout
    for text in ("this network", "nearest neighbour", "a field takes the solver", f"wrote {figure}"):
        assert text in done.stdout
    assert "has 120 samples; --held-out 120 leaves none" in done.stderr and "grid 3x1x1" in done.stderr
    assert figure.read_bytes().startswith(b"\x89PNG")
