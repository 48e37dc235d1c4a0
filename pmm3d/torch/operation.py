"""Operations of `pmm3d.nn` under torch's autograd: the same rules, gradients summed during torch's backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..comm import Grid
from ..errors import Pmm3dError
from ..layout import Layout
from ..nn.contract import Part
from ..nn.forming import brought
from ..nn.gradients import Leaf
from ..nn.parallel import Parallel
from ..nn.tape import Tape
from ..nn.tensor import Tensor
from ..product import DistMatrix
from .held import ROWS, Held


class Passes:
    """torch's backward passes over what runs on a grid. `Passes.of(grid)`.

    A pass begins with the first gradient that it brings here, and at its end, when torch's engine has been everywhere,
    all gradients are summed and in `.grad`.

    partners   ranks that hold other rows of a batch, this one included
    whole      whether a module has parameters on no axis, which the ranks must use alike
    """

    def __init__(self, grid: Grid):
        self.grid, self.parallel = grid, Parallel.of(grid)
        self.partners = grid.shape.along(ROWS)
        self.whole = False
        self._uses: Counter[Leaf] = Counter()
        self._open: AbstractContextManager[None] | None = None
        self._taken: dict[Held, None] = {}

    @classmethod
    def of(cls, grid: Grid) -> Passes:
        if cls not in grid.attached:
            grid.attached[cls] = cls(grid)
        return grid.attached[cls]

    @property
    def under_way(self) -> bool:
        return self._open is not None

    def used(self, held: Sequence[Held]) -> None:
        """A forward pass uses them: so often the next backward pass will come back, if it goes over all of it."""
        self._uses.update(each.weight for each in held)

    def begin(self) -> None:
        """A gradient is here: of a pass that is under way, or of a new one."""
        if self._open is None:
            uses, self._uses = self._uses, Counter()
            opened = self.parallel.backward(Tape.of(self.grid).syncing, uses)
            opened.__enter__()
            self._open = opened
            torch.autograd.Variable._execution_engine.queue_callback(_End(self))

    def receive(self, held: Held, part: Part) -> None:
        """A part of a parameter's gradient."""
        self.begin()
        if held not in self._taken:
            held.resume()
            self._taken[held] = None
        held.weight.receive(part)

    def end(self) -> None:
        """torch's engine has been everywhere."""
        opened, taken = self._open, self._taken
        assert opened is not None
        try:
            if self.whole:
                self.grid.compared("backward", ", ".join(each.weight.name for each in taken))()
        except BaseException as error:
            self.abandon(error)
            raise
        self._open, self._taken = None, {}
        try:
            opened.__exit__(None, None, None)
        except BaseException:
            _each(taken, Held.drop)
            raise
        _each(taken, Held.give)

    def abandon(self, error: BaseException) -> None:
        """The pass ended with an error, here or in another part of torch's graph."""
        opened, taken, self._open, self._taken = self._open, self._taken, None, {}
        if opened is not None:
            try:
                opened.__exit__(type(error), error, error.__traceback__)
            except BaseException as raised:
                if raised is not error:
                    raise
        _each(taken, Held.drop)


def _each(held: dict[Held, None], action: Callable[[Held], None]) -> None:
    for each in held:
        action(each)


class _End:
    """What torch's engine calls at the end of a pass; it lets go of it, uncalled, if the pass ends with an error."""

    def __init__(self, passes: Passes):
        self._passes: Passes | None = passes

    def __call__(self) -> None:
        passes, self._passes = self._passes, None
        if passes is not None:
            passes.end()

    def __del__(self) -> None:
        if self._passes is not None:
            self._passes.abandon(Pmm3dError("a backward pass of torch ended with an error"))


@dataclass(frozen=True)
class Call:
    """One use of an operation.

    layout     of the operand, of so many columns in all
    function   function(x) of a `pmm3d.nn.Tensor`, with the parameters in `held`
    records    whether torch notes what it needs for a backward pass
    """

    passes: Passes
    function: Callable[[Tensor], Tensor]
    layout: Layout
    columns: int
    held: tuple[Held, ...]
    records: bool

    def operand(self, x: torch.Tensor) -> Tensor:
        """The rows of this rank in a matrix of as many rows on each of its partners: how many they really have is of
        no account, since rows stay where they are."""
        grid, rows = self.passes.grid, prod(x.shape[:-1])
        local = x.detach().contiguous().view(rows, x.shape[-1])
        value = DistMatrix(grid, local, (rows * self.passes.partners, self.columns), self.layout)
        return Tensor(value, requires_grad=self.records and x.requires_grad)

    def __call__(self, x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        if self.records:
            self.passes.used(self.held)
        made: torch.Tensor = _Operation.apply(self, x, *tensors)  # type: ignore[no-untyped-call]
        return made


class _Operation(torch.autograd.Function):
    """Runs an operation of `pmm3d.nn`. What its rule needs is kept by torch, which sees to it that it is not changed
    meanwhile and lets `torch.utils.checkpoint` have it."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        with Tape.of(call.passes.grid).set(recording=call.records, pack=lambda array: array):
            operand = call.operand(x)
            out = call.function(operand)
        node = out.node
        if node is not None:
            ctx.call, ctx.rule, ctx.form, ctx.shape = call, node.rule, operand.form, x.shape
            ctx.save_for_backward(*tensors, *node.kept)
        made: torch.Tensor = out.shard
        return made.view(*x.shape[:-1], made.shape[1]).detach()  # no view, so that it may be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        call: Call = ctx.call
        kept = ctx.saved_tensors[len(call.held) :]
        call.passes.begin()
        rows = gradient.contiguous().view(prod(gradient.shape[:-1]), gradient.shape[-1])
        of_input, *others = ctx.rule(rows, *kept)
        coming = brought(ctx.form, of_input) if ctx.needs_input_grad[1] else None
        for held, part, needed in zip(call.held, others, ctx.needs_input_grad[2:]):
            if needed:
                call.passes.receive(held, part)
        dx = None if coming is None else coming.wait().view(ctx.shape)
        return None, dx, *[None] * len(call.held)

