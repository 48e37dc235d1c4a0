"""Replay of training steps: the passes of a step are recorded once, and later steps carry out the recorded program."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from types import MethodType
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

from ..arrays import Arena, library_of
from ..comm import Axis, Grid, Program, Recorder
from ..errors import Pmm3dError
from ..layout import Layout
from ..product import DistMatrix
from .functional import ACTIVATIONS
from .gradient_buffer import GradientBuffer
from .loss import cross_entropy, mae, mse
from .module import Module
from .operations import log_softmax, softmax
from .parallel import BackwardSync
from .parameter import Parameter
from .tape import Tape

logger = logging.getLogger("pmm3d.nn")
ORDINARY = 2
"""Steps with equal facts before one is recorded. The first step differs: nothing is prefetched, and buffers are new."""
LARGEST = 4
"""Largest number of recorded steps of a network. The one that was not used for longest is dropped."""
MANY = 12
"""Kinds of steps, after which the log says what differs."""
NO_AGREEMENT = -1.0
"""Value of `BackwardSync.proposals` until `step_agreement` sets it."""
TRIES = 8
"""Number of steps after a recording in which a step with equal facts is compared."""
CHECKED = 50
"""With PMM3D_DEBUG=1, each step whose number is a multiple of this one is compared with ordinary passes."""
FUNCTIONS = *ACTIVATIONS.values(), softmax, log_softmax
"""Functions that are recorded, as layers."""
LOSSES = mse, mae, cross_entropy
"""Losses that are recorded, also as `functools.partial` with further arguments."""
VALUES = {int, float, str, bool, tuple, Layout, MethodType}
"""Types of facts that are compared. Other facts must be the same objects."""
Batch = tuple[DistMatrix, DistMatrix]
Passes = Callable[[Sequence[Batch]], list[Any]]
"""passes(batches) runs the forward and backward passes, and returns the losses."""


class Recorded:
    """The passes of a step with equal facts.

    facts     objects on which the program depends
    seen      number of ordinary steps
    program   None: it is not recorded
    checked   whether the program gave the bits of ordinary passes on this rank
    trusted   whether it did so on all ranks
    repeats   whether it may be recorded once more, if not all ranks recorded in the same step
    problem   reason why the steps are not replayed, or ""
    """

    def __init__(self, facts: list[Any]):
        self.facts, self.seen, self.problem = facts, 0, ""
        self.checked, self.trusted, self.repeats = False, False, True
        self.program: Program | None = None
        self._batches, self._losses, self._noted = list[Batch](), list[Any](), list[Any]()
        self._after = list[State]()

    def record(self, network: Module, batches: Sequence[Batch], passes: Passes, arena: Arena) -> list[Any]:
        """Run the passes, and record them."""
        grid, parallel = network.grid, BackwardSync.of(network.grid)
        self._batches = [(_copy(x), _copy(y)) for x, y in batches]
        recorder, before = Recorder(grid.engine, grid.workspace, arena), parallel.passes
        try:
            with recorder.recording():
                self._losses = passes(self._batches)
        except BaseException:
            self.problem = "the step that was recorded ended with an error"
            raise
        self._after = _states(network._gradient_buffers())
        self._noted = parallel.last_passes(parallel.passes - before)
        if len(self._noted) < parallel.passes - before:
            recorder.refuse("a step has too many backward passes")
        self.problem = recorder.problem
        if not self.problem:
            self.program = recorder.program()
        return self._losses

    def replay(self, batches: Sequence[Batch]) -> list[Any]:
        """Carry out the program for other batches."""
        assert self.program is not None
        for given, own in zip(batches, self._batches):
            for matrix, copy in zip(given, own):
                copy.local[...] = matrix.local
                copy.labels_below = matrix.labels_below
        parallel = BackwardSync.of(batches[0][0].grid)
        parallel.gradients.wait_for_partials()
        try:
            self.program.run()
        except BaseException:  # collectives that are under way may still write to the arrays
            for _, buffer, _, _ in self._after:
                buffer.fail()
            self.forget()
            batches[0][0].grid.attached.pop(Arena, None)  # no other step may use its memory
            raise
        for _, buffer, layout, scales in self._after:
            buffer.layout, buffer.pending, buffer.is_open = layout, None, False
            buffer.scales |= scales
        for noted in self._noted:
            parallel.note_pass(*noted)
        parallel.passes += len(self._noted)
        return self._losses

    def forget(self, seen: int = 0) -> None:
        """Forget the program. A new one is compared before it is trusted."""
        self.program, self.trusted, self.checked, self.seen = None, False, False, seen

    def compare(self, network: Module, batches: Sequence[Batch], passes: Passes) -> list[Any]:
        """Run the program, then the passes as usual, and compare their bits. Return the losses of the usual passes."""
        assert self.program is not None
        parallel, workspace = BackwardSync.of(batches[0][0].grid), batches[0][0].grid.workspace
        batches = [(_copy(x), _copy(y)) for x, y in batches]  # an array of an earlier step may be in the arena
        digest, passed, random = parallel.digest, parallel.passes, network.random_state()
        own, buffers = _digests(self._after, self.replay(batches)), [(each.name, each.buffer) for each in self._after]
        parallel.digest, parallel.passes = digest, passed
        network.set_random_state(random)
        for _, buffer in buffers:
            parallel.gradients.forget(buffer)
        with workspace.apart(self.program.arena):
            losses = passes(batches)
        usual = _states(buffers)
        if usual != self._after:
            self.problem = "the layouts of gradients differ from step to step"
        elif differing := [name for name, digest in _digests(usual, losses).items() if digest != own[name]]:
            self.problem = f"a second step gave other bits: {', '.join(differing)}"
        self.checked = not self.problem
        return losses


class Replays:
    """The recorded steps of a network. `Replays.of(network)`.

    The third step with equal facts is recorded; the first step of a network has other facts, because its gradients have
    no memory yet. In the next one the program and the ordinary passes run, and their bits are compared on all ranks.
    From then on only the program runs. `BackwardSync.proposal` is 1 if this rank has recorded, or compared, the step
    that it just made. The agreement of the step adds these numbers: the sum is the number of ranks if all did.

    replayed   number of replayed steps
    problem    reason why the last step was not replayed, or ""
    """

    def __init__(self, grid: Grid, everyone: Axis):
        self._grid, self._everyone, self._all, self._tries = grid, everyone, list[Recorded](), 0
        self._now: Recorded | None = None
        self._replayed: Recorded | None = None
        self.replayed = self._steps = self._kinds = 0
        self.problem = ""

    @classmethod
    def of(cls, network: Module) -> Replays:
        known: Replays | None = vars(network).get("_replays")
        if known is None:
            vars(network)["_replays"] = known = cls(network.grid, network.parent_grid.everyone)
        return known

    def __deepcopy__(self, memo: object) -> Replays:
        """A copy of the network has recorded no steps."""
        return Replays(self._grid, self._everyone)

    def run(self, facts: list[Any] | str, network: Module, batches: Sequence[Batch], passes: Passes) -> list[Any]:
        """Run the passes of a step, ordinarily or replayed, and return the losses. Collective.

        facts: its facts, or a reason why the step cannot be replayed
        """
        parallel = BackwardSync.of(self._grid)
        self._now, self._replayed, recorded = None, None, None
        parallel.proposal, parallel.proposals = 0.0, NO_AGREEMENT
        self._steps += 1
        if isinstance(facts, str):
            self._tell(facts)
        else:
            recorded = self._with(facts)
            if recorded.program is not None and recorded.program.arena is not self._arena():
                recorded.forget()  # after an error of another step
        again = self._grid.debug and self._steps % CHECKED == 0
        if self._tries or again:
            if self._every(recorded is not None and recorded.program is not None and recorded.trusted == again):
                assert recorded is not None
                self._tries, losses = 0, recorded.compare(network, batches, passes)
                parallel.proposal, self._now = float(recorded.checked), recorded
                return losses
            self._tries = max(0, self._tries - 1)
        if recorded is None:
            return passes(batches)
        if recorded.trusted:
            self.replayed, self.problem, self._replayed = self.replayed + 1, "", recorded
            return recorded.replay(batches)
        recorded.seen += 1
        if recorded.seen <= ORDINARY or self._tries or recorded.problem:
            return passes(batches)
        self._now = recorded
        losses = recorded.record(network, batches, passes, self._arena() or self._arena(make=True))
        parallel.proposal = float(recorded.program is not None)
        return losses

    def agreed(self) -> None:
        """Conclude a step, after its agreement. Raises Pmm3dError, on every rank, if a replayed step is wrong."""
        recorded, self._now, proposals = self._now, None, BackwardSync.of(self._grid).proposals
        if proposals == NO_AGREEMENT:
            if recorded is not None:
                recorded.problem, recorded.program = "the agreement of the step is a function of your own", None
                self._tell(recorded.problem)
            return
        if recorded is None:
            if proposals and (other := self._replayed) is not None:  # the facts of another stage changed
                other.forget(ORDINARY)
            return
        if proposals < self._everyone.size and recorded.repeats and not (recorded.checked or recorded.problem):
            recorded.repeats, recorded.program = False, None
        elif proposals < self._everyone.size:
            wrong = recorded.trusted
            recorded.problem = recorded.problem or "another rank could not record the step, or got other bits"
            recorded.program, recorded.trusted = None, False
            self._tell(recorded.problem)
            if wrong:
                raise Pmm3dError(
                    f"a replayed step is wrong: {recorded.problem}. This step changed no weight, but up to "
                    f"{CHECKED - 1} steps before it may be wrong: go back to an earlier checkpoint. A forward method "
                    "does not do the same in each call, or uses what is no fact of the step: leave nn.replay out"
                )
        elif not recorded.checked:
            self._tries = TRIES
        elif not recorded.trusted:
            recorded.trusted, program = True, recorded.program
            self._grid.workspace.clear()
            if program is not None and self._everyone.index == 0:
                logger.info("training steps are replayed: %d instructions", len(program.instructions))

    def _arena(self, make: bool = False) -> Any:
        """The arena of all recorded steps of the grid, or None. Only programs keep it. make: a new one."""
        if not make:
            found = self._grid.attached.get(Arena)
            return None if found is None else found()
        arena = Arena(self._grid.workspace)
        self._grid.attached[Arena] = ref(arena)
        return arena

    def _every(self, mine: bool) -> bool:
        """Whether `mine` is true on all ranks. Collective."""
        with self._grid.ledger.phase("agreement"):
            total = self._everyone.all_reduce(np.array([float(mine)]), agreed=True).wait()
        return bool(total[0] == self._everyone.size)

    def _tell(self, problem: str) -> None:
        """Log why steps are not replayed, once for each reason in turn."""
        if problem != self.problem and self._everyone.index == 0 and self._grid.dry_run is None:
            logger.info("training steps are not replayed: %s", problem)
        self.problem = problem

    def _with(self, facts: list[Any]) -> Recorded:
        for place, each in enumerate(self._all):
            if len(each.facts) == len(facts) and all(
                [a is b or (type(a) in VALUES and type(a) is type(b) and a == b) for a, b in zip(each.facts, facts)]
            ):
                if place:
                    self._all.insert(0, self._all.pop(place))
                return each
        if self._all:
            self._kinds += 1
            self.problem = f"{_difference(self._all[0].facts, facts)} since an earlier step"
        if self._kinds == MANY:
            logger.log(
                logging.INFO if self._everyone.index == 0 else logging.DEBUG, "training steps differ: %s", self.problem
            )
        self._all = [each for each in self._all if not _stale(each.facts, facts)][: LARGEST - 1]
        self._all.insert(0, Recorded(facts))
        return self._all[0]


def _difference(before: Sequence[Any], now: Sequence[Any]) -> str:
    """Describe the first fact that differs."""
    if len(before) != len(now):
        return "the modules, or the number of micro-batches, changed"
    pairs = zip(before, now)
    one, other = next((pair for pair in pairs if not _same(*pair)), (None, None))
    return f"{one!r:.60} became {other!r:.60}"


def _same(one: Any, other: Any) -> bool:
    """Whether a fact is unchanged."""
    return one is other or (type(one) in VALUES and type(one) is type(other) and bool(one == other))


def _stale(before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Whether an array in the facts was replaced, so that a step with these facts does not come again."""
    arrays = ((a, b) for a, b in zip(before, now) if hasattr(a, "dtype") and hasattr(a, "shape"))
    return len(before) == len(now) and any(a is not b for a, b in arrays)


