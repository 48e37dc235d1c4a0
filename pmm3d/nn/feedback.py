"""Errors of compressed sums of gradients, which are added to later gradients: memory, and matrices of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from ..arrays import Array, NumpyLibrary, by_rows, copy_into
from ..comm import NOTHING, OWN, TOTAL, Axis, Coded, Feedback, LowRank, Method, finite, sum_named
from ..errors import DTypeError
from ..layout import AXES, FIRST, PIPE, Layout, itemsize, offsets
from ..model.rounds import accumulator
from ..product import DistMatrix
from .gradient_buffer import GradientBuffer, replica_axis

if TYPE_CHECKING:
    from .module import Module
    from .parameter import Parameter

FEEDBACK = "feedback/"
"""Beginning of the names in a checkpoint."""


def is_feedback(name: str) -> bool:
    """Whether a matrix of this name in a checkpoint is the feedback of a gradient."""
    return name.startswith(FEEDBACK)


def method_named(name: str, sent: str) -> Method | None:
    """How gradients are summed in messages of the type `sent`; None: as usual. name: "", or of `sum_named`."""
    method = sum_named(name) if name else None
    return None if isinstance(method, Coded) and not method.codec.shortens(sent) else method


def feedback_of(buffer: GradientBuffer, method: Method, axis: Axis) -> Feedback | None:
    """Feedback of a gradient for a sum over an axis; None if the method sums a gradient of this shape as usual. Raises
    DTypeError for complex numbers."""
    spec, feedback = buffer.spec, buffer.feedback
    if spec.dtype.startswith("complex"):
        raise DTypeError(
            "sums of complex gradients are not compressed: leave out Compression(gradients=...), or memory.gradients"
        )
    if not method.compresses(spec.local_shape):
        return None
    if feedback is None:
        feedback = _new(buffer)
    feedback.axis = axis
    if isinstance(method, LowRank) and method.lacks_factor(feedback, spec.local_shape[1]):
        with spec.grid.ledger.holding("state"):
            feedback.factor = method.new_factor(spec.library, spec.local_shape[1], accumulator(spec.dtype))
    return feedback


def _new(buffer: GradientBuffer) -> Feedback:
    spec = buffer.spec
    made = partial(spec.library.empty, (prod(spec.local_shape),), accumulator(spec.dtype))
    may_skip = buffer.precision.compute == "float16"  # a loss scale skips steps
    with spec.grid.ledger.holding("state"):
        buffer.feedback = Feedback(made(), before=made() if may_skip else None)
    return buffer.feedback


def _replicas(buffer: GradientBuffer) -> tuple[str, ...]:
    """Axes other than x, y and z along which ranks hold the same shard."""
    layout, names = buffer.spec.layout, buffer.spec.grid.shape.names
    axes = replica_axis(layout), *(name for name in names[len(AXES) :] if name != PIPE)
    return tuple([name for name in axes if name not in layout.splitting])


def _is_compressed(buffer: GradientBuffer, name: str) -> bool:
    """Whether sums of a gradient are compressed on the rank with the largest shard, and so maybe on others."""
    spec, method = buffer.spec, method_named(name, buffer.message.dtype)
    if method is None or prod(getattr(spec.grid.shape, axis) for axis in _replicas(buffer)) == 1:
        return False
    return method.compresses(spec.layout.box(spec.shape, spec.grid.shape, FIRST).shape)


def _compression(network: Module) -> str:
    return next((each.tape.parallel.compression.gradients for each in network.parameters()), "")


def compresses(network: Module) -> bool:
    """Whether sums of the network's gradients are compressed: a method sends fewer bytes, between several ranks."""
    name = _compression(network)
    return any(_is_compressed(each.grad_buffer, name) for each in network.parameters())


def feedback_matrices(network: Module, stored: Collection[str] = ()) -> dict[str, DistMatrix]:
    """Feedback by name, such as "feedback/0.weight", for a checkpoint, if gradients are compressed. Collective.

    stored   names in a checkpoint that is to be loaded: the matrices are empty. Call `load_feedback` when they are
             filled

    Each is the sum of the errors of all ranks. It is split over data like a state of ZeRO-1, so it can be loaded on any
    grid. Of a weight that stages share, the first stage has the sum of all. The errors do not change, so a training
    continues as if nothing had been saved.
    """
    named = _named(network, stored)
    if stored:
        return {name: _matrix_of(each.grad_buffer) for name, each in named.items() if each.in_norm}
    matrices, compression = {name: _sum_of(each.grad_buffer) for name, each in named.items()}, _compression(network)
    own = {each.grad_buffer: matrices[name] for name, each in named.items()}

    def part_of(buffer: GradientBuffer) -> Array | None:
        if buffer in own:
            return own[buffer].local
        return _sum_of(buffer).local if _is_compressed(buffer, compression) else None

    if compression:
        network._sum_tied(part_of)
    return {name: matrix for name, matrix in matrices.items() if named[name].in_norm}


