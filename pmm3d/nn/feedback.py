"""Errors of compressed sums of gradients, which are added to later gradients: memory, and matrices of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from ..arrays import Array, NumpyLibrary, by_rows
from ..comm import NOTHING, OWN, TOTAL, Axis, Feedback, LowRank, Method, finite
from ..errors import DTypeError
from ..layout import Layout, itemsize, offsets
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
    with spec.grid.ledger.holding("state"):
        buffer.feedback = Feedback(spec.library.empty((prod(spec.local_shape),), accumulator(spec.dtype)))
    return buffer.feedback


def compresses(network: Module) -> bool:
    """Whether sums of the network's gradients are compressed: there is a method, and an axis with several ranks."""
    grid = network.grid
    several = grid.size > grid.x.size * grid.y.size * grid.z.size
    return several and any(each.tape.parallel.compression.gradients for each in network.parameters())


def feedback_matrices(network: Module, stored: Collection[str] = ()) -> dict[str, DistMatrix]:
    """Feedback by name, such as "feedback/0.weight", for a checkpoint, if gradients are compressed. Collective.

    stored   names in a checkpoint that is to be loaded. Call `forget_others` afterwards

    Each is the sum of the errors of all ranks. It is split over data like a state of ZeRO-1, so it can be loaded on any
    grid. Of a weight that stages share, the first stage has the sum of all. Later steps continue from this sum, also
    of a training that goes on: a training that is resumed has its bits.
    """
    named = _named(network, stored)
    matrices = {name: _summed(each.grad_buffer) for name, each in named.items()}
    if not stored and compresses(network):
        network._sum_tied(lambda buffer: _summed(buffer).local)
        forget_others(network, [name for name, each in named.items() if each.in_norm])
    return {name: matrix for name, matrix in matrices.items() if named[name].in_norm}


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
    named = network.named_parameters() if compresses(network) else {}
    return {
        FEEDBACK + path: each
        for path, each in named.items()
        if (FEEDBACK + path in stored if stored else each.requires_grad)
    }


def forget_others(network: Module, kept: Collection[str]) -> None:
    """Forget the feedback of other parameters, and of the later stages of tied weights. kept: names of matrices."""
    for path, parameter in network.named_parameters().items():
        buffer = parameter.grad_buffer
        for each in (*buffer.apart.values(), *([] if FEEDBACK + path in kept else [buffer])):
            each.forget_feedback()


def _part(buffer: GradientBuffer) -> tuple[Layout, int, int]:
    """Layout of the feedback in a checkpoint, and begin and end of this rank's part of the error."""
    layout, grid = buffer.spec.layout, buffer.spec.grid
    name = replica_axis(layout)
    if name in layout.splitting:
        return layout, 0, prod(buffer.spec.local_shape)
    index = grid.axis(name).index
    first, last = offsets(buffer.counts(name))[index : index + 2]
    return buffer.split_layout(name), first, last


def _summed(buffer: GradientBuffer) -> DistMatrix:
    """Add up the feedback of all ranks. Each rank keeps the rows that it would update with ZeRO-1, and zeros."""
    spec, feedback = buffer.spec, buffer.feedback or _new(buffer)
    grid, library, error = spec.grid, spec.library, feedback.error
    layout, first, last = _part(buffer)
    if feedback.holds == OWN:
        by_rows(library, partial(_unscaled, library, feedback.scale), error, error, name="unscale feedback")
        assert feedback.axis is not None
        feedback.axis._all_reduce_into(error, error).wait()
    if feedback.holds == NOTHING:
        error[...] = 0
    elif feedback.holds == OWN:
        error[:first] = error[last:] = 0
    feedback.holds, feedback.scale = TOTAL, 1.0
    box = layout.box(spec.shape, grid.shape, grid.coords)
    return DistMatrix(grid, error[first:last].reshape(box.shape), spec.shape, layout)


def _unscaled(library: NumpyLibrary, scale: float, error: Array) -> Array:
    return finite(library, error) / scale
