"""A table in physical units, from CSV to predictions in its own units."""

import csv
import json
import re
import shutil
import signal

import h5py
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from training_runs import fails, signal_at

from pmm3d import Grid
from pmm3d.io import Checkpoints, DataSet, convert
from pmm3d.nn.training import Trainer
from pmm3d.nn.training.samples import unlike

pytestmark = [pytest.mark.deadline(240), pytest.mark.parallel([2])]
SITES = {"north": 1.0, "south": 1.3}


def write_table(path, rows, seed, names=("pressure", "speed", "site", "heat flux", "yield")):
    """Write a table with columns in the order of `names`. Return its targets."""
    random, lines, targets = np.random.default_rng(seed), [], []
    for row in range(rows):
        pressure, speed, site = random.normal(1e5, 5e3), random.uniform(0.5, 2), random.choice(list(SITES))
        heat = 1e3 * SITES[site] * speed * (pressure / 1e5)
        rate = 1e-3 * (speed + 20 * (pressure / 1e5 - 1))
        values = {"pressure": pressure if row % 100 else "", "speed": speed, "site": site}
        lines.append({**values, "heat flux": heat, "yield": rate})
        targets.append((heat, rate))
    with open(path, "w", newline="") as file:
        written = csv.DictWriter(file, names, extrasaction="ignore")
        written.writeheader()
        written.writerows(lines)
    return np.array(targets)


@pytest.fixture
def table(here):
    """Runs in a folder with the table lab.csv, and lab.h5 that was converted from it."""
    if here.comm.rank == 0:
        write_table(here.folder / "lab.csv", 400, 0)
        options = {"targets": ["heat flux", "yield"], "categories": "site", "missing": "mean"}
        convert(here.folder / "lab.csv", here.folder / "lab.h5", **options)
    here.comm.barrier()
    return here


def config(here, name="run", data="", epochs=40, file="lab.h5", training="", **sections):
    lines = f"epochs = {epochs}\n{training}"
    path = here.config(name, data, lines, hidden=[24], optimizer="lr = 0.02", **sections)
    if here.comm.rank == 0:
        with open(path) as opened:
            text = opened.read().replace("data.h5", file)
        with open(path, "w") as opened:
            opened.write(text)
    here.comm.barrier()
    return path


def on_rank_0(here, body):
    """Return body() of rank 0 on every rank."""
    return here.comm.bcast(body() if here.comm.rank == 0 else None)


def test_a_table_in_physical_units_is_predicted_in_these(table):
    done = table.finish(config(table, grid='shape = "1x2x1"'))
    assert "2 values a row ('heat flux', 'yield')" in done.stderr and "standardised" in done.stderr
    assert "orders of magnitude" not in done.stderr
    figures = [line["validation"] for line in table.metrics() if "validation" in line][-1]
    assert set(figures) == {"loss", "r2", "r2 of heat flux", "r2 of yield"}
    assert min(figures[f"r2 of {name}"] for name in ("heat flux", "yield")) > 0.95
    folder, names = table.folder, ("site", "yield", "speed", "heat flux", "pressure")
    right = on_rank_0(table, lambda: write_table(folder / "new.csv", 250, 1, names))
    done = table.run("predict", str(folder / "run"), str(folder / "new.csv"), "--out", str(folder / "out.csv"))
    assert done.returncode == 0 and "250 lines of heat flux, yield" in done.stdout, done.stderr
    with open(folder / "out.csv") as file:
        first, *lines = csv.reader(file)
    predicted = np.array(lines, float)
    r2 = 1 - ((predicted - right) ** 2).sum(0) / ((right - right.mean(0)) ** 2).sum(0)
    root = ((predicted - right) ** 2).mean(0) ** 0.5
    assert first == ["heat flux", "yield"] and min(r2) > 0.95
    done = table.run("evaluate", str(folder / "run"), str(folder / "new.csv"))
    assert done.returncode == 0, done.stderr
    for name, score, size in zip(first, r2, root):
        [line] = [line for line in done.stdout.splitlines() if line.startswith(f"{name}: r2 ")]
        said = line.replace(",", "").split()
        assert float(said[-3]) == pytest.approx(score, abs=1e-4) and float(said[-1]) == pytest.approx(size, rel=1e-3)
    assert "standardised" in done.stdout and not on_rank_0(table, lambda: list(folder.glob(".*.h5")))
    refusals = [
        ("site", "east", "line 2, column site: 'east' is none of the categories of the training data: north, south"),
        ("speed", "fast", "line 2, column speed: 'fast' is not a number"),
    ]
    for column, value, text in refusals:
        if table.comm.rank == 0:
            lines = [{"pressure": 1e5, "speed": 1, "site": "north"} | {column: value}]
            with open(folder / "odd.csv", "w", newline="") as file:
                written = csv.DictWriter(file, list(lines[0]))
                written.writeheader()
                written.writerows(lines)
        table.comm.barrier()
        fails(table.run("predict", str(folder / "run"), str(folder / "odd.csv"), "--out", str(folder / "o.csv")), text)
    fails(table.run("evaluate", str(folder / "run"), str(folder / "odd.csv")), "has no column 'heat flux'")
    if table.comm.rank == 0:
        options = {"targets": ["yield", "heat flux"], "categories": "site", "missing": "mean"}
        convert(folder / "lab.csv", folder / "swapped.h5", **options)
    table.comm.barrier()
    fails(table.run("evaluate", str(folder / "run"), str(folder / "swapped.h5")), "--accept targets")
    other = config(table, "other", f'validation_file = "{folder}/swapped.h5"')
    fails(table.train(other), "targets was ['heat flux', 'yield'], is ['yield', 'heat flux']")
    fails(table.run("evaluate", str(folder / "run"), str(folder / "lab.csv"), "--targets", "yield"), "leave it out")


