"""One action of a rank: what a table is made of."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

PROCESSOR = "processor"
"""What computes: its tasks run in the order of the table, one at a time."""
SHARED = "node:"
"""What the name of a resource begins with that is one for all tables that name it."""


@dataclass(frozen=True, slots=True)
class Task:
    """One action of a rank.

    kind       "gemm", "pass", "collective", "wait", "overhead", or whatever else; what times are added up by. The
               seconds of a "wait" count as waiting for the first of `after`
    resource   what it occupies while it runs; one task at a time, in the order of the table. All tasks of the
               processor follow each other; one of another resource is issued when the processor comes to it in the
               table, and then runs beside it. A rank's own, but one whose name begins with "node:" is one for all
               tables that name it: it serves first who can begin first, of those who can at once the first table
    seconds    that it takes once it runs
    after      numbers, in this rank's table, of earlier tasks that must have ended before
    meets      tasks of all ranks with this key begin together, when the last of them can; None: alone. Met by those
               tables that have it. Of one meeting, all on the same shared resource use it as one. A pair such as
               ("x", 12): seconds waited for it are added up under its first
    name       for people
    """

    kind: str
    resource: str
    seconds: float
    after: tuple[int, ...] = ()
    meets: Hashable = None
    name: str = ""