def load_feedback(network: Module, matrices: Mapping[str, DistMatrix]) -> None:
    """Set the feedback from the filled matrices of a checkpoint, by name, and forget all other feedback."""
    for path, parameter in network.named_parameters().items():
        buffer = parameter.grad_buffer
        for each in (buffer, *buffer.apart.values()):
            each.forget_feedback()
        if (matrix := matrices.get(FEEDBACK + path)) is not None:
            _, first, last = _part(buffer)
            feedback = buffer.feedback or _new(buffer)
            feedback.error[...] = 0
            copy_into(buffer.spec.library, matrix.local.reshape(-1), feedback.error[first:last])
            feedback.holds, feedback.scale = TOTAL, 1.0


def feedback_bytes(network: Module) -> int:
    """Bytes that this rank writes to a checkpoint of the matrices of `feedback_matrices`."""
    total = 0
    for each in _named(network).values():
        layout, first, last = _part(each.grad_buffer)
        if each.in_norm and (coords := each.grid.coords) and layout.is_first(coords):
            total += (last - first) * itemsize(accumulator(each.grad_buffer.spec.dtype))
    return total


def _named(network: Module, stored: Collection[str] = ()) -> dict[str, Parameter]:
    """Name in a checkpoint -> parameter, of gradients with feedback."""
    compression = _compression(network)
    return {
        FEEDBACK + path: each
        for path, each in network.named_parameters().items()
        if (FEEDBACK + path in stored if stored else each.requires_grad)
        and _is_compressed(each.grad_buffer, compression)
    }


def _part(buffer: GradientBuffer) -> tuple[Layout, int, int]:
    """Layout of the feedback in a checkpoint, and begin and end of this rank's part of the error."""
    layout, grid = buffer.spec.layout, buffer.spec.grid
    name = replica_axis(layout)
    if name in layout.splitting:
        return layout, 0, prod(buffer.spec.local_shape)
    index = grid.axis(name).index
    first, last = offsets(buffer.counts(name))[index : index + 2]
    return buffer.split_layout(name), first, last


def _matrix_of(buffer: GradientBuffer, flat: Array | None = None) -> DistMatrix:
    """Matrix of a checkpoint. flat: this rank's part of it. Default: new memory."""
    spec, grid = buffer.spec, buffer.spec.grid
    layout = _part(buffer)[0]
    shape = layout.box(spec.shape, grid.shape, grid.coords).shape
    array = spec.library.empty(shape, accumulator(spec.dtype)) if flat is None else flat.reshape(shape)
    return DistMatrix(grid, array, spec.shape, layout)


def _sum_of(buffer: GradientBuffer) -> DistMatrix:
    """Sum of the feedback of all ranks. Collective, also on a rank without feedback, such as after a failed pass."""
    spec, grid, library = buffer.spec, buffer.spec.grid, buffer.spec.library
    _, first, last = _part(buffer)
    with grid.workspace.borrow((prod(spec.local_shape),), accumulator(spec.dtype), library) as total:
        _copy_own(buffer, total, slice(first, last))
        if total.shape[0]:
            grid.axis(_replicas(buffer))._all_reduce_into(total, total).wait()
        return _matrix_of(buffer, library.copy(total[first:last]))


def _copy_own(buffer: GradientBuffer, out: Array, part: slice) -> None:
    """Write what this rank adds to the sum of the feedback. part: this rank's part of a total."""
    feedback, grid, library = buffer.feedback, buffer.spec.grid, buffer.spec.library
    out[...] = 0
    if feedback is None or feedback.holds == NOTHING:
        return
    assert grid.coords is not None
    apart = [replica_axis(buffer.spec.layout)]
    if feedback.holds == OWN:
        assert feedback.axis is not None
        apart, part = feedback.axis.name.split("+"), slice(None)
    if not any(getattr(grid.coords, name) for name in _replicas(buffer) if name not in apart):
        by_rows(
            library,
            partial(_unscaled, library, feedback.scale),
            out[part],
            feedback.error[part],
            name="unscale feedback",
        )


def _unscaled(library: NumpyLibrary, scale: float, error: Array) -> Array:
    return finite(library, error) / scale
