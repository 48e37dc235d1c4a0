"""What a weight of 16 bits lacks of the one that is trained.

A parameter of low precision holds the rounded weight; beside it an optimizer keeps the remainder, what it lacks of the
true one, in float32. Together they have some 32 bits of mantissa in the bytes of a float32 copy: changes for which
float32 has no place beside the weight are not lost.
"""

from __future__ import annotations

from types import ModuleType

from ..arrays import Array, NumpyLibrary

STATE, REMAINDER = "optimizer/", "remainder"
"""How names of an optimizer's matrices begin, and how names of remainders end."""
EXACT = "float64"
"""Holds weight + remainder."""
NEARLY = 1 - 2.0**-12
"""A remainder times this, added to its weight, is never rounded away from it."""


def joined(library: NumpyLibrary, weight: Array, remainder: Array) -> Array:
    """The true weights, in float64. Where somebody wrote to a weight, so that it is not what they are rounded to, it
    counts alone."""
    wide = library.astype(weight, EXACT)
    return wide + library.xp.where(_own(library, weight, wide, remainder), remainder, 0)


def _own(library: NumpyLibrary, weight: Array, wide: Array, remainder: Array) -> Array:
    return library.astype(wide + NEARLY * remainder, library.dtype(weight)) == weight


def forget_written(library: NumpyLibrary, weight: Array, remainder: Array) -> None:
    """As `joined` sees to weights that somebody wrote to: their remainders become 0."""
    own = _own(library, weight, library.astype(weight, EXACT), remainder)
    remainder[...] = library.xp.where(own, remainder, 0)


def part(library: NumpyLibrary, exact: Array, weight: Array, remainder: Array) -> None:
    """Fill weights, rounded, and their remainders; of what the smaller type cannot hold at all there is none."""
    weight[...] = exact
    lacking = exact - weight
    remainder[...] = library.xp.where(library.xp.isfinite(lacking), lacking, 0)


def carry(torch: ModuleType, weight: Array, remainder: Array, fresh: Array, change: Array) -> None:
    """Let weights take in what their remainders have too much of, with few passes over tensors. fresh, change: work
    arrays of their shape, of the weight's type and of the remainder's."""
    torch.add(weight, remainder, out=fresh)
    remainder.add_(change.copy_(weight).sub_(fresh))
    weight.copy_(fresh)
    if weight.dtype == torch.float16:
        remainder.nan_to_num_(0.0, 0.0, 0.0)


def is_state(name: str) -> bool:
    """Of a matrix in a checkpoint: whether it is an optimizer's."""
    return name.startswith(STATE)


def state_name(parameter: str, state: str) -> str:
    """The name of a state array of a parameter in a checkpoint."""
    return f"{STATE}{parameter}/{state}"
