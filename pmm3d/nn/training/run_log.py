"""What a training run tells people and programs: the progress bar, metrics.jsonl, curves.png, figures for
Prometheus. Rank 0 speaks."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import log
from pathlib import Path
from typing import Any

from ...errors import MissingPackageError, needs

BLOCKS = "▁▂▃▄▅▆▇█"
METRICS = "metrics.jsonl"
logger = logging.getLogger("pmm3d.nn")


class RunLog:
    """The log of one run in a folder; on ranks other than 0 it does nothing.

    metrics.jsonl   a JSON object a line: {"step", "epoch", "loss", "lr", "samples_per_second", "waiting", "seconds"},
                    and {"step", "validation": {...}}. "waiting" is the share of the time since the line before that
                    rank 0 waited for messages or the loader. A resumed run goes on in the same file; what lies
                    beyond is cut off.
    curves.png      loss and validation by step

    bar             whether a progress bar is drawn
    prometheus      a .prom file that is to hold the latest figures, for a node exporter; see `prometheus.Textfile`

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = RunLog(folder, rank=0, bar=False)
        ...     log.open(0, 1)
        ...     log.step({"step": 1, "loss": 0.5})
        ...     read_metrics(log.folder / METRICS)[0]["loss"]
        0.5
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int, *, bar: bool = True,
                 prometheus: str | os.PathLike[str] | None = None):
        self.folder, self.speaks = Path(folder), rank == 0
        self._draws, self._begun, self._prometheus = bar, time.perf_counter(), prometheus
        self._bar: Any = None
        self._task: Any = None
        self._file: Any = None
        self._exporter: Any = None

    def open(self, step: int, total: int) -> None:
        """Begin, or go on after a step, of so many in all. Raises OSError where the folder cannot be written, and
        Pmm3dError where the file for Prometheus cannot."""
        if not self.speaks:
            return
        if self._prometheus is not None:
            from .prometheus import Textfile

            self._exporter = Textfile(Path(self._prometheus), self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / METRICS
        kept = [line for line in read_metrics(path) if line["step"] <= step] if step else []
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(temporary, path)
        self._file = open(path, "a")
        if self._draws:
            self._open_bar(step, total)

    def _open_bar(self, step: int, total: int) -> None:
        with needs("train", "the progress bar"):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(TextColumn("training"), BarColumn(), MofNCompleteColumn(),
                             TextColumn("{task.fields[said]}"), TimeRemainingColumn(),
                             console=Console(file=sys.stderr), auto_refresh=False)
        self._bar.start()
        self._task = self._bar.add_task("training", total=total, completed=step, said="")

    def step(self, metrics: dict[str, float]) -> None:
        """A line about a step."""
        if not self.speaks:
            return
        self._write({**metrics, "seconds": round(time.perf_counter() - self._begun, 3)})
        self._export(metrics)
        if self._bar is not None:
            said = (f"loss {metrics['loss']:.4g}, {metrics['samples_per_second']:,.0f} samples/s, "
                    f"waiting {metrics['waiting']:.0%}")
            self._bar.update(self._task, completed=metrics["step"], said=said)
            self._bar.refresh()

    def validation(self, step: int, epoch: int, figures: dict[str, float]) -> None:
        """A line about an evaluation."""
        if self.speaks:
            self._write({"step": step, "epoch": epoch, "validation": figures})
            self._export({"step": step, "epoch": epoch}, figures)
        self.say(f"step {step}: " + ", ".join(f"validation {name} {value:.4f}" for name, value in figures.items()))

    def saved(self, step: int, path: Path) -> None:
        """A checkpoint is on the disk."""
        self.say(f"step {step}: wrote {path}")
        self._export({"checkpoint_step": step, "checkpoint_timestamp_seconds": time.time()})

    def _export(self, figures: Mapping[str, float], validation: Mapping[str, float] | None = None) -> None:
        """For Prometheus; a file that cannot be written any more is given up, and the training goes on."""
        if self._exporter is None:
            return
        try:
            self._exporter.write(figures, validation)
        except OSError as error:
            logger.warning(f"{self._prometheus} cannot be written any more: {error.strerror}")
            self._exporter = None

    def say(self, text: str) -> None:
        """Print it, above the progress bar."""
        if self.speaks and self._bar is not None and self._bar.console.is_terminal:
            self._bar.console.print(text, highlight=False)
        elif self.speaks:
            print(text, file=sys.stderr, flush=True)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """The end of a run, whatever ended it: curves.png is drawn."""
        if self._file is None:
            return
        if self._bar is not None:
            self._bar.stop()
        self._file.close()
        self._file = None
        try:
            plot(self.folder / METRICS, self.folder / "curves.png")
        except (OSError, MissingPackageError) as error:
            logger.warning(f"curves.png could not be written: {error}")


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last one that a crash cut short is left out."""
    lines: list[dict[str, Any]] = []
    with suppress(FileNotFoundError, json.JSONDecodeError):
        for line in Path(path).read_text().splitlines():
            lines.append(json.loads(line))
    return lines


def curve(values: Sequence[float], width: int = 48) -> str:
    """A line of blocks, as high as the logarithms of positive numbers."""
    chosen = [values[index * len(values) // width] for index in range(width)] if len(values) > width else values
    heights = [log(value) for value in chosen if value > 0]
    if not heights:
        return ""
    low, span = min(heights), max(heights) - min(heights) or 1.0
    return "".join(BLOCKS[round((height - low) / span * (len(BLOCKS) - 1))] for height in heights)


def plot(metrics: Path, picture: Path) -> None:
    """Draw the loss, and what was validated, by step."""
    with needs("report", "curves.png"):
        from matplotlib.figure import Figure

    lines = read_metrics(metrics)
    validated = [line for line in lines if "validation" in line]
    scores = [name for name in (validated[-1]["validation"] if validated else {}) if name != "loss"]
    figure = Figure(figsize=(5 + 4 * bool(scores), 3.6))
    left, *right = figure.subplots(1, 1 + bool(scores), squeeze=False)[0]
    steps = [line for line in lines if "loss" in line]
    left.plot([line["step"] for line in steps], [line["loss"] for line in steps], label="training", linewidth=0.8)
    for axes, name in zip([left, *right * len(scores)], ["loss", *scores] if validated else []):
        points = [line["step"] for line in validated], [line["validation"][name] for line in validated]
        axes.plot(*points, "o-", label="validation", markersize=3)
        axes.set(xlabel="step", ylabel=f"validation {name}")
    left.set(xlabel="step", ylabel="loss", yscale="log")
    left.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
