"""Replay of forward passes without a backward pass: evaluations, predictions, and generation of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakMethod

from ..arrays import Arena
from ..comm import Axis, Grid, Recorder
from ..errors import Pmm3dError
from ..product import DistMatrix
from . import recorded_steps
from .module import Module
from .parallel import BackwardSync
from .parameter import Parameter
from .recorded_steps import digest_of, facts_of_pass, names_of, of_matrices
from .replays import Recording, Recordings
from .tensor import Tensor

VOTES = 32
"""Number of passes in which the ranks vote, until they agree that nothing is left to record."""
KEPT = 8
"""Ordinary passes before one is recorded that uses kept blocks of weights: its program ends with the evaluation."""
Forward = Callable[..., Tensor]


class RecordedPass(Recording):
    """A forward pass with equal facts.

    last   number of the last pass with these facts
    kept   whether it uses blocks of weights that were gathered by an earlier pass
    """

    def __init__(self, facts: list[Any]):
        super().__init__(facts)
        self.last, self.kept = 0, False
        self._out: DistMatrix | None = None

    def record(
        self, forward: Forward, inputs: Sequence[DistMatrix], arena: Arena, names: Mapping[Module, str]
    ) -> Tensor:
        """Run the pass, and record it. Returns a copy of its result, because a replay writes to the result itself."""
        grid, weights = inputs[0].grid, BackwardSync.of(inputs[0].grid).weights
        recorder, pauses = Recorder(grid.engine, grid.workspace, arena, names), weights.pauses
        try:
            with recorder.recording(), weights.apart():
                out = forward(*self.arguments(inputs))
                made = out.value if isinstance(out, Tensor) and out.tiled is None else None
        except BaseException:
            self.problem = "the pass that was recorded ended with an error"
            raise
        self.keep(recorder, grid, pauses, "the network returns several tensors, or logits by tiles" * (made is None))
        if made is None:
            return out
        self._out = made
        return _copied(made)

    def replay(self, inputs: Sequence[DistMatrix]) -> Tensor:
        """Carry out the program for other inputs. Returns a copy of its result."""
        assert self._out is not None
        self.fill(inputs)
        self.run(inputs[0].grid)
        return _copied(self._out)

    def forget(self, seen: int = 0) -> None:
        super().forget(seen)
        self._out = None

    def compare(self, forward: Forward, inputs: Sequence[DistMatrix], begin: Callable[[], None]) -> Tensor:
        """Run the program, then the pass as usual, and compare their bits. Return the result of the usual pass."""
        begin()
        own = self.replay(inputs)
        begin()
        out = forward(*inputs)
        if (own.shape, own.layout) != (out.shape, out.layout):
            self.problem = f"a second pass gave {out.shape} in {out.layout}, not {own.shape} in {own.layout}"
        elif digest_of(own.shard) != digest_of(out.shard):
            self.problem = "a second pass gave other bits"
        return out


class Passes(Recordings[RecordedPass]):
    """The recorded forward passes of a network. `Passes.of(network)`.

    The first two passes with equal facts run as usual, and the third is recorded. In the next one the program and the
    ordinary pass run, and their bits are compared on all ranks. From then on only the program runs.

    No agreement follows a pass, so the ranks vote before a pass: an all-reduce of three numbers. They record, or
    compare, if all of them can. `_votes` is equal on all ranks: it changes only by the results of votes, and by calls
    of `vote_again`, which all ranks make. So all ranks vote in the same passes, even if their facts differ. The votes
    end when nothing is left to record.
    """

    what = "forward passes"

    def __init__(self, grid: Grid, everyone: Axis):
        super().__init__(grid, everyone)
        self._votes, self._ended, self._since, self._dropped = VOTES, 0, 0, False

    def _new(self, facts: list[Any]) -> RecordedPass:
        return RecordedPass(facts)

    def output(self, network: Module, x: DistMatrix) -> Tensor:
        """Output of a network for a batch, ordinarily or replayed. Collective. Passes of a `Pipeline` with several
        ranks along "pipe" are not replayed, because they overlap."""
        if network.parent_grid is not network.grid:
            self._tell("passes of a pipeline overlap")
        elif isinstance(x, DistMatrix):
            return self.run(facts_of_pass(network), network, network, [x])
        return network(x)

    def run(
        self,
        facts: list[Any] | str,
        network: Module,
        forward: Forward,
        inputs: Sequence[DistMatrix],
        begin: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Result of forward(*inputs), ordinarily or replayed. Collective. Nobody writes to the result later.

        facts: those of the network and of the state that `forward` reads, or a reason why the pass cannot be replayed;
        begin: is called before each run of the pass.
        """
        self._steps += 1
        if not inputs[0].library.on_host:
            facts = "the arrays are on a device"
        weights = BackwardSync.of(self._grid).weights
        parameters = [each for each in facts if isinstance(each, Parameter)]
        blocks = weights.blocks(parameters)
        kind = self._of(facts, blocks, inputs)
        action = self._agreed(kind, waits=blocks is None)
        if kind is not None and action == "record":
            begin()
            out = kind.record(forward, inputs, self._arena() or self._arena(make=True), names_of(network))
            if any(one is not other for one, other in zip(blocks or (), weights.blocks(parameters) or ())):
                kind.problem = "a pass gathers weights, and keeps them"
            self._conclude(kind, trusted=False)
            return out
        if kind is not None and action == "compare":
            wrong, random = kind.trusted, network.random_state()

            def again() -> None:
                network.set_random_state(random)
                begin()

            out = kind.compare(forward, inputs, again)
            self._conclude(kind, trusted=True)
            if kind.problem and wrong:
                raise Pmm3dError(
                    f"a replayed forward pass is wrong: {kind.problem}. Up to {recorded_steps.CHECKED - 1} passes "
                    "before it may be wrong. If there is a forward method of your own, it does not do the same in each "
                    "call, or uses what is no fact of the pass: leave nn.replay out"
                )
            return out
        begin()
        if kind is not None and kind.trusted:
            self.replayed, self.problem = self.replayed + 1, ""
            return kind.replay(inputs)
        if kind is not None:
            kind.seen += 1
        with weights.apart():
            return forward(*inputs)

    @property
    def open(self) -> bool:
        """Whether passes with equal facts came several times, lately, and are not replayed: in this evaluation or in
        the one before."""
        return self._dropped or any(
            [each.seen > 1 and each.last > self._since and not each.trusted and not each.problem for each in self._all]
        )

    def conclude(self, are_open: float) -> None:
        """End an evaluation. are_open: the sum of `open` over all ranks."""
        self._since, self._ended, self._dropped = self._ended, self._steps, False
        if are_open:
            self.vote_again()

    def vote_again(self) -> None:
        """Let the ranks vote in the next passes, which may be of a new kind. All ranks call it before the same pass."""
        self._votes = VOTES

    def drop_kept(self) -> None:
        """Forget the programs that use kept weights, at the end of `unchanged` on all ranks."""
        self._all = [each for each in self._all if not each.kept]
        self._dropped = True

    def _of(
        self, facts: list[Any] | str, blocks: list[Any] | None, inputs: Sequence[DistMatrix]
    ) -> RecordedPass | None:
        """The kind of a pass; None if it cannot be recorded, or if it may gather weights that later passes keep."""
        if isinstance(facts, str):
            self._tell(facts)
            return None
        if blocks is None:
            return None
        kind = self._with([*blocks, *of_matrices(inputs), *facts])
        if not kind.last and any(each is not None for each in blocks):
            kind.kept = True
            after, drop = BackwardSync.of(self._grid).weights.after, WeakMethod(self.drop_kept)
            if drop not in after:
                after.append(drop)
        kind.last = self._steps
        return kind

    def _agreed(self, kind: RecordedPass | None, waits: bool) -> str:
        """Action of all ranks in this pass: "record", "compare" or "". waits: whether a later pass may be recorded."""
        again = self._grid.debug and self._steps % recorded_steps.CHECKED == 0
        if again and self._every(kind is not None and kind.trusted):
            return "compare"
        if not self._votes or self._grid.dry_run is not None:
            return ""
        new = kind is not None and not kind.problem and not kind.trusted
        can_compare = new and kind is not None and kind.program is not None
        can_record = (
            new
            and kind is not None
            and not can_compare
            and kind.seen >= max(recorded_steps.ORDINARY, KEPT if kind.kept else 0)
        )
        records, compares, still = self._totals(can_record, can_compare, new or waits or self.open)
        self._votes = self._votes - 1 if still else 0
        if kind is not None and kind.trusted and records:
            kind.forget(recorded_steps.ORDINARY)
        everyone = self._everyone.size
        return "record" if records == everyone else "compare" if compares == everyone else ""

    def _conclude(self, kind: RecordedPass, trusted: bool) -> None:
        """Conclude a pass that all ranks recorded (trusted: compared). Collective."""
        if self._every(kind.program is not None and not kind.problem):
            if trusted and not kind.trusted:
                self._trust(kind)
            return
        problem = kind.problem or "another rank could not record the pass, or got other bits"
        kind.forget()
        kind.problem = problem
        self._tell(problem)


def _copied(result: DistMatrix) -> Tensor:
    """Copy of the result of a program, in work memory."""
    local = result.grid.workspace.array(tuple(result.local.shape), result.dtype, result.library)
    local[...] = result.local
    return Tensor(DistMatrix(result.grid, local, result.shape, result.layout))
