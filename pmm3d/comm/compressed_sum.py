"""Sums of arrays over ranks in fewer bytes, with error feedback.

Arrays are sent as numbers of 16 or 8 bits, as their largest numbers, or as factors of low rank.

Each rank adds what it has not sent yet to its array, sends a part of the sum, and keeps the rest for the next call
(Seide et al., Interspeech 2014). So the sums of all calls, and what is kept after the last one, add up to the sums of
all arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..arrays import Array, NumpyLibrary, by_rows, copy_into, library_of, sum_in_order
from ..arrays.codecs import Codec, codec_named
from ..errors import Pmm3dError
from ..layout import offsets, part_sizes
from .executor import Counts
from .strided_collectives import all_gather_into, all_to_all_into, sum_coalesced
from .transport import Collective, Link

if TYPE_CHECKING:
    from .axis import Axis

NAMES = '"bfloat16", "float16", "int8", "int8:BLOCK", "powersgd:RANK" or "topk:SHARE"'
NOTHING, OWN, TOTAL = "nothing", "own", "total"


@dataclass(eq=False)
class Feedback:
    """The error of the compressed sums of an array, which is added to its next sum.

    error    flat array of the accumulator's type
    holds    NOTHING: zeros, whatever the values. OWN: the part of this rank. TOTAL: the parts of all ranks, added up;
             each rank has some of them
    scale    factor of the arrays of the last sum, as of a scaled loss
    factor   right factor of a matrix in the last sum by `LowRank`, (columns, rank)
    begins   whether the sum in progress is the first one on this memory
    axis     axis of the last sum
    before   copy of the error before the first sum since `commit`, for `undo`. None: it is not kept
    began    `holds` and `scale` of that copy; None: there was no sum since `commit`, or there is no copy
    """

    error: Array
    factor: Array | None = None
    holds: str = NOTHING
    scale: float = 1.0
    begins: bool = True
    axis: Axis | None = None
    before: Array | None = None
    began: tuple[str, float] | None = None

    @property
    def arrays(self) -> list[Array]:
        return [each for each in (self.error, self.factor, self.before) if each is not None]

    def copy(self) -> Feedback:
        """Copy of the error for `restore`, made between steps."""
        library = library_of(self.error)
        factor = None if self.factor is None else library.copy(self.factor)
        return Feedback(library.copy(self.error), factor, self.holds, self.scale)

    def restore(self, before: Feedback) -> None:
        """Return to an earlier copy, on the same memory."""
        for array, held in zip(self.arrays, before.arrays):
            array[...] = held
        self.holds, self.scale, self.began = before.holds, before.scale, None

    def commit(self) -> None:
        """Note that a step used the sums."""
        self.began = None

    def undo(self) -> None:
        """Return to the error before the sums since `commit`, which no step used. Without a copy, nothing changes."""
        if self.began is not None:
            (self.holds, self.scale), self.began = self.began, None
            if self.holds != NOTHING:
                copy_into(library_of(self.error), self.before, self.error)

    def forget(self) -> None:
        """Set the error to zeros."""
        self.holds, self.began = NOTHING, None

    def add(self, library: NumpyLibrary, array: Array, scale: float, keeps: bool) -> None:
        """Add an array to the error. keeps: whether this rank's part of a total counts."""
        if self.before is not None and self.began is None:
            self.began = self.holds, self.scale
            if self.holds != NOTHING:
                copy_into(library, self.error, self.before)
        ratio, flat = scale / self.scale, array.reshape(-1)
        if self.holds == OWN or (self.holds == TOTAL and keeps):
            by_rows(library, partial(_added, library, ratio), self.error, self.error, flat, name="add feedback")
        else:
            copy_into(library, flat, self.error)
        self.begins, self.holds, self.scale = self.holds != OWN, OWN, scale


def _added(library: NumpyLibrary, ratio: float, error: Array, array: Array) -> Array:
    return finite(library, error) * ratio + array


def finite(library: NumpyLibrary, array: Array) -> Array:
    """Copy with zeros instead of numbers that are not finite, which are of a step that was not taken."""
    return library.xp.where(library.xp.isfinite(array), array, 0)


