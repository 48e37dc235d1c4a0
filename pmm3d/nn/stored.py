"""Weights of one precision in checkpoints of another: what is read, and what is calculated from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..arrays import Array, NumpyLibrary
from ..arrays.numpy_library import DEVICE_ELEMENTS
from ..errors import CheckpointError, Pmm3dError
from ..layout import LOW_PRECISION
from ..product import DistMatrix
from .masters import EXACT, REMAINDER, STATE, is_state, joined, part, state_name

if TYPE_CHECKING:
    from ..io import Checkpoints
    from ..io.checkpoint import Checkpoint


class Stored(NamedTuple):
    """A weight in a checkpoint.

    name, dtype        its name and its type; "" if the checkpoint does not contain it
    besides, wide      name and type of its remainder; "" if there is none
    """

    name: str
    dtype: str
    besides: str
    wide: str

    @classmethod
    def of(cls, found: Checkpoint, name: str) -> Stored:
        entries = found.manifest["matrices"]
        besides = state_name(name, REMAINDER)
        besides = besides if besides in entries else ""
        dtype, wide = (entries[each]["dtype"] if each in entries else "" for each in (name, besides))
        return cls(name, dtype, besides, wide)

    def converts(self, weight: DistMatrix) -> bool:
        """Whether the weight must be converted from the stored type."""
        if self.dtype in ("", weight.dtype):
            return False
        return weight.dtype in LOW_PRECISION or self.wide == weight.dtype or (
            self.dtype in LOW_PRECISION and not self.besides)

    def sources(self, weight: DistMatrix) -> dict[str, DistMatrix]:
        """New matrices like the weight, by the names of what is to be read into them, all in one library."""
        types = {self.name: self.dtype} | ({self.besides: self.wide} if self.besides else {})
        library = _holding(weight, self.dtype)
        return {name: DistMatrix(weight.grid, library.empty(weight.box.shape, dtype), weight.shape, weight.layout)
                for name, dtype in types.items()}


class Conversion(NamedTuple):
    """A weight and its remainder, and what they are calculated from, by its names in the checkpoint."""

    weight: DistMatrix
    remainder: DistMatrix | None
    sources: dict[str, DistMatrix]


def _holding(weight: DistMatrix, dtype: str) -> NumpyLibrary:
    """The library of the weight, or torch's where that has no such type. Raises CheckpointError if that is not here."""
    if dtype != "bfloat16" or weight.library.name == "torch":
        return weight.library
    try:
        return weight.grid.library("torch")
    except Pmm3dError as error:
        raise CheckpointError(f"the checkpoint's weights are of bfloat16, which torch reads: {error}") from None


def fill(keeper: Checkpoints, found: Checkpoint, matrices: Mapping[str, DistMatrix], *,
         check: Callable[[Any], None] | None = None, partial: bool = False) -> Any:
    """Fill the matrices of a network, or of a training, from a checkpoint. Returns the checkpoint's meta. Collective.

    Weights of low precision, with their remainders, become weights of float32, and the other way round. A weight
    without a state in the checkpoint, because it was frozen, begins with a state of zeros; so does a remainder.
    check, partial: as in `Checkpoints.fill`. State that another type does not need may be left over. Raises
    CheckpointError, on every rank, for matrices that do not fit.
    """
    plain, path = dict(matrices), str(found.path)
    with keeper.grid.collective_call("load: types", path, always=True):
        conversions, spare = _planned(found, plain)
        zeros = [plain.pop(name) for name in _lacking(found, plain)]
        for conversion in conversions:
            plain.update(conversion.sources)
    meta = keeper.fill(found, plain, check=check,
                       partial=partial or found.manifest["matrices"].keys() - plain.keys() <= spare)
    plain.clear()
    with keeper.grid.collective_call("load: converting", path, always=True):
        while conversions:
            weight, remainder, sources = conversions.pop()
            convert(weight, remainder, [*sources.values()])
        for matrix in zeros:
            matrix.local[...] = 0
    return meta


def _lacking(found: Checkpoint, plain: Mapping[str, DistMatrix]) -> list[str]:
    """Names of state arrays that the checkpoint lacks and that are 0 then: remainders, and all state of a weight of
    which the checkpoint has no state."""
    there, has_state = found.contents, {name.rpartition("/")[0] for name in found.contents if is_state(name)}
    named = [(name, *name.removeprefix(STATE).rsplit("/", 1)) for name in plain if is_state(name)]
    return [name for name, weight, kind in named if weight in there and name not in there
            and (kind == REMAINDER or f"{STATE}{weight}" not in has_state)]


def _planned(found: Checkpoint, plain: dict[str, DistMatrix]) -> tuple[list[Conversion], set[str]]:
    """What is calculated, which is taken out of those that are read as they are; and the names of what may be left over
    in the checkpoint."""
    conversions, spare = list[Conversion](), set[str]()
    for name, weight in [(name, matrix) for name, matrix in plain.items() if not is_state(name)]:
        stored, remainder = Stored.of(found, name), plain.get(state_name(name, REMAINDER))
        if stored.converts(weight):
            conversions.append(Conversion(weight, remainder, stored.sources(weight)))
            plain.pop(name)
            plain.pop(state_name(name, REMAINDER), None)
            spare.add(name)
        elif remainder is None and stored.dtype == weight.dtype:
            spare.add(stored.besides)
    return conversions, spare


def convert(weight: DistMatrix, remainder: DistMatrix | None, terms: Sequence[DistMatrix]) -> None:
    """Fill a weight and its remainder, which may be spread over more axes, from one that is stored, of another type
    maybe, and the remainder of that if there is one. Works through a slice of rows at a time."""
    library, box = weight.library, weight.box
    step = max(1, (library.slice_elements or DEVICE_ELEMENTS) // max(1, box.shape[1]))
    for start in range(box.r0, box.r1, step):
        piece = box._replace(r0=start, r1=min(start + step, box.r1))
        within = piece.within(box)
        exact = _exact(library, [term.local[within] for term in terms], terms[0].library)
        if remainder is None:
            weight.local[within] = exact
            continue
        lacking, own = library.copy(exact), piece & remainder.box
        part(library, exact, weight.local[within], lacking)
        if own.size:
            remainder.local[own.within(remainder.box)] = lacking[own.within(piece)]


def _exact(library: NumpyLibrary, terms: Sequence[Array], holding: NumpyLibrary) -> Array:
    """What the terms are together, in float64 and in that library."""
    exact = joined(holding, *terms) if len(terms) > 1 else holding.astype(terms[0], EXACT)
    return exact if holding == library else library.from_numpy(holding.to_numpy(exact), EXACT)
