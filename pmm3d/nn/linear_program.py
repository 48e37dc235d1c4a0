"""A linear layer as a program: its products and collectives are decided once, and get the arrays of each call."""

from __future__ import annotations

from collections.abc import Sequence

from ..arrays import Array
from ..comm import Axis, Counted, Kernel, Pending
from ..layout import Layout
from .compute import gemm_of_forms
from .contract import LazyMatrix, route
from .dense import layouts_of
from .overlapped_gemm import PendingGradient
from .parallel import BackwardSync
from .parameter import Parameter
from .tape import Tape

SUMMED = ("stay", "all_reduce")
"""Relayouts of products (`route`) with replicated activations."""


class LinearProgram:
    """`linear` for inputs of one form, with replicated activations. Messages and bits are those of `linear`.

    Decisions that depend on shapes, layouts and types are made once. Each call binds its arrays to the kernels.
    Results are new arrays in each call.

    layout    layout of the input
    rows      number of rows of this rank
    weight    in the `weight_layout` of the input;   bias: of the same type. Both keep their memory
    wanted    whether the gradient of the input is needed
    learns    whether the gradient of the weight is needed
    records   whether a backward pass may follow
    """

    def __init__(
        self,
        layout: Layout,
        rows: int,
        weight: Parameter,
        bias: Parameter | None,
        wanted: bool,
        learns: bool,
        records: bool,
    ):
        grid, self._layouts = weight.grid, layouts_of(layout, weight.layout, True, "replicated")
        layouts, gathered_over = self._layouts, grid.axis(weight.layout.rows[-1])
        of_output = route(layouts.natural, layouts.out, grid.shape)
        of_input = route(layouts.of_input, layout, grid.shape)
        assert layouts.gathers and layouts.input == layout and of_output[0] in SUMMED and of_input[0] in SUMMED
        self._sums_of_output, self._sums_of_input = (
            None if kind == "stay" else grid.axis(name) for kind, name in (of_output, of_input)
        )
        self._sync, self._tape, self._grid, self._spec = BackwardSync.of(grid), Tape.of(grid), grid, weight.spec
        self._weight, self._is_biased, self._tf32 = weight, bias is not None, weight.precision.tf32
        self._block = weight.shard if gathered_over.size == 1 else None
        self._begins = None if bias is None or grid.axis(layouts.k).index else bias.shard
        self._rows, self._wanted, self._learns, self._records = rows, wanted, learns, records
        self._kernels = dict[tuple[object, ...], Kernel]()
        self._ones: Array = None

    def forward(self, x: Array) -> tuple[Array, Sequence[Array] | None]:
        """Return O, and the arrays that `backward` needs, or None if no backward pass follows. Collective."""
        if self._tape.forms is not None:
            self._tape.forms.refuse()
        full = self._gathered(self._tape.phase)
        out = self._new(self._rows, full.shape[1])
        if self._begins is not None:
            out[...] = self._begins
        self._multiply("O", x, full, out, 0 if self._begins is None else 1)
        if self._sums_of_output is not None:
            self._start_sum(self._sums_of_output, out, "reduce O").wait()
        return out, ([x] if self._learns else []) if self._records else None

    def backward(
        self, reached: bool, gradient: Array, *saved: Array
    ) -> tuple[PendingGradient | None, list[LazyMatrix | None]]:
        """Begin to compute dI, if it is needed and `reached`. Return it, and dW and db, which are not computed yet.
        Collective."""
        coming, layouts, width = None, self._layouts, gradient.shape[1]
        if self._wanted:
            full = self._gathered("backward")
            if reached:
                dx = self._new(self._rows, full.shape[0])
                self._multiply("dI", gradient, full.T, dx, 0)
                axis = self._sums_of_input
                coming = PendingGradient(dx, None if axis is None else self._start_sum(axis, dx, "reduce dI"))
                if not self._sync.weights.overlap.oar:
                    coming.wait()
        of_weight = of_bias = None
        if self._learns:
            columns = saved[0].T

            def fill(out: Array, beta: int, _: slice) -> None:
                self._multiply("dW", columns, gradient, out, beta)

            of_weight = LazyMatrix(layouts.of_weight, (columns.shape[0], width), fill, "reduce dW")
        if self._is_biased:

            def fill_bias(out: Array, beta: int, _: slice) -> None:
                if self._ones is None:
                    self._ones = self._new(1, self._rows)
                    self._ones[...] = 1
                self._multiply("db", self._ones, gradient, out, beta)

            of_bias = LazyMatrix(layouts.of_bias, (1, width), fill_bias, "reduce dW")
        return coming, [of_weight, of_bias] if self._is_biased else [of_weight]

    def _gathered(self, phase: str) -> Array:
        """Return the block of the weight."""
        return self._sync.weights.gathered(self._weight, phase) if self._block is None else self._block

    def _new(self, rows: int, columns: int) -> Array:
        return self._grid.workspace.array((rows, columns), self._spec.dtype, self._spec.library)

    def _multiply(self, name: str, a: Array, b: Array, c: Array, beta: int) -> None:
        """Compute C = A B + beta C by the kernel of this product, which the first call makes."""
        ledger, engine, counted = self._grid.ledger, self._grid.engine, Counted()
        key = name, beta, c.dtype, ledger._phase
        kernel = self._kernels.get(key)
        if kernel is None:
            multiply = gemm_of_forms(self._spec, a, b, c, beta, self._tf32)
            work = 2 * a.shape[0] * a.shape[1] * b.shape[1]
            kernel = self._kernels[key] = Kernel(multiply, (), (), False, "gemm", work, ledger._phase, name)
        kernel.run(engine, counted, a, b, c)
        ledger.add_computed(counted)

    def _start_sum(self, axis: Axis, array: Array, phase: str) -> Pending:
        with self._grid.ledger.phase(phase):
            return axis._all_reduce_into(array, array)
