"""Values of a network's parameters from a state dict, and as whole arrays."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from ..arrays import Array, library_of
from ..errors import LayoutError, Pmm3dError, hint
from ..io.matrices import differences, form_in_words
from ..layout import LOW_PRECISION, PIPE
from ..product import DistMatrix
from .parameter import Parameter, of_stages

REAL = {*LOW_PRECISION, "float32", "float64"}


def gathered(network: Any, name: str) -> Array:
    """See `Module.gather`."""
    own = network.matrices()
    stages = of_stages(network, {each: (matrix.shape, matrix.dtype) for each, matrix in own.items()})
    holders = [index for index, held in enumerate(stages) if name in held]
    with network.parent_grid.collective_call("gather", name, always=True):
        if not holders:
            raise Pmm3dError(f"gather: no parameter is named {name!r}{hint(name, set[str]().union(*stages))}")
    array: Any = own[name].gather() if name in own else None
    if len(stages) == 1:
        return array
    (shape, dtype), pipe = stages[holders[0]][name], network.parent_grid.axis(PIPE)
    if pipe.index != holders[0]:
        array = network.parameters()[0].library.empty((0,), dtype)
    counts = [prod(shape) * (index == holders[0]) for index in range(pipe.size)]
    return pipe.all_gather(array.reshape(-1), counts=counts).wait().reshape(shape)


def check_state(named: Mapping[str, Parameter], state: Mapping[str, Any], strict: bool) -> None:
    """Raise LayoutError if `Module.load_state_dict` cannot use the values."""
    both = [name for name in named if name in state]
    wanted = {name: form_in_words(named[name].shape, named[name].dtype) for name in (named if strict else both)}
    given = {name: _given(named[name], state[name]) if name in named else "" for name in (state if strict else both)}
    if text := differences(wanted, given):
        raise LayoutError(f"load_state_dict: the state is of another network. {text}")
    for name in both:
        value = state[name]
        if isinstance(value, DistMatrix) and not value.grid.same_processes(named[name].grid):
            raise LayoutError(
                f"load_state_dict: {name!r} is on a grid over other processes, or in another order: save "
                "a checkpoint of it, and load that (nn.exchange.load_weights)"
            )


def _given(parameter: Parameter, value: Any) -> str:
    """Describe a value. The text equals that of the parameter if the value fits."""
    dtype = value.dtype if isinstance(value, DistMatrix) else library_of(value).dtype(value)
    shape = (1, *value.shape) if len(value.shape) == 1 and parameter.shape[0] == 1 else tuple(value.shape)
    return form_in_words(shape, parameter.dtype if {dtype, parameter.dtype} <= REAL else dtype)


def matrix_for(parameter: Parameter, value: Any) -> DistMatrix:
    """Copy the values to the parameter's library, and to the type of its matrix `_to_fill`."""
    given, box = value if isinstance(value, DistMatrix) else parameter, parameter.box
    array = value.local if given is value else value.reshape(*given.shape)[box.r0 : box.r1, box.c0 : box.c1]
    library = library_of(array)
    dtype = parameter._to_fill(library.dtype(array)).dtype
    if library == parameter.library:
        local = library.copy(library.astype(array, dtype))
    else:
        local = parameter.library.from_numpy(library.to_numpy(array), dtype)
    return DistMatrix(given.grid, local, given.shape, given.layout)
