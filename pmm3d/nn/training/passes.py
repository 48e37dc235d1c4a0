"""What a training run is made of, one thing after the other: steps, and evaluations batch by batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...errors import Pmm3dError
from ...product import DistMatrix
from .. import loss as losses
from ..dry import Facts
from ..layers import Module
from ..optim import Optimizer
from ..tape import Tape, unchanged
from ..tensor import Tensor

Batch = tuple[DistMatrix, DistMatrix]
Loss = Callable[[Tensor, DistMatrix], Tensor]
LOSSES: dict[str, Loss] = {"cross_entropy": losses.cross_entropy, "mse": losses.mse, "mae": losses.mae}


def loss_named(loss: str | Loss) -> Loss:
    """The loss of that name; a function passes through. Raises Pmm3dError for what is neither."""
    function = LOSSES.get(loss, loss) if isinstance(loss, str) else loss
    if isinstance(function, str) or not callable(function):
        raise Pmm3dError(f"the loss is {', '.join(LOSSES)} or a function; got {loss!r}")
    return function


def train_step(network: Module, optimizer: Optimizer, loss: Loss, size: int, batches: Iterable[Batch],
               clip: float | None, check: Callable[[DistMatrix, str, float], None]) -> tuple[float, float | None]:
    """The loss of a step of so many batches, and the norm of the gradient if it is clipped. check(input, what, value)
    may raise before anything is changed."""
    value = 0.0
    with unchanged(network.grid):
        for index, (x, y) in enumerate(batches):
            result = loss(network(x), y)
            result = result if size == 1 else result / size
            with Tape.of(network.grid).set(syncing=index == size - 1):
                result.backward()
            value += result.item()
            check(x, "the loss is", value)
    norm = optimizer.clip(clip) if clip else None
    if norm is not None:
        check(x, "the gradient's norm is", norm)
    optimizer.step()
    return value, norm


class Evaluation:
    """Means over batches, which are added in `network.evaluating()`."""

    def __init__(self, network: Module, loss: Loss):
        self._network, self._loss, self._classes = network, loss, loss is losses.cross_entropy
        self._total, self._right, self._rows, self._score = 0.0, 0.0, 0, losses.R2()

    def add(self, x: DistMatrix, y: DistMatrix) -> None:
        out = self._network(x)
        if self._classes:
            self._right += losses.accuracy(out, y) * x.shape[0]
        else:
            self._score.add(out, y)
        self._total += self._loss(out, y).item() * x.shape[0]
        self._rows += x.shape[0]

    def figures(self) -> dict[str, float]:
        """"loss", and "accuracy" for classes or "r2" for vectors. Collective."""
        rows = max(1, self._rows)
        score = {"accuracy": self._right / rows} if self._classes else {"r2": self._score.value()}
        return {"loss": self._total / rows, **score}


def facts_of(x: DistMatrix, y: DistMatrix) -> tuple[Facts, Facts]:
    return Facts.of(x), Facts.of(y)


class Event(NamedTuple):
    """what       "step"; "batch" of an evaluation, "evaluated" at its end; "asked": of signals, by all ranks
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
        return self.number("step")

    def summary(self) -> dict[str, Any]:
        """For JSON."""
        return {"trained": dict(self.rows("step")), "evaluated": dict(self.rows("batch")), "steps": self.steps,
                "evaluations": self.number("evaluated"), "asked": self.number("asked")}
