"""What a machine does in a second: its GEMMs, passes over memory and collectives, as measured or published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log2

from ...errors import Pmm3dError
from ...layout import itemsize
from ..node_map import GATHERS_FROM, NEVER
from .figures import Gemms, InSteps, Measured, Pass
from .groups import Group
from .laws import DEFAULT, Law, may_go_by_nodes

REMEMBERED = 2**17
"""GEMMs whose seconds are kept, so that the same one is not priced again."""
WHOLES = [2.0**power for power in range(30, 7, -1)]
"""Bytes of a whole for which gathers by nodes are compared with flat ones."""
LEAST_IN_STEP = 0.2
"""Of a collective's seconds by itself, what it takes in a step at least."""


@dataclass(frozen=True)
class Machine:
    """A machine as a rank of it sees it. All figures are those of a rank while all ranks of its node do the same.

    name             "perlmutter", or that of the measured host
    ranks_per_node   ranks that share a node
    memory           bytes that a rank may hold; 0: not known, so nothing is too large
    peak             dtype -> flop/s of a rank that its maker states, or that the best GEMM reached
    sources          section of the file -> where its figures are from
    hidden           share of a collective that runs under computation, by where its ranks are: "inside" a node or
                     "across"; 0 where it is not given
    noise            standard deviation of a rank's time for a step, as a share of it
    overhead         seconds that a GEMM or a pass takes besides the other figures: Python
    in_steps         what actions take more in steps of training than by themselves
    key              what a measured machine is told from others by: host kind, MPI, BLAS, their versions
    gemms            dtype -> rates of its GEMMs
    passes           name -> rate of a pass over memory; "default" for all others
    collectives      that were measured
    laws             operation -> what it takes where it was not measured; "default" for all others
    axonn            p -> G -> GiB/s: the bandwidths of AxoNN's authors (`pmm3d.model.axonn`)

    Files: `pmm3d.model.machines.reading`. Prices raise Pmm3dError if the machine has no figure for what is asked,
    which no machine that was read from a file does.
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

    def gemm_seconds(self, m: int, n: int, k: int, dtype: str, form: str = "nn") -> float:
        """Of C (m, n) = A (m, k) B on a rank: of 2 m n k flop, or, of complex elements, 8 m n k.

        form   "n" or "t" for A and for B, as in BLAS; "c" counts as "t"

        A dtype without figures is priced as that of `stands_for`.
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
        """The dtype by whose GEMMs those of this one are priced: itself, if the machine has figures for it, else the
        nearest in bits of a real number, the wider of two. Who shows prices says so, if it is another."""
        if dtype not in self._nearest:
            if not self.gemms:
                raise Pmm3dError(f"machine {self.name} has no figures for GEMMs")
            self._nearest[dtype] = min(self.gemms, key=lambda other: _distance(dtype, other))
        return self._nearest[dtype]

    def pass_seconds(self, name: str, nbytes: int) -> float:
        """Of a pass over so many bytes of arrays, read and written: an elementwise operation, a sum, a copy."""
        found = self.passes.get(name) or self.passes.get(DEFAULT)
        if found is None:
            raise Pmm3dError(f"machine {self.name} has no figures for passes over memory")
        return found.overhead + nbytes / found.rate

    def collective_seconds(self, operation: str, group: Group, nbytes: float) -> float:
        """Of a collective in which a rank receives so many bytes (sends, if those are more), all groups of the axis at
        once, from its beginning to its end, with nothing under it.

        By what was measured of that operation, with as many ranks on each of as many nodes, and as far from each other;
        else by its law. To move nothing takes nothing.
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
        if operation == "all_gather" and may_go_by_nodes(operation, group):  # the library takes the faster way
            return min(law.seconds(operation, group, nbytes, by_nodes) for by_nodes in (False, True))
        return law.seconds(operation, group, nbytes)

    def gathers_from(self, group: Group) -> float:
        """Bytes of a whole from which an all-gather along an axis that is placed evenly on nodes is faster by nodes, by
        the machine's law. `NEVER` if it is never faster, `GATHERS_FROM` if the machine has no law.

            >>> from pmm3d.model.machines import load
            >>> load("nominal").gathers_from(Group(8, 4, 2, 1)) < 2**20
            True
        """
        law = self.laws.get("all_gather") or self.laws.get(DEFAULT)
        if law is None:
            return GATHERS_FROM
        found = NEVER
        for size in WHOLES:
            received = size * (group.size - 1) / group.size
            flat, by_nodes = (law.seconds("all_gather", group, received, way) for way in (False, True))
            if by_nodes > flat:
                break
            found = size
        return found

    @property
    def overhead_in_step(self) -> float:
        """Seconds that a GEMM or a pass takes besides its own in a step of training."""
        return self.overhead + self.in_steps.action

    def collective_in_step(self, operation: str, group: Group, nbytes: float) -> float:
        """As `collective_seconds`, in a step of training."""
        alone = self.collective_seconds(operation, group, nbytes)
        more = self.in_steps.inside if group.nodes == 1 else self.in_steps.across
        return max(LEAST_IN_STEP * alone, alone + more) if alone else 0.0

    def hidden_share(self, group: Group) -> float:
        """Of a collective's seconds, those that pass under computation if there is enough of it."""
        return self.hidden.get("inside" if group.nodes == 1 else "across", 0.0)

    def with_ranks_per_node(self, number: int) -> Machine:
        """The same with so many ranks on a node: by laws alone, if collectives were measured with other numbers of
        them, which shared the node in another way. Its sources say so."""
        if number == self.ranks_per_node:
            return self
        found = replace(self, ranks_per_node=number)
        if not self.collectives:
            return found
        source = f"by laws: what was measured is of {self.ranks_per_node} ranks a node"
        return replace(found, collectives=(), sources={**self.sources, "collectives": source})

    @cached_property
    def _measured(self) -> dict[tuple[str, int, int, int], Measured]:
        return {(row.operation, row.inside, row.nodes, row.stride): row for row in self.collectives}

    @cached_property
    def _priced(self) -> dict[tuple[int, int, int, str, str], float]:
        return {}

    @cached_property
    def _nearest(self) -> dict[str, str]:
        return {dtype: dtype for dtype in self.gemms}


def flop_of(m: int, n: int, k: int, dtype: str) -> float:
    """Of a GEMM, where a multiply-add of real numbers counts two, and of complex ones eight.

        >>> flop_of(2, 3, 5, "float32"), flop_of(2, 3, 5, "complex64")
        (60.0, 240.0)
    """
    return (8.0 if dtype.startswith("complex") else 2.0) * m * n * k


def _distance(dtype: str, other: str) -> tuple[float, int, bool, str]:
    bits, others = _real_bits(dtype), _real_bits(other)
    is_other_kind = dtype.startswith("complex") != other.startswith("complex")
    return abs(log2(bits / others)), -others, is_other_kind, other


def _real_bits(dtype: str) -> int:
    return 8 * itemsize(dtype) // (2 if dtype.startswith("complex") else 1)
