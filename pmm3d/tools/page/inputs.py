"""The files from which a page is made: run.json and metrics.jsonl of a run, or the figures of a benchmark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from ...errors import Pmm3dError, needs
from ...io.lock import owner_of

with needs("report", "the page of a run"):
    from pydantic import Field, ValidationError

from ...nn.training.run_file import Part, RunFile

Json = dict[str, Any]
OF_A_RUN = "a run's folder (with metrics.jsonl or run.json in it) or a file written by pmm3d bench --json"
OF_A_BENCHMARK = {"m", "n", "k", "grid", "seconds", "gflops", "ratio", "bytes_sent", "phases"}
MOST_SHOWN = 40
"""Characters of a value that does not fit."""


class Line(Part):
    """A line of metrics.jsonl, about a step or an evaluation after it."""

    step: Annotated[int, Field(ge=0, le=2**53)]
    loss: float | None = None
    lr: float | None = None
    samples_per_second: float | None = None
    waiting: float | None = None
    gradient_norm: float | None = None
    loss_scale: float | None = None
    skipped: float | None = None
    validation: dict[str, float | None] | None = None


class RunFiles(NamedTuple):
    """Files of a run.

    path     the folder;   owner   who holds its lock
    record   run.json; None if it is missing or unreadable
    notes    what is missing or left out
    """

    path: Path
    metrics: list[Line]
    record: RunFile | None
    owner: Json
    notes: list[str]


def read_source(path: Path) -> RunFiles | list[Json]:
    """Return the files of a run, or the figures of a benchmark on each grid.

    Raises Pmm3dError, with the remedy, if the path is neither.
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


def _metrics(path: Path, notes: list[str]) -> list[Line]:
    """Return the valid lines."""
    if not path.exists():
        notes.append("metrics.jsonl is missing, so there are no curves: the run ended before its first step, or the "
                     "file was removed.")
        return []
    try:
        written = path.read_bytes().splitlines()
    except OSError as error:
        notes.append(f"metrics.jsonl cannot be read, so there are no curves: {error.strerror}.")
        return []
    lines, wrong = list[Line](), dict[int, str]()
    for number, text in enumerate(written, 1):
        try:
            lines.append(Line.model_validate(json.loads(text)))
        except ValidationError as error:
            wrong[number] = _explained(error.errors()[0])
        except (ValueError, RecursionError):
            wrong[number] = "it is not JSON"
    notes.extend(_left_out(wrong, len(written)))
    if not lines:
        notes.append("metrics.jsonl holds no step yet.")
    return lines


def _left_out(wrong: dict[int, str], last: int) -> Iterator[str]:
    """Yield notes about the lines that are left out."""
    if wrong.get(last) == "it is not JSON":
        del wrong[last]
        yield ("metrics.jsonl: the last line is cut short and left out, as after a crash or while the run goes on.")
    if wrong:
        number, problem = next(iter(wrong.items()))
        yield f"metrics.jsonl: {len(wrong)} of {last} lines are left out; line {number}: {problem}."


def _record(path: Path, notes: list[str]) -> RunFile | None:
    """Return the valid parts."""
    if not path.exists():
        notes.append("run.json is missing, so hosts, times, bytes and memory of the ranks are not known. pmm3d train "
                     "writes it at the start of a run and with each checkpoint.")
        return None
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        notes.append(f"run.json cannot be read, so hosts, times, bytes and memory are not known: {reason}")
        return None
    if not isinstance(found, dict) or found.get("format") != 1:
        notes.append("run.json is of another version of pmm3d, so it is left out.")
        return None
    try:
        record, problems = RunFile.model_validate(found), list[str]()
    except ValidationError as error:
        wrong = {str(problem["loc"][0]): problem for problem in reversed(error.errors())}
        record = RunFile.model_validate({name: part for name, part in found.items() if name not in wrong})
        problems = [_explained(problem) for problem in wrong.values()]
    for name in _not_for_its_ranks(record):
        setattr(record, name, None)
        problems.append(f"{name} is not of as many ranks as the rest")
    notes.extend(f"run.json: {problem}. What it tells is left out." for problem in problems)
    return record


def _not_for_its_ranks(record: RunFile) -> list[str]:
    """Return the parts whose lists are not as long as there are ranks."""
    if record.ranks is None:
        return []
    ranks, moved, memory = len(record.ranks.seconds), record.moved or (), record.memory
    spans = [span for host in record.hosts or () for span in host.ranks]
    wrong = {"moved": any(len(entry.calls) != ranks for entry in moved),
             "memory": memory is not None and len(memory.work) != ranks,
             "hosts": any(last >= ranks or last < first for first, last in spans)}
    return [name for name, found in wrong.items() if found]


def _read_bench(path: Path) -> list[Json]:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise Pmm3dError(f"{path} is not JSON ({error}): name {OF_A_RUN}") from None
    results = found if isinstance(found, list) else [found]
    if not results or not all(isinstance(result, dict) and OF_A_BENCHMARK <= result.keys() for result in results):
        raise Pmm3dError(f"{path} holds no figures of pmm3d bench: name {OF_A_RUN}")
    return results


def _explained(problem: Any) -> str:
    """Return the field, its value, and the values that fit."""
    place, shown = ".".join(map(str, problem["loc"])), repr(problem["input"])
    shown = shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}..."
    text = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return f"{place} is missing"
    return f"{place} is {shown}: {text[0].lower()}{text[1:]}".removeprefix(" is ")
