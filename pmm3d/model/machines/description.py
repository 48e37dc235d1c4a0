"""What a machine does in a second: its GEMMs, passes over memory and collectives, as measured or published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .groups import Group


@dataclass(frozen=True)
class Machine:
    """A machine as a rank of it sees it. All figures are those of a rank while all ranks of its node do the same.

    name             "perlmutter", or that of the measured host
    ranks_per_node   ranks that share a node
    memory           bytes that a rank may hold
    peak             dtype -> flop/s of a rank that its maker states, or that the best GEMM reached
    sources          section of the file -> where its figures are from
    hidden           share of a collective that runs under computation, by where its ranks are: "inside" a node, "across"
    noise            standard deviation of a rank's time for a step, as a share of it
    overhead         seconds that Python takes for an action of a step, besides what the other figures hold

    Files: `pmm3d.model.machines.reading`.
    """

    name: str
    ranks_per_node: int
    memory: int
    peak: Mapping[str, float]
    sources: Mapping[str, str]
    hidden: Mapping[str, float] = field(default_factory=dict)
    noise: float = 0.0
    overhead: float = 0.0

    def gemm_seconds(self, m: int, n: int, k: int, dtype: str, form: str = "nn") -> float:
        """Of C (m, n) = A (m, k) B on a rank. form: "n" or "t" for A and for B, as in BLAS."""
        raise NotImplementedError

    def pass_seconds(self, name: str, nbytes: int) -> float:
        """Of a pass over so many bytes of arrays, read and written: an elementwise operation, a sum, a copy."""
        raise NotImplementedError

    def collective_seconds(self, operation: str, group: Group, nbytes: int) -> float:
        """Of a collective in which a rank receives so many bytes (sends, if those are more), all groups of the axis at
        once, from its beginning to its end, with nothing under it."""
        raise NotImplementedError

    def hidden_share(self, group: Group) -> float:
        """Of a collective's seconds, those that pass under computation if there is enough of it."""
        raise NotImplementedError
