"""Operations of `pmm3d.nn` under torch's autograd. Gradients are summed over ranks during torch's backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from math import prod
from typing import Any, Protocol
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
from ..nn.offloaded_arrays import Offload
from ..nn.overlapped_gemm import PendingGradient, relayout_gradient
from ..nn.parallel import BackwardSync
from ..nn.ragged_rows import ragged
from ..nn.tape import Tape
from ..nn.tensor import Tensor
from ..product.checks import check_replicas
from .grid_parameter import COLUMNS, MARK, ROWS, SAME_BATCH, GridParameter, reached

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
        is_open, taken = self._is_open, self._taken
        if not is_open and not taken:
            return
        self._is_open, self._taken = False, Counter()
        if is_open:
            self.parallel.abandon()
        for held in taken:
            held.drop()


class Operation(Protocol):
    """An operation of `pmm3d.nn` with the parameters of one call."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Sequence[torch.Tensor] | None]:
        """Return the result, and the arrays that `backward` needs, or None if no backward pass follows."""

    def backward(
        self, reached: bool, gradient: torch.Tensor, *saved: torch.Tensor
    ) -> tuple[PendingGradient | None, Sequence[Contribution]]:
        """Return the gradient of the input, if the pass has `reached` it, and the contributions to those of the
        parameters."""


class OnTape:
    """The operation that function(x) runs on a Tensor.

    layout      layout of x
    columns     number of columns of x over all ranks
    records     whether torch records the operation for a backward pass
    """

    def __init__(
        self,
        grid: Grid,
        function: Callable[[Tensor], Tensor],
        layout: Layout,
        columns: int,
        records: bool,
        wanted: bool,
    ):
        self._grid, self._function, self._layout, self._columns = grid, function, layout, columns
        self._records, self._wanted = records, wanted

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Sequence[torch.Tensor] | None]:
        tape = Tape.of(self._grid)
        if tape.forms is not None:
            tape.forms.refuse()
        if tape.facts and isinstance(tape.pack, Offload):
            raise Pmm3dError(
                "nn.offload: torch keeps the arrays of pmm3d.torch modules: call nn.offload(grid, None) before they run"
            )
        with tape.set(recording=self._records, pack=lambda name, array: array):
            operand = ragged(self._grid, x, self._columns, self._layout, requires_grad=self._wanted)
            out = self._function(operand)
        node = out.node
        if node is None:
            return out.shard, None
        self._rule, self._spec = node.rule, operand.spec
        return out.shard, [saved.packed for saved in node.saved]

    def backward(
        self, reached: bool, gradient: torch.Tensor, *saved: torch.Tensor
    ) -> tuple[PendingGradient | None, Sequence[Contribution]]:
        assert self._rule is not None
        of_input, *others = self._rule(gradient, *saved)
        return relayout_gradient(self._spec, of_input) if reached else None, others


def run(passes: BackwardPasses, operation: Operation, held: Sequence[GridParameter], x: torch.Tensor) -> torch.Tensor:
    """Run an operation on this rank's rows. Rows do not move, and their number may differ among ranks."""
    made: torch.Tensor = _Operation.apply(  # type: ignore[no-untyped-call]
        passes, operation, held, x, *[each.tensor() for each in held]
    )
    if made.requires_grad:
        passes.used([each for each in held if each.weight.node is not None])
    return made


class _Operation(torch.autograd.Function):
    """Runs an operation of `pmm3d.nn`. torch saves the arrays that the gradient rule needs.

    So torch detects changes of these arrays in place, and `torch.utils.checkpoint` works.
    """

    @staticmethod
    def forward(
        ctx: Any,
        passes: BackwardPasses,
        operation: Operation,
        held: Sequence[GridParameter],
        x: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        made, saved = operation.forward(x.detach().contiguous().view(prod(x.shape[:-1]), x.shape[-1]))
        if saved is not None:
            ctx.passes, ctx.operation, ctx.held, ctx.shape = passes, operation, held, x.shape
            ctx.save_for_backward(*tensors, *saved)
        return made.view(*x.shape[:-1], made.shape[1]).detach()  # no view: callers may change it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        passes: BackwardPasses = ctx.passes
        passes.begin()
        saved = ctx.saved_tensors[len(ctx.held) :]
        before, *ends = [node for node, _ in ctx.next_functions]
        rows = gradient.contiguous().view(prod(gradient.shape[:-1]), gradient.shape[-1])
        coming, others = ctx.operation.backward(reached(before) is not False, rows, *saved)
        for held, part, end in zip(ctx.held, others, ends):
            if end is not None and held.is_reached(end):
                passes._receive(held, part)
        dx = None if coming is None else coming.wait().view(ctx.shape)
        return None, None, None, dx, *[None] * len(ctx.held)
