"""Losses by name, evaluations, and the search for infinite numbers and NaN."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import nan
from typing import Any

import numpy as np

from ...errors import Pmm3dError
from ...io import Loader
from ...layout import Layout
from ...product import DistMatrix
from .. import loss as losses
from .. import scores
from ..contexts import unchanged
from ..module import Module
from ..pipeline.network import Pipeline
from ..recorded_passes import Passes
from ..tape import Tape
from ..tensor import Tensor, summed

Batch = tuple[DistMatrix, DistMatrix]
Loss = Callable[..., Tensor]
"""loss(output, y): a mean over the rows, 1 x 1."""
Metrics = Mapping[str, Callable[[Tensor, DistMatrix], float]]
MOST_NAMED = 8
"""Largest number of targets that have a figure of their own in the log."""
LOSSES: dict[str, Loss] = {each.__name__: each for each in losses.LOSSES if each is not losses.kl_div}
"""Losses of outputs as they are; those of `kl_div` are logarithms of probabilities."""


def loss_named(loss: str | Loss, class_weights: Sequence[float] | None = None, label_smoothing: float = 0.0) -> Loss:
    """Return the loss of that name, or the given function. Raises Pmm3dError for anything else.

    class_weights: weight of each class for "cross_entropy"; None: 1. label_smoothing: for "cross_entropy".
    """
    function = LOSSES.get(loss, loss) if isinstance(loss, str) else loss
    if isinstance(function, str) or not callable(function):
        raise Pmm3dError(f"the loss must be {', '.join(LOSSES)} or a function; got {loss!r}")
    given = dict[str, Any]() if class_weights is None else {"weight": tuple(class_weights)}
    given |= {"label_smoothing": label_smoothing} if label_smoothing else {}
    if given and without_arguments(function) is not losses.cross_entropy:
        raise Pmm3dError(f"{' and '.join(given)}: for the loss cross_entropy; the loss is {loss!r}: leave it out")
    return partial(function, **given) if given else function


def without_arguments(loss: Loss) -> Loss:
    """Return the function of a `functools.partial`; another loss as it is."""
    return loss.func if isinstance(loss, partial) else loss


def local_loss(result: Tensor) -> float:
    """Return this rank's part of a 1 x 1 number. The sum over all ranks is the number."""
    grid = result.grid
    local = result.library.to_numpy(result.shard)
    return float(local[0, 0]) if local.size and result.layout.is_first(grid.shape.position(grid.rank)) else 0.0


def number_of(value: Any) -> float:
    """Return the number that a metric returned; collective for a tensor. Raises TypeError for anything else."""
    try:
        return float(value.gather()[0, 0] if isinstance(value, Tensor) and value.shape == (1, 1) else value)
    except (TypeError, ValueError):
        raise TypeError(f"a metric returns a number or a 1 x 1 tensor, not {type(value).__name__}") from None


class Evaluation:
    """Means over the rows of batches. Call `add` in `network.evaluating()`. Rows with ignored labels do not count in
    the loss. Raises Pmm3dError for a metric that has the name of another figure.

    targets   names of the columns of targets that are values; up to MOST_NAMED have a figure of their own
    """

    def __init__(self, network: Module, loss: Loss, metrics: Metrics | None = None, targets: Sequence[str] = ()):
        self._network, self._loss, self._metrics = network, loss, dict(metrics or {})
        plain, given = without_arguments(loss), {*loss.keywords} if isinstance(loss, partial) else set()
        self._classes = plain is losses.cross_entropy and given <= {"weight", "label_smoothing"}
        self._binary = plain is losses.binary_cross_entropy_with_logits
        self._vectors = plain in (losses.mse, losses.mae, losses.huber)
        self._scored = plain is not losses.kl_div
        if taken := sorted({"loss", "accuracy", "r2", *(f"r2 of {name}" for name in targets)} & set(self._metrics)):
            raise Pmm3dError(f"metrics: an evaluation already has {', '.join(taken)}; give yours another name")
        self._sums, self._rows, self._terms, self._mixed = np.zeros(2), 0, 0.0, False
        self._judged = 1  # outputs of a row that are right or wrong
        self._passes = Passes.of(network)
        self.score, self._targets = scores.R2(), targets if 1 < len(targets) <= MOST_NAMED else ()
        self._means = dict.fromkeys(self._metrics, 0.0)

    def add(self, batches: Iterable[Batch]) -> None:
        """Add batches. In a Pipeline, each rank works on another batch."""
        ahead = self._network.ranks - 1 if isinstance(self._network, Pipeline) else 0
        under_way = deque[tuple[Tensor, DistMatrix]]()
        for x, y in batches:
            under_way.append((self._passes.output(self._network, x), y))
            if len(under_way) > ahead:
                self._count(*under_way.popleft())
        for out, y in under_way:
            self._count(out, y)

    def _count(self, out: Tensor, y: DistMatrix) -> None:
        """Add a batch, from the output of the network."""
        grid, rows, out = self._network.grid, out.shape[0], summed(out)
        with Tape.of(grid).set(summing=False):
            step = losses.WholeStep(grid, [y])
            result = step.loss(self._loss, 0, out)
        number = step.terms(result, rows)
        self._mixed |= number is None
        if self._mixed and self._rows:
            raise Pmm3dError(
                "evaluate: the loss is a sum, or it changes a mean with ignore_index, so its mean over "
                "several batches is not known. Return the mean of nn.cross_entropy itself, or evaluate "
                "one batch"
            )
        terms, position = rows if number is None else number, grid.shape.position(grid.rank)
        self._sums[0] += local_loss(result) * terms if terms else 0.0
        self._terms += terms
        if self._classes:
            counts = Layout(out.layout.rows).is_first(position)
            self._sums[1] += scores.right_rows(out, y) * counts
        elif self._binary:
            self._sums[1] += scores.right_elements(out, y) * out.layout.is_first(position)
            self._judged = out.shape[1]
        elif self._vectors or (self._scored and y.dtype == out.dtype and y.shape == out.shape):
            self._vectors = True
            self.score.add(out, y)
        for name, metric in self._metrics.items():
            with self._network.parent_grid.collective_call("evaluate", name, always=True):
                try:
                    value = number_of(metric(out, y))
                except TypeError as error:
                    raise Pmm3dError(f"metrics: {name}: {error}") from error
            self._means[name] += value * rows
        self._rows += rows

    @property
    def has_terms(self) -> bool:
        """Whether a row counts in the loss."""
        return self._terms != 0

    def figures(self) -> dict[str, float]:
        """Return "loss"; "accuracy" for classes, and for 0 and 1 (the share of the elements whose probability is on the
        right side of 1/2), or "r2" for vectors; "r2 of NAME" of targets with names; and the metrics. Collective. For a
        user's loss with labels there is neither accuracy nor r2."""
        grid, rows = self._network.grid, self._rows
        if not rows:
            raise Pmm3dError(
                "an evaluation needs batches, and there were none. An exhausted iterator returns no more: "
                "pass a list or a Loader, which starts again by itself"
            )
        with grid.ledger.phase("agreement"):
            sums = np.append(self._sums, self._passes.open)
            loss, right, are_open = grid.everyone.all_reduce(sums, agreed=True).wait().tolist()
        self._passes.conclude(are_open)
        score = {"r2": self.score.value()} if self._vectors else {}
        score = {"accuracy": right / (rows * self._judged)} if self._classes or self._binary else score
        if self._vectors and self._targets:
            score |= {f"r2 of {name}": float(each) for name, each in zip(self._targets, self.score.of_columns()[0])}
        loss = loss / self._terms if self._terms else nan
        return {"loss": loss, **score} | {name: value / rows for name, value in self._means.items()}