def replay(network: Module) -> Module:
    """Let `train_step` and `Trainer` replay a network with a `forward` of your own. Returns the network.

    Networks of the library's modules replay by themselves. Python code in a `forward`, or in a loss, of your own runs
    in the first steps only, and is not called again: what it prints, counts, or decides by values of tensors happens
    once. Call this if your code does the same in each call. Attributes of modules may change between steps: then the
    step is recorded again.

    Parameters
    ----------
    network : Module
        A network; all modules in it may be replayed, also with functions of your own, and with any loss.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> class Twice(nn.Module):
    ...     def __init__(self, grid):
    ...         self.grid, self.layer = grid, nn.Linear(grid, 4, 4)
    ...     def forward(self, x):
    ...         return self.layer(nn.relu(self.layer(x)))
    >>> with Grid(shape="ddp") as grid:
    ...     nn.replay(Twice(grid)).replays
    True
    """
    for _, module in network.named_modules():
        vars(module)["replays"] = True
    return network


def facts_of(network: Module, loss: Any, batches: Sequence[Batch], factor: float) -> list[Any] | str:
    """Return the facts on which a recorded step depends, or the reason why the step cannot be replayed."""
    tape, own = Tape.of(network.grid), vars(network).get("replays", False)
    if network.grid.dry_run is not None:
        return "it is a dry run"
    function, *given = (loss.func, *loss.args, *loss.keywords.items()) if isinstance(loss, partial) else (loss,)
    if function not in LOSSES and not own:
        return "the loss is a function of your own; see nn.replay"
    if tape.inspect is not None or not tape.is_plain:
        return "the tape packs or inspects arrays"
    if not batches[0][0].library.on_host:
        return "the arrays are on a device"
    facts = [factor, function, *map(_fixed, given), len(batches), *vars(tape.parallel.overlap).values()]
    for batch in batches:
        for matrix in batch:
            facts += matrix.grid, matrix.shape, matrix.layout, matrix.dtype, matrix.library.kind
    waiting, seen = list[Any]([network]), set[Module]()
    for part in waiting:
        if isinstance(part, Parameter):
            value, buffer = part._value, part.grad_buffer
            memory, learns = value._memory, part.node is not None
            facts += value, memory, getattr(memory, "data_ptr", int)(), learns  # torch's .data may be replaced
            facts += buffer, buffer.array, buffer.split_over, buffer.scattered
        elif isinstance(part, Module):
            kind = type(part)
            if not vars(kind).get("replays") and not vars(part).get("replays"):
                return f"{kind.__name__} is not recorded; see nn.replay"
            if part not in seen:
                seen.add(part)
                waiting += part._facts()
        elif isinstance(part, (list, tuple)):
            waiting += len(part), *part
        elif isinstance(part, dict):
            waiting += *part, *part.values()
        elif isinstance(part, DistMatrix):
            facts += part, part._memory
        elif callable(part) and part not in FUNCTIONS and not own:
            return f"{getattr(part, '__name__', part)} is not recorded; see nn.replay"
        else:
            facts.append(part)
    return facts


