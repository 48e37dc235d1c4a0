"""Tensors: distributed matrices that remember the operation that made them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from numbers import Real
from operator import add as plus
from typing import TYPE_CHECKING, Any, SupportsFloat
from weakref import ReferenceType, ref

from ..arrays import Array
from ..comm import Pending, assign
from ..errors import DTypeError, GridError, LayoutError, Pmm3dError
from ..layout import LOW_PRECISION, Box, Layout
from ..product import DistMatrix
from ..product.relayout import relayout as relayout_array
from ..product.stored import Uncompared
from .compute import TensorSpec
from .contract import Contribution, Gradient
from .elementwise import map_elementwise
from .gradient_buffer import GradientBuffer
from .overlapped_gemm import relayout_gradient
from .tape import Edge, Node, Rule, Saved, Tape, backward_from, reachable, state_of

if TYPE_CHECKING:
    from .keep import Form

Operator = Callable[["Tensor", Any], "Tensor"]


def _operators(name: str, module: str = "arithmetic") -> tuple[Operator, Operator]:
    """Return the operators x o y and y o x, by a function of a module that imports this one."""

    def operation(a: Any, b: Any) -> Any:
        if all(isinstance(operand, (Tensor, DistMatrix, Real)) for operand in (a, b)):
            return getattr(import_module(f".{module}", __package__), name)(a, b)
        return NotImplemented

    return operation, lambda x, other: operation(other, x)


class Tensor(Uncompared):
    """Matrix on a grid that remembers the operation that made it.

    Parameters
    ----------
    value : DistMatrix
        The matrix. Nothing is copied.
    requires_grad : bool
        Whether a backward pass computes the gradient by this tensor. Default: False.
    edge, pending
        For operations: the node that made the tensor, and a collective that writes its values.

    Attributes
    ----------
    grid, layout, shape, dtype, library, box, local
        Attributes of the matrix. `local` is this rank's shard.
    spec : TensorSpec
        Everything except the values, for gradient rules.
    grad : DistMatrix or None
        Gradient after a backward pass, if no operation made the tensor. It has this tensor's layout without partial
        sums. Ranks with the same shard have the same gradient.

    Raises
    ------
    Pmm3dError
        If `value` is no DistMatrix.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = nn.Tensor(DistMatrix.from_function(grid, (1, 3), lambda i, j: j), requires_grad=True)
    ...     (x * 3 - x).gather()
    array([[0., 2., 4.]])
    """

    grad: DistMatrix | None
    name = ""
    version = 0
    grad_buffer: GradientBuffer | None = None
    node: Node | None
    output = 0
    tiled: Any = None
    """The tensor itself, if its values are computed by tiles (`TiledHead`)."""
    _saved: tuple[ReferenceType[Saved], tuple[object, ...]] | None = None

    def __init__(
        self,
        value: DistMatrix,
        *,
        requires_grad: bool = False,
        edge: Edge | None = None,
        pending: Pending | None = None,
    ):
        if not isinstance(value, DistMatrix):
            raise Pmm3dError(
                f"a Tensor is made of a DistMatrix; got {type(value).__name__}: convert an array that all "
                "ranks hold by DistMatrix.from_global(grid, array.astype(dtype), layout=batch_layout()), "
                "with the network's dtype and pmm3d.layout.batch_layout"
            )
        self._take(value)
        self._pending, self.grad = pending, None
        self.node = Node(self.spec, leaf=self) if requires_grad else None
        if edge is not None:
            self.node, self.output = edge

    def _take(self, value: DistMatrix) -> None:
        value = value.resolved
        self._value, self.spec = value, TensorSpec.of(value)
        self.grid, self.layout, self.shape = value.grid, value.layout, value.shape
        self.dtype, self.library, self.tape = value.dtype, value.library, Tape.of(value.grid)

    @property
    def requires_grad(self) -> bool:
        """Whether a backward pass computes the gradient by this tensor."""
        return self.node is not None

    @property
    def _edge(self) -> Edge | None:
        """Place on the tape: the operation that made the tensor, and the index of the result."""
        return None if self.node is None else Edge(self.node, self.output)

    @property
    def value(self) -> DistMatrix:
        """The matrix. Waits for its values."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        return self._value

    @property
    def local(self) -> Array:
        """This rank's shard. Waits for its values."""
        return self.value.local

    @property
    def shard(self) -> Array:
        """The same as `local`, for operations, which only read it."""
        return self._value.local if self._pending is None else self.value.local

    @property
    def box(self) -> Box:
        """Rows and columns of this rank's shard."""
        return self._value.box

    @property
    def _written(self) -> tuple[object, ...]:
        """Tuple that changes if the values are written to.

        It contains `version`, the number of products and redistributions into the matrix, torch's version of the shard,
        and its address. Writes to numpy and cupy arrays do not change these. PMM3D_DEBUG=1 adds a digest of the shard.
        """
        shard = self.shard
        return (self.version, self._value.fills, self.spec.library.address(shard), *state_of(shard, self.tape.debug))

    def _pack(self, name: str, form: Form | None = None) -> Saved:
        """Return the packed shard (`Tape.pack`). All operations that keep the shard get the same object. If it has no
        form yet, it is packed anew in the form of the later name."""
        written = self._written
        saved = self._saved[0]() if self._saved is not None and self._saved[1] == written else None
        if saved is None:
            saved = Saved(self.tape, name, self.shard, form, self.grad_buffer is None)
            self._saved = ref(saved), written
        elif form is not None and saved.form is None:
            saved.__init__(self.tape, name, self.shard, form)  # type: ignore[misc]
        return saved

    def from_op(
        self,
        local: Array,
        parents: Sequence[Tensor | Edge | None],
        rule: Rule,
        *,
        keep: Mapping[str, Tensor | Array] = {},
        shape: tuple[int, int] | None = None,
        layout: Layout | None = None,
        pending: Pending | None = None,
    ) -> Tensor:
        """Result of an operation on this tensor. `results_of` returns several.

        Parameters
        ----------
        local : Array
            This rank's shard of the result.
        parents : sequence of Tensor
            The operands, or their places on the tape.
        rule : callable
            rule(gradient, *kept) returns the gradients of the parents, one for each. `gradient` is a local array in the
            result's layout without partial sums, and must not be written to. A gradient is None if none is needed, a
            local array in the parent's layout, a `Gradient`, or a `LazyMatrix`. The tape relays it out into the
            parent's layout. A rule must not refer to tensors, or to arrays that are not its arguments.
        keep : mapping
            Name -> array or tensor that the rule needs, such as "square.input". The tape releases them after the rule
            has run. `Tape.pack` receives the name.
        shape, layout
            Shape and layout of the result. Default: those of this tensor.
        pending : Pending or None
            Collective that writes the values.

        Raises
        ------
        GridError
            If a parent is on another grid.
        """
        value = DistMatrix(self.grid, local, shape or self.shape, layout or self.layout)
        return _noted([Tensor(value, pending=pending)], parents, rule, keep)[0]

    def backward(self, gradient: Tensor | DistMatrix | None = None, *, scale: SupportsFloat = 1.0) -> None:
        """Add the gradients by all tensors that this tensor was computed from. Collective.

        Parameters
        ----------
        gradient : Tensor, DistMatrix or None
            Gradient by this tensor, of its shape and type, in any layout. Default: `scale`, for a loss, which is 1 x 1.
        scale : float
            Factor of all gradients, the same on all ranks; see `optim.LossScale`. Default: 1.

        Raises
        ------
        LayoutError, DTypeError
            On every rank, if the gradient has another shape, type or array library.
        Pmm3dError
            On every rank, if nothing needs a gradient, or if a backward pass has already used a part of the tape.
        DisagreementError
            On every rank, if the ranks used different parameters or scales. It is raised before a gradient is used.

        Notes
        -----
        Operations can be used by one backward pass. The pass starts the sums of gradients over ranks with different
        rows, and does not wait for them. `Parameter.grad`, and an optimizer's `step` and `clip`, wait. In `no_sync`, a
        later pass starts the sums over data.
        """
        node, edge = self.node, self._edge
        if node is None or edge is None or node.used:
            raise Pmm3dError("backward: no operand of this tensor needs a gradient, or its tape was used already")
        backward_from([(edge, self._start(gradient, scale))], None if gradient is not None else float(scale))

    def _start(self, gradient: Tensor | DistMatrix | None, scale: SupportsFloat) -> Array:
        factor = float(scale)
        if gradient is not None and factor != 1:
            raise Pmm3dError("backward: give the gradient or a scale, not both: multiply the gradient with it")
        if gradient is not None:
            given = gradient.value if isinstance(gradient, Tensor) else gradient
            with self.grid.collective_call("backward", str(getattr(given, "layout", ""))):
                self._check_start(given)
            if given.layout != self.layout.summed:
                return given.redistribute(self.layout.summed).local
            start = self.spec.new()
            assign(self.grid.engine, start, as_tensor(given).shard)
            return start
        if self.shape != (1, 1):
            raise LayoutError(
                f"backward starts from a loss, 1 x 1, or needs the gradient of this tensor, which is "
                f"{self.shape[0]} x {self.shape[1]}: backward(gradient)"
            )
        if factor != 1 and self.dtype in LOW_PRECISION:
            raise DTypeError(
                f"backward: a {self.dtype} loss with the scale {factor:g} may overflow: compute the loss "
                'from nn.cast(x, "float32")'
            )
        one = self.spec.new()
        assign(self.grid.engine, one, scale)
        return one

    def _check_start(self, gradient: Any) -> None:
        if not isinstance(gradient, DistMatrix):
            raise Pmm3dError(
                "backward: the gradient is a Tensor or a DistMatrix of the tensor's shape and type; got a "
                f"{type(gradient).__name__}. DistMatrix.from_global(grid, array) spreads an array that "
                "all ranks hold"
            )
        if gradient.shape != self.shape:
            raise LayoutError(
                f"backward: the gradient is {gradient.shape[0]} x {gradient.shape[1]}, the tensor "
                f"{self.shape[0]} x {self.shape[1]}"
            )
        if (gradient.dtype, gradient.library) != (self.dtype, self.library) or gradient.grid is not self.grid:
            raise DTypeError(
                f"backward: the gradient is {gradient!r}, the tensor {self._value!r}: they must be of "
                "one type and library, on one Grid"
            )

    def kept(self) -> list[Array]:
        """Arrays that the tape keeps for a backward pass from this tensor, as `Tape.pack` returned them, each once."""
        saved_arrays = [saved.packed for node in (reachable(self.node) if self.node else ()) for saved in node.saved]
        return list({id(packed): packed for packed in saved_arrays}.values())

    def _receive(self, part: Contribution) -> None:
        """Add a part of the gradient."""
        gradient = relayout_gradient(self.spec, part).wait()
        if self.grad is None:
            part = gradient
            if self.grid.engine.recorder is None:
                gradient = self.library.copy(part)
            else:
                gradient = self.spec.new()
                assign(self.grid.engine, gradient, part)
        else:
            gradient = map_elementwise(self.spec, "add", plus, self.grad.local, gradient)
        self.grad = DistMatrix(self.grid, gradient, self.shape, self.layout.summed)

    def item(self) -> float:
        """The number in a 1 x 1 tensor. Waits for the sum over the ranks.

        Raises
        ------
        LayoutError
            If the tensor has another shape.
        """
        if self.shape != (1, 1):
            raise LayoutError(
                f"item: the tensor must have one element; this one is {self.shape[0]} x {self.shape[1]}. "
                "tensor.value.gather() returns all elements"
            )
        host = self.library.to_numpy(summed(self).shard)
        return float(host[0, 0]) if host.size else float("nan")

    def gather(self, root: int | None = None) -> Array:
        """The whole matrix as one array. Collective. See `DistMatrix.gather`.

        Parameters
        ----------
        root : int or None
            Rank that gets the array; other ranks get None. Default: all ranks get it.

        Returns
        -------
        array or None
        """
        return self.value.gather(root)

    __add__, __radd__ = _operators("add")
    __sub__, __rsub__ = _operators("subtract")
    __mul__, __rmul__ = _operators("multiply")
    __truediv__, __rtruediv__ = _operators("divide")
    __matmul__, __rmatmul__ = _operators("matmul", "dense")
    __pow__ = _operators("pow", "elementary")[0]
    __array_ufunc__ = None

    def __neg__(self) -> Tensor:
        return self * -1.0

    def __abs__(self) -> Tensor:
        return import_module(".elementary", __package__).abs(self)

    @property
    def T(self) -> Tensor:
        """The transpose; see `nn.matrix_transpose`."""
        return import_module(".parts", __package__).matrix_transpose(self)

    def __getitem__(self, key: Any) -> Tensor:
        """x[start:stop], x[:, start:stop], or both; see `nn.rows` and `nn.columns`."""
        keys, parts, x = key if isinstance(key, tuple) else (key,), import_module(".parts", __package__), self
        if not 1 <= len(keys) <= 2 or not all(isinstance(each, slice) and each.step in (None, 1) for each in keys):
            raise LayoutError(
                "an index of a Tensor is a slice of rows, of columns, or of both: x[start:stop], x[:, start:stop]. "
                "Steps are not supported. nn.take(x, indices) selects rows by their indices"
            )
        for dim, (part, cut) in enumerate(zip(keys, (parts.rows, parts.columns))):
            if (part.start, part.stop) != (None, None):
                start, stop, _ = part.indices(x.shape[dim])
                x = cut(x, start, max(start, stop))
        return x

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._value!r}>"


