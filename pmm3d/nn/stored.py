"""Weights of one precision in checkpoints of another: what is read, and what is calculated from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..arrays import Array, NumpyLibrary
from ..layout import LOW_PRECISION
from ..product import DistMatrix
from .masters import EXACT, MASTER, REMAINDER, is_state, part, state_name

if TYPE_CHECKING:
    from ..io import Checkpoints
    from ..io.checkpoint import Checkpoint


class Stored(NamedTuple):
    """Of a weight in a checkpoint: the type of what is stored under its name, and, "" if there is nothing, the name and
    the type of what there is besides: of its remainder, or of its older float32 copy."""

    name: str
    dtype: str
    besides: str
    wide: str

    @classmethod
    def of(cls, found: Checkpoint, name: str) -> Stored:
        types = {each: dtype for each, (_, dtype) in found.contents.items()}
        besides = next((each for each in (state_name(name, REMAINDER), state_name(name, MASTER)) if each in types), "")
        return cls(name, types.get(name, ""), besides, types.get(besides, ""))

    def converts(self, weight: DistMatrix, remainder: DistMatrix | None) -> bool:
        """Whether a weight of that type, and its remainder, are calculated from what is stored, not read as such."""
        if self.dtype in ("", weight.dtype):
            return remainder is not None and self.besides == state_name(self.name, MASTER)
        return weight.dtype in LOW_PRECISION or self.wide == weight.dtype

    def sources(self, weight: DistMatrix) -> dict[str, DistMatrix]:
        """New matrices like the weight, by the names of what is to be read into them."""
        copied = self.besides == state_name(self.name, MASTER)
        types = {} if copied else {self.name: self.dtype}
        types |= {self.besides: self.wide} if self.besides else {}
        return {name: DistMatrix.empty(weight.grid, weight.shape, dtype=dtype, layout=weight.layout,
                                       library=_holding(weight, dtype)) for name, dtype in types.items()}


def _holding(weight: DistMatrix, dtype: str) -> NumpyLibrary:
    """The library of the weight, or torch's where that has no such type."""
    other = dtype == "bfloat16" and weight.library.name != "torch"
    return weight.grid.library("torch") if other else weight.library


def fill(keeper: Checkpoints, found: Checkpoint, matrices: Mapping[str, DistMatrix], *,
         check: Callable[[Any], None] | None = None, partial: bool = False) -> Any:
    """Fill the matrices of a network, or of a training, from a checkpoint, also of weights of another type; the
    checkpoint's meta. Collective.

    Weights of low precision, with their remainders, become weights of float32, and the other way round, and so do the
    float32 copies of older checkpoints. check, partial as in `Checkpoints.fill`; what another type has no use for may
    be left over all the same. Raises CheckpointError, on every rank, for what does not fit.
    """
    plain, converted, spare = dict(matrices), list[tuple[DistMatrix, DistMatrix | None, dict[str, DistMatrix]]](), set()
    for name, weight in matrices.items():
        stored, remainder = Stored.of(found, name), matrices.get(state_name(name, REMAINDER))
        if is_state(name):
            continue
        if stored.converts(weight, remainder):
            sources = stored.sources(weight)
            converted.append((weight, remainder, sources))
            plain = {each: matrix for each, matrix in plain.items()
                     if each not in (name, state_name(name, REMAINDER))} | sources
            spare.add(name)
        elif remainder is None and stored.dtype == weight.dtype:
            spare.add(stored.besides)
    meta = keeper.fill(found, plain, check=check, partial=partial or found.contents.keys() - plain.keys() <= spare)
    for weight, remainder, sources in converted:
        convert(weight, remainder, [*sources.values()])
    return meta


def convert(weight: DistMatrix, remainder: DistMatrix | None, terms: list[DistMatrix]) -> None:
    """Split the sum of the terms into a weight and its remainder, which may be spread over more axes."""
    library = weight.library
    exact = sum(_exact(library, term) for term in terms)
    if remainder is None:
        weight.local[...] = exact
        return
    lacking = library.copy(exact)
    part(library, exact, weight.local, lacking)
    remainder.local[...] = lacking[remainder.box.within(weight.box)]


def _exact(library: NumpyLibrary, term: DistMatrix) -> Array:
    if term.library == library:
        return library.astype(term.local, EXACT)
    return library.from_numpy(term.library.to_numpy(term.local), EXACT)
