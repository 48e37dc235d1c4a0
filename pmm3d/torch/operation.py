"""Operations of `pmm3d.nn` under torch's autograd. Gradients are summed over ranks during torch's backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from math import prod
from typing import Any, NamedTuple
from weakref import ref
from zlib import crc32

import torch
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakIdKeyDictionary

from ..comm import Grid
from ..errors import DTypeError, Pmm3dError
from ..layout import Layout
from ..nn.contract import Contribution
from ..nn.gradient_buffer import Leaf
from ..nn.overlapped_gemm import relayout_gradient
from ..nn.parallel import BackwardSync
from ..nn.ragged_rows import ragged
from ..nn.tape import Tape
from ..nn.tensor import Tensor
from ..product.checks import check_replicas
from .grid_parameter import COLUMNS, MARK, ROWS, SAME_BATCH, GridParameter, digest, reached

NO_PASS = -1
"""Number that torch returns for the current backward pass if none is in progress."""
DEFERRED = (
    "pmm3d.nn.defer_weights leaves gradients of weights for later, and torch has them in .grad when backward() "
    "ends: call backward() outside of this context"
)
REENTRANT = (
    "a backward pass ran inside another one, over layers of the same grid, as torch.utils.checkpoint does "
    "with use_reentrant=True. Pass use_reentrant=False"
)


class BackwardPasses:
    """torch's backward passes through the modules of a grid. Get it by `BackwardPasses.of(grid)`.

    A pass begins with the first gradient that reaches a parameter or an operation on the grid. At its end torch's
    engine calls `end`, which sums all gradients into `.grad`. After an error torch calls nothing. Then the pass is
    abandoned when the next forward or backward pass begins, which is the same moment on all ranks.

    partners   number of ranks among which the rows of a batch are split
    numbers    iterator of numbers for modules, the same on all ranks; they keep parameter names distinct
    copied     parameter of a plain module -> references to this module, and to its copy by `parallelize`
    ignores    whether a mean had ignored labels
    warned     whether a mean has warned about losses of 0
    """

    ignores = warned = False

    def __init__(self, grid: Grid):
        self.grid, self.parallel = grid, BackwardSync.of(grid)
        self.partners = grid.shape.along(ROWS)
        self.numbers = count(1)
        self._uses: Counter[GridParameter] = Counter()
        self._is_open = False
        self._id = NO_PASS
        """torch's number of the current or last pass. Numbers increase."""
        self._taken: Counter[GridParameter] = Counter()
        self._called = set[str]()
        self.copied: Any = WeakIdKeyDictionary()

    @classmethod
    def of(cls, grid: Grid) -> BackwardPasses:
        if cls not in grid.attached:
            grid.attached[cls] = cls(grid)
        return grid.attached[cls]

    def compares(self, what: str) -> bool:
        """Return whether the ranks compare the data of this call: in the first call of each kind, or in all calls with
        PMM3D_DEBUG=1. Ranks that make the same calls get the same result."""
        first = what not in self._called
        self._called.add(what)
        return self.grid.debug or (self.grid.engine.check and first)

    def compare(
        self,
        what: str,
        numbers: Sequence[float],
        remedy: str = SAME_BATCH,
        trains: bool = True,
        cols: Iterable[str] | None = None,
        spread: float = 0.0,
    ) -> None:
        """Compare data among the ranks that hold the same rows of a batch, and the same columns.

        numbers   a digest of the data, or sums of it;   spread: relative difference that is allowed
        trains    whether all ranks call; otherwise the ranks along x and y call
        cols      axes that split the columns, or may split them; None: all ranks of the grid hold the same data

        Raises DisagreementError on every rank that calls. Collective over these ranks.
        """
        own = [] if cols is None else [(axis, self.grid.axis(axis).index) for axis in (*ROWS, *sorted(cols))]
        check_replicas(
            self.grid, what, crc32(repr(own).encode()), numbers, remedy, spread=spread, along=() if trains else COLUMNS
        )

    def begin_forward(self) -> bool:
        """Begin a forward pass. Return False if it is a recomputation inside a backward pass.

        Otherwise a backward pass that is still open has ended with an error, and is abandoned.
        """
        if torch._C._current_graph_task_id() != NO_PASS:
            return False
        self.abandon()
        return True

    def used(self, held: Sequence[GridParameter]) -> None:
        """Count uses of parameters in a forward pass: the number of contributions to expect in the backward pass.

        A recomputation in a backward pass does not count.
        """
        if torch._C._current_graph_task_id() == NO_PASS:
            self._uses.update(held)

    def begin(self) -> None:
        """Note that a gradient has arrived, and begin a new pass if the gradient does not belong to the current one.

        Raises Pmm3dError in a nested backward pass, and inside `defer_weights`.
        """
        number = torch._C._current_graph_task_id()
        if number < self._id:
            raise Pmm3dError(REENTRANT)
        if number != self._id:
            self.abandon()
            self._id = number
        if self.parallel.deferred is not None:
            raise Pmm3dError(DEFERRED)
        if not self._is_open:
            used, self._uses = self._uses, Counter()
            uses = Counter[Leaf](
                {held.weight: times + held.has_more for held, times in used.items() if held.is_reached()}
            )
            self.parallel.begin(Tape.of(self.grid).syncing, uses)
            self._is_open = True
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.end(number))

    def _receive(self, held: GridParameter, part: Contribution) -> None:
        """Add a contribution to the gradient of a parameter."""
        self.begin()
        if held not in self._taken:
            held.resume()
        self._taken[held] += 1
        held.weight._receive(part)

    def hold(
        self,
        tensor: torch.nn.Parameter,
        shape: tuple[int, int] | None = None,
        layout: Layout = Layout(),
        name: str = "",
        partners: int = 1,
    ) -> GridParameter:
        """Return the GridParameter over the present memory of a parameter, made by these arguments if there is none.

        Hooks receive the gradients that reach the parameter without an operation on the grid: those of weights on the
        grid, as in a penalty, and all of replicated parameters.
        """
        held = GridParameter.of(tensor) or GridParameter(self.grid, tensor, shape, layout, name, partners)
        if tensor.requires_grad and not held.has_hooks and (shape is not None or partners > 1):
            held.has_hooks, own = True, ref(tensor)
            tensor.register_hook(lambda gradient: self._arrived(own(), gradient))  # type: ignore[no-untyped-call]
            tensor.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda tensor: setattr(tensor, "grad", None)
            )
        return held

    def _arrived(self, tensor: torch.Tensor | None, gradient: torch.Tensor | None) -> None:
        held: GridParameter | None = getattr(tensor, MARK, None)
        if tensor is None or held is None or gradient is None or not held.is_reached():
            return
        if gradient.layout != torch.strided:
            raise DTypeError(
                f"{held.weight.name}: its gradient is sparse, which is not summed over ranks: make the "
                "embedding with sparse=False"
            )
        held.has_more = True
        self._receive(held, held.part(gradient))
        tensor.grad = None

    def end(self, number: int) -> None:
        """Sum the gradients of the pass of this number. torch's engine calls this after the last node. Collective.

        The ranks first compare which parameters received gradients, because equal forward passes may have losses of
        different layers.
        """
        if number != self._id:
            raise Pmm3dError(REENTRANT)
        taken = self._taken
        if not self._is_open:
            return
        try:
            if self.grid.size > 1:
                weights_taken = ", ".join(f"{each.weight.name} {times}" for each, times in taken.items())
                self.grid._compared("backward", weights_taken)()
            self.parallel.finish()
            self._is_open, self._taken = False, Counter()
            for held in taken:
                held.give()
        except BaseException:
            self.abandon()
            for held in taken:
                held.drop()
            raise

    def abandon(self) -> None:
        """Close the open pass, if there is one, as failed. Local. The error may be elsewhere in torch's graph."""
        is_open, taken, self._is_open, self._taken = self._is_open, self._taken, False, Counter()
        if is_open:
            self.parallel.abandon()
        for held in taken:
            held.drop()