def results_of(
    values: Sequence[DistMatrix],
    parents: Sequence[Tensor | Edge | None],
    rule: Rule,
    *,
    keep: Mapping[str, Tensor | Array] = {},
) -> list[Tensor]:
    """Results of an operation that has several.

    Parameters
    ----------
    values : sequence of DistMatrix
        The values of the results.
    parents
        As in `Tensor.from_op`.
    rule : callable
        rule(*gradients, *kept), with a gradient for each result, or None if it has none. It returns the same as a rule
        of `Tensor.from_op`.
    keep
        As in `Tensor.from_op`.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, Layout, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = nn.Tensor(DistMatrix.random(grid, (2, 2), layout=Layout()), requires_grad=True)
    ...     rule = lambda of_one, of_other: (of_one if of_other is None else of_one - of_other,)
    ...     one, other = nn.results_of([x.value, x.spec.matrix(-x.local)], (x,), rule)
    ...     (one + other).gather().any()
    np.False_
    """
    return _noted([Tensor(value) for value in values], parents, rule, keep)


def _noted(
    results: list[Tensor], parents: Sequence[Tensor | Edge | None], rule: Rule, arrays: Mapping[str, Tensor | Array]
) -> list[Tensor]:
    """Put the results on the tape if a gradient is needed."""
    tape, grid = results[0].tape, results[0].grid
    edges = [parent._edge if isinstance(parent, Tensor) else parent for parent in parents]
    for edge in edges:
        if edge is not None and edge.spec.grid is not grid:
            raise GridError(
                f"an operation on tensors of two Grids: the result is on {grid.shape}, an operand on "
                f"{edge.spec.grid.shape}"
            )
    if tape.recording and any(edges):
        frozen = [
            parent
            for parent in parents
            if isinstance(parent, Tensor) and parent.node is None and parent.grad_buffer is not None
        ]
        saved = [_saved(name, each, results) for name, each in arrays.items()] if tape.keeping else ()
        node = Node(
            *[result.spec for result in results],
            parents=edges,
            rule=rule if tape.keeping else None,
            saved=saved,
            frozen=frozen,
        )
        for output, result in enumerate(results):
            result.node, result.output = node, output
    return results


