"""One error for all ranks, from what each of them told."""

from __future__ import annotations

import pickle

from .errors import DisagreementError, Pmm3dError
from .units import ranks_in_words


def packed(error):
    """The error in bytes, for the other ranks; its text in a Pmm3dError if it cannot be pickled."""
    if error is None:
        return None
    try:
        whole = pickle.dumps(error)
        pickle.loads(whole)
        return whole
    except Exception:
        return pickle.dumps(Pmm3dError(f"{type(error).__name__}: {error}"))


def common_error(what: str, told) -> Exception:
    """The one error that all ranks raise, from what each of them told: (arguments, text of its error, the error)."""
    failed = {rank: text for rank, (_, text, _) in enumerate(told) if text}
    listed = "; ".join(f"rank {rank}: {failed[rank]}" for rank in list(failed)[:4])
    listed += f" (and {len(failed) - 4} more ranks)" if len(failed) > 4 else ""
    groups: dict[str, list[int]] = {}
    for rank, (arguments, *_) in enumerate(told):
        groups.setdefault(arguments, []).append(rank)
    if len(groups) > 1:
        passed = "; ".join(f"{ranks_in_words(ranks)}: {text}" for text, ranks in groups.items())
        error = DisagreementError(f"{what}: the ranks passed different arguments. {passed}"
                                  + (f". And it failed: {listed}" if failed else ""))
    else:
        error = pickle.loads(told[min(failed)][2])
        if len(failed) < len(told) or len(set(failed.values())) > 1:
            kind = type(error) if isinstance(error, Pmm3dError) else Pmm3dError
            error = kind(f"{what} failed on {len(failed)} of {len(told)} ranks. {listed}")
    error.everywhere = True
    return error