def _fixed(value: Any) -> Any:
    """Convert a sequence, which may change, to a value."""
    return tuple(map(_fixed, value)) if isinstance(value, (list, tuple)) or hasattr(value, "__array__") else value


def _copy(matrix: DistMatrix) -> DistMatrix:
    copy = DistMatrix(matrix.grid, matrix.library.copy(matrix.local), matrix.shape, matrix.layout)
    copy.labels_below = matrix.labels_below
    return copy


class State(NamedTuple):
    """A gradient after the passes of a step: name of its parameter, buffer, layout, and scales of the losses."""

    name: str
    buffer: GradientBuffer
    layout: Layout | None
    scales: frozenset[float]


def _states(named: Sequence[tuple[str, GradientBuffer]]) -> list[State]:
    """Wait for the sums of gradients."""
    for _, buffer in named:
        buffer.wait()
    return [State(name, buffer, buffer.layout, frozenset(buffer.scales)) for name, buffer in named]


def _digests(states: Sequence[State], losses: Sequence[Any]) -> dict[str, bytes]:
    """Name -> digest of the bits of each gradient and loss."""
    arrays = {f"the loss of micro-batch {number}": loss.shard for number, loss in enumerate(losses)}
    arrays |= {f"the gradient of {each.name}": each.buffer.local for each in states if each.layout is not None}
    return {
        name: blake2b(library_of(each).to_numpy(each).tobytes(), digest_size=16).digest()
        for name, each in arrays.items()
    }