def evaluate(network: Module, loader: Iterable[Batch], loss: Loss, metrics: Metrics | None = None) -> dict[str, float]:
    """Means over the batches of a loader. Collective.

    Parameters
    ----------
    network : Module
        The network. Dropout is inactive, and operations are not recorded.
    loader : iterable
        Batches (x, y) of one pass, the same on all ranks. A Loader returns all batches of an epoch, from any position.
        If the position was inside an epoch, training can continue there.
    loss : callable
        loss(output, y) -> Tensor, 1 x 1.
    metrics : mapping or None
        Name -> function (output, y) -> number or 1 x 1 tensor of a batch. Default: none.

    Returns
    -------
    dict
        "loss", "accuracy" for classes or for 0 and 1 (`binary_cross_entropy_with_logits`), or "r2" for vectors, and the
        metrics.

    Raises
    ------
    Pmm3dError
        If there is no batch, or if a metric has the name of another figure.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> from pmm3d.nn.training import evaluate
    >>> with Grid(shape="ddp") as grid:
    ...     net, x = nn.MLP(grid, [3, 2]), DistMatrix.random(grid, (4, 3), dtype="float32")
    ...     evaluate(net, [(x, net(x).value)], nn.mse)
    {'loss': 0.0, 'r2': 1.0}
    """
    evaluation = Evaluation(network, loss, metrics)
    with network.evaluating(), unchanged(network.grid):
        evaluation.add(loader.whole_epoch() if isinstance(loader, Loader) else loader)
    return evaluation.figures()


def first_non_finite(network: Module, inputs: Sequence[DistMatrix]) -> str:
    """Return a sentence that names the first parameter, input or layer with infinite numbers or NaN. Collective."""
    grid, names = network.grid, {module: name or "the network" for name, module in network.named_modules()}
    wrong: list[tuple[str, str]] = []

    def finite(value: Tensor | DistMatrix) -> bool:
        local = value.library.to_numpy(value.local)
        count = np.array([np.count_nonzero(~np.isfinite(local))], np.int64)
        return int(grid.everyone.all_reduce(count, agreed=True).wait()[0]) == 0

    def look(module: Module, output: Tensor) -> None:
        if not wrong and module in names and not finite(output):
            wrong.append((names[module], f"layer {names[module]} ({type(module).__name__})"))

    def first() -> str:
        """Return the first wrong part of the network, over all stages; "" if there is none."""
        everyones = [each[0] for each in network.parent_grid.comm.allgather(wrong) if each]
        return min(everyones, key=lambda each: (len(each[0].partition(".")[0]), each[0]), default=("", ""))[1]

    for name, parameter in network.named_parameters().items():
        if not wrong and not finite(parameter):
            wrong.append((name, name))
    if where := first():
        return f"The parameter {where} is not finite."
    for x in inputs:
        if not finite(x):
            return "The input is not finite."
        with Tape.of(grid).set(inspect=look), network.evaluating():
            network(x)
        if where := first():
            return f"The output of {where} is not finite."
    return "All layers' outputs are finite: the loss or the gradient itself is not."
