"""The record of an action of a rank in a dry run."""

from __future__ import annotations

from dataclasses import dataclass

UPDATE = "update "
"""Beginning of the names of passes of optimizers: "update adamw"."""


@dataclass(slots=True)
class Action:
    """One action of a rank in a dry run.

    Attributes
    ----------
    what
        "gemm", "pass", "begin" (of a collective), or "wait".
    m, n, k, dtype
        Sizes and type of a GEMM, C (m, n) = A (m, k) B.
    form
        "n" or "t" for A and for B of a GEMM, as in "nt". "t" is a transposed view.
    operation
        Name of a collective, such as "all_gather", or of a pass over memory: "relu",
        "layer_norm backward", "update adamw".
    nbytes
        Bytes that a pass, or several passes in one action, read and write.
    axis, phase
        Axis and phase of a collective, as in the ledger.
    sent, received
        Bytes of this rank in a collective.
    number
        Number of a collective in the run. A wait has the number of its collective.
    after
        Numbers of the collectives that must end before a collective sends anything.
    collective_bytes, message
        Bytes of the whole collective, and number of the message from 1, if the action is one message of a collective.
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
    collective_bytes: int = 0
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
        return (
            f"begin #{self.number} {self.operation}{phase} on axis {self.axis}: sends {self.sent:,}, receives "
            f"{self.received:,} bytes"
        )