class Call(NamedTuple):
    """Arguments of a compressed sum, as `sum_compressed`, without the arrays that are summed as usual."""

    link: Link
    library: NumpyLibrary
    arrays: Sequence[Array]
    counts: Sequence[Counts] | None
    outs: Sequence[Array] | None
    beta: complex
    feedback: Sequence[Feedback]

    @property
    def dtype(self) -> str:
        """Type of the errors, in which terms are added."""
        return self.library.dtype(self.feedback[0].error)

    def part(self, number: int) -> slice:
        """This rank's part of an array: for an all-reduce, all of it."""
        if self.counts is None:
            return slice(0, self.feedback[number].error.shape[0])
        return slice(*offsets(self.counts[number])[self.link.rank : self.link.rank + 2])

    def conclude(self, number: int, sums: Array) -> None:
        """Write, or add, the sums of this rank's part of an array."""
        out = self.arrays[number].reshape(-1)[self.part(number)] if self.outs is None else self.outs[number]
        sum_in_order(self.library, [sums.reshape(-1)], out.reshape(-1), self.beta)


class Method:
    """How arrays are summed in fewer bytes. `sum_named` makes it."""

    def compresses(self, shape: Sequence[int]) -> bool:
        """Whether an array of this shape is sent in fewer bytes. The others are summed as usual."""
        return True

    def sums(self, call: Call) -> Collective[None]:
        """Generator: sum the errors in `feedback`, to which the arrays were added."""
        raise NotImplementedError


def sum_compressed(
    link: Link,
    library: NumpyLibrary,
    method: Method,
    arrays: Sequence[Array],
    feedback: Sequence[Feedback | None],
    counts: Sequence[Counts] | None,
    outs: Sequence[Array] | None = None,
    beta: complex = 0,
    sent: str | None = None,
    scale: float = 1.0,
    keeps: bool = True,
) -> Collective[None]:
    """Sum several arrays of one real type over the ranks, as `sum_coalesced`, in fewer bytes and with error feedback.

    All ranks have the same bits afterwards. Terms are added in rank order, in float32 or float64.

    feedback   of each array; None: it is summed as usual
    scale      factor of the arrays. Errors of an earlier call with another factor are scaled
    keeps      whether this rank's part of a `Feedback.TOTAL` counts
    """
    kept = [each for each in feedback if each is not None]
    for usual in (True, False):
        given, parts, into = (
            None if each is None else [one for one, own in zip(each, feedback) if (own is None) == usual]
            for each in (arrays, counts, outs)
        )
        if given and usual:
            yield from sum_coalesced(link, library, given, parts, sent, into, beta)
        elif given:
            for array, own in zip(given, kept):
                own.add(library, array, scale, keeps)
            yield from method.sums(Call(link, library, given, parts, into, beta, kept))


@dataclass(frozen=True)
class Coded(Method):
    """Numbers of 16 or 8 bits: each rank sends its coded part of every array to the rank that adds this part, and gets
    the coded sums. A rank's own part is not rounded before it is added.

    For `size` ranks and n numbers in parts of equal size, a rank receives 2 (size - 1) codec.nbytes(n / size) bytes;
    half of them for a reduce-scatter. The error of the second rounding is kept by the rank that added the part.
    """

    codec: Codec

    def sums(self, call: Call) -> Collective[None]:
        link, library, arrays, counts, *_, feedback = call
        codec, own, borrow = self.codec, link.rank, link.workspace.borrow
        flats, errors = [each.reshape(-1) for each in arrays], [each.error for each in feedback]
        parts = [part_sizes(each.shape[0], link.size) for each in flats] if counts is None else counts
        places = [[slice(start, start + size) for start, size in zip(offsets(each), each)] for each in parts]
        ranks = [[codec.nbytes(size) for size in each] for each in zip(*parts)]  # bytes of the parts of each rank
        coded = [sum(each) for each in ranks]
        sent, received = [*coded], [coded[own]] * link.size
        sent[own] = received[own] = 0
        mine = [each[own] for each in places]
        own_sizes = [each[own] for each in parts]
        with (
            borrow((max(map(max, parts)),), call.dtype, library) as term,
            borrow((sum(own_sizes),), call.dtype, library) as totals,
        ):
            sums = _cut(totals, own_sizes)
            with (
                borrow((sum(sent),), "uint8", library) as outgoing,
                borrow((sum(received),), "uint8", library) as incoming,
            ):
                for rank, message in enumerate(_cut(outgoing, sent)):
                    for error, place, data in zip(errors, places, _cut(message, ranks[rank]) if rank != own else ()):
                        self._take(library, error[place[rank]], data, term)
                yield from all_to_all_into(link, library, outgoing, incoming, sent, received)
                for rank, message in enumerate(_cut(incoming, received)):
                    for each, error, part, data in zip(sums, errors, mine, _cut(message, ranks[own])):
                        added = error[part] if rank == own else term[: each.shape[0]]
                        if rank != own:
                            codec.decode(library, data, added)
                        sum_in_order(library, [each, added] if rank else [added], each)
            if counts is not None:
                for number, (each, error, part) in enumerate(zip(sums, errors, mine)):
                    call.conclude(number, each)
                    error[part] = 0
                return
            with borrow((sum(coded),), "uint8", library) as gathered:
                messages = _cut(gathered, coded)
                for each, error, part, data in zip(sums, errors, mine, _cut(messages[own], ranks[own])):
                    copy_into(library, each, error[part])
                    self._take(library, error[part], data, term)
                yield from all_gather_into(link, library, messages[own], gathered, coded)
                for rank, message in enumerate(messages):
                    for flat, place, data in zip(flats, places, _cut(message, ranks[rank])):
                        codec.decode(library, data, flat[place[rank]])

    def _take(self, library: NumpyLibrary, error: Array, data: Array, term: Array) -> None:
        """Code a part of an error, and subtract the coded numbers from it. term: work memory."""
        decoded = term[: error.shape[0]]
        self.codec.encode(library, error, data)
        self.codec.decode(library, data, decoded)
        with np.errstate(all="ignore"):
            by_rows(library, lambda one, other: one - other, error, error, decoded, name="subtract sent")


