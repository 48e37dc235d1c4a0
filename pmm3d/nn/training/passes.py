"""What a training run is made of, one thing after the other: steps, and evaluations batch by batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from ...errors import Pmm3dError
from ...layout import Layout
from ...product import DistMatrix
from .. import loss as losses
from .. import scores
from ..compute import changed
from ..dry import Facts
from ..layers import Module
from ..loss_scale import LossScale
from ..optim import NonFiniteGradientError, Optimizer
from ..optimizer import clipping
from ..tape import Tape, unchanged
from ..tensor import Tensor, whole
from .agreed import Agreed, step_agreement
from .finite import first_non_finite

Batch = tuple[DistMatrix, DistMatrix]
Loss = Callable[[Tensor, DistMatrix], Tensor]
Metrics = Mapping[str, Callable[[Tensor, DistMatrix], float]]
Agreement = Callable[[float, float], Agreed]
Check = Callable[[DistMatrix, str, float], None]
LOSSES: dict[str, Loss] = {"cross_entropy": losses.cross_entropy, "mse": losses.mse, "mae": losses.mae}


def loss_named(loss: str | Loss) -> Loss:
    """The loss of that name; a function passes through. Raises Pmm3dError for what is neither."""
    function = LOSSES.get(loss, loss) if isinstance(loss, str) else loss
    if isinstance(function, str) or not callable(function):
        raise Pmm3dError(f"the loss is {', '.join(LOSSES)} or a function; got {loss!r}")
    return function


def train_step(network: Module, optimizer: Optimizer, loss: Loss, rows: Sequence[int], batches: Iterable[Batch],
               clip: float | None = None, agreement: Agreement | None = None, check: Check | None = None,
               scale: LossScale | None = None) -> tuple[float, float]:
    """A step of batches of so many rows, whose gradient is that of the mean over all of these; the loss and the norm of
    the gradient, before it was clipped.

    batches     are taken one after the other, each after the agreement of the one before
    agreement   agreement(this rank's part of the loss, that of the square of the norm), as `step_agreement`: once a
                batch, after its backward pass, and before the weights are changed. On a device the loss of all batches
                comes with the last one: nobody waits before
    check       check(input, what, value) may raise then
    scale       of the loss; with it a step whose loss or gradient is not finite is skipped, and not checked

    Raises NonFiniteGradientError, on every rank, for too many skipped steps; it names what is not finite first.
    """
    grid, tape, value, total = network.grid, Tape.of(network.grid), 0.0, max(1, sum(rows))
    check, factor = (None, scale.value) if scale is not None else (check, 1.0)
    agreement, waiting, part, results = agreement or partial(step_agreement, grid), iter(batches), 0.0, list[Tensor]()
    with unchanged(grid), tape.set(summing=False), changed(tape.parallel, trusting=True):
        for index, count in enumerate(rows):
            last = index == len(rows) - 1
            x, y = next(waiting)
            result = loss(network(x), y)
            result = result if len(rows) == 1 else result * (count / total)
            with tape.set(syncing=last):
                result.backward(scale=factor)
            results.append(result)
            if last or result.library.on_host:
                part, results = sum(map(own_part, results)), []
            agreed = agreement(part, optimizer.own_square() if last else 0.0)
            value += agreed.loss
            if check is not None:
                check(x, "the loss is", value)
    norm = agreed.norm / factor
    if check is not None:
        check(x, "the gradient's norm is", norm)
    if scale is not None:
        _conclude(scale, optimizer, norm if isfinite(value) else value, clip, partial(first_non_finite, network, x))
    else:
        optimizer.step(factor=clipping(norm, clip))
    return value, norm


def _conclude(scale: LossScale, optimizer: Optimizer, norm: float, clip: float | None,
              explained: Callable[[], str]) -> None:
    try:
        scale.conclude([optimizer], norm, clip)
    except NonFiniteGradientError as error:
        raise NonFiniteGradientError(f"{error}. In the forward pass: {explained()}") from None


def own_part(result: Tensor) -> float:
    """This rank's part of a number, 1 x 1: their sum over all ranks is the number."""
    grid = result.grid
    local = result.library.to_numpy(result.shard)
    return float(local[0, 0]) if local.size and result.layout.is_first(grid.shape.position(grid.rank)) else 0.0


class Evaluation:
    """Means over the rows of batches, which are added in `network.evaluating()`.

    metrics   name -> function (output, y) -> float of a batch, the same on all ranks

    Raises Pmm3dError for a metric that has the name of another figure.
    """

    def __init__(self, network: Module, loss: Loss, metrics: Metrics | None = None):
        self._network, self._loss, self._metrics = network, loss, dict(metrics or {})
        self._classes, self._vectors = loss is losses.cross_entropy, loss in (losses.mse, losses.mae)
        if taken := sorted({"loss", "accuracy", "r2"} & set(self._metrics)):
            raise Pmm3dError(f"metrics: {', '.join(taken)} is what an evaluation has already; give yours another name")
        self._sums, self._rows = np.zeros(2), 0
        self._score = scores.R2()
        self._means = dict.fromkeys(self._metrics, 0.0)

    def add(self, x: DistMatrix, y: DistMatrix) -> None:
        """Take a batch in. Sends nothing but what network, loss and metrics send."""
        grid, rows = self._network.grid, x.shape[0]
        out = whole(self._network(x))
        for name, metric in self._metrics.items():
            self._means[name] += float(metric(out, y)) * rows
        with Tape.of(grid).set(summing=False):
            self._sums[0] += own_part(self._loss(out, y)) * rows
        if self._classes:
            counts = Layout(out.layout.rows).is_first(grid.shape.position(grid.rank))
            self._sums[1] += scores.right_rows(out, y) * counts
        elif self._vectors or (y.dtype == out.dtype and y.shape == out.shape):
            self._vectors = True
            self._score.add(out, y)
        self._rows += rows

    def figures(self) -> dict[str, float]:
        """"loss", "accuracy" for classes or "r2" for vectors, and the metrics. Of a loss of one's own with labels there
        is no score but the metrics. Collective."""
        grid, rows = self._network.grid, self._rows
        if not rows:
            raise Pmm3dError("an evaluation needs batches, and there were none: an iterator that came to its end gives "
                             "no more, a loader begins anew by itself")
        with grid.ledger.phase("agreement"):
            loss, right = grid.everyone.all_reduce(self._sums, agreed=True).wait().tolist()
        score = {"accuracy": right / rows} if self._classes else {"r2": self._score.value()} if self._vectors else {}
        return {"loss": loss / rows, **score} | {name: value / rows for name, value in self._means.items()}


def evaluate(network: Module, loader: Iterable[Batch], loss: Loss, metrics: Metrics | None = None) -> dict[str, float]:
    """Means over the batches of a loader: "loss", "accuracy" for classes or "r2" for vectors, and the metrics.
    Collective.

    loader    batches (x, y): it must start a pass of its own and not shuffle
    metrics   name -> function (output, y) -> float of a batch

        >>> from pmm3d import Grid, nn
        >>> with Grid(shape="ddp") as grid:
        ...     net, x = nn.MLP(grid, [3, 2]), DistMatrix.random(grid, (4, 3), dtype="float32")
        ...     evaluate(net, [(x, net(x).value)], nn.mse)
        {'loss': 0.0, 'r2': 1.0}
    """
    evaluation = Evaluation(network, loss, metrics)
    with network.evaluating(), unchanged(network.grid):
        for x, y in loader:
            evaluation.add(x, y)
    return evaluation.figures()


def facts_of(x: DistMatrix, y: DistMatrix) -> tuple[Facts, Facts]:
    return Facts.of(x), Facts.of(y)


class Event(NamedTuple):
    """what       "step"; "skipped", one that overflowed; "batch" of an evaluation, "evaluated" at its end; "asked": of
               signals, by all ranks
    batches    that a step or a "batch" is of;   first: whether it is an evaluation's first one
    """

    what: str
    batches: tuple[tuple[Facts, Facts], ...] = ()
    first: bool = False

    @property
    def rows(self) -> list[int]:
        return [x.shape[0] for x, _ in self.batches]


@dataclass
class Passes:
    """What a trainer did: how often each event came, by what went before it. What it moves depends on no more: which
    weights are there already, and which one is gathered ahead."""

    counts: Counter[tuple[Event | None, Event]] = field(default_factory=Counter)
    last: Event | None = None

    def note(self, what: str, *facts: tuple[Facts, Facts]) -> None:
        """An event, and what its batches are."""
        event = Event(what, facts, what == "batch" and (self.last is None or self.last.what != "batch"))
        self.counts[self.last if facts else None, event] += 1
        self.last = event if facts else self.last

    def number(self, what: str) -> int:
        return sum(count for (_, event), count in self.counts.items() if event.what == what)

    def rows(self, what: str) -> Counter[int]:
        """Rows -> batches of so many."""
        found: Counter[int] = Counter()
        for (_, event), count in self.counts.items():
            for rows in event.rows if event.what == what else ():
                found[rows] += count
        return found

    @property
    def steps(self) -> int:
        """Taken or skipped."""
        return self.number("step") + self.number("skipped")

    def summary(self) -> dict[str, Any]:
        """For JSON."""
        return {"trained": dict(self.rows("step")), "evaluated": dict(self.rows("batch")), "steps": self.steps,
                "skipped": self.number("skipped"), "evaluations": self.number("evaluated"),
                "asked": self.number("asked")}
