"""Agreement: ranks compare what they were called with, and all raise one error, or none does."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ..arrays import NumpyLibrary
from ..errors import DisagreementError, Pmm3dError
from .algorithms import gather_parts
from .transport import Collective, Link
from .words import ranks_in_words


class Terms(NamedTuple):
    """What a rank brings to an agreement.

    compared   must be the same on all ranks;   shown: what the message says in its place, if that is more
    error      what went wrong here, if anything did
    """

    compared: str
    shown: str = ""
    error: Exception | None = None


def agree(link: Link, what: str, headline: str, terms: Terms, numbers: Sequence[int] | None = None,
          kind: type[Pmm3dError] = DisagreementError) -> Collective[np.ndarray | None]:
    """Generator: every rank raises the same error if their terms differ or one of them failed.

    what       the operation;   headline: how the message begins where terms differ, as an error of that kind
    numbers    what the ranks tell each other besides, which may differ: as many on each. Returns one row a rank

    Costs an all-reduce of 24 bytes by MPI, or, with numbers, an all-gather of a few; texts travel where terms differ.
    """
    digest = int.from_bytes(hashlib.blake2b(terms.compared.encode(), digest_size=7).digest(), "big")
    failed, rows = terms.error is not None, None
    if numbers is None:
        mine, largest = np.array([digest, -digest, failed], np.int64), np.empty(3, np.int64)
        yield [link.comm.Iallreduce(mine, largest, MPI.MAX)]
        agreed = largest[2] == 0 and largest[0] == -largest[1]
    else:
        all_rows = yield from exchanged(link, np.array([digest, failed, *numbers], np.int64), 2 + len(numbers))
        agreed, rows = not all_rows[:, 1].any() and len(set(all_rows[:, 0])) == 1, all_rows[:, 2:]
    if agreed:
        return rows
    text = np.frombuffer(pickle.dumps((terms.compared, terms.shown or terms.compared, *_packed(terms.error))), np.uint8)
    lengths = (yield from exchanged(link, np.array([len(text)], np.int64), 1))[:, 0]
    padded = np.zeros(max(lengths), np.uint8)
    padded[: len(text)] = text
    texts = yield from exchanged(link, padded, len(padded))
    everyones = [pickle.loads(text.tobytes()) for text in texts]
    raise _common_error(what, headline, everyones, link.record.members, kind)


def exchanged(link: Link, mine: np.ndarray, length: int) -> Collective[np.ndarray]:
    """Generator: every rank's row of so many numbers. Not payload: its bytes are not in the ledger."""
    rows = np.empty((link.size, length), mine.dtype)
    counts = [1] * link.size
    yield from link.uncounted(gather_parts(link, NumpyLibrary(), mine[None, :], rows, counts))
    return rows


def _packed(error: Exception | None) -> tuple[str, bytes]:
    """Its text, and the error in bytes; a Pmm3dError with that text if it cannot be pickled."""
    if error is None:
        return "", b""
    text = f"{type(error).__name__}: {error}"
    try:
        whole = pickle.dumps(error)
        pickle.loads(whole)
        return text, whole
    except Exception:
        return text, pickle.dumps(Pmm3dError(text))


def _common_error(what: str, headline: str, everyones: list[Any], ranks: Sequence[int],
                  kind: type[Pmm3dError]) -> Exception:
    """The one error that all ranks raise, from everyone's (compared, shown, text of the error, the error)."""
    failed = {rank: text for rank, (_, _, text, _) in zip(ranks, everyones) if text}
    listed = "; ".join(f"rank {rank}: {failed[rank]}" for rank in list(failed)[:4])
    listed += f" (and {len(failed) - 4} more ranks)" if len(failed) > 4 else ""
    if len({compared for compared, *_ in everyones}) > 1:
        groups: dict[str, list[int]] = {}
        for rank, (_, shown, *_) in zip(ranks, everyones):
            groups.setdefault(shown, []).append(rank)
        passed = "; ".join(f"{ranks_in_words(members)}: {shown}" for shown, members in groups.items())
        error: Exception = kind(f"{headline} {passed}" + (f". And it failed: {listed}" if failed else ""))
    else:
        error = pickle.loads(next(whole for *_, whole in everyones if whole))
        if len(failed) < len(everyones) or len(set(failed.values())) > 1:
            kind = type(error) if isinstance(error, Pmm3dError) else Pmm3dError
            error = kind(f"{what} failed on {len(failed)} of {len(everyones)} ranks. {listed}")
    error.everywhere = True  # type: ignore[attr-defined]
    return error
