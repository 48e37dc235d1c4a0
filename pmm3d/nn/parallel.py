"""The collectives of a grid's networks: weights, gradients, and the comparison of the ranks' backward passes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from zlib import crc32

from ..comm import Axis, Grid, RepeatedSum
from ..errors import DisagreementError, Pmm3dError
from .compression import Compression
from .contract import Contribution
from .gathered import Weights
from .gradient_buffer import GradientBuffer, Leaf
from .gradients import Gradients
from .overlap import Overlap

NAMED = 4
"""Largest number of parameters that an error names."""
REMEMBERED = 64
"""Number of backward passes that are remembered, to name the first pass that differs between ranks."""
Uses = list[tuple[str, int]]


class BackwardSync:
    """The collectives of one grid's networks. `BackwardSync.of(grid)`.

    Before its first message, a backward pass that sums gradients over data compares the used parameters among the
    ranks, also those of the passes since the last comparison. A pass with the parameters of an earlier pass sends no
    comparison in two cases: in `no_sync`, and if the caller compares `digest` later (`defers_agreement`).

    overlap, compression   all ranks may replace them between steps
    deferred   None, or the function that receives contributions instead of `gradients` (see `defer_weights`)
    proposal   number that the agreement of a step sums over all ranks (`Replays`);   proposals   the last sum
    program    number of the program that this step replayed (`Replays`), 0 for none;   programs_differ   whether it
               differed between the ranks of the grid in the last agreement
    digest     16-bit checksum of the parameters that all backward passes used, and of the scales of their losses

    defers_agreement   whether the caller compares `digest` before the gradients are used, and calls `explain` if it
                       differs
    """

    def __init__(self, grid: Grid):
        self.grid, self.weights, self.gradients = grid, Weights(grid, self), Gradients(grid)
        self.compression = Compression()
        self.deferred: Callable[[Leaf, Contribution], None] | None = None
        self.defers_agreement = False
        self.digest = self.passes = 0
        self.proposal = self.proposals = 0.0
        self.program, self.programs_differ = 0, False
        self._sums = dict[tuple[Axis, int], RepeatedSum]()
        self._recent = deque[tuple[Uses, float | None, str]](maxlen=REMEMBERED)
        self._known = set[str]()

    @property
    def overlap(self) -> Overlap:
        return self.weights.overlap

    @overlap.setter
    def overlap(self, value: Overlap) -> None:
        self.weights.overlap = value

    @classmethod
    def of(cls, grid: Grid) -> BackwardSync:
        if cls not in grid.attached:
            grid.attached[cls] = cls(grid)
        return grid.attached[cls]

    def begin(self, sync: bool, uses: Counter[Leaf], scale: float | None = None, problem: str = "") -> None:
        """Begin a backward pass. `finish` or `abandon` ends it.

        uses: number of contributions to each leaf; scale: None if the gradient was given; problem: reason why this rank
        computes no gradients. The first collective of the pass, or `finish`, raises DisagreementError on every rank if
        ranks differ.
        """
        agreed, buffers = self._agreement(sync, uses, scale, problem), _buffers(uses)
        self.grid.ledger.memory["recompute saves"] = 0
        self.passes += not problem
        for buffer in buffers:
            buffer.scales |= set() if problem or scale is None else {scale}
        self._begin(sync and self.deferred is None, buffers, agreed, more=not sync)

    def begin_drain(self, sync: bool, uses: Counter[Leaf]) -> None:
        """Begin to add contributions of an earlier backward pass. Ranks compare nothing."""
        self._begin(sync, _buffers(uses), None, more=True)

    def _begin(
        self, sync: bool, buffers: Counter[GradientBuffer], agreed: Callable[[], None] | None, more: bool
    ) -> None:
        """more: whether another pass follows in the same step."""
        self._phase, self.weights.more = self.grid.ledger.phase("backward"), more
        self._phase.__enter__()
        self.gradients.begin(sync, self.overlap, buffers, agreed, self.compression.gradients)

    def finish(self) -> None:
        """End a pass: start all sums of gradients that are due (`Gradients.finish`), without waiting for them."""
        self.gradients.finish()
        self._end()
        self.grid.ledger.memory["arrays, most at once"] = self.grid.workspace.most_lent

    def abandon(self) -> None:
        """End a pass after an error. Its gradients are marked as failed."""
        self.gradients.abandon()
        self._end()

    def _end(self) -> None:
        self.weights.pause()
        self.weights.more = False
        self._phase.__exit__()

    def _agreement(
        self, sync: bool, uses: Counter[Leaf], scale: float | None, problem: str
    ) -> Callable[[], None] | None:
        """Begin to compare parameters, scale and problem among the ranks.

        Return a function that waits, and raises an error if they differ; or None if they are not compared now.
        """
        used = [
            (f"{leaf.name or 'a tensor'} ({leaf.shape[0]} x {leaf.shape[1]})", times) for leaf, times in uses.items()
        ]
        text = f"{problem}{used}"
        self.note_pass(used, scale, problem)
        if text in self._known and not problem and (self.defers_agreement or not sync):
            return None
        compared = self.grid._compared("backward", text, scale, self.digest)

        def conclude() -> None:
            try:
                compared()
            except DisagreementError:
                self.explain()
            if len(self._known) == REMEMBERED:
                self._known.clear()
            self._known.add(text)
            self._recent.clear()

        return conclude

    def note_pass(self, used: Uses, scale: float | None, problem: str = "") -> None:
        """Include a backward pass in the digest."""
        self._recent.append((used, scale, problem))
        self.digest = crc32(f"{self.digest} {scale} {problem}{used}".encode()) & 0xFFFF

    def last_passes(self, number: int) -> list[tuple[Uses, float | None, str]]:
        """Return the last backward passes, as arguments of `note_pass`. At most `REMEMBERED` are known."""
        return [*self._recent][-number:] if number else []

    def summed(self, axis: Axis, numbers: Sequence[float]) -> list[float]:
        """Sums of these numbers over all ranks of an axis, by an all-reduce on the memory of the last call. Collective.
        All ranks must pass equally many numbers."""
        key = axis, len(numbers)
        sums = self._sums.pop(key, None) or RepeatedSum(*key, "agreement")
        total = sums(numbers)
        self._sums[key] = sums  # not after an error, because messages may still arrive in the memory
        return total

    def explain(self) -> None:
        """Raise the DisagreementError of the backward passes since the last comparison, on every rank. Collective."""
        mine, others = [*self._recent], self.grid.comm.bcast([*self._recent])
        own, first = self.grid.ledger.rank, self.grid.everyone.ranks[0]
        self._recent.clear()
        self.digest = 0
        with self.grid.collective_call("backward", always=True):
            problems = [problem for _, _, problem in mine if problem]
            for (uses, scale, _), (other_uses, other_scale, _) in zip(mine, others):
                if scale != other_scale:
                    raise DisagreementError(
                        f"backward: the loss is scaled by {scale!r} on rank {own}, by "
                        f"{other_scale!r} on rank {first}: all ranks must use the same scale, or "
                        "their weights diverge"
                    )
                if problems:
                    raise Pmm3dError(problems[-1])
                if uses != other_uses:
                    raise DisagreementError(
                        "backward: the ranks use different parameters, or in another order. On "
                        f"rank {own} {_difference(_added(uses), _added(other_uses), first)}. "
                        "All ranks must compute the same operations: do not choose layers by a "
                        "value that differs between ranks"
                    )
        raise DisagreementError(
            f"backward: the ranks made different backward passes; on rank {own} {len(mine)} "
            f"since the last comparison, on rank {first} {len(others)}"
        )


def _buffers(uses: Counter[Leaf]) -> Counter[GradientBuffer]:
    """Number of contributions to each gradient. A leaf that is no parameter has no gradient."""
    return Counter({leaf.grad_buffer: times for leaf, times in uses.items() if leaf.grad_buffer is not None})


def _added(uses: Uses) -> Counter[str]:
    """Name -> number of uses, summed over tensors with the same name."""
    return Counter(name for name, times in uses for _ in range(times))


def _difference(mine: Counter[str], others: Counter[str], first: int) -> str:
    """Describe the difference between the uses of this rank and of the first rank."""
    names = [name for name in {**others, **mine} if mine[name] != others[name]]
    texts = [f"{name} is used {mine[name]} times, on rank {first} {others[name]} times" for name in names[:NAMED]]
    return "; ".join(texts + [f"and {len(names) - NAMED} more"] * (len(names) > NAMED)) or "the order is another"
