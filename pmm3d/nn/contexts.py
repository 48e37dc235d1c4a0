"""Contexts for operations and backward passes: no_grad, no_sync, unchanged, defer_weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from ..comm import Grid
from .compute import override
from .contract import Contribution
from .gradient_buffer import Leaf
from .tape import Tape


@contextmanager
def no_grad(grid: Grid) -> Iterator[None]:
    """Context in which operations are not recorded for a backward pass, for evaluation.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid, nn.no_grad(grid):
    ...     nn.scale(nn.Tensor(DistMatrix.random(grid, (2, 2)), requires_grad=True), 2).requires_grad
    False
    """
    tape = Tape.of(grid)
    try:
        with tape.set(recording=False):
            yield
    finally:
        tape.parallel.weights.pause()


def no_sync(grid: Grid) -> AbstractContextManager[None]:
    """Context in which backward passes defer the sums of gradients over data to the next pass outside the context.

    Notes
    -----
    Use it for all but the last of several batches of one step. With `shard_over_data="gradients"`, gradients are summed
    in each pass all the same, because a rank has memory for its part only.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> with Grid(shape="ddp") as grid, nn.no_sync(grid):
    ...     nn.Tape.of(grid).syncing
    False
    """
    return Tape.of(grid).set(syncing=False)


class WeightProducts:
    """Queue of deferred products of weight gradients; `defer_weights` makes it.

    Each product holds its input and its gradient. The gradient of a parameter is summed over data when no queue
    contains a product of it; with ZeRO-2, in each `drain`. Products of discarded gradients are not computed.
    """

    def __init__(self, grid: Grid):
        self._grid, self._mark = grid, object()
        self._waiting: list[tuple[Leaf, Contribution, int]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, parameter: Leaf, part: Contribution) -> None:
        self._waiting.append((parameter, part, _times_forgotten(parameter)))
        if parameter.grad_buffer is not None:
            parameter.grad_buffer.queues.add(self._mark)

    def drain(self, count: int | None = None) -> None:
        """Compute the first `count` products (None: all), and add them to the gradients. Collective."""
        tape, number = Tape.of(self._grid), len(self._waiting) if count is None else count
        taken, self._waiting = self._waiting[:number], self._waiting[number:]
        wanted = [(parameter, part) for parameter, part, times in taken if times == _times_forgotten(parameter)]
        left = {parameter for parameter, _, times in self._waiting if times == _times_forgotten(parameter)}
        uses = Counter(parameter for parameter, _ in wanted)
        for parameter in uses.keys() - left:
            if parameter.grad_buffer is not None:
                parameter.grad_buffer.queues.discard(self._mark)
        del taken
        parallel, recorder = tape.parallel, self._grid.engine.recorder
        with override(parallel, deferred=None):
            parallel.begin_drain(tape.syncing, uses)
            try:
                while wanted:
                    parameter, part = wanted.pop(0)
                    if recorder is not None:
                        recorder.layer = parameter.name.rpartition(".")[0]
                    parameter._receive(part)
                    del part
                parallel.finish()
            except BaseException:
                parallel.abandon()
                raise


def _times_forgotten(leaf: Leaf) -> int:
    return 0 if leaf.grad_buffer is None else leaf.grad_buffer.times_forgotten


def unchanged(grid: Grid) -> AbstractContextManager[None]:
    """Context in which no weight changes, so all its forward passes can use the same gathered weights.

    Notes
    -----
    Use it for the batches of one step or of an evaluation. `Overlap.reshard_after_forward` selects whether gathered
    weights are kept. If a weight is written to in the context, forward passes may use its old values.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="fsdp") as grid, nn.unchanged(grid), nn.no_grad(grid):
    ...     net, x = nn.Linear(grid, 3, 2), DistMatrix.random(grid, (4, 3), dtype="float32")
    ...     (net(x) - net(x)).gather().any()
    np.False_
    """
    return Tape.of(grid).parallel.weights.unchanged()


@contextmanager
def defer_weights(grid: Grid) -> Iterator[WeightProducts]:
    """Context in which backward passes compute gradients of activations only.

    Returns
    -------
    context manager of WeightProducts
        `drain()` computes the gradients of the weights. Until then, a step of an optimizer raises Pmm3dError.

    Notes
    -----
    Pipelines without bubbles need it (Qi et al. 2023, arXiv 2401.10241).

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     net, x = nn.Linear(grid, 3, 2), DistMatrix.random(grid, (4, 3), dtype="float32")
    ...     with nn.defer_weights(grid) as queue:
    ...         nn.mse(net(x), net(x).value).backward()
    ...     before = net.weight.grad
    ...     queue.drain()
    ...     before, net.weight.grad.shape
    (None, (3, 2))
    """
    queue = WeightProducts(grid)
    with override(Tape.of(grid).parallel, deferred=queue.put):
        yield queue
