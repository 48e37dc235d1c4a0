"""Files for the cases: samples, configurations, and a run that has trained to its end."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import h5py
import numpy as np

from .jobs import Job, command

Sections = Mapping[str, Mapping[str, str]]
Arguments = Sequence[str | Path]
BASE: Sections = {
    "grid": {"shape": '"2x1x1"'},
    "data": {"file": '"data.h5"', "batch_size": "50", "validation": "0.2"},
    "network": {"hidden": "[16]"},
    "optimizer": {"lr": "3e-3", "clip": "1.0"},
    "training": {"folder": '"runs/a"', "epochs": "2", "log_every": "1"},
}
"""Section -> key -> TOML text. An empty text removes the key."""


def samples(path: Path, rows: int = 400, features: int = 6, classes: int = 3, seed: int = 0, **storage: Any) -> Path:
    """Write x (rows, features) and labels y, which a small network learns. storage: options of create_dataset."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((rows, features)).astype("float32")
    y = (x @ generator.standard_normal((features, classes))).argmax(1)
    with h5py.File(path, "w") as file:
        for name, values in ("x", x), ("y", y):
            chunks = {"chunks": (64, *values.shape[1:])} if storage else {}
            file.create_dataset(name, data=values, **chunks, **storage)
    return path


def configured(path: Path, changes: Sections | None = None) -> Path:
    """Write a configuration: BASE with changes."""
    names = {**BASE, **(changes or {})}
    sections = {name: {**BASE.get(name, {}), **(changes or {}).get(name, {})} for name in names}
    lines = [
        f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items() if value)
        for name, keys in sections.items()
    ]
    path.write_text("\n".join(lines))
    return path


def training(
    changes: Sections | None = None, *arguments: str, first: Callable[[Path], object] = lambda folder: None
) -> Callable[[Path], Arguments]:
    """Return a function that prepares a training: good samples, a configuration with changes, then `first`."""

    def prepare(folder: Path) -> Arguments:
        samples(folder / "data.h5")
        configured(folder / "config.toml", changes)
        first(folder)
        return "train", "config.toml", *arguments

    return prepare


def trained(folder: Path) -> Path:
    """Copy a run that has trained to its end, with its data and configuration. Return the run's folder, runs/a."""
    shutil.copytree(_trained_once(), folder, dirs_exist_ok=True, symlinks=True)
    return folder / "runs/a"


@cache
def _trained_once() -> Path:
    folder = Path(mkdtemp(prefix="hostile-trained-"))
    log = folder.with_suffix(".log")
    ending = Job(command(2, ["-m", "pmm3d", *training()(folder)]), log, folder=folder).end()
    log.unlink()
    if ending.code:
        raise SystemExit(f"an undisturbed training ended with {ending.code}:\n{ending.output[-3000:]}")
    return folder


def forget_trained() -> None:
    """Remove the run that `trained` copies."""
    if _trained_once.cache_info().currsize:
        shutil.rmtree(_trained_once())
        _trained_once.cache_clear()
