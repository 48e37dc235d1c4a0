"""Hostile inputs to train, export, predict and report. Each must be refused or reported, and harm no file.
tests/io/test_convert.py has those to convert."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np

from .files import Arguments, Sections, configured, samples, trained, training
from .jobs import Job, command
from .judgement import FINISHED, REFUSED, Outcome, check_files, fingerprints, refused


@dataclass(frozen=True)
class Case:
    """A hostile input to a command.

    prepare  makes the files in an empty folder, the working folder; returns the arguments of pmm3d
    says     regular expression that the output must match: the cause, and the remedy if there is one
    code     expected exit code
    ranks    0: without mpiexec
    """

    command: str
    name: str
    prepare: Callable[[Path], Arguments]
    says: str
    code: int = REFUSED
    ranks: int = 0
    environ: Mapping[str, str] = field(default_factory=dict)


def tried(case: Case, folder: Path) -> Outcome:
    """Run the command in a new folder. Check its end, its message and the files."""
    folder.mkdir()
    arguments = case.prepare(folder)
    before = dict(fingerprints(folder))
    line = command(case.ranks, ["-m", "pmm3d", *arguments])
    ending = Job(line, folder.with_suffix(".log"), case.environ, folder=folder).end()
    outcome = refused(case.command, case.name, ending, case.says, case.code)
    check_files(outcome, folder, before)
    return outcome


def train(
    name: str,
    says: str,
    changes: Sections | None = None,
    *arguments: str,
    first: Callable[[Path], object] = lambda folder: None,
    code: int = REFUSED,
) -> Case:
    return Case("train", name, training(changes, *arguments, first=first), says, code, ranks=2)


def resumed(
    name: str, says: str, changes: Sections, first: Callable[[Path], object] = lambda folder: None, code: int = REFUSED
) -> Case:
    """A training that is resumed from the checkpoint of a different one."""

    def prepare(folder: Path) -> Arguments:
        trained(folder)
        first(folder)
        configured(folder / "config.toml", {"training": {"epochs": "3"}, **changes})
        return "train", "config.toml", "--resume", "auto"

    return Case("train", name, prepare, says, code, ranks=2)


def without_file(name: str, says: str, first: Callable[[Path], object], *config: str) -> Case:
    def prepare(folder: Path) -> Arguments:
        samples(folder / "data.h5")
        first(folder)
        return "train", *(config or ("config.toml",))

    return Case("train", name, prepare, says, ranks=2)


def data(name: str, says: str, change: Callable[[h5py.File], object], code: int = REFUSED) -> Case:
    """A training whose data file was changed."""

    return train(name, says, first=lambda folder: spoiled(folder, change), code=code)


def spoiled(folder: Path, change: Callable[[h5py.File], object]) -> None:
    with h5py.File(folder / "data.h5", "r+") as file:
        change(file)


def replaced(name: str, values: object) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file[name]
        file[name] = values

    return change


def put(name: str, row: int, value: float) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        file[name][row] = value

    return change


def claimed(file: h5py.File) -> None:
    for name in "xy":
        del file[name]
        file.create_dataset(name, (2**50, 1), "i8", chunks=(1024, 1))


TRAIN = [
    without_file("the configuration is missing", "no such file|is not there|cannot read", lambda folder: None),
    without_file("the configuration is a folder", "is a directory|not a regular file", lambda folder: None, "."),
    without_file("the configuration is a named pipe", "named pipe", lambda folder: os.mkfifo(folder / "config.toml")),
    without_file(
        "the configuration is no TOML",
        "is not TOML",
        lambda folder: (folder / "config.toml").write_text("[data\nfile = data.h5"),
    ),
    without_file(
        "the configuration is UTF-16",
        "is not TOML",
        lambda folder: (folder / "config.toml").write_bytes("[data]".encode("utf-16")),
    ),
    train("an unknown key", "unknown key optimizer.leraning_rate", {"optimizer": {"leraning_rate": "1"}}),
    train("hidden = [0]", r"hidden", {"network": {"hidden": "[0]"}}),
    train("hidden = [-3]", r"hidden", {"network": {"hidden": "[-3]"}}),
    train("lr = inf", r"optimizer\.lr", {"optimizer": {"lr": "inf"}}),
    train("lr = nan", r"optimizer\.lr", {"optimizer": {"lr": "nan"}}),
    train("a text as lr", r"optimizer\.lr", {"optimizer": {"lr": '"fast"'}}),
    train("betas beyond 1", r"betas", {"optimizer": {"betas": "[1.5, 0.9]"}}),
    train("a negative seed", r"seed", {"training": {"seed": "-1"}}),
    train("batch_size = 0", r"data\.batch_size", {"data": {"batch_size": "0"}}),
    train("batch_size = 10^12", r"batch_size", {"data": {"batch_size": "1000000000000"}}, code=FINISHED),
    train("validation leaves no row to train on", "leaves no row", {"data": {"validation": "0.9999"}}),
    train(
        "a loss that does not fit the targets",
        "cross_entropy.*floating point",
        {"training": {"loss": '"cross_entropy"'}},
        first=lambda folder: spoiled(folder, replaced("y", np.zeros((400, 1)))),
    ),
    train("an array library that is not there", "jax", {"network": {"library": '"jax"'}}),
    train("a grid of other ranks", "3x1x1", {"grid": {"shape": '"3x1x1"'}}),
    train("no grid at all", "banana", {"grid": {"shape": '"banana"'}}),
    train("the folder is a file", "runs", first=lambda folder: (folder / "runs").write_text("in the way")),
    train("a folder that cannot be made", "/proc/run", {"training": {"folder": '"/proc/run"'}}),
    train("a checkpoint that is not there", "nowhere", None, "--resume", "nowhere"),
    train(
        "a network from a file that is not there",
        r"model\.py",
        {"network": {"build": '"model.py:build"', "hidden": ""}},
    ),
    data("NaN among the samples", "row 17 .*nan", put("x", 17, float("nan"))),
    data("a label below 0", "row 5 .*label -1", put("y", 5, -1)),
    data("a label of 2^62", "4611686018427387904", put("y", 5, 2**62)),
    data("only one class", "class", replaced("y", np.zeros(400, int))),
    data("targets of another length", "rows", replaced("y", np.zeros(300, int))),
    data("samples that are texts", "strings", replaced("x", ["a"] * 400)),
    data("2^50 rows that are not there", "rows|memory|storage", claimed),
    train("three rows", "2 rows to train on", first=lambda folder: samples(folder / "data.h5", rows=3), code=FINISHED),
    train("the data are missing", "data.h5", first=lambda folder: (folder / "data.h5").unlink()),
    train("the data are no HDF5", "data.h5", first=lambda folder: (folder / "data.h5").write_text("not HDF5")),
    train("the data are cut short", "data.h5", first=lambda folder: os.truncate(folder / "data.h5", 3000)),
    resumed(
        "resumed with another activation",
        r"network\.activation.*--accept network",
        {"network": {"activation": '"relu"'}},
    ),
    resumed("resumed with other sizes", "hidden|another network", {"network": {"hidden": "[17]"}}),
    resumed("resumed with other data", "--accept data", {}, lambda folder: samples(folder / "data.h5", seed=1)),
    resumed(
        "resumed with another learning rate",
        r"optimizer\.lr.*0\.003.*0\.5",
        {"optimizer": {"lr": "0.5"}},
        code=FINISHED,
    ),
]


def of_a_run(
    command: str,
    name: str,
    says: str,
    *arguments: str,
    spoil: Callable[[Path], object] = lambda run: None,
    code: int = REFUSED,
    ranks: int = 1,
) -> Case:
    """Call export, predict or report on runs/a, after a change to that run."""

    def prepare(folder: Path) -> Arguments:
        spoil(trained(folder))
        return command, *(arguments or ("runs/a", "net.safetensors"))

    return Case(command, name, prepare, says, code, ranks)


def all_damaged(run: Path) -> None:
    for path in (run / "checkpoints").glob("step-*/rank-00000.h5"):
        path.write_bytes(path.read_bytes()[:-7] + b"damaged")


def narrower(run: Path) -> None:
    with h5py.File(run / "../../other.h5", "w") as file:
        file["x"] = np.ones((5, 4), "float32")


EXPORT = [
    of_a_run("export", "a run that is not there", "nowhere", "nowhere", "net.safetensors"),
    of_a_run("export", "a folder without a checkpoint", "checkpoint", "runs", "net.safetensors"),
    of_a_run(
        "export",
        "a target that exists",
        "--overwrite",
        spoil=lambda run: (run / "../../net.safetensors").write_text("precious"),
    ),
    of_a_run("export", "another ending", r"\.safetensors", "runs/a", "net.pt"),
    of_a_run(
        "export",
        "a target that is a folder",
        "net.safetensors",
        spoil=lambda run: (run / "../../net.safetensors").mkdir(),
    ),
    of_a_run("export", "every checkpoint is damaged", "damaged|checksum", spoil=all_damaged),
    of_a_run(
        "predict", "samples of another width", "features", "runs/a", "other.h5", "--out", "out.h5", spoil=narrower
    ),
    of_a_run("predict", "the output is the input", "data.h5", "runs/a", "data.h5", "--out", "data.h5", "--overwrite"),
    of_a_run("predict", "the output exists", "--overwrite", "runs/a", "data.h5", "--out", "other.h5", spoil=narrower),
    of_a_run("predict", "samples that are not there", "nowhere.h5", "runs/a", "nowhere.h5", "--out", "out.h5"),
]
REPORT = [
    of_a_run("report", "a folder that is not there", "nowhere", "nowhere", ranks=0),
    of_a_run("report", "a folder that is no run's", "run", "runs", ranks=0),
    of_a_run(
        "report",
        "run.json is a list",
        "wrote|run.json",
        "runs/a",
        spoil=lambda run: (run / "run.json").write_text("[7]"),
        code=FINISHED,
        ranks=0,
    ),
    of_a_run(
        "report",
        "metrics.jsonl is not UTF-8",
        "wrote",
        "runs/a",
        spoil=lambda run: (run / "metrics.jsonl").write_bytes(b'{"step": "\xff\xfe"}\n[]\n7\n'),
        code=FINISHED,
        ranks=0,
    ),
]
"""tests/tools/test_run_report.py has more."""
CASES = TRAIN + EXPORT + REPORT