class Call(NamedTuple):
    """One use of an operation of `pmm3d.nn`: function(x) of a Tensor, with the parameters in `held`.

    layout    layout of x
    columns   number of columns of x over all ranks
    records   whether torch records the operation for a backward pass
    """

    passes: BackwardPasses
    function: Callable[[Tensor], Tensor]
    layout: Layout
    columns: int
    held: Sequence[GridParameter]
    records: bool


def run(
    grid: Grid,
    function: Callable[[Tensor], Tensor],
    layout: Layout,
    columns: int,
    held: Sequence[GridParameter],
    x: torch.Tensor,
) -> torch.Tensor:
    """Run an operation (see `Call`) on this rank's rows. Rows do not move, and their number may differ among ranks."""
    call = Call(BackwardPasses.of(grid), function, layout, columns, held, torch.is_grad_enabled())
    call.passes.begin_forward()
    if grid.debug:
        call.passes.compare("a layer's input", [digest([x])], trains=call.records, cols=layout.cols)
    for each in held:
        each.follow()
    made: torch.Tensor = _Operation.apply(  # type: ignore[no-untyped-call]
        call, x, *[each.tensor() for each in held]
    )
    if made.requires_grad:
        call.passes.used([each for each in held if each.weight.requires_grad])
    return made


class _Operation(torch.autograd.Function):
    """Runs an operation of `pmm3d.nn`. torch saves the arrays that the gradient rule needs.

    So torch detects changes of these arrays in place, and `torch.utils.checkpoint` works.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        grid, local = call.passes.grid, x.detach().contiguous().view(prod(x.shape[:-1]), x.shape[-1])
        with Tape.of(grid).set(recording=call.records, pack=lambda name, array: array):
            operand = ragged(grid, local, call.columns, call.layout, requires_grad=call.records and x.requires_grad)
            out = call.function(operand)
        node = out.node
        if node is not None:
            ctx.call, ctx.rule, ctx.spec, ctx.shape = call, node.rule, operand.spec, x.shape
            ctx.save_for_backward(*tensors, *(saved.packed for saved in node.saved))
        made: torch.Tensor = out.shard
        return made.view(*x.shape[:-1], made.shape[1]).detach()  # no view: callers may change it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        call: Call = ctx.call
        call.passes.begin()
        saved_arrays = ctx.saved_tensors[len(call.held) :]
        before, *ends = (node for node, _ in ctx.next_functions)
        rows = gradient.contiguous().view(prod(gradient.shape[:-1]), gradient.shape[-1])
        of_input, *others = ctx.rule(rows, *saved_arrays)
        coming = relayout_gradient(ctx.spec, of_input) if reached(before) is not False else None
        for held, part, end in zip(call.held, others, ends):
            if end is not None and held.is_reached():
                call.passes._receive(held, part)
        dx = None if coming is None else coming.wait().view(ctx.shape)
        return None, dx, *[None] * len(call.held)
