"""Agreement: ranks compare their arguments, and either all raise the same error or none does. Out-of-memory errors get
an explanation."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from threading import get_ident
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from mpi4py import MPI

from ..arrays import NumpyLibrary, Workspace, library_of_error
from ..errors import DisagreementError, MemoryLimitError, OutOfMemoryError, Pmm3dError
from ..model.machine import available_memory, resident_memory
from ..text import counted, in_bytes, ranks_in_words
from .hang import callers_call, source_line
from .ledger import Ledger
from .strided_collectives import all_gather_into
from .transport import Collective, Link

Failure = TypeVar("Failure", bound=Exception)
MOST_TEXTS = 8
"""Largest number of different texts in an error message, each with its ranks."""
MOST_CHARACTERS = 1000
"""Largest length of each of these texts."""
MOST_ARGUMENTS = 100
"""Largest number of arguments of which equal ones are left out of these texts."""
WITHOUT_MEMORY = "OutOfMemoryError"
"""Short text of each rank that is out of memory. The full texts differ in many figures. So these ranks share one line,
and only one full text is printed."""
DOTS = "..."
TORCHS_WORDS = ("OutOfMemoryError", "can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


class Terms(NamedTuple):
    """The terms of one rank in an agreement.

    compared   text that must be equal on all ranks
    shown      called for an error message: (canonical form, text) of each argument. Equal ones are left out. Default:
               `compared`
    error      the error of this rank, or None
    call       the operation. If the ranks call different operations, the error message names them and their lines
    """

    compared: str
    shown: Callable[[], Sequence[tuple[str, str]]] | None = None
    error: Exception | None = None
    call: str = ""

    def arguments(self) -> Sequence[tuple[str, str]]:
        return [(self.compared, self.compared)] if self.shown is None else self.shown()


class Report(NamedTuple):
    """A text, the ranks that have it, and the type of their error."""

    ranks: list[int]
    text: str
    kind: type[Pmm3dError]


class Reports(NamedTuple):
    """The first MOST_TEXTS different texts, and the ranks with other texts."""

    first: list[Report]
    others: list[int]

    @property
    def ranks(self) -> int:
        """Number of ranks that have a text."""
        return sum(len(one.ranks) for one in self.first) + len(self.others)

    def __str__(self) -> str:
        """ "rank 0: one text; ranks 1-3: another; other texts of 9,992 more ranks"."""
        texts = [f"{ranks_in_words(one.ranks)}: {one.text}" for one in self.first]
        if self.others:
            texts.append(f"other texts of {counted(len(self.others), 'more rank')}")
        return "; ".join(texts)


def agree(
    link: Link,
    what: object,
    difference: str,
    terms: Terms,
    numbers: Sequence[int] | np.ndarray | None = None,
    kind: type[Pmm3dError] = DisagreementError,
) -> Collective[Any]:
    """Generator: compare the terms of the ranks. If they differ, or if a rank failed, every rank raises the same error.

    what         the operation; its str is in messages
    difference   what the message says if terms differ
    kind         type of the error if terms differ
    numbers      further numbers of this rank. Values may differ between ranks; the number of values must be equal

    Returns the numbers, one row per rank, or None without numbers.

    Costs an all-reduce of 24 bytes by MPI, or, with numbers or debug, an all-gather of a few numbers. If there is an
    error, each of the first few different texts is sent once. In a dry run all ranks have the terms of this one, and
    nothing is sent, as on one rank.
    """
    if link.dry or link.size == 1:
        if terms.error is not None:
            raise everywhere(terms.error)
        return None if numbers is None else np.tile(np.array(numbers, np.int64), (link.size, 1))
    own, failed = digest(terms.compared), terms.error is not None
    thread = get_ident()  # another thread may end the agreement
    rows: Any = None
    if numbers is None:
        mine, largest = np.array([own, -own, failed], np.int64), np.empty(3, np.int64)
        if link.debug:  # MPI's all-reduce needs the same order of calls on all ranks, which is not checked yet
            largest = (yield from gather_small(link, mine)).max(axis=0)
        else:
            yield [link.comm.Iallreduce(mine, largest, MPI.MAX)]
        same, any_failed = bool(largest[0] == -largest[1]), bool(largest[2])
    else:
        mine = np.empty(2 + len(numbers), np.int64)
        mine[0], mine[1], mine[2:] = own, failed, numbers
        all_rows = yield from gather_small(link, mine)
        heads = all_rows[:, :2].tolist()  # for a few ranks this is faster than numpy's reductions
        same, any_failed = all(each == own for each, _ in heads), any(failure for _, failure in heads)
        rows = all_rows[:, 2:]
    if same and not any_failed:
        return rows
    failures = (yield from _exchanged(link, *_as_text(terms.error))) if any_failed else Reports([], [])
    without = next((len(one.ranks) for one in failures.first if one.text == WITHOUT_MEMORY), 0)
    fullest = (yield from _fullest(link, terms.error, without)) if without else ""
    frame = sys._current_frames().get(thread)
    if (call := callers_call(frame)) is not None:
        what = call.name
    also = f". And it failed: {failures}{fullest}" if any_failed else ""
    error = None if same else (yield from _disagreement(link, f"{what}: {difference}", terms, frame, kind, also))
    raise everywhere(error or _failure(link, what, terms.error, failures, fullest))


def everywhere(error: Failure) -> Failure:
    """Mark an error as raised by all ranks, and return it."""
    error.everywhere = True  # type: ignore[attr-defined]
    return error


def gather_small(link: Link, mine: np.ndarray) -> Collective[np.ndarray]:
    """Generator: return the flat arrays of all ranks, which have equal lengths, as rows. The ledger does not count
    them."""
    rows = np.empty((link.size, len(mine)), mine.dtype)
    yield from link.uncounted(all_gather_into(link, NumpyLibrary(), mine[None, :], rows, [1] * link.size))
    return rows


@lru_cache(maxsize=256)
def digest(text: str) -> int:
    """Return a digest of a text, 56 bits; the same on all ranks. Repeated calls have the texts of the calls before."""
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=7).digest(), "big")


def _disagreement(
    link: Link, headline: str, terms: Terms, frame: FrameType | None, kind: type[Pmm3dError], also: str
) -> Collective[Exception | None]:
    """Generator: return the error with the arguments of the ranks, or with their calls if the calls differ. Return None
    if ranks failed and the same is shown of all ranks.

    frame   of the thread that began the agreement. If it executes a call of a C or Fortran program, that call is named.
            All ranks send the same messages with such a call and without it
    also    end of the message: what failed
    """
    call = callers_call(frame)
    name, place = (terms.call, f" at {source_line(frame)}") if call is None else (call.name, "")
    names = yield from gather_small(link, np.array([digest(name)], np.int64))
    if np.any(names != names[0]):
        made = yield from _exchanged(link, f"{name}{place}")
        return DisagreementError(f"the ranks made different calls. {made}{also}")
    arguments = terms.arguments() if call is None else [(text, text) for text in call.arguments()]
    passed = yield from _passed(link, name, arguments, call is not None)
    if len(passed.first) == 1:
        if also:
            return None
        passed = yield from _passed(link, terms.call, terms.arguments())
    return kind(f"{headline} {passed}{also}")


def _passed(link: Link, call: str, arguments: Sequence[tuple[str, str]], named: bool = False) -> Collective[Reports]:
    """Generator: return the calls of the ranks. If some of the arguments differ, dots replace the others.

    arguments   (canonical form, text) of each. If the texts of different arguments are equal, their forms are shown
    named       whether the texts contain the names of the arguments. Otherwise their positions are shown
    """
    count, texts = len(arguments), [text for _, text in arguments]
    counts = yield from gather_small(link, np.array([count], np.int64))
    if 0 < count <= MOST_ARGUMENTS and np.all(counts == count):
        own = [digest(form) for forms in zip(*arguments) for form in forms]
        digests = yield from gather_small(link, np.array(own, np.int64))
        differs, seen = (digests != digests[0]).any(axis=0).reshape(2, count)
        if differs.any():
            numbers = [f"argument {number}: " * (count > 1 and not named) for number in range(1, count + 1)]
            shown = [
                f"{number}{text if visible else form}" if differ else DOTS
                for number, (form, text), differ, visible in zip(numbers, arguments, differs, seen)
            ]
            texts = [text for text, before in zip(shown, ["", *shown]) if not text == before == DOTS]
    listed = ", ".join(texts)
    return (yield from _exchanged(link, f"{call}({listed})" if call else listed))


def _failure(link: Link, what: object, mine: Exception | None, failures: Reports, fullest: str) -> Exception:
    """Return the common error of ranks whose terms agree and of which some failed. If all ranks failed in the same way,
    it is the error of this rank."""
    alike = len(failures.first) == 1 and failures.ranks == link.size and not (fullest and link.size > 1)
    if mine is not None and alike:
        return mine
    error = failures.first[0].kind(f"{what} failed on {failures.ranks:,} of {link.size:,} ranks. {failures}{fullest}")
    error.__suppress_context__ = isinstance(mine, Pmm3dError)  # its text is already in the message
    return error


def _as_text(error: Exception | None) -> tuple[str, type[Pmm3dError]]:
    """Return (text of an error for the other ranks, type of the common error)."""
    if error is None:
        return "", Pmm3dError
    if isinstance(error, OutOfMemoryError) and error.held:
        return WITHOUT_MEMORY, OutOfMemoryError
    return f"{type(error).__name__}: {error}", type(error) if isinstance(error, Pmm3dError) else Pmm3dError


def _fullest(link: Link, error: Exception | None, ranks: int) -> Collective[str]:
    """Generator: return the full error text of the out-of-memory rank whose process holds the most bytes.

    error   error of this rank, or None;   ranks   number of ranks that are out of memory
    """
    held = error.held if isinstance(error, OutOfMemoryError) else 0
    everyones = yield from gather_small(link, np.array([held], np.int64))
    reports = yield from _exchanged(link, str(error) if link.rank == int(everyones[:, 0].argmax()) else "")
    return f". {'The rank that holds the most memory: ' if ranks > 1 else ''}{reports.first[0].text}"


def _exchanged(link: Link, text: str, kind: type[Pmm3dError] = Pmm3dError) -> Collective[Reports]:
    """Generator: return the texts of the ranks. Of the ranks with equal texts, the first one sends the text. Empty
    texts are not sent."""
    packed = _packed(text, kind) if text else b""
    rows = yield from gather_small(link, np.array([digest(text), len(packed)], np.int64))
    sending, members = np.flatnonzero(rows[:, 1]), link.record.members
    _, firsts, groups = np.unique(rows[sending, 0], return_index=True, return_inverse=True)
    chosen = np.sort(firsts)[:MOST_TEXTS]
    counts = np.zeros(link.size, np.int64)
    counts[sending[chosen]] = rows[sending[chosen], 1]
    starts = [0, *accumulate(counts.tolist())]
    sent, texts = np.frombuffer(packed[: counts[link.rank]], np.uint8), np.empty(starts[-1], np.uint8)
    yield from link.uncounted(all_gather_into(link, NumpyLibrary(), sent, texts, counts.tolist()))
    received = [json.loads(texts[starts[rank] : starts[rank + 1]].tobytes()) for rank in sending[chosen]]
    reports = [
        Report([members[rank] for rank in sending[groups == groups[first]]], text, _kind_named(name))
        for first, (text, name) in zip(chosen, received)
    ]
    return Reports(reports, [members[rank] for rank in sending[~np.isin(groups, groups[chosen])]])


def _packed(text: str, kind: type[Pmm3dError]) -> bytes:
    """Return the text, cut to MOST_CHARACTERS, and the name of the type of the error, as JSON."""
    bounded = text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
    return json.dumps((bounded, _name_of(kind))).encode()


def _name_of(kind: type[Pmm3dError]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _kind_named(name: str) -> type[Pmm3dError]:
    """Return the type of error of this name. Types that this process does not have are replaced by Pmm3dError."""
    kinds = [Pmm3dError]
    for kind in kinds:  # the list grows by the subclasses
        kinds += kind.__subclasses__()
    return next((kind for kind in kinds if _name_of(kind) == name), Pmm3dError)


def as_out_of_memory(error: BaseException, rank: int, host: str, ledger: Ledger, workspace: Workspace) -> BaseException:
    """Return an OutOfMemoryError that explains an out-of-memory error of numpy, cupy or torch. Other errors are
    returned unchanged."""
    if not is_out_of_memory(error):
        return error
    held_bytes = resident_memory()
    held = f"This process holds {in_bytes(held_bytes)}, {in_bytes(workspace.allocated)} of it in work arrays"
    free = f"the node has {in_bytes(available_memory())} left{_of_device(error)}"
    predicted = "; ".join(f"{what} {in_bytes(nbytes)}" for what, nbytes in ledger.predicted.items())
    out_of_memory = OutOfMemoryError(
        f"rank {rank} (host {host}) is out of memory: {error or 'the allocation failed'}. {held}; "
        f"{free}. Predicted for a rank: "
        f"{predicted or 'nothing, since no product or network was planned'}. Use more ranks or "
        "nodes, another grid, a smaller max_workspace, fewer rows a batch, or recompute; ulimit "
        "and the batch system (--mem) may set limits too"
    )
    out_of_memory.__cause__, out_of_memory.held = error, int(held_bytes)
    return out_of_memory


def _of_device(error: BaseException) -> str:
    """Return a text about the used and free memory of the device; "" if host memory was exhausted."""
    if (library := library_of_error(error)) is None:
        return ""
    try:
        memory, device = library.device_memory(), library.current_device()
    except Exception as error:
        return f", memory of the device unknown ({type(error).__name__})"
    if memory is None or device is None:
        return ""
    return (
        f", device {device.number} ({device.name}) {in_bytes(memory.free)} of {in_bytes(memory.total)}, and "
        f"{library.name}'s pool holds {in_bytes(memory.held)} there"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of numpy, cupy or torch means that an allocation failed."""
    if isinstance(error, MemoryError):
        return not isinstance(error, (MemoryLimitError, OutOfMemoryError))
    return isinstance(error, RuntimeError) and any(mark in f"{type(error).__name__}: {error}" for mark in TORCHS_WORDS)