@dataclass(frozen=True)
class Largest(Method):
    """The numbers of the largest magnitude: `share` of each array, at least one. For `size` ranks, a rank receives
    (size - 1) (4 + itemsize) bytes for each number, also for a reduce-scatter.

    The squared error of an array x of n numbers is at most (1 - k/n) |x|^2 (Stich et al., NeurIPS 2018). Positions take
    8 bytes in arrays of more than 2^31 numbers.
    """

    share: float

    def sums(self, call: Call) -> Collective[None]:
        link, library, *_, feedback = call
        errors, borrow = [each.error for each in feedback], link.workspace.borrow
        sizes = [each.shape[0] for each in errors]
        chosen = [ceil(self.share * size) for size in sizes]
        number, wide = sum(chosen), call.dtype
        with (
            borrow((link.size, number), wide, library) as values,
            borrow((link.size, number), "int32" if max(sizes) <= 2**31 else "int64", library) as positions,
            borrow((max(sizes),), wide, library) as total,
        ):
            own = values[link.rank], positions[link.rank]
            for error, value, position in zip(errors, _cut(own[0], chosen), _cut(own[1], chosen)):
                _take_largest(library, error, value, position)
            for array, part in zip((values, positions), own):
                yield from all_gather_into(link, library, part.reshape(1, -1), array, [1] * link.size)
            for index, (first, size) in enumerate(zip(offsets(chosen), chosen)):
                sums, columns = total[: sizes[index]], slice(first, first + size)
                _add_largest(library, values[:, columns], positions[:, columns], sums)
                call.conclude(index, sums[call.part(index)])


def _take_largest(library: NumpyLibrary, error: Array, values: Array, positions: Array) -> None:
    """Move the largest numbers of an error to `values`. NaN counts as infinite."""
    if not library.has_data:
        library.passed("select largest", error, values, positions)
        return
    xp, number, size = library.xp, values.shape[0], error.shape[0]
    if number == size:
        chosen = xp.argsort(error)  # all of them
    elif hasattr(xp, "argpartition"):
        chosen = xp.argpartition(xp.abs(error), size - number)[size - number :]
    else:
        chosen = xp.topk(xp.abs(error), number, sorted=False).indices
    positions[...], values[...] = chosen, error[chosen]
    error[chosen] = 0


def _add_largest(library: NumpyLibrary, values: Array, positions: Array, out: Array) -> None:
    """Add up the numbers that all ranks sent, in rank order."""
    if not library.has_data:
        library.passed("add largest", out, values, positions)
        return
    out[...] = 0
    with np.errstate(all="ignore"):
        for value, position in zip(values, positions):
            out[library.astype(position, "int64")] += value


