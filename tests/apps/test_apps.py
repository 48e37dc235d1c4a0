"""The programs of apps/: each runs from a copy outside the repository, and its result is right."""

import ast
import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import h5py
import numpy as np
import pytest
from loops import given, looped
from on_disk import write_arrays
from training_runs import floats_in

from pmm3d import nn
from pmm3d.nn.training import evaluate
from pmm3d.nn.training.build import trainer
from pmm3d.nn.training.config import checked, load

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


def output_of(command, folder, code=0, seconds=300, **options):
    """Standard output of a command that ends with this code; if it is not 0, also stderr."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds, **options)
    assert done.returncode == code, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr * bool(code)


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
        return output_of([*launch, program, *map(str, options)], tmp_path, code, env=environ)

    return start


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
    write_arrays(tmp_path / "h.h5", H=h)
    said = run("purify.py", 2, "--file", "h.h5", "H", "--electrons", 11, "--grid", "1x2x1", "--out", "p.npy")
    assert said.endswith("right: True\n") and "on grid 1x2x1: H 37 x 37, 11 electrons" in said
    assert abs(np.load(tmp_path / "p.npy") - projector).max() < 1e-10
    assert float(re.search(r"tr\(P H\) (\S+)", said)[1]) == pytest.approx(energy, abs=1e-8)


def of_condition(rows, cols, condition):
    random = np.random.default_rng(1)
    left, right = (np.linalg.qr(random.standard_normal((size, cols)))[0] for size in (rows, cols))
    return (left * np.geomspace(1, 1 / condition, cols)) @ right.T


@pytest.mark.nightly("an app as a user starts it")
def test_cholesky_qr(run, tmp_path):
    a = of_condition(403, 17, 1e12)
    write_arrays(tmp_path / "a.h5", A=a)
    said = run("cholesky_qr.py", 2, "--file", "a.h5", "A", "--check", "--out", "a")
    q, r = np.load(tmp_path / "a-q.npy"), np.load(tmp_path / "a-r.npy")
    assert re.match(r"2 ranks: A 403 x 17 float64", said) and said.endswith("right: True\n")
    assert np.linalg.norm(q.T @ q - np.eye(17)) < 1e-14 * np.sqrt(17)
    assert np.linalg.norm(a - q @ r) < 1e-14 * np.linalg.norm(a)
    assert np.array_equal(r, np.triu(r)) and (np.diag(r) > 0).all()
    assert float(re.search(r"condition of A, from R (\S+)", said)[1]) == pytest.approx(1e12, rel=0.05)


@pytest.mark.nightly("an app as a user starts it")
def test_least_squares(run, tmp_path):
    a, y = of_condition(203, 9, 1e6), np.random.default_rng(5).standard_normal((203, 2))
    write_arrays(tmp_path / "a.h5", A=a, y=y)
    said = run("least_squares.py", 2, "--file", "a.h5", "A", "y", "--check", "--out", "x")
    assert said.endswith("right: True\n") and "least squares on 2 ranks: A 203 x 9 float64, 2 right-hand sides" in said
    expected = np.linalg.lstsq(a, y, rcond=None)[0]
    assert np.linalg.norm(np.load(tmp_path / "x.npy") - expected) < 1e-8 * np.linalg.norm(expected)
    assert run("least_squares.py", 1, "--rows", 6, "--cols", 6).endswith("right: True\n")  # no residual


@pytest.mark.nightly("an app as a user starts it")
def test_newton_schulz(run, tmp_path):
    from scipy.linalg import polar

    a = np.random.default_rng(2).standard_normal((31, 20))
    write_arrays(tmp_path / "a.h5", A=a)
    said = run("newton_schulz.py", 2, "--file", "a.h5", "A", "--grid", "1x2x1", "--check", "--out", "u.npy")
    assert said.endswith("right: True\n") and "polar factor on grid 1x2x1: A 31 x 20" in said
    assert abs(np.load(tmp_path / "u.npy") - polar(a)[0]).max() < 1e-12
    errors = [float(error) for error in re.findall(r"\|X\^H X - I\|_F (\S+)", said)]
    assert errors[-1] < 1e-13 and errors == sorted(errors, reverse=True)


@pytest.mark.nightly("an app as a user starts it")
def test_generalized_eigen(run, tmp_path):
    from scipy.linalg import eigh

    random = np.random.default_rng(4)
    h, s = random.standard_normal((2, 41, 41))
    h, s = h + h.T, s @ s.T + np.eye(41)
    write_arrays(tmp_path / "hs.h5", H=h, S=s)
    said = run("generalized_eigen.py", 2, "--file", "hs.h5", "H", "S", "--leaf", 12, "--check", "--out", "c.npy")
    assert said.endswith("right: True\n") and re.match(r"41 eigenvalues: \d+ and \d+\n  ", said)
    values, c = eigh(h, s, eigvals_only=True), np.load(tmp_path / "c.npy")
    assert abs(c.T @ h @ c - np.diag(values)).max() < 1e-11 * abs(values).max()
    assert "the size is 1: give at least 2" in run("generalized_eigen.py", 0, "--size", 1, code=2)


@pytest.mark.nightly("an app as a user starts it")
def test_rpa_like(run):
    said = run("rpa_like.py", 2, "--aux", 12, "--pairs", 101, "--block", 5, "--check")
    assert said.endswith("right: True\n")
    energy, coarse = map(float, re.search(r"^E (\S+), with half of the frequencies (\S+)$", said, re.M).groups())
    assert energy < -0.1 and coarse == pytest.approx(energy, rel=1e-2) and coarse != energy


SMALL_RPA = ("--aux", 23, "--pairs", 301, "--block", 5, "--check")


OPTIONS = [
    ("purify.py", 8, "--size 90 --method sp2 --grid 2x2x2", "45 electrons"),
    ("purify.py", 8, "--size 90 --method mcweeny --grid 2x1x4", "45 electrons"),
    ("purify.py", 8, "--size 90 --method mcweeny --grid auto", "45 electrons"),
    ("cholesky_qr.py", 4, "--rows 300 --cols 20 --dtype float32", "4 ranks: A 300 x"),
    ("cholesky_qr.py", 4, "--rows 300 --cols 1", "4 ranks: A 300 x"),
    ("cholesky_qr.py", 4, "--rows 300 --cols 20 --condition 1e10 --dtype complex128", "4 ranks: A 300 x"),
    ("least_squares.py", 4, "--rows 3000 --cols 40", "standard deviations"),
    *(("rpa_like.py", ranks, " ".join(map(str, SMALL_RPA[:-1])), "\nE ") for ranks in (1, 4, 6)),
    ("generalized_eigen.py", 4, "--size 100 --leaf 20 --grid 2x1x2", "lowest eigenvalues 0.5"),
    ("generalized_eigen.py", 1, "--size 64 --leaf 64", "lowest eigenvalues 0.5"),
    ("newton_schulz.py", 4, "--rows 40 --condition 1e5 --quintic 0", "40 x 40"),
    ("newton_schulz.py", 4, "--rows 40 --condition 1e5 --quintic 8", "40 x 40"),
    ("newton_schulz.py", 4, "--rows 30 --cols 44 --grid 1x2x2", "30 x 44"),
    ("newton_schulz.py", 4, "--rows 30 --sign --grid 2x2x1", "30 x 30"),
    ("newton_schulz.py", 4, "--rows 30 --sign --condition 1e4", "30 x 30"),
]


@pytest.mark.thorough("other methods, grids, types, shapes and conditions")
@looped("program, ranks, options, text", OPTIONS)
def test_results_are_right_with_other_options(run, program, ranks, options, text):
    said = run(program, ranks, *options.split(), "--check")
    assert said.endswith("right: True\n") and text in said


@pytest.mark.thorough("what the programs refuse, and results that are not right")
def test_what_cannot_be_computed_is_refused_or_called_wrong(run, tmp_path):
    """A matrix without gap, and an integral with too few frequencies, are no success."""
    write_arrays(tmp_path / "h.h5", identity=2 * np.eye(5), no_gap=np.diag([0.0, 1.0, 1.0, 2.0]))
    for program, ranks, options, code, text in (
        ("purify.py", 1, ("--file", "h.h5", "identity"), 2, "--file needs --electrons"),
        ("purify.py", 1, ("--file", "h.h5", "identity", "--electrons", 5), 2, "--electrons 5 is not within 1 and 4"),
        ("purify.py", 1, ("--size", 9, "--electrons", 0), 2, "--electrons 0 is not within 1 and 8"),
        ("purify.py", 1, ("--size", 1), 2, "H has 1 rows; a gap needs at least 2"),
        ("purify.py", 1, ("--file", "h.h5", "identity", "--electrons", 2), 1, "is 2 times the identity"),
        ("purify.py", 2, ("--file", "h.h5", "no_gap", "--electrons", 2), 1, "right: False"),
        ("generalized_eigen.py", 1, ("--file", "h.h5", "identity", "identity", "--leaf", 3), 1, "raise --leaf"),
        ("rpa_like.py", 2, (*SMALL_RPA, "--points", 2), 1, "right: False"),
    ):
        assert text in run(program, ranks, *options, code=code)


@pytest.mark.nightly("an app as a user starts it")
def test_train_fc_resumes_to_the_same_bits(run, tmp_path):
    random = np.random.default_rng(0)
    write_arrays(tmp_path / "data.h5", x=random.standard_normal((160, 6)).astype("float32"), y=np.arange(160) % 3)

    def start(folder, epochs):
        said = run("train_fc.py", 2, "data.h5", "--data", 2, "--epochs", epochs, "--checkpoints", folder)
        return [int(epoch) for epoch in re.findall(r"^epoch (\d+): ", said, re.MULTILINE)], said

    assert start("whole", 2)[0] == [1, 2]
    first, last = sorted((tmp_path / "whole").iterdir())
    shutil.copytree(first, tmp_path / "resumed" / first.name)
    epochs, said = start("resumed", 2)
    assert epochs == [2] and f"resumed resumed/{first.name}, after epoch 1" in said
    expected, found = (floats_in(path / "checkpoint.h5") for path in (last, tmp_path / "resumed" / last.name))
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


@pytest.mark.nightly("five trainings of some seconds")
@pytest.mark.parallel([1])
@pytest.mark.deadline(900)
def test_the_digits_are_right_in_97_of_100_held_out_images_for_each_seed(comm, shared_path, monkeypatch):
    """With the configuration of `make run`, on one rank. The seed determines the held-out images and the weights."""
    monkeypatch.chdir(shared_path)
    runpy.run_path(str(APPS / "digits.py"))["main"]("runs/digits.h5")
    values = tomllib.loads((APPS / "digits.toml").read_text()) | {"grid": {}}
    found = []
    for seed in range(5):
        values["training"] |= {
            "seed": seed,
            "folder": f"runs/{seed}",
            "evaluate_every": 10**6,
            "checkpoint_every": 10**6,
        }
        with trainer(checked(values), comm) as run:
            assert run.run() and run.loader.epoch == values["training"]["epochs"]
            figures = evaluate(run.state.network, run.validation, nn.cross_entropy)
            found.append(figures["accuracy"])
    assert min(found) >= 0.97, found


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


# apps/gpt: its text, and the training of its GPT

MINUTES = 10


@pytest.fixture
def folder(tmp_path):
    """A folder with a copy of the app and its text."""
    shutil.copytree(APPS / "gpt", tmp_path / "gpt", ignore=shutil.ignore_patterns("__pycache__"))
    output_of([sys.executable, "gpt/text.py"], tmp_path)
    return tmp_path


def test_the_text_has_no_paragraph_twice(folder):
    texts = [(folder / f"runs/gpt/{name}.txt").read_text().split("\n\n") for name in ("text", "held")]
    every = [paragraph for text in texts for paragraph in text]
    assert len(every) == len(set(every)) > 1000 and len(texts[1]) > 50
    with h5py.File(folder / "runs/gpt/held.h5") as file:
        assert file["tokens"][()].tobytes() == (folder / "runs/gpt/held.txt").read_bytes()
    dense, mixture = (load(folder / f"gpt/{name}.toml").network for name in ("gpt", "experts"))
    assert mixture.top_k * mixture.expert_mlp == dense.mlp and mixture.hidden == dense.hidden


@pytest.mark.thorough("ten minutes of two cores")
@pytest.mark.deadline(MINUTES * 60 + 200)
def test_held_out_topics_take_less_than_2_4_bits_a_byte(folder):
    launch = [sys.executable, "-m", "pmm3d.launcher", "-n", "4", "-m", "pmm3d"]
    trained = output_of([*launch, "train", "gpt/gpt.toml"], folder, seconds=MINUTES * 60)
    lines = [json.loads(line) for line in (folder / "runs/gpt/metrics.jsonl").read_text().splitlines()]
    figures = [line["validation"]["bits_per_byte"] for line in lines if "validation" in line]
    assert figures[-1] < 2.4 and f"validation bits_per_byte: {figures[-1]:.4f}" in trained
    sample = output_of([*launch, "generate", "runs/gpt", "--prompt", "The list", "--length", "100"], folder)
    assert "The list" in sample and len(sample) >= 100, sample


# The five commands of the README: from a CSV file to a trained network, a report, predictions and a torch model

README = APPS.parent / "README.md"
SPECIES = ["setosa", "versicolor", "virginica"]
COMMANDS = ["convert", "train", "report", "predict", "export"]


def shown():
    """(the configuration, the five commands) of the README, as text for a shell."""
    text = README.read_text()
    [(configuration, below)] = re.findall(r"^```toml\n(.*?)^```\n\n((?:    [^\n]*\n)+)", text, re.M | re.S)
    return configuration, [line.strip() for line in below.splitlines()]


@pytest.mark.nightly("the commands as a user starts them: half a minute")
def test_the_five_commands_of_the_readme(tmp_path):
    configuration, commands = shown()
    assert [next(word for word in command.split() if word in COMMANDS) for command in commands] == COMMANDS
    (tmp_path / "flowers.toml").write_text(configuration)
    (tmp_path / "apps").symlink_to(APPS)
    here = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PMM3D_")} | here
    for command in commands:
        output_of(command, tmp_path, env=environment, shell=True)
    assert "on 4 ranks" in (tmp_path / "runs/flowers/run.json").read_text()
    assert "<title>flowers" in (tmp_path / "runs/flowers/report.html").read_text()
    with h5py.File(tmp_path / "predicted.h5") as file, h5py.File(tmp_path / "flowers.h5") as samples:
        assert list(file["classes"].attrs["class_names"]) == SPECIES
        assert np.mean(file["classes"][...].reshape(-1) == np.repeat([0, 1, 2], 50)) > 0.95
        outputs, x = file["outputs"][...], samples["x"][...]
    (tmp_path / "in_torch.py").write_text(IN_TORCH)
    np.savez(tmp_path / "right.npz", x=x, outputs=outputs)
    assert "equal: True" in output_of([sys.executable, "in_torch.py"], tmp_path)


IN_TORCH = """
import numpy, torch
from safetensors.torch import load_file
net = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.GELU(), torch.nn.Linear(32, 32), torch.nn.GELU(),
                          torch.nn.Linear(32, 3))
net.load_state_dict(load_file("flowers.safetensors"))
right = numpy.load("right.npz")
with torch.no_grad():
    found = net.eval()(torch.from_numpy(right["x"])).numpy()
print("equal:", numpy.allclose(found, right["outputs"], rtol=1e-5, atol=1e-5))
"""
