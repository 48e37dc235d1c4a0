"""The description of a machine: the times of GEMMs, passes over memory and collectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log2

from ...errors import Pmm3dError
from ...layout import itemsize
from ...text import counted
from ..node_map import GATHERS_FROM, NEVER
from .figures import Gemms, InSteps, Measured, Pass
from .groups import Group
from .laws import DEFAULT, Law

REMEMBERED = 2**17
"""Number of GEMMs whose seconds are cached."""
WHOLES = [2.0**power for power in range(30, 7, -1)]
"""Bytes of gathered arrays for which a gather by nodes is compared with a direct gather, in descending order."""
LEAST_IN_STEP = 0.2
"""Least time of a collective in a training step, as a share of its time alone."""


@dataclass(frozen=True)
class Machine:
    """Times and rates of a rank when all ranks of its node do the same.

    name             "perlmutter", or the name of the measured host
    ranks_per_node   number of ranks on a node
    memory           bytes that a rank may hold; 0: unknown, no limit
    peak             flop/s of a rank by dtype, stated by the manufacturer or measured with the fastest GEMM
    sources          source of the figures of each section of the file
    hidden           shares of a collective that can run during computation: "inside" a node, and "across" nodes.
                     Default: 0
    noise            standard deviation of a rank's time for a step, as a share of this time
    overhead         seconds of Python for each GEMM and each pass
    in_steps         additional seconds of actions in training steps
    key              identity of a measured machine: host kind, MPI, BLAS, their versions
    gemms            rates of GEMMs by dtype
    passes           rates of passes over memory by name; "default" for all other passes
    collectives      measured collectives
    laws             laws of collectives that were not measured, by operation; "default" for all other operations
    axonn            bandwidths of AxoNN's authors (`pmm3d.model.axonn.Bandwidths`)

    `pmm3d.model.machines.reading` reads files. The methods raise Pmm3dError if the machine has no figure for the
    request. A machine that was read from a file has figures for all requests.

        >>> from pmm3d.layout import GridShape
        >>> from pmm3d.model.machines import groups_of, load
        >>> machine = load("perlmutter")
        >>> groups_of(GridShape(2, 4, 8), machine.ranks_per_node)["y"]
        Group(size=4, inside=2, nodes=2, sharers=2, stride=2)
        >>> round(machine.gemm_seconds(4096, 4096, 4096, "bfloat16"), 6)
        0.000501
    """

    name: str
    ranks_per_node: int
    memory: int
    peak: Mapping[str, float]
    sources: Mapping[str, str]
    hidden: Mapping[str, float] = field(default_factory=dict)
    noise: float = 0.0
    overhead: float = 0.0
    key: Mapping[str, str] = field(default_factory=dict)
    gemms: Mapping[str, Gemms] = field(default_factory=dict)
    passes: Mapping[str, Pass] = field(default_factory=dict)
    collectives: tuple[Measured, ...] = ()
    laws: Mapping[str, Law] = field(default_factory=dict)
    axonn: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    in_steps: InSteps = InSteps()

    def __hash__(self) -> int:
        return hash((self.name, self.ranks_per_node))

    def gemm_seconds(self, m: int, n: int, k: int, dtype: str, form: str = "nn") -> float:
        """Return the seconds of C (m, n) = A (m, k) B on a rank.

        dtype  if it has no figures, those of the type that `stands_for` returns are used
        form   "n", "t" or "c" for A and for B, as in BLAS. "c" has the price of "t"
        """
        asked = (m, n, k, dtype, form)
        seconds = self._priced.get(asked)
        if seconds is None:
            gemms, flop = self.gemms[self.stands_for(dtype)], flop_of(m, n, k, dtype)
            seconds = gemms.seconds(m, n, k, flop, form.replace("c", "t"))
            if len(self._priced) >= REMEMBERED:
                self._priced.clear()
            self._priced[asked] = seconds
        return seconds

    def stands_for(self, dtype: str) -> str:
        """Return the dtype whose figures price this dtype: itself if the machine has figures for it. Otherwise the
        dtype with the nearest number of bits in a real number, or the wider of two equally near ones."""
        if not self.gemms:
            raise Pmm3dError(f"machine {self.name} has no figures for GEMMs")
        return dtype if dtype in self.gemms else min(self.gemms, key=lambda other: _distance(dtype, other))

    def pass_seconds(self, name: str, nbytes: int) -> float:
        """Return the seconds of a pass that reads and writes `nbytes`, such as an elementwise operation, a sum, a
        copy."""
        law = self.passes.get(name) or self.passes.get(DEFAULT)
        if law is None:
            raise Pmm3dError(f"machine {self.name} has no figures for passes over memory")
        return law.overhead + nbytes / law.rate

    def collective_seconds(self, operation: str, group: Group, nbytes: float) -> float:
        """Return the seconds of a collective alone, in all groups of the axis at once.

        `nbytes` is the larger of the bytes that a rank receives and sends. 0 bytes take 0 seconds. The price is that of
        the measured collective of this operation with the same numbers of ranks and nodes and the same stride. If
        there is none, the operation's law gives the price.
        """
        if group.size < 2 or nbytes <= 0:
            return 0.0
        if group.size == group.inside * group.nodes:
            kind = operation, group.inside, group.nodes
            measured = self._measured.get((*kind, group.stride)) or self._measured.get((*kind, 0))
            if measured is not None:
                return measured.price(nbytes)
        law = self.laws.get(operation) or self.laws.get(DEFAULT)
        if law is None:
            raise Pmm3dError(f"machine {self.name} has no figures for collectives")
        if operation == "all_gather" and group.even:  # the library selects the faster of the two
            return min(law.seconds(operation, group, nbytes, by_nodes) for by_nodes in (False, True))
        return law.seconds(operation, group, nbytes)

    def gathers_from(self, group: Group) -> float:
        """Return the bytes of a gathered array from which an all-gather of an even group is faster by nodes, according
        to the machine's law. `NEVER` if it is never faster, `GATHERS_FROM` if the machine has no law.

            >>> from pmm3d.model.machines import load
            >>> load("nominal").gathers_from(Group(8, 4, 2, 1)) < 2**20
            True
        """
        law = self.laws.get("all_gather") or self.laws.get(DEFAULT)
        if law is None:
            return GATHERS_FROM
        least = NEVER
        for size in WHOLES:
            received = size * (group.size - 1) / group.size
            flat, by_nodes = (law.seconds("all_gather", group, received, way) for way in (False, True))
            if by_nodes > flat:
                break
            least = size
        return least

    @property
    def overhead_in_step(self) -> float:
        """Seconds of overhead of a GEMM or a pass in a training step."""
        return self.overhead + self.in_steps.action

    def collective_in_step(self, operation: str, group: Group, nbytes: float) -> float:
        """Return `collective_seconds` in a training step."""
        alone = self.collective_seconds(operation, group, nbytes)
        more = self.in_steps.inside if group.nodes == 1 else self.in_steps.across
        return max(LEAST_IN_STEP * alone, alone + more) if alone else 0.0

    def hidden_share(self, group: Group) -> float:
        """Return the share of a collective that can run during computation."""
        return self.hidden.get("inside" if group.nodes == 1 else "across", 0.0)

    def with_ranks_per_node(self, number: int) -> Machine:
        """Return the machine with this number of ranks on a node. Collectives that were measured with another number
        are left out, and `sources` has a note."""
        if number == self.ranks_per_node:
            return self
        changed = replace(self, ranks_per_node=number)
        if not self.collectives:
            return changed
        source = f"by laws: collectives were measured with {counted(self.ranks_per_node, 'rank')} a node"
        return replace(changed, collectives=(), sources={**self.sources, "collectives": source})

    @cached_property
    def _measured(self) -> dict[tuple[str, int, int, int], Measured]:
        return {(row.operation, row.inside, row.nodes, row.stride): row for row in self.collectives}

    @cached_property
    def _priced(self) -> dict[tuple[int, int, int, str, str], float]:
        return {}


def flop_of(m: int, n: int, k: int, dtype: str) -> float:
    """Return the flop of a GEMM: 2 m n k, or 8 m n k of complex elements.

    >>> flop_of(2, 3, 5, "float32"), flop_of(2, 3, 5, "complex64")
    (60.0, 240.0)
    """
    return (8.0 if dtype.startswith("complex") else 2.0) * m * n * k


def _distance(dtype: str, other: str) -> tuple[float, int, bool, str]:
    complexes = dtype.startswith("complex"), other.startswith("complex")
    real, others = (itemsize(name) // (1 + is_complex) for name, is_complex in zip((dtype, other), complexes))
    return abs(log2(real / others)), -others, complexes[0] != complexes[1], other
