"""What a training run tells people and programs: the progress bar, metrics.jsonl, curves.png, figures for
Prometheus. Rank 0 speaks."""

from __future__ import annotations

import json
import os
import sys
import time
from math import log
from pathlib import Path

BLOCKS = "▁▂▃▄▅▆▇█"


class RunLog:
    """The record of one run in a folder; on ranks other than 0 it does nothing.

    metrics.jsonl   a JSON object a line: {"step", "epoch", "loss", "lr", "samples_per_second", "waiting", "seconds"},
                    and {"step", "validation": {...}}. "waiting" is the share of the time since the line before that
                    rank 0 waited for messages or the loader. A resumed run goes on in the same file; what lies
                    beyond is cut off.
    curves.png      loss and validation by step

    prometheus      a .prom file that is to hold the latest figures, for a node exporter; see `prometheus.Textfile`
    """

    def __init__(self, folder, rank: int, *, bar: bool = True, prometheus=None):
        self.folder, self.speaks = Path(folder), rank == 0
        self._bar = self._task = self._file = self._exporter = None
        self._prometheus = prometheus
        self._begun = time.perf_counter()
        self._draws = bar

    def open(self, step: int, total: int) -> None:
        """Begin, or go on after a step, of so many in all. Raises OSError where the folder cannot be written, and
        Pmm3dError where the file for Prometheus cannot."""
        if not self.speaks:
            return
        if self._prometheus is not None:
            from .prometheus import Textfile

            self._exporter = Textfile(self._prometheus, self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "metrics.jsonl"
        kept = [line for line in read_metrics(path) if line["step"] <= step] if step else []
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(temporary, path)
        self._file = open(path, "a")
        if self._draws:
            self._open_bar(step, total)

    def _open_bar(self, step: int, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(TextColumn("training"), BarColumn(), MofNCompleteColumn(),
                             TextColumn("{task.fields[said]}"), TimeRemainingColumn(),
                             console=Console(file=sys.stderr), auto_refresh=False)
        self._bar.start()
        self._task = self._bar.add_task("training", total=total, completed=step, said="")

    def step(self, metrics: dict) -> None:
        """A line about a step."""
        if not self.speaks:
            return
        self._write({**metrics, "seconds": round(time.perf_counter() - self._begun, 3)})
        self._export(metrics)
        said = (f"loss {metrics['loss']:.4g}, {metrics['samples_per_second']:,.0f} samples/s, "
                f"waiting {metrics['waiting']:.0%}")
        if self._bar is not None:
            self._bar.update(self._task, completed=metrics["step"], said=said)
            self._bar.refresh()

    def validation(self, step: int, epoch: int, figures: dict) -> None:
        if not self.speaks:
            return
        self._write({"step": step, "epoch": epoch, "validation": figures})
        self._export({"step": step, "epoch": epoch}, figures)
        self.say(f"step {step}: " + ", ".join(f"validation {name} {value:.4f}" for name, value in figures.items()))

    def saved(self, step: int, path) -> None:
        """A checkpoint is on the disk."""
        self.say(f"step {step}: wrote {path}")
        self._export({"checkpoint_step": step, "checkpoint_timestamp_seconds": time.time()})

    def _export(self, figures: dict, validation: dict | None = None) -> None:
        """For Prometheus; a file that cannot be written any more is given up, and the training goes on."""
        if self._exporter is None:
            return
        try:
            self._exporter.write(figures, validation)
        except OSError as error:
            self.say(f"pmm3d: warning: {self._prometheus} cannot be written any more: {error.strerror}")
            self._exporter = None

    def say(self, text: str) -> None:
        if not self.speaks:
            return
        if self._bar is not None and self._bar.console.is_terminal:
            self._bar.console.print(text, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def _write(self, line: dict) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self, draw: bool = True) -> None:
        if not self.speaks or self._file is None:
            return
        if self._bar is not None:
            self._bar.stop()
        self._file.close()
        self._file = None
        if draw:
            try:
                plot(self.folder / "metrics.jsonl", self.folder / "curves.png")
            except OSError as error:
                self.say(f"pmm3d: curves.png could not be written: {error}")


def read_metrics(path) -> list[dict]:
    """The lines of a metrics file; a last one that a crash cut short is left out."""
    try:
        lines = Path(path).read_text().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found


def curve(values, width: int = 48) -> str:
    """A line of blocks, as high as the logarithms of positive numbers."""
    chosen = [values[index * len(values) // width] for index in range(width)] if len(values) > width else list(values)
    heights = [log(value) for value in chosen if value > 0]
    if not heights:
        return ""
    low, span = min(heights), max(heights) - min(heights) or 1.0
    return "".join(BLOCKS[round((height - low) / span * (len(BLOCKS) - 1))] for height in heights)


def plot(metrics, picture) -> None:
    """Draw the loss, and what was validated, by step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = read_metrics(metrics)
    steps = [line for line in lines if "loss" in line]
    validated = [line for line in lines if "validation" in line]
    scores = [name for name in (validated[-1]["validation"] if validated else {}) if name != "loss"]
    figure, axes = pyplot.subplots(1, 1 + bool(scores), figsize=(5 + 4 * bool(scores), 3.6), squeeze=False)
    axes[0, 0].plot([line["step"] for line in steps], [line["loss"] for line in steps], label="training", linewidth=0.8)
    if validated:
        axes[0, 0].plot([line["step"] for line in validated], [line["validation"]["loss"] for line in validated], "o-",
                        label="validation", markersize=3)
    axes[0, 0].set(xlabel="step", ylabel="loss", yscale="log")
    axes[0, 0].legend()
    for name in scores:
        axes[0, 1].plot([line["step"] for line in validated], [line["validation"][name] for line in validated], "o-",
                        markersize=3)
        axes[0, 1].set(xlabel="step", ylabel=f"validation {name}")
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
