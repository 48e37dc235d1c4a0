"""Values of parameters from elsewhere: whether they fit, and how they become matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..arrays import Array, library_of
from ..errors import LayoutError
from ..io.matrices import differences, form_in_words
from ..layout import LOW_PRECISION
from ..product import DistMatrix
from .parameter import Parameter

REAL = (*LOW_PRECISION, "float32", "float64")


def check_state(named: Mapping[str, Parameter], state: Mapping[str, Any], strict: bool) -> None:
    """Raises LayoutError if `Module.load_state_dict` cannot take the values."""
    both = [name for name in named if name in state]
    wanted = {name: form_in_words(named[name].shape, named[name].dtype) for name in (named if strict else both)}
    given = {name: _given(named[name], state[name]) if name in named else "" for name in (state if strict else both)}
    if text := differences(wanted, given):
        raise LayoutError(f"load_state_dict: the state is of another network. {text}")
    for name in both:
        value = state[name]
        if isinstance(value, DistMatrix) and not value.grid.same_processes(named[name].grid):
            raise LayoutError(f"load_state_dict: {name!r} is on a grid over other processes, or in another order: save "
                              "a checkpoint of it, and load that (nn.exchange.load_weights)")


def _given(parameter: Parameter, value: Any) -> str:
    """As the parameter is described, if the value fits."""
    library = value.library if isinstance(value, DistMatrix) else library_of(value)
    dtype = value.dtype if isinstance(value, DistMatrix) else library.dtype(value)
    if {dtype, parameter.dtype} <= {*REAL}:
        dtype = parameter.dtype
    return form_in_words(_shape(parameter, tuple(value.shape)), dtype)


def _shape(parameter: Parameter, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1, *shape) if len(shape) == 1 and parameter.shape[0] == 1 else shape


def matrix_for(parameter: Parameter, value: Any) -> DistMatrix:
    """The values as a matrix of the type of `in_checkpoint` and of the parameter's library, which shares no memory with
    it."""
    if isinstance(value, DistMatrix):
        return DistMatrix(value.grid, _converted(value.local, parameter), value.shape, value.layout)
    box = parameter.box
    shard = value.reshape(*parameter.shape)[box.r0 : box.r1, box.c0 : box.c1]
    return DistMatrix(parameter.grid, _converted(shard, parameter), parameter.shape, parameter.layout)


def _converted(array: Array, parameter: Parameter) -> Array:
    library, dtype = library_of(array), parameter.dtype if parameter.master is None else parameter.master.dtype
    if library == parameter.library:
        return library.copy(library.astype(array, dtype))
    return parameter.library.from_numpy(library.to_numpy(array), dtype)
