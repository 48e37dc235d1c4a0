"""Rates of passes over memory: operations of nn run on a grid of one rank each, and the dry run of the same program
says by what name, and over how many bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ... import nn
from ...arrays.dry_run import Action
from ...comm import Grid
from ...layout import Layout
from ...model.machines.figures import Pass
from ...model.machines.laws import DEFAULT
from ...nn import loss, optim
from ...product import DistMatrix
from .fitting import line
from .sampling import Sampler, Work

COLUMNS = 256
ROWS = 32, 1024, 8192
"""Of arrays of COLUMNS float32: 32 KiB, 1 MiB, 8 MiB."""
COPY, DEFAULT_IS = "copy", "add"
SECONDS = 18.0
SAMPLE_SECONDS = 2e-3


class Phase(NamedTuple):
    """What is timed of a program: work; before is done each time before it, untimed."""

    work: Work
    before: Work | None = None


Program = Callable[[Grid, int], Iterator[Phase]]
"""program(grid, rows): its phases, one after the other."""


def programs() -> list[Program]:
    """Every pass that is measured; those that are parts of later ones first."""
    unary = [nn.relu, nn.tanh, nn.sigmoid, nn.silu, nn.gelu, nn.softmax, nn.log_softmax, lambda x: x * 2.0,
             lambda x: nn.dropout(x, 0.1, 1), lambda x: nn.cast(x, "float64")]
    optimizers = [partial(optim.SGD, lr=1e-3), partial(optim.SGD, lr=1e-3, momentum=0.9), partial(optim.Adam, lr=1e-3),
                  partial(optim.AdamW, lr=1e-3)]
    return [_copy, _sum, *(partial(_applied, each) for each in unary), _normalized,
            *(partial(_of_two, each) for each in (nn.multiply, nn.subtract)),
            *(partial(_loss, each) for each in (nn.mse, nn.mae)), _classes,
            *(partial(_step, each) for each in optimizers)]


def _random(grid: Grid, rows: int, seed: int = 1) -> DistMatrix:
    return DistMatrix.random(grid, (rows, COLUMNS), seed=seed, dtype="float32")


def _leaf(grid: Grid, rows: int, seed: int = 1) -> nn.Tensor:
    return nn.Tensor(_random(grid, rows, seed), requires_grad=True)


def _copy(grid: Grid, rows: int) -> Iterator[Phase]:
    """Its bytes are known: every dry run has copies among other passes."""
    source = _random(grid, rows).local
    library = grid.library("numpy")
    target = library.copy(source)
    yield Phase(partial(_copied, target, source))


def _copied(target: Any, source: Any) -> None:
    target[...] = source


def _sum(grid: Grid, rows: int) -> Iterator[Phase]:
    """Forward only: the gradient of a sum goes on as it is."""
    one, other = _leaf(grid, rows), _leaf(grid, rows, 2)
    yield Phase(lambda: nn.add(one, other))


def _applied(function: Callable[[nn.Tensor], nn.Tensor], grid: Grid, rows: int) -> Iterator[Phase]:
    x = _leaf(grid, rows)
    yield Phase(lambda: function(x))
    yield _backward([x], lambda: function(x))


def _of_two(function: Callable[..., nn.Tensor], grid: Grid, rows: int) -> Iterator[Phase]:
    one, other = _leaf(grid, rows), _leaf(grid, rows, 2)
    yield Phase(lambda: function(one, other))
    yield _backward([one, other], lambda: function(one, other))


def _normalized(grid: Grid, rows: int) -> Iterator[Phase]:
    layer, x = nn.LayerNorm(grid, COLUMNS), _leaf(grid, rows)
    yield Phase(lambda: layer(x))
    yield _backward([x, *layer.parameters()], lambda: layer(x))


def _loss(function: Callable[..., nn.Tensor], grid: Grid, rows: int) -> Iterator[Phase]:
    x, target = _leaf(grid, rows), _random(grid, rows, 2)
    yield Phase(lambda: function(x, target))
    yield _backward([x], lambda: function(x, target), of_loss=True)


def _classes(grid: Grid, rows: int) -> Iterator[Phase]:
    labels = grid.library("numpy").made((rows, 1), "int64", lambda: np.arange(rows)[:, None] % COLUMNS)
    matrix = DistMatrix(grid, labels, (rows, 1), Layout())
    x = _leaf(grid, rows)
    yield Phase(lambda: loss.cross_entropy(x, matrix))
    yield _backward([x], lambda: loss.cross_entropy(x, matrix), of_loss=True)


def _step(make: Callable[..., optim.Optimizer], grid: Grid, rows: int) -> Iterator[Phase]:
    """Of an optimizer, over a weight of as many elements."""
    layer = nn.Linear(grid, rows, COLUMNS, bias=False)
    optimizer = make(layer.parameters())
    x, gradient = DistMatrix.random(grid, (1, rows), dtype="float32"), _random(grid, 1, 2)
    yield Phase(optimizer.step, lambda: layer(nn.Tensor(x)).backward(gradient))


def _backward(leaves: list[nn.Tensor], forward: Callable[[], nn.Tensor], of_loss: bool = False) -> Phase:
    made = list[nn.Tensor]()
    gradient = list[DistMatrix]()

    def prepare() -> None:
        for leaf in leaves:
            leaf.grad = None
        made[:] = [forward()]
        if not of_loss and not gradient:
            gradient.append(made[0].value.copy() if hasattr(made[0].value, "copy") else made[0].value)

    return Phase(lambda: made[0].backward(*gradient), prepare)


def measured_passes(sampler: Sampler, tell: Callable[[str, int], None]) -> dict[str, Pass]:
    """Overhead and rate by the names that dry runs give; "default" for all others."""
    found: dict[str, Pass] = {}
    with sampler.section("passes", SECONDS), Grid(MPI.COMM_SELF, (1, 1, 1)) as grid:
        for program in programs():
            timed: dict[int, list[tuple[dict[str, int], float]]] = defaultdict(list)
            for rows in ROWS:
                bytes_of = passes_of(program, rows)
                for index, phase in enumerate(program(grid, rows)):
                    seconds = sampler.measure(phase.work, phase.before, sample_seconds=SAMPLE_SECONDS)
                    if seconds is not None and bytes_of[index]:
                        timed[index].append((bytes_of[index], seconds))
                tell("passes", 1)
            for points in timed.values():
                learn(found, points)
    found.setdefault(DEFAULT, found.get(DEFAULT_IS) or found.get(COPY) or Pass(0.0, 1e9))
    return found


def passes_of(program: Program, rows: int) -> list[dict[str, int]]:
    """Of each phase of a program, bytes by name of pass, as its dry run says."""
    if program is _copy:
        return [{COPY: 2 * rows * COLUMNS * 4}]
    found = []
    with Grid.dry((1, 1, 1)) as grid:
        assert grid.dry_run is not None
        for phase in program(grid, rows):
            if phase.before is not None:
                phase.before()
            grid.dry_run.actions.clear()
            phase.work()
            found.append(by_name(grid.dry_run.actions))
    return found


def by_name(actions: list[Action]) -> dict[str, int]:
    """Bytes of the passes of each name."""
    found: dict[str, int] = defaultdict(int)
    for action in actions:
        if action.what == "pass":
            found[action.operation] += action.nbytes
    return dict(found)


def learn(found: dict[str, Pass], points: list[tuple[dict[str, int], float]]) -> None:
    """Add the passes of a phase that are not known yet: what those that are known take is subtracted.

    points   bytes by name, and seconds, for each size

        >>> known = {"copy": Pass(0.0, 100.0)}
        >>> learn(known, [({"relu": 100, "copy": 100}, 3.0), ({"relu": 300, "copy": 300}, 8.0)])
        >>> known["relu"].rate, round(known["relu"].overhead, 9)
        (66.66666666666667, 0.5)
    """
    names = [name for name in points[0][0] if name not in found]
    if not names:
        return
    left = list[tuple[float, float]]()
    for bytes_of, seconds in points:
        known = sum(found[name].overhead + nbytes / found[name].rate for name, nbytes in bytes_of.items()
                    if name in found)
        left.append((sum(bytes_of.get(name, 0) for name in names), max(seconds - known, seconds / 10)))
    overhead, rate = line(left)
    for name in names:
        found[name] = Pass(overhead / len(names), rate)


def count() -> int:
    """How many points there are."""
    return len(programs()) * len(ROWS)