def test_an_exported_network_takes_and_returns_the_units_of_the_table(table):
    table.finish(config(table, epochs=4))
    folder = table.folder
    for command in (
        ("predict", str(folder / "run"), str(folder / "lab.h5"), "--out", str(folder / "out.h5")),
        ("export", str(folder / "run"), str(folder / "run.safetensors")),
    ):
        done = table.run(*command)
        assert done.returncode == 0, done.stderr
    assert "have the units of the data" in done.stdout
    with h5py.File(folder / "lab.h5") as data, h5py.File(folder / "out.h5") as out:
        x, predicted = data["x"][:].astype(float), out["outputs"][:]
        assert list(out["outputs"].attrs["columns"]) == ["heat flux", "yield"]
    weights = load_file(folder / "run.safetensors")
    hidden = x @ weights["0.weight"].T.astype(float) + weights["0.bias"]
    from scipy.special import erf

    outputs = hidden * (1 + erf(hidden / 2**0.5)) / 2 @ weights["2.weight"].T.astype(float) + weights["2.bias"]
    assert (abs(outputs - predicted).max(0) < 1e-3 * predicted.std(0)).all()
    table.finish(config(table, "bare", epochs=1, network="bias = false"))
    done = table.run("export", str(folder / "bare"), str(folder / "bare.safetensors"))
    assert "the network takes standardised samples" in done.stdout
    with safe_open(folder / "bare.safetensors", "numpy") as file:
        assert len(json.loads(file.metadata()["pmm3d"])["scaling"]["inputs"][0]) == 4
    weights = f'weights = "{folder}/bare.safetensors"'
    done = table.finish(config(table, "more", epochs=1, network="bias = false", training=weights))
    assert "loaded, with the scales of its samples" in done.stderr


def test_a_resumed_run_keeps_its_scales(table, comm):
    options = {"epochs": 3, "grid": 'shape = "1x2x1"'}
    table.finish(config(table, "whole", **options))
    with signal_at(comm, Trainer, "_step", 10, signal.SIGTERM):
        assert table.train(config(table, "ended", **options)).returncode == 75
    off = config(table, "ended", "standardize = false", **options)
    fails(table.train(off, "--resume", "auto"), "of a run with standardised samples, and nothing was changed")
    table.finish(config(table, "ended", **options), "--resume", "auto")
    table.assert_same_weights("whole", "ended")
    folder = table.folder
    if comm.rank == 0:
        shutil.copy(folder / "lab.h5", folder / "more.h5")
        with h5py.File(folder / "more.h5", "r+") as file:
            file["x"][:, 0] += 1e5
    comm.barrier()
    before = scales_of(table, "ended")
    other = config(table, "ended", file="more.h5", **options | {"epochs": 4})
    table.finish(other, "--resume", "auto", "--accept", "data")
    assert scales_of(table, "ended") == before is not None


def scales_of(here, name):
    with Grid(here.comm, "ddp") as grid:
        kept = Checkpoints(grid, here.folder / name / "checkpoints")
        return kept.meta(kept.latest())["loader"].get("scaling")


