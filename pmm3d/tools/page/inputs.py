"""What a page is made from: the files of a run, or the figures of a benchmark, as they are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import Pmm3dError
from ...io.lock import owner_of
from ...nn.training.metrics import read_metrics

OF_A_RUN = "a run's folder (with metrics.jsonl or run.json in it) or a file written by pmm3d bench --json"
OF_A_BENCHMARK = {"m", "n", "k", "grid", "seconds", "gflops", "ratio", "bytes_sent", "phases"}
Json = dict[str, Any]


class RunFiles(NamedTuple):
    """path: the folder; metrics: lines of metrics.jsonl; record: run.json, empty if there is none; owner: who holds the
    lock; notes: what is missing or cut short, for people."""

    path: Path
    metrics: list[Json]
    record: Json
    owner: Json
    notes: list[str]


def read_source(path: Path) -> RunFiles | list[Json]:
    """The files of a run, or the figures of a benchmark on each grid.

    Raises Pmm3dError, with the remedy, if there is nothing to make a page of.
    """
    if path.name in ("run.json", "metrics.jsonl"):
        path = path.parent
    if not path.exists():
        raise Pmm3dError(f"{path} is not there: name {OF_A_RUN}")
    try:
        return _read_run(path) if path.is_dir() else _read_bench(path)
    except OSError as error:
        raise Pmm3dError(f"cannot read {error.filename or path}: {error.strerror}") from None


def _read_run(folder: Path) -> RunFiles:
    metrics, record = folder / "metrics.jsonl", folder / "run.json"
    if not metrics.exists() and not record.exists():
        raise Pmm3dError(f"{folder} is not the folder of a run: it holds neither metrics.jsonl nor run.json. Name "
                         f"{OF_A_RUN}")
    notes: list[str] = []
    return RunFiles(folder, _metrics(metrics, notes), _record(record, notes), owner_of(folder), notes)


def _metrics(path: Path, notes: list[str]) -> list[Json]:
    if not path.exists():
        notes.append("metrics.jsonl is missing, so there are no curves: the run ended before its first step, or the "
                     "file was removed.")
        return []
    lines = read_metrics(path)
    lost = len(path.read_bytes().splitlines()) - len(lines)
    if lost:
        notes.append(f"metrics.jsonl: {'a line is' if lost == 1 else f'{lost} lines are'} cut short or damaged and "
                     "left out, as after a crash or while the run goes on.")
    if not lines:
        notes.append("metrics.jsonl holds no step yet.")
    return lines


def _record(path: Path, notes: list[str]) -> Json:
    if not path.exists():
        notes.append("run.json is missing, so hosts, times, bytes and memory of the ranks are not known. pmm3d train "
                     "writes it at the start of a run and with each checkpoint; runs of older versions have none.")
        return {}
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        notes.append(f"run.json cannot be read, so hosts, times, bytes and memory are not known: {error}")
        return {}
    if not isinstance(found, dict) or found.get("format") != 1:
        notes.append("run.json is of another version of pmm3d, so it is left out.")
        return {}
    return found


def _read_bench(path: Path) -> list[Json]:
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise Pmm3dError(f"{path} is not JSON ({error}): name {OF_A_RUN}") from None
    results = found if isinstance(found, list) else [found]
    if not results or not all(isinstance(result, dict) and OF_A_BENCHMARK <= result.keys() for result in results):
        raise Pmm3dError(f"{path} holds no figures of pmm3d bench: name {OF_A_RUN}")
    return results