def _saved(name: str, array: Tensor | Array, results: Sequence[Tensor]) -> Saved:
    """Pack an array that the tape keeps. The shard of a tensor is packed once."""
    owners = [array] if isinstance(array, Tensor) else [each for each in results if each._value.local is array]
    forms, form = results[0].tape.forms, None
    if forms is not None and not (owners and owners[0].grad_buffer is not None):
        form = forms.of(name, owners[0].shard if owners else array)
    if owners and (form is None or not form.is_of_signs):
        return owners[0]._pack(name, form)
    return Saved(results[0].tape, name, owners[0].shard if owners else array, form)


Matrix = Tensor | DistMatrix
"""Operand of most operations: a Tensor, or a DistMatrix without a gradient."""


def as_tensor(value: Matrix) -> Tensor:
    return value if isinstance(value, Tensor) else Tensor(value)


def relayout(x: Tensor, layout: Layout) -> Tensor:
    """The same matrix in another layout. The gradient is relaid out to the layout of `x`.

    Parameters
    ----------
    x : Tensor
        (m, n), in any layout.
    layout : Layout
        Layout of the result.

    Returns
    -------
    Tensor
        (m, n). If nothing is sent, it may share memory with `x`.

    Notes
    -----
    Each axis that changes needs one collective: an all-gather, a reduce-scatter, an all-reduce or an all-to-all. The
    ledger's phase is "relayout".

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, Layout, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = nn.Tensor(DistMatrix.random(grid, (8, 2)))
    ...     nn.relayout(x, Layout("data")).box.size == 16 // grid.size
    True
    """
    if x.layout == layout:
        return x
    given = x.shard
    with x.grid.ledger.phase("relayout"):
        local = relayout_array(x.grid, given, x.shape, x.layout, layout).wait()
    if not x.library.is_contiguous(local):
        part, local = local, x.spec.new(tuple(local.shape))
        assign(x.grid.engine, local, part)
    made = x.from_op(local, (x,), lambda gradient: (Gradient(gradient, layout.summed),), layout=layout)
    if local is given:
        made._saved = x._saved
    return made


def summed(x: Tensor) -> Tensor:
    """Sum the partial sums of a tensor."""
    return relayout(x, x.layout.summed) if x.layout.sums else x


__all__ = ["Tensor", "as_tensor", "relayout", "results_of", "summed"]
