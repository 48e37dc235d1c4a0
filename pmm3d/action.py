"""The record of one thing that a rank does in a dry run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Action:
    """One thing that a rank does.

    what   "gemm": C (m, n) of A (m, k) and B, of that dtype; its form says whether A and B, as they are given, lie by
           rows ("n") or are transposed views ("t"): "nn", "nt", "tn", "tt"
           "pass": `operation` reads and writes arrays of `nbytes` in all, be it in one pass over memory or in several:
           "relu", "layer_norm backward", "adamw", "copy"
           "begin": a collective, by `axis`, `operation`, `phase` of the ledger, the bytes that this rank sends and
           receives in it (known once it has ended), its number in the run, its turn among the collectives along the
           axis, which is the same on all its ranks, and the numbers of those that must end before it sends anything.
           If it is a message of a collective, `whole` is the bytes of that collective, and `message` is the number of
           the message in it, from 1
           "wait": for the collective of that number
    """

    what: str
    m: int = 0
    n: int = 0
    k: int = 0
    dtype: str = ""
    axis: str = ""
    operation: str = ""
    phase: str = ""
    sent: int = 0
    received: int = 0
    number: int = 0
    form: str = ""
    nbytes: int = 0
    turn: int = 0
    after: tuple[int, ...] = ()
    whole: int = 0
    message: int = 0

    def __str__(self) -> str:
        if self.what == "gemm":
            transposed = f" {self.form}" if self.form not in ("", "nn") else ""
            return f"gemm {self.m} x {self.n} x {self.k} {self.dtype}{transposed}"
        if self.what == "pass":
            return f"{self.operation}: reads and writes {self.nbytes:,} bytes"
        if self.what == "wait":
            return f"wait for #{self.number}"
        phase = f" ({self.phase})" if self.phase else ""
        return (f"begin #{self.number} {self.operation}{phase} on axis {self.axis}: sends {self.sent:,}, receives "
                f"{self.received:,} bytes")