def test_initial_weights_bring_their_scales(table):
    folder, options = table.folder, {"epochs": 1, "grid": 'shape = "1x2x1"'}
    table.finish(config(table, "first", "", **options))
    done = table.finish(config(table, "second", "validation = 0.5", training=f'weights = "{folder}/first"', **options))
    assert "loaded, with the scales of its samples" in done.stderr
    assert scales_of(table, "second") == scales_of(table, "first") is not None
    assert table.run("export", str(folder / "first"), str(folder / "w.safetensors")).returncode == 0
    third = config(table, "third", training=f'weights = "{folder}/w.safetensors"', **options)
    fails(table.train(third), "name this run or its checkpoint")
    raw = config(table, "third", "standardize = false", training=f'weights = "{folder}/w.safetensors"', **options)
    table.finish(raw)
    assert scales_of(table, "third") is None
    if table.comm.rank == 0:
        save_file(load_file(folder / "w.safetensors"), folder / "torch.safetensors")
        shutil.copy(folder / "lab.h5", folder / "classes.h5")
        with h5py.File(folder / "classes.h5", "r+") as file:
            labels = (file["y"][:, 0] > 1000).astype(int)
            del file["y"]
            file["y"] = labels
    table.comm.barrier()
    fourth = config(table, "fourth", training=f'weights = "{folder}/torch.safetensors"', **options)
    assert "the scales of the samples are those of this run's rows" in table.finish(fourth).stderr
    assert scales_of(table, "fourth") is not None
    labels = config(table, "labels", training=f'weights = "{folder}/first"', file="classes.h5", **options)
    table.finish(labels)
    assert scales_of(table, "labels") == scales_of(table, "first") | {"targets": None}
    back = config(table, "back", training=f'weights = "{folder}/labels"', **options)
    table.finish(back)
    assert scales_of(table, "back")["targets"] is not None


OWN = """
from pmm3d import nn

def asymmetric(output, y):
    error = output - y
    return nn.mean(nn.relu(error) * 3 + nn.relu(error * -1.0))

def largest(output, y):
    return float(abs((output - y).gather()).max())

def broken(output, y):
    return output.no_such

def text(output, y):
    return "1 m"

def on_one_rank(output, y):
    return 1 / output.grid.rank

def square(output, y):
    return nn.mean((output - y) * (output - y))
"""


def test_a_loss_and_metrics_of_ones_own(table):
    """The loss penalises an error above the target: most predictions are below it."""
    if table.comm.rank == 0:
        (table.folder / "own.py").write_text(OWN)
    folder = table.folder
    lines = f'loss = "{folder}/own.py:asymmetric"\nmetrics = ["{folder}/own.py:largest", "{folder}/own.py:square"]'
    done = table.finish(config(table, "own", epochs=15, training=lines, grid='shape = "1x2x1"'))
    [figures] = [line["validation"] for line in table.metrics("own") if "validation" in line][-1:]
    assert set(figures) == {"loss", "largest", "square", "r2", "r2 of heat flux", "r2 of yield"} and figures["r2"] > 0.5
    assert "by the loss " in done.stderr and "memory is not predicted" not in done.stderr
    done = table.run("predict", str(folder / "own"), str(folder / "lab.csv"), "--out", str(folder / "own.h5"))
    with h5py.File(folder / "own.h5") as out, h5py.File(folder / "lab.h5") as data:
        assert (out["outputs"][:] < data["y"][:]).mean() > 0.55
    done = table.run("evaluate", str(folder / "own"), str(folder / "lab.csv"))
    assert done.returncode == 0 and "largest " in done.stdout, done.stderr
    for training, text in (
        (f'loss = "{folder}/own.py:gone"', "has no function gone; it has asymmetric, largest, broken"),
        (f'metrics = ["{folder}/own.py:text"]', "own.py:text raised an error: TypeError: a metric returns a number"),
        (f'metrics = ["{folder}/own.py:on_one_rank"]', "own.py, line 18)"),
        (f'loss = "{folder}/own.py:broken"', "own.py, line 12)"),
        (f'metrics = ["{folder}/own.py:r2"]', "must differ, also from loss, accuracy and r2"),
    ):
        fails(table.train(config(table, "no", epochs=1, training=training)), text)


def test_without_standardising_there_is_a_warning_and_the_bits_of_any_other_file(table):
    folder, options = table.folder, {"epochs": 1, "grid": 'shape = "1x2x1"'}
    done = table.finish(config(table, "off", "standardize = false", **options))
    assert "differ by orders of magnitude" in done.stderr and "'pressure'" in done.stderr
    assert "set data.standardize = true" in done.stderr
    if table.comm.rank == 0:
        with h5py.File(folder / "lab.h5") as file, h5py.File(folder / "plain.h5", "w") as plain:
            plain["x"], plain["y"] = file["x"][:], file["y"][:]
    table.comm.barrier()
    table.finish(config(table, "plain", file="plain.h5", **options))
    table.assert_same_weights("off", "plain")
    for values, said in (
        ([1e-4, 2e-4], "differ from 1 by orders"),
        ([1e-4, 1], "columns of .* differ by"),
        ([1, 2], ""),
    ):
        with Grid(table.comm, "ddp") as grid:
            if grid.rank == 0:
                with h5py.File(folder / "some.h5", "w") as file:
                    file["x"], file["y"] = np.ones((4, 2)) * values, np.ones((4, 1))
            grid.comm.barrier()
            with DataSet(grid, folder / "some.h5") as data:
                assert bool(re.search(said, unlike(data))) and bool(said) == bool(unlike(data))
    table.finish(config(table, "on", "standardize = true", file="plain.h5", **options))
    table.finish(config(table, "table", **options))
    table.assert_same_weights("on", "table")
