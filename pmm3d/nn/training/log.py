"""Log of a training run: metrics.jsonl and a progress line. Rank 0 writes it.
After the start of the run, a failure to write is only a warning."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from math import isfinite
from pathlib import Path
from typing import Any, TextIO

from ...comm import Grid
from ...errors import Pmm3dError, check_regular
from ...io.disk import not_following, replace_file

METRICS, AVERAGED = "metrics.jsonl", " (averaged weights)"
logger = logging.getLogger("pmm3d.nn")


def attempt(what: str, body: Callable[[], object]) -> None:
    """Run a function that the training does not need, on one rank. An error becomes a warning that begins with
    `what`."""
    try:
        body()
    except Exception as error:
        logger.warning(f"{what}: {type(error).__name__}: {error}. The training is not affected")


def on_first(grid: Grid, path: Path, body: Callable[[], None]) -> None:
    """Run a function that writes to a path on rank 0; every rank raises its error as a Pmm3dError. Collective."""
    problem: Pmm3dError | None = None
    if grid.rank == 0:
        try:
            body()
        except OSError as error:
            problem = Pmm3dError(f"{error.filename2 or error.filename or path} cannot be written: {error.strerror}")
        except Pmm3dError as error:
            problem = error
        except Exception as error:
            problem = Pmm3dError(f"{path} cannot be used: {type(error).__name__}: {error}")
    problem = grid.comm.bcast(problem)
    with grid.collective_call("training", str(path)):
        if problem is not None:
            raise problem


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the lines of a metrics file; an empty list if there is no file. Lines that are not JSON of a step are left
    out, with a warning unless it is the last line, which a crash may have cut."""
    lines: list[dict[str, Any]] = []
    try:
        check_regular(path)
        texts = Path(path).read_bytes().splitlines()
    except FileNotFoundError:
        return lines
    wrong = []
    for number, text in enumerate(texts, 1):
        line = None
        with suppress(ValueError, RecursionError):  # ValueError: also of text that is not UTF-8
            line = json.loads(text)
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
        elif number < len(texts):
            wrong.append(number)
    if wrong:
        logger.warning(
            f"{path}: {len(wrong)} lines are left out, because they are not JSON of a step (the first is "
            f"line {wrong[0]})"
        )
    return lines


class RunLog:
    """Log of a run in a folder. On ranks other than 0 it does nothing.

    Parameters
    ----------
    folder : path
        Folder of the run.
    rank : int
        Rank of this process.

    Notes
    -----
    metrics.jsonl has one JSON object per line: {"step", "epoch", "loss", "gradient_norm", "lr", "samples_per_second",
    "waiting", "seconds"}, and {"step", "validation": {...}}, with "ema": true if the figures are of averaged weights.
    "lr" is the rate that the step used. "gradient_norm" is the 2-norm before clipping. "waiting" is the share of the
    time since the previous line in which rank 0 waited for messages or the loader. For tokens there are also
    "perplexity" and "bits_per_byte", and samples are tokens. For float16 there are also "loss_scale", of the next step,
    and "skipped". Figures that are not finite are left out, or null in a validation. A resumed run continues the file,
    without lines of later steps. Progress is printed if stderr is a terminal.

    For mixtures of experts there are also "experts", for each router the number of tokens of the step that chose each
    expert, before capacity, over all micro-batches; and "imbalance", the largest number over the mean. With a capacity
    there is "dropped", the share of tokens' experts that it dropped. With losses of routers there is "router_loss",
    their sum times their factors, which "loss" does not contain.

    Examples
    --------
    >>> import json, tempfile
    >>> from pmm3d.nn.training import RunLog
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = RunLog(folder, rank=0)
    ...     log.open(0, 1)
    ...     log.step({"step": 1, "loss": 0.5})
    ...     json.loads((log.folder / "metrics.jsonl").read_text())["loss"]
    0.5
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int):
        self.folder, self.writes = Path(folder), rank == 0
        self._warned = set[str]()
        self._file: TextIO | None = None
        self._first = self._total = 0
        self._begun = time.perf_counter()

    def open(self, step: int, total: int) -> None:
        """Begin the log, or continue it after a step; `total` is the last step. Raises OSError."""
        if not self.writes:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / METRICS
        earlier = [line for line in read_metrics(path) if line["step"] <= step] if step else []
        replace_file(path, "".join(json.dumps(line) + "\n" for line in earlier).encode())
        self._file = open(path, "a", opener=not_following)
        self._first, self._total = step, total

    def step(self, metrics: dict[str, Any]) -> None:
        """Write a line of the figures of a step, with at least "step"."""
        if not self.writes:
            return
        seconds = time.perf_counter() - self._begun
        self._write({**metrics, "seconds": round(seconds, 3)})
        if self._shows:
            step, loss = int(metrics["step"]), metrics.get("loss", float("nan"))
            left = timedelta(seconds=int(seconds / max(1, step - self._first) * (self._total - step)))
            rate, waiting = metrics["samples_per_second"], metrics["waiting"]
            self._print(
                f"\r\033[Ktraining {step}/{self._total}, loss {loss:.4g}, {rate:,.0f} samples/s, "
                f"waiting {waiting:.0%}, {left} left",
                end="",
            )

    def validation(self, step: int, epoch: int, figures: dict[str, float], ema: bool = False) -> None:
        """Write a line of the figures of an evaluation after this many steps and epochs. ema: of averaged weights."""
        if self.writes:
            said = {name: value if isfinite(value) else None for name, value in figures.items()}
            self._write({"step": step, "epoch": epoch, "validation": said, **({"ema": True} if ema else {})})
        texts = ", ".join(f"validation {name} {value:.4f}" for name, value in figures.items())
        self.say(f"step {step}: {texts}{AVERAGED * ema}")

    def saved(self, step: int, path: Path) -> None:
        """Report a checkpoint that is on the disk."""
        self.say(f"step {step}: wrote {path}")

    def say(self, text: str) -> None:
        """Print a line above the line of progress."""
        if self.writes:
            self._print(("\r\033[K" if self._shows else "") + text)

    @property
    def _shows(self) -> bool:
        return self._file is not None and sys.stderr.isatty()

    def _print(self, text: str, end: str = "\n") -> None:
        try:
            print(text, end=end, file=sys.stderr, flush=True)
        except (OSError, ValueError) as error:  # the terminal was closed, or cannot encode a name
            self._warn(f"the run's messages cannot be printed: {error}")

    def _write(self, line: dict[str, Any]) -> None:
        """Write a line. If the disk is full, the file object keeps the line for the next write."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            self._warn(f"{self.folder / METRICS} cannot be written: {error.strerror}. The training continues")

    def _warn(self, text: str) -> None:
        """Warn once."""
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text)

    def close(self) -> None:
        """Close the log."""
        if self._shows:
            self._print("")
        if self._file is not None:
            attempt(f"{self.folder / METRICS} could not be closed", self._file.close)
        self._file = None