@dataclass(frozen=True)
class LowRank(Method):
    """The product P Q^T of a matrix, with `rank` columns in P and Q (PowerSGD, Vogels et al., NeurIPS 2019). Of a
    matrix that is split over ranks, each shard is a matrix of its own.

    A call is a step of power iteration: P = orthogonal basis of sum(M Q), then Q = sum(M^T P), for the next call too.
    For m rows and n columns, both sums are all-reduces of rank (m + n) numbers. A matrix for which these are not fewer
    than m n numbers, such as a vector, is summed as usual. The error of each rank is M - P Q^T / size.

    All ranks compute P Q^T, so their BLAS must be the same.
    """

    rank: int

    def compresses(self, shape: Sequence[int]) -> bool:
        rows, cols = shape
        return self.rank * (rows + cols) < rows * cols

    def sums(self, call: Call) -> Collective[None]:
        link, library, arrays, *_, feedback = call
        wide, work, rank = call.dtype, link.workspace, self.rank
        shapes = [tuple(each.shape) for each in arrays]
        errors = [each.error.reshape(*shape) for each, shape in zip(feedback, shapes)]
        right = [self._prepared(library, each, shape[1]) for each, shape in zip(feedback, shapes)]
        with ExitStack() as held:
            # Each factor has memory of its own, because the bits of a GEMM may depend on addresses.
            bases, factors = (
                [held.enter_context(work.borrow((shape[dim], rank), wide, library)) for shape in shapes]
                for dim in (0, 1)
            )
            for error, factor, basis in zip(errors, right, bases):
                library.gemm(error, factor, basis, 1, 0, work)
            yield from sum_coalesced(link, library, bases, None)
            for error, basis, factor in zip(errors, bases, factors):
                _orthogonalise(library, basis)
                library.gemm(error.T, basis, factor, 1, 0, work)
            yield from sum_coalesced(link, library, factors, None)
            for number, (error, basis, factor) in enumerate(zip(errors, bases, factors)):
                library.gemm(basis, factor.T, error, -1 / link.size, 1, work)
                copy_into(library, factor, right[number])
                part, cols = call.part(number), factor.shape[0]
                own = basis[part.start // cols : part.stop // cols]
                if own.shape[0]:
                    with work.borrow((own.shape[0], cols), wide, library) as product:
                        library.gemm(own, factor.T, product, 1, 0, work)
                        call.conclude(number, product)

    def new_factor(self, library: NumpyLibrary, cols: int, dtype: str) -> Array:
        """Random numbers, the same on all ranks, for the first call."""
        shape = cols, self.rank
        return library.made(shape, dtype, lambda: np.random.default_rng(shape).standard_normal(shape))

    def lacks_factor(self, feedback: Feedback, cols: int) -> bool:
        """Whether the feedback has no factor of this rank."""
        return feedback.factor is None or tuple(feedback.factor.shape) != (cols, self.rank)

    def _prepared(self, library: NumpyLibrary, feedback: Feedback, cols: int) -> Array:
        """The factor of the last call, or of the first call, with orthogonal columns."""
        if self.lacks_factor(feedback, cols):  # a program that was recorded with another rank is used again
            feedback.factor = self.new_factor(library, cols, library.dtype(feedback.error))
        factor: Array = feedback.factor
        if feedback.begins:
            factor[...] = self.new_factor(library, cols, library.dtype(factor))
        elif library.has_data:
            factor[...] = finite(library, factor)
        _orthogonalise(library, factor)
        return factor


def _orthogonalise(library: NumpyLibrary, matrix: Array) -> None:
    """Replace the columns of a matrix by an orthogonal basis that spans them. Q of Householder's QR has full rank, also
    if the matrix has not."""
    if library.has_data:
        matrix[...] = library.xp.linalg.qr(matrix)[0]
    else:
        library.passed("orthogonalise", matrix, matrix)


def _cut(flat: Array, sizes: Sequence[int]) -> list[Array]:
    """Consecutive parts of a flat array."""
    return [flat[start : start + size] for start, size in zip(offsets(sizes), sizes)]


@lru_cache(maxsize=16)
def sum_named(name: str) -> Method:
    """The method of a compressed sum. Raises Pmm3dError for an unknown name.

    >>> sum_named("powersgd:4"), sum_named("topk:0.01")
    (LowRank(rank=4), Largest(share=0.01))
    """
    kind, _, number = name.partition(":")
    try:
        if kind == "powersgd" and int(number) > 0:
            return LowRank(int(number))
        if kind == "topk" and 0 < float(number) <= 1:
            return Largest(float(number))
        return Coded(codec_named(name))
    except (ValueError, Pmm3dError):
        raise Pmm3dError(f"gradients are compressed by {NAMES}; got {name!r}") from None
