"""Rates of passes over memory: operations of nn run on a grid of one rank each, and the dry run of the same program
says by what name, and over how many bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ... import nn
from ...action import Action
from ...comm import Grid
from ...layout import Layout
from ...model.machines import Machine
from ...model.machines.figures import Pass
from ...model.machines.laws import DEFAULT
from ...model.simulation.replay import seconds_of
from ...nn import loss, optim
from ...product import DistMatrix
from .fitting import line
from .sampling import Sampler, Work

COLUMNS = 256
ROWS = 32, 512, 4096
"""Of arrays of COLUMNS float32: 32 KiB, 512 KiB, 4 MiB."""
CHAIN = 3
"""Times that an operation is done one after the other, so that its backward pass is seen beside what any takes."""
LONG = 0.02
"""Seconds from which on a program is not measured with larger arrays."""
FASTER = 2.0
"""Times the rate of a copy: no pass is faster, but where what was subtracted was disturbed."""
COPY, DEFAULT_IS = "copy", "add"
SECONDS = 18.0
SAMPLE_SECONDS = 2e-3


class Phase(NamedTuple):
    """What is timed of a program: work; before is done each time before it, untimed. beside: what is timed too, with
    the same before, and subtracted."""

    work: Work
    before: Work | None = None
    beside: Work | None = None


Program = Callable[[Grid, int], Iterator[Phase]]
"""program(grid, rows): its phases, one after the other."""
Function = Callable[[nn.Tensor], nn.Tensor]
Done = dict[str, tuple[int, int]]
"""Name of passes -> how many, bytes of them all."""


class Told(NamedTuple):
    """What a dry run says of a phase: its passes, and seconds of the GEMMs among them."""

    passes: Done
    gemms: float


def programs() -> list[Program]:
    """Every pass that is measured; those that are parts of others first, then by how much training needs them."""
    optimizers: list[Callable[..., optim.Optimizer]] = [optim.SGD, optim.Adam, optim.AdamW]
    first: list[Program] = [_copy, _sum, partial(_applied, nn.relu), *(partial(_step, each) for each in optimizers),
                            partial(_loss, nn.mse), _classes, _normalized]
    unary: list[Function] = [nn.gelu, lambda x: nn.dropout(x, 0.1, 1), _scaled, nn.silu, nn.tanh, nn.sigmoid,
                             nn.softmax, nn.log_softmax, lambda x: nn.cast(nn.cast(x, "float64"), "float32")]
    two = [partial(_of_two, each) for each in (nn.multiply, nn.subtract)]
    return [*first, *(partial(_applied, each) for each in unary), *two, partial(_loss, nn.mae)]


def count() -> int:
    """How many points there are."""
    return len(programs()) * len(ROWS)


def _random(grid: Grid, rows: int, seed: int = 1) -> DistMatrix:
    return DistMatrix.random(grid, (rows, COLUMNS), seed=seed, dtype="float32")


def _leaf(grid: Grid, rows: int, seed: int = 1) -> nn.Tensor:
    return nn.Tensor(_random(grid, rows, seed), requires_grad=True)


def _scaled(x: nn.Tensor) -> nn.Tensor:
    return x * 2.0


def _copy(grid: Grid, rows: int) -> Iterator[Phase]:
    """Its bytes are known: every dry run has copies among other passes."""
    source = _random(grid, rows).local
    target = grid.library("numpy").copy(source)
    yield Phase(partial(_copied, target, source))


def _copied(target: Any, source: Any) -> None:
    target[...] = source


def _sum(grid: Grid, rows: int) -> Iterator[Phase]:
    """Forward only: the gradient of a sum goes on as it is."""
    one, other = _leaf(grid, rows), _leaf(grid, rows, 2)
    yield Phase(lambda: nn.add(one, other))


def _applied(function: Function, grid: Grid, rows: int) -> Iterator[Phase]:
    yield from _forward_and_back(grid, rows, function)


def _of_two(function: Callable[..., nn.Tensor], grid: Grid, rows: int) -> Iterator[Phase]:
    other = _leaf(grid, rows, 2)
    yield from _forward_and_back(grid, rows, lambda x: function(x, other), [other])


def _normalized(grid: Grid, rows: int) -> Iterator[Phase]:
    layer = nn.LayerNorm(grid, COLUMNS)
    yield from _forward_and_back(grid, rows, layer, layer.parameters())


def _forward_and_back(grid: Grid, rows: int, function: Function, others: Iterable[nn.Tensor] = ()) -> Iterator[Phase]:
    """Backward through a chain, beside a backward pass that only brings the gradient to where it belongs."""
    x, gradient, made = _leaf(grid, rows), _random(grid, rows, 3), list[nn.Tensor]()
    yield Phase(lambda: function(x))
    leaves = [x, *others]

    def prepare() -> None:
        end = x
        for _ in range(CHAIN):
            end = function(end)
        made[:] = [end]
        for leaf in leaves:
            leaf.grad = None

    yield Phase(lambda: made[0].backward(gradient), prepare, lambda: x.backward(gradient))


def _loss(function: Callable[..., nn.Tensor], grid: Grid, rows: int) -> Iterator[Phase]:
    """Of the backward pass of a loss, all that any backward pass takes is a part: each step has one."""
    x, target = _leaf(grid, rows), _random(grid, rows, 2)
    yield from _of_loss(x, lambda: function(x, target))


def _classes(grid: Grid, rows: int) -> Iterator[Phase]:
    labels = grid.library("numpy").made((rows, 1), "int64", lambda: np.arange(rows)[:, None] % COLUMNS)
    matrix = DistMatrix(grid, labels, (rows, 1), Layout())
    x = _leaf(grid, rows)
    yield from _of_loss(x, lambda: loss.cross_entropy(x, matrix))


def _of_loss(x: nn.Tensor, function: Callable[[], nn.Tensor]) -> Iterator[Phase]:
    made = list[nn.Tensor]()

    def prepare() -> None:
        x.grad = None
        made[:] = [function()]

    yield Phase(function)
    yield Phase(lambda: made[0].backward(), prepare)


def _step(make: Callable[..., optim.Optimizer], grid: Grid, rows: int) -> Iterator[Phase]:
    """Of an optimizer, over a weight of as many elements."""
    layer = nn.Linear(grid, rows, COLUMNS, bias=False)
    optimizer = make(layer.parameters(), lr=1e-3)
    x, gradient = DistMatrix.random(grid, (1, rows), dtype="float32"), _random(grid, 1, 2)
    yield Phase(optimizer.step, lambda: layer(nn.Tensor(x)).backward(gradient))


def measured_passes(sampler: Sampler, machine: Machine, tell: Callable[[str, int], None]) -> dict[str, Pass]:
    """Overhead and rate by the names that dry runs give; "default" for all others.

    machine   whose GEMMs are known: some passes come with small ones
    """
    found: dict[str, Pass] = {}
    with sampler.section("passes", SECONDS), Grid(MPI.COMM_SELF, (1, 1, 1)) as grid:
        for program in programs():
            timed: dict[int, list[tuple[Done, float]]] = defaultdict(list)
            longest = 0.0
            for rows in ROWS:
                tell("passes", 1)
                expected = told(program, rows, machine) if longest < LONG else []
                for index, (phase, one) in enumerate(zip(program(grid, rows) if expected else (), expected)):
                    seconds = _seconds(sampler, phase)
                    if seconds is not None and one.passes:
                        longest = max(longest, seconds)
                        timed[index].append((one.passes, max(seconds - one.gemms, seconds / 10)))
            for points in timed.values():
                learn(found, points)
    found[DEFAULT] = found.get(DEFAULT_IS) or found.get(COPY) or Pass(0.0, 1e9)
    return found


def _seconds(sampler: Sampler, phase: Phase) -> float | None:
    seconds = sampler.measure_busy(phase.work, phase.before, sample_seconds=SAMPLE_SECONDS)
    if seconds is None or phase.beside is None:
        return seconds
    beside = sampler.measure_busy(phase.beside, phase.before, sample_seconds=SAMPLE_SECONDS)
    return None if beside is None else max(seconds - beside, seconds / 10)


def told(program: Program, rows: int, machine: Machine) -> list[Told]:
    """What its dry run says of each phase of a program."""
    if program is _copy:
        return [Told({COPY: (1, 2 * rows * COLUMNS * 4)}, 0.0)]
    found = []
    with Grid.dry((1, 1, 1)) as grid:
        for phase in program(grid, rows):
            actions = _done(grid, phase.work, phase.before)
            others = [] if phase.beside is None else _done(grid, phase.beside, phase.before)
            gemms = seconds_of_gemms(actions, machine) - seconds_of_gemms(others, machine)
            found.append(Told(less(passes_of(actions), passes_of(others)), gemms))
    return found


def _done(grid: Grid, work: Work, before: Work | None) -> list[Action]:
    """The second time: in the first one an optimizer makes its state."""
    assert grid.dry_run is not None
    for _ in range(2):
        if before is not None:
            before()
        grid.dry_run.actions.clear()
        work()
    return list(grid.dry_run.actions)


def passes_of(actions: Iterable[Action]) -> Done:
    """How many passes of each name there are, and over how many bytes."""
    found: Done = {}
    for action in actions:
        if action.what == "pass":
            count, nbytes = found.get(action.operation, (0, 0))
            found[action.operation] = (count + 1, nbytes + action.nbytes)
    return found


def less(done: Done, others: Done) -> Done:
    """What is left of passes without others, where anything is.

        >>> less({"relu": (2, 30), "copy": (2, 10)}, {"copy": (1, 10)})
        {'relu': (2, 30)}
    """
    left: Done = {}
    for name, (count, nbytes) in done.items():
        fewer, beside = others.get(name, (0, 0))
        if nbytes > beside:
            left[name] = (max(1, count - fewer), nbytes - beside)
    return left


def seconds_of_gemms(actions: Iterable[Action], machine: Machine) -> float:
    """Of the GEMMs among the actions."""
    return sum(seconds_of(action, machine, {}) for action in actions if action.what == "gemm")


def learn(found: dict[str, Pass], points: Sequence[tuple[Done, float]]) -> None:
    """Add the passes of a phase that are not known yet: what those that are known take is subtracted.

    points   passes by name, and seconds, for each size

        >>> known = {"copy": Pass(0.0, 100.0)}
        >>> learn(known, [({"relu": (2, 100), "copy": (1, 100)}, 3.0), ({"relu": (2, 300), "copy": (1, 300)}, 8.0)])
        >>> round(known["relu"].rate, 6), round(known["relu"].overhead, 6)
        (66.666667, 0.25)
    """
    names = [name for name in points[0][0] if name not in found]
    if not names:
        return
    left = list[tuple[int, int, float]]()
    for done, seconds in points:
        known = sum(count * found[name].overhead + nbytes / found[name].rate
                    for name, (count, nbytes) in done.items() if name in found)
        own = [done[name] for name in names if name in done]
        count, nbytes = map(sum, zip(*own))
        left.append((count, nbytes, max(seconds - known, seconds / 10)))
    overhead, rate = line(left)
    fastest = FASTER * found[COPY].rate if COPY in found else rate
    found.update(dict.fromkeys(names, Pass(overhead, min(rate, fastest))))
