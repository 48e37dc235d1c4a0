"""What a page is made from: the files of a run, or the figures of a benchmark, as they are found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ...errors import Pmm3dError
from ...io.lock import owner_of
from .schema import Json, checked_record, problem_of_benchmark, problem_of_line

OF_A_RUN = "a run's folder (with metrics.jsonl or run.json in it) or a file written by pmm3d bench --json"
OF_A_BENCHMARK = {"m", "n", "k", "grid", "seconds", "gflops", "ratio", "bytes_sent", "phases"}


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
    """The lines that can be shown."""
    if not path.exists():
        notes.append("metrics.jsonl is missing, so there are no curves: the run ended before its first step, or the "
                     "file was removed.")
        return []
    try:
        written = path.read_bytes().splitlines()
    except OSError as error:
        notes.append(f"metrics.jsonl cannot be read, so there are no curves: {error.strerror}.")
        return []
    lines, wrong = [], {}
    for number, text in enumerate(written, 1):
        try:
            line = json.loads(text)
            wrong[number] = problem_of_line(line)
        except (ValueError, RecursionError):
            wrong[number] = "it is not JSON"
        if not wrong[number]:
            lines.append(line)
    notes.extend(_left_out({number: problem for number, problem in wrong.items() if problem}, len(written)))
    if not lines:
        notes.append("metrics.jsonl holds no step yet.")
    return lines


def _left_out(wrong: dict[int, str], last: int) -> Iterator[str]:
    """What is said of the lines that cannot be shown."""
    if wrong.get(last) == "it is not JSON":
        del wrong[last]
        yield ("metrics.jsonl: the last line is cut short and left out, as after a crash or while the run goes on.")
    if wrong:
        number, problem = next(iter(wrong.items()))
        yield f"metrics.jsonl: {len(wrong)} of {last} lines are left out; line {number}: {problem}."


def _record(path: Path, notes: list[str]) -> Json:
    """The parts that can be shown."""
    if not path.exists():
        notes.append("run.json is missing, so hosts, times, bytes and memory of the ranks are not known. pmm3d train "
                     "writes it at the start of a run and with each checkpoint.")
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        notes.append(f"run.json cannot be read, so hosts, times, bytes and memory are not known: {reason}")
        return {}
    if not isinstance(found, dict) or found.get("format") != 1:
        notes.append("run.json is of another version of pmm3d, so it is left out.")
        return {}
    parts, problems = checked_record(found)
    notes.extend(f"run.json: {problem}. What it tells is left out." for problem in problems)
    return parts


def _read_bench(path: Path) -> list[Json]:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise Pmm3dError(f"{path} is not JSON ({error}): name {OF_A_RUN}") from None
    results = found if isinstance(found, list) else [found]
    if not results or not all(isinstance(result, dict) and OF_A_BENCHMARK <= result.keys() for result in results):
        raise Pmm3dError(f"{path} holds no figures of pmm3d bench: name {OF_A_RUN}")
    for number, result in enumerate(results, 1):
        if problem := problem_of_benchmark(result):
            raise Pmm3dError(f"{path}, result {number}: {problem}. Was it changed? pmm3d bench --json writes it anew")
    return results
