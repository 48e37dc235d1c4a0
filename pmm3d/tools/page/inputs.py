"""The files that a page is made of: run.json and metrics.jsonl of a run, or the figures of a benchmark."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from ...errors import Pmm3dError, needs
from ...io.lock import owner_of
from ...text import counted

with needs("report", "the page of a run"):
    from pydantic import Field, ValidationError

from ...nn.training.run_file import Part, RunFile

Json = dict[str, Any]
OF_A_RUN = "a run's folder (with metrics.jsonl or run.json in it) or a file written by pmm3d bench --json"


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
    imbalance: float | None = None
    dropped: float | None = None
    router_loss: float | None = None
    experts: dict[str, list[Annotated[float, Field(ge=0, le=2**53)]]] | None = None
    validation: dict[str, float | None] | None = None


class RunFiles(NamedTuple):
    """The contents of the folder of a run.

    record   run.json; None if it is missing or cannot be used
    owner    process that holds the folder's lock
    notes    warnings about missing or damaged files
    """

    path: Path
    metrics: list[Line]
    record: RunFile | None
    owner: Json
    notes: list[str]


def read_source(path: Path) -> RunFiles | list[Json]:
    """Return the files of a run, or the objects in a file of JSON, one for each grid of a benchmark.

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
        raise Pmm3dError(
            f"{folder} is not the folder of a run: it contains neither metrics.jsonl nor run.json. Name {OF_A_RUN}"
        )
    notes: list[str] = []
    return RunFiles(folder, _metrics(metrics, notes), _record(record, notes), owner_of(folder), notes)


def _metrics(path: Path, notes: list[str]) -> list[Line]:
    """Return the valid lines."""
    if not path.exists():
        notes.append(
            "metrics.jsonl is missing, so there are no curves. The run ended before its first step, or the "
            "file was removed."
        )
        return []
    written, lines = path.read_bytes().splitlines(), list[Line]()
    for text in written:
        with suppress(ValidationError):
            lines.append(Line.model_validate_json(text))
    if wrong := len(written) - len(lines):
        notes.append(
            f"metrics.jsonl: {wrong} of {counted(len(written), 'line')} cannot be read and are left out. The "
            "last line may be incomplete after a crash, or while the run continues."
        )
    if not lines:
        notes.append("metrics.jsonl contains no step yet.")
    return lines


def _record(path: Path, notes: list[str]) -> RunFile | None:
    """Return the contents of run.json, or None if they cannot be used."""
    try:
        return RunFile.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        notes.append(
            "run.json is missing, so hosts, times, bytes and memory of the ranks are not known. pmm3d train "
            "writes it at the start of a run and with each checkpoint."
        )
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        notes.append(
            f"{path.absolute()} cannot be used ({place}{': ' * bool(place)}{first['msg']}), so hosts, times, "
            "bytes and memory of the ranks are not known. The file is damaged, or from another version of "
            "pmm3d: make the page with that version, or continue the run, which writes the file anew (pmm3d "
            "train CONFIG --resume auto)."
        )
    return None


def _read_bench(path: Path) -> list[Json]:
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise Pmm3dError(f"{path} is not JSON ({error}): name {OF_A_RUN}") from None
    return document if isinstance(document, list) else [document]
