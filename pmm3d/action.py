"""The record of an action of a rank in a dry run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Action:
    """One action of a rank in a dry run.

    what               "gemm", "pass", "begin" (of a collective), or "wait"
    m, n, k, dtype     of a GEMM: C (m, n) = A (m, k) B
    form               of a GEMM: "n" or "t" for A and for B, as in "nt". "t" is a transposed view
    operation          of a pass over memory: its name, such as "relu", "layer_norm backward", "adamw", "copy". Of a
                       collective: "all_gather", ...
    nbytes             bytes that a pass, or several passes in one action, read and write
    axis, phase        of a collective, as in the ledger
    sent, received     bytes of this rank in a collective
    number             of a collective in the run; of a wait: the number of the awaited collective
    after              numbers of the collectives that must end before a collective sends anything
    whole, message     of one message of a collective: bytes of the collective, and number of the message, from 1
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
