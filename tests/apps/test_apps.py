"""The programs of apps/: each runs from a copy outside the repository, and its result is right."""

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from loops import given

APPS = Path(__file__).parents[2] / "apps"
PROGRAMS = sorted(APPS.rglob("*.py"))
PUBLIC = (
    "pmm3d",
    "pmm3d.errors",
    "pmm3d.io",
    "pmm3d.layout",
    "pmm3d.nn",
    "pmm3d.nn.dry",
    "pmm3d.nn.optim",
    "pmm3d.nn.training",
    "pmm3d.torch",
)
"""Modules whose names are listed in docs/reference."""
OTHERS = {"h5py", "matplotlib", "mpi4py", "numpy", "scipy", "sklearn", "torch", "typer"}
MOST_LINES = 155


def imports(path):
    """(module, name) of each import in a file. The name is "" for `import module`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, path
            yield from ((node.module, alias.name) for alias in node.names)


def is_public(module, name):
    known = importlib.import_module(module)
    if names := getattr(known, "__all__", None):
        return name in names or f"{module}.{name}" in PUBLIC
    return not name.startswith("_") and getattr(known, name).__module__ == module


def test_the_programs_use_public_names_only():
    assert len(PROGRAMS) >= 14
    for path in PROGRAMS:
        own_folder = {other.stem for other in path.parent.glob("*.py")} if path.parent.name == "surrogate" else set()
        for module, name in imports(path):
            with given(path=path.name, module=module, name=name):
                if module.split(".")[0] == "pmm3d":
                    assert module in PUBLIC and is_public(module, name)
                else:
                    assert module.split(".")[0] in OTHERS | own_folder | sys.stdlib_module_names
        with given(path=path.name):
            assert len(path.read_text().splitlines()) <= MOST_LINES


@pytest.fixture
def run(tmp_path):
    """run("product.py", 2, "--option"): standard output of a copy on two ranks; with a code also stderr. 0 ranks:
    without a launcher."""
    for path in PROGRAMS:
        target = tmp_path / (f"surrogate/{path.name}" if path.parent.name == "surrogate" else path.name)
        target.parent.mkdir(exist_ok=True)
        shutil.copy(path, target)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def start(program, ranks, *options, code=0):
        launch = [sys.executable, *(["-m", "pmm3d.launcher", "-n", str(ranks)] if ranks else [])]
        done = subprocess.run(
            [*launch, program, *map(str, options)],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr * bool(code)

    return start


def hdf5(path, **arrays):
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array


def test_product(run):
    assert "C is 1500 x 1000, right: True; rank 0 received" in run("product.py", 2)


def hamiltonian(size, occupied):
    random = np.random.default_rng(3)
    vectors = np.linalg.qr(random.standard_normal((size, size)))[0]
    levels = np.concatenate([random.uniform(-3, -1, occupied), random.uniform(1, 4, size - occupied)])
    h = vectors * levels @ vectors.T
    return (h + h.T) / 2, vectors[:, :occupied] @ vectors[:, :occupied].T, levels[:occupied].sum()


@pytest.mark.nightly("an app as a user starts it")
def test_purify(run, tmp_path):
    h, projector, energy = hamiltonian(37, 11)
    hdf5(tmp_path / "h.h5", H=h)
    said = run("purify.py", 2, "--file", "h.h5", "H", "--electrons", 11, "--grid", "1x2x1", "--out", "p.npy")
    assert said.endswith("right: True\n") and "on grid 1x2x1: H 37 x 37, 11 electrons" in said
    assert abs(np.load(tmp_path / "p.npy") - projector).max() < 1e-10
    assert float(re.search(r"tr\(P H\) (\S+)", said)[1]) == pytest.approx(energy, abs=1e-8)


@pytest.mark.thorough("files that purification refuses")
def test_purify_refuses_what_it_cannot_project(run, tmp_path):
    hdf5(tmp_path / "h.h5", H=2 * np.eye(5))
    assert "--file needs --electrons" in run("purify.py", 1, "--file", "h.h5", "H", code=2)
    assert "H is 2 times the identity" in run("purify.py", 1, "--file", "h.h5", "H", "--electrons", 2, code=1)


@pytest.mark.thorough("purification by the other method and on deeper grids")
def test_purify_by_both_methods(run):
    for method, grid in (("sp2", "2x2x2"), ("mcweeny", "2x1x4"), ("mcweeny", "auto")):
        with given(method=method, grid=grid):
            said = run("purify.py", 8, "--size", 90, "--method", method, "--grid", grid, "--check")
            assert said.endswith("right: True\n") and "45 electrons" in said


@pytest.mark.thorough("where purification has no gap it does not pass for right")
def test_purify_without_a_gap(run, tmp_path):
    hdf5(tmp_path / "h.h5", H=np.diag([0.0, 1.0, 1.0, 2.0]))
    assert "right: False" in run("purify.py", 2, "--file", "h.h5", "H", "--electrons", 2, code=1)


def of_condition(rows, cols, condition):
    random = np.random.default_rng(1)
    left, right = (np.linalg.qr(random.standard_normal((size, cols)))[0] for size in (rows, cols))
    return (left * np.geomspace(1, 1 / condition, cols)) @ right.T


@pytest.mark.nightly("an app as a user starts it")
def test_cholesky_qr(run, tmp_path):
    a = of_condition(403, 17, 1e12)
    hdf5(tmp_path / "a.h5", A=a)
    said = run("cholesky_qr.py", 2, "--file", "a.h5", "A", "--check", "--out", "a")
    q, r = np.load(tmp_path / "a-q.npy"), np.load(tmp_path / "a-r.npy")
    assert re.match(r"shifted-cholesky-qr\d on 2 ranks: A 403 x 17 float64", said) and said.endswith("right: True\n")
    assert np.linalg.norm(q.T @ q - np.eye(17)) < 1e-14 * np.sqrt(17)
    assert np.linalg.norm(a - q @ r) < 1e-14 * np.linalg.norm(a)
    assert np.array_equal(r, np.triu(r)) and (np.diag(r) > 0).all()
    assert float(re.search(r"condition of A, from R (\S+)", said)[1]) == pytest.approx(1e12, rel=0.05)


@pytest.mark.thorough("Cholesky QR in other types and conditions")
def test_cholesky_qr_of_random_matrices(run):
    for options, how in (
        (["--dtype", "float32"], "cholesky-qr2"),
        (["--cols", 1], "cholesky-qr2"),
        (["--condition", 1e10, "--dtype", "complex128"], "shifted"),
    ):
        with given(options=options):
            said = run("cholesky_qr.py", 4, "--rows", 300, "--cols", 20, "--check", *options)
            assert said.startswith(how) and said.endswith("right: True\n")


@pytest.mark.nightly("an app as a user starts it")
def test_newton_schulz(run, tmp_path):
    from scipy.linalg import polar

    a = np.random.default_rng(2).standard_normal((31, 20))
    hdf5(tmp_path / "a.h5", A=a)
    said = run("newton_schulz.py", 2, "--file", "a.h5", "A", "--grid", "1x2x1", "--check", "--out", "u.npy")
    assert said.endswith("right: True\n") and "polar factor on grid 1x2x1: A 31 x 20" in said
    assert abs(np.load(tmp_path / "u.npy") - polar(a)[0]).max() < 1e-12
    errors = [float(error) for error in re.findall(r"\|X\^H X - I\|_F (\S+)", said)]
    assert errors[-1] < 1e-13 and errors == sorted(errors, reverse=True)


@pytest.mark.thorough("Newton-Schulz of wide, ill-conditioned and symmetric matrices")
def test_newton_schulz_of_random_matrices(run):
    steps = {}
    for quintic in (0, 8):
        said = run("newton_schulz.py", 4, "--rows", 40, "--condition", 1e5, "--quintic", quintic, "--check")
        assert said.endswith("right: True\n")
        steps[quintic] = int(re.search(r"^(\d+) iterations", said, re.M)[1])
    assert steps[8] < steps[0] - 5
    for options in (["--cols", 44, "--grid", "1x2x2"], ["--sign", "--grid", "2x2x1"], ["--sign", "--condition", 1e4]):
        with given(options=options):
            assert run("newton_schulz.py", 4, "--rows", 30, "--check", *options).endswith("right: True\n")


@pytest.mark.nightly("an app as a user starts it")
def test_rpa_like(run):
    said = run("rpa_like.py", 2, "--aux", 12, "--pairs", 101, "--block", 5, "--check")
    assert said.endswith("right: True\n")
    energy, coarse = map(float, re.search(r"^E (\S+), with half of the frequencies (\S+)$", said, re.M).groups())
    assert energy < -0.1 and coarse == pytest.approx(energy, rel=1e-2) and coarse != energy


@pytest.mark.thorough("the RPA energy is the same on other numbers of ranks, and wrong with too few frequencies")
def test_rpa_like_on_any_ranks(run):
    small = "--aux", 23, "--pairs", 301, "--block", 5, "--check"
    energies = [float(re.search(r"^E (\S+),", run("rpa_like.py", ranks, *small), re.M)[1]) for ranks in (1, 4, 6)]
    assert energies == pytest.approx(energies[:1] * 3, rel=1e-11)
    assert "right: False" in run("rpa_like.py", 2, *small, "--points", 2, code=1)


def weights(checkpoint):
    found = {}
    with h5py.File(checkpoint / "checkpoint.h5") as file:
        file.visititems(
            lambda key, item: (
                found.update({key: item[...]}) if isinstance(item, h5py.Dataset) and item.dtype.kind == "f" else None
            )
        )
    return found


@pytest.mark.nightly("an app as a user starts it")
def test_train_fc_resumes_to_the_same_bits(run, tmp_path):
    random = np.random.default_rng(0)
    hdf5(tmp_path / "data.h5", x=random.standard_normal((160, 6)).astype("float32"), y=np.arange(160) % 3)

    def start(folder, epochs):
        said = run("train_fc.py", 2, "data.h5", "--data", 2, "--epochs", epochs, "--checkpoints", folder)
        return [int(epoch) for epoch in re.findall(r"^epoch (\d+): ", said, re.MULTILINE)], said

    assert start("whole", 2)[0] == [1, 2]
    first, last = sorted((tmp_path / "whole").iterdir())
    shutil.copytree(first, tmp_path / "resumed" / first.name)
    epochs, said = start("resumed", 2)
    assert epochs == [2] and f"resumed resumed/{first.name}, after epoch 1" in said
    expected, found = weights(last), weights(tmp_path / "resumed" / last.name)
    assert len(expected) == 30 and expected.keys() == found.keys()
    assert all(np.array_equal(expected[name], found[name]) for name in expected)
    assert start("resumed", 3)[0] == [3]


@pytest.mark.nightly("an app as a user starts it")
def test_digits(run, tmp_path):
    assert "wrote digits.h5: 1797 samples" in run("digits.py", 0, "digits.h5")
    text = (APPS / "digits.toml").read_text()
    for old, new in (
        ("runs/digits.h5", "digits.h5"),
        ("runs/digits", "run"),
        ("epochs = 15", "epochs = 2"),
        ('"2x2x1"', '"1x1x1"'),
    ):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "digits.toml").write_text(text)
    run("-m", 2, "pmm3d", "train", "digits.toml")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["validation"]["accuracy"] for line in lines if "validation" in line][-1] > 0.8


@pytest.mark.parametrize(
    "grid",
    [
        pytest.param("1x2x1", marks=pytest.mark.nightly("an app as a user starts it")),
        pytest.param("2x1x1", marks=pytest.mark.thorough("the same program on another grid")),
    ],
)
def test_torch_bridge(run, grid):
    said = run("torch_bridge.py", 2, "--grid", grid)
    assert float(re.search(r"right (\S+);", said)[1]) > 0.9 and said.endswith(
        "0.weight, 0.bias, 2.weight, 2.bias, 4.weight, 4.bias, 6.weight, 6.bias\n"
    )


CELLS = """
import ast, json, sys
scope = {"__name__": "__main__"}
for cell in json.load(open(sys.argv[1]))["cells"]:
    body = ast.parse("".join(cell["source"])).body if cell["cell_type"] == "code" else []
    shown = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), scope)
    if shown is not None:
        print(repr(eval(compile(ast.Expression(shown.value), "cell", "eval"), scope)))
"""
"""Program that runs the cells of a notebook, and prints the output of each."""


def test_one_process_needs_no_launcher(run, tmp_path):
    """A dry run, and the cells of the notebook."""
    (tmp_path / "cells.py").write_text(CELLS)
    said = run("cells.py", 0, APPS / "notebook.ipynb")
    assert "<Grid 1x1x1 on 1 rank, rank 0" in said and "array([[ 5.,  2.]" in said
    assert "Box(r0=0, r1=1, c0=0, c1=2)" in said and re.search(r"^21\.1\d+$", said, re.M), said
    said = run("dry_run.py", 0, "--grid", "4x4x4", "--width", 64, "--batch", 64, "--layers", 2, "--actions")
    assert "| z    | reduce dW" in said and "7 GEMMs" in said and "of this rank: weights 4" in said
    assert re.search(r"\d+ actions; the dry step took", said)
