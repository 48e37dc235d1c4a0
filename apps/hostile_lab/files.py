"""Files that hostile cases are made of: samples, configurations, a run that has trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import h5py
import numpy as np

from .trial import run

Sections = Mapping[str, Mapping[str, str]]
BASE: Sections = {
    "grid": {"shape": '"2x1x1"'},
    "data": {"file": '"data.h5"', "batch_size": "50", "validation": "0.2"},
    "network": {"hidden": "[16]"},
    "optimizer": {"lr": "3e-3", "clip": "1.0"},
    "training": {"folder": '"runs/a"', "epochs": "2", "log_every": "1"},
}
"""Section -> key -> TOML text; an empty one takes a key out."""


def samples(path: Path, rows: int = 400, seed: int = 0, classes: int = 3) -> Path:
    """x (rows, 6) and labels y, which a small network learns."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((rows, 6)).astype("float32")
    with h5py.File(path, "w") as file:
        file["x"], file["y"] = x, (x @ generator.standard_normal((6, classes))).argmax(1)
    return path


def configured(folder: Path, changes: Sections | None = None, text: str = "") -> Path:
    """config.toml: BASE with changes; or the text, as it is."""
    sections = {name: {**BASE.get(name, {}), **(changes or {}).get(name, {})} for name in {**BASE, **(changes or {})}}
    lines = [f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items() if value)
             for name, keys in sections.items()]
    (folder / "config.toml").write_text(text or "\n".join(lines))
    return folder / "config.toml"


def training(changes: Sections | None = None, *arguments: str,
             first: Callable[[Path], object] = lambda folder: None) -> Callable[[Path], Sequence[str | Path]]:
    """What prepares a training: good samples, the configuration with changes, then what is hostile."""

    def prepare(folder: Path) -> Sequence[str | Path]:
        samples(folder / "data.h5")
        configured(folder, changes)
        first(folder)
        return "train", "config.toml", *arguments

    return prepare


def trained(folder: Path) -> Path:
    """runs/a: a copy of a run that has trained to its end, with its data and configuration; its folder."""
    shutil.copytree(_trained_once(), folder, dirs_exist_ok=True, symlinks=True)
    return folder / "runs/a"


@cache
def _trained_once() -> Path:
    folder = Path(mkdtemp(prefix="hostile-trained-"))
    code, output = run(training()(folder), folder, 2, {})
    if code:
        raise SystemExit(f"a training that nothing is wrong with ended with {code}:\n{output[-3000:]}")
    return folder


def forget_trained() -> None:
    """Remove what `trained` copies."""
    if _trained_once.cache_info().currsize:
        shutil.rmtree(_trained_once())
        _trained_once.cache_clear()


def with_record(change: Callable[[dict[str, object]], object]) -> Callable[[Path], Sequence[str | Path]]:
    """What prepares a report of a run whose run.json was changed."""

    def prepare(folder: Path) -> Sequence[str | Path]:
        path = trained(folder) / "run.json"
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))
        return "report", "runs/a"

    return prepare
