"""Replay of training steps: the passes of a step are recorded once, and later steps carry out the recorded program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Arena, library_of
from ..comm import Argument, Axis, Grid, Instruction, Look, Recorder, Wait
from ..errors import Pmm3dError
from ..layout import Layout
from ..product import DistMatrix
from .elementary import abs, exp, log, sqrt
from .functional import ACTIVATIONS
from .gradient_buffer import GradientBuffer
from .loss import LOSSES
from .module import Module
from .operations import log_softmax, softmax
from .parallel import BackwardSync
from .parameter import Parameter
from .replays import Recording, Recordings, copy_of, logger
from .tape import Tape

ORDINARY = 2
"""Steps with equal facts before one is recorded. The first step differs: nothing is prefetched, and buffers are new."""
NO_AGREEMENT = -1.0
"""Value of `BackwardSync.proposals` until `step_agreement` sets it."""
TRIES = 8
"""Number of steps after a recording in which a step with equal facts is compared."""
CHECKED = 50
"""With PMM3D_DEBUG=1, each step whose number is a multiple of this one is compared with ordinary passes."""
FUNCTIONS = *ACTIVATIONS.values(), exp, log, sqrt, abs, softmax, log_softmax
"""Functions that are recorded, as layers."""
Batch = tuple[DistMatrix, DistMatrix]
RunPasses = Callable[[Sequence[Batch]], list[Any]]
"""passes(batches) runs the forward and backward passes, and returns the losses."""


class RecordedStep(Recording):
    """The passes of a step with equal facts.

    checked   whether the program gave the bits of ordinary passes on this rank
    repeats   whether it may be recorded once more, if not all ranks recorded in the same step
    scale     factor of the losses, an argument of the program
    number    number of the program, equal on all ranks; 0 until it is trusted
    """

    def __init__(self, facts: list[Any], scale: Argument):
        super().__init__(facts)
        self.scale, self.number, self.checked, self.repeats = scale, 0, False, True
        self._batches, self._losses, self._noted = list[Batch](), list[Any](), list[Any]()
        self._overflows = False
        self._after, self._arrays = list[State](), list[Any]()

    def record(self, network: Module, batches: Sequence[Batch], passes: RunPasses, arena: Arena) -> list[Any]:
        """Run the passes, and record them."""
        grid, parallel = network.grid, BackwardSync.of(network.grid)
        copies = self.arguments([each for batch in batches for each in batch])
        self._batches = [*zip(copies[::2], copies[1::2])]
        recorder, before = Recorder(grid.engine, grid.workspace, arena, names_of(network)), parallel.passes
        pauses = parallel.weights.pauses
        try:
            with recorder.recording():
                self._losses = passes(self._batches)
        except BaseException:
            self.problem = "the step that was recorded ended with an error"
            raise
        _note_checks(batches, self._batches)
        self._after = _states(network._gradient_buffers())
        self._arrays = [each.buffer.array for each in self._after]
        self._overflows = float(self.scale) != 1 or any(
            each.buffer.precision.compute == "float16" for each in self._after
        )
        self._noted = parallel.last_passes(parallel.passes - before)
        if len(self._noted) < parallel.passes - before:
            recorder.refuse("a step has too many backward passes")
        self.keep(recorder, grid, pauses)
        return self._losses

    def replay(self, batches: Sequence[Batch], look: Look | None = None) -> list[Any]:
        """Carry out the program for other batches. look: see `Program.run`."""
        grid = batches[0][0].grid
        parallel = BackwardSync.of(grid)
        self.fill([each for batch in batches for each in batch])
        parallel.gradients.wait_for_partials()
        try:
            if self._overflows:  # as in ordinary passes, the values are checked later
                with np.errstate(over="ignore", invalid="ignore"):
                    self.run(grid, look)
            else:
                self.run(grid, look)
        except BaseException:
            for _, buffer, _, _ in self._after:
                buffer.fail()
            raise
        _note_checks(batches, self._batches)
        scale = float(self.scale)
        for (_, buffer, layout, is_scaled), array in zip(self._after, self._arrays):
            buffer.array, buffer.layout, buffer.pending, buffer.is_open = array, layout, None, False
            if is_scaled:
                buffer.scales.add(scale)
        for uses, recorded_scale, problem in self._noted:
            parallel.note_pass(uses, None if recorded_scale is None else scale, problem)
        parallel.passes += len(self._noted)
        parallel.weights.pause()
        return self._losses

    def forget(self, seen: int = 0) -> None:
        """Forget the program. A new one is compared before it is trusted."""
        super().forget(seen)
        self.checked = False

    def compare(self, network: Module, batches: Sequence[Batch], passes: RunPasses) -> list[Any]:
        """Run the program, then the passes as usual, and compare their bits. Return the losses of the usual passes.

        With debug, the passes are recorded once more, so that the first operation that differs is named."""
        assert self.program is not None
        grid = batches[0][0].grid
        parallel, arena, debug = BackwardSync.of(grid), self.program.arena, grid.debug
        given, batches = (
            batches,
            [(copy_of(x), copy_of(y)) for x, y in batches],
        )  # an earlier step's may be in the arena
        digest, passed, random = parallel.digest, parallel.passes, network.random_state()
        feedback = [(each, each.copy()) for _, buffer, *_ in self._after if (each := buffer.feedback)]
        replayed, usually = Trace(), Trace()
        own = _digests(self._after, self.replay(batches, replayed.note if debug else None))
        buffers = [(each.name, each.buffer) for each in self._after]
        parallel.digest, parallel.passes = digest, passed
        network.set_random_state(random)
        for _, buffer in buffers:
            parallel.gradients.forget(buffer)
        for each, before in feedback:
            each.restore(before)
        recorder = Recorder(grid.engine, grid.workspace, arena, names_of(network), usually.note)
        with recorder.recording() if debug else grid.workspace.apart(arena):
            losses = passes(batches)
        _note_checks(given, batches)
        usual = _states(buffers)
        if usual != self._after:
            self.problem = "the layouts of gradients differ from step to step"
        elif differing := [name for name, digest in _digests(usual, losses).items() if digest != own[name]]:
            self.problem = f"a second step gave other bits: {', '.join(differing)}{replayed.difference(usually)}"
        self.checked = not self.problem
        return losses


class Trace:
    """The operations of a step in their order, with digests of the arrays that they read and wrote."""

    def __init__(self) -> None:
        self._noted = list[tuple[str, bytes]]()

    def note(self, instruction: Instruction) -> None:
        """Note an instruction that was carried out."""
        own, of = blake2b(digest_size=16), instruction.start if isinstance(instruction, Wait) else instruction
        for each in (*of.reads, *of.writes):
            own.update(library_of(each).to_numpy(each).tobytes())
        self._noted.append((str(instruction), own.digest()))

    def difference(self, usual: Trace) -> str:
        """Name the first operation with other results than in the usual passes, as the end of a sentence; "" if there
        is none."""
        for number, ((name, own), (other, others)) in enumerate(zip(self._noted, usual._noted)):
            if name != other:
                return f". Operation {number} is {name} in the program, and {other} in the second step"
            if own != others:
                return f". The first operation whose arrays differ is operation {number}, {name}"
        return ""


def hooks_of(network: Module) -> list[Callable[[bool], None]]:
    """`after_step` of the modules that define it."""
    modules = [module for _, module in network.named_modules()]
    return [each.after_step for each in modules if type(each).after_step is not Module.after_step]


class Replays(Recordings[RecordedStep]):
    """The recorded steps of a network. `Replays.of(network)`.

    The third step with equal facts is recorded; the first step of a network has other facts, because its gradients have
    no memory yet. In the next one the program and the ordinary passes run, and their bits are compared on all ranks.
    From then on only the program runs. `BackwardSync.proposal` is 1 if this rank has recorded, or compared, the step
    that it just made. The agreement of the step adds these numbers: the sum is the number of ranks if all did. It also
    compares the numbers of the replayed programs (`BackwardSync.program`).

    scale   factor of the losses of the next step, an argument of all programs
    hooks   `hooks_of` the network
    """

    what = "training steps"

    def __init__(self, grid: Grid, everyone: Axis):
        super().__init__(grid, everyone)
        self.scale, self._programs, self._tries = Argument(1.0), 0, 0
        self.hooks: list[Callable[[bool], None]] = []
        self._now: RecordedStep | None = None
        self._replayed: RecordedStep | None = None

    def _new(self, facts: list[Any]) -> RecordedStep:
        return RecordedStep(facts, self.scale)

    def run(self, facts: list[Any] | str, network: Module, batches: Sequence[Batch], passes: RunPasses) -> list[Any]:
        """Run the passes of a step, ordinarily or replayed, and return the losses. Collective.

        facts: its facts, or a reason why the step cannot be replayed
        """
        parallel = BackwardSync.of(self._grid)
        self._now, self._replayed, recorded = None, None, None
        parallel.proposal, parallel.proposals = 0.0, NO_AGREEMENT
        parallel.program, parallel.programs_differ = 0, False
        self._steps += 1
        if isinstance(facts, str):
            self._tell(facts)
        else:
            recorded = self._with(facts)
        if recorded is None or not recorded.trusted:
            self.hooks = hooks_of(network)
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
            parallel.program = recorded.number
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
        parallel = BackwardSync.of(self._grid)
        recorded, self._now, proposals = self._now, None, parallel.proposals
        if parallel.programs_differ:
            self._part()
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
            self._programs += 1
            recorded.number = self._programs
            self._trust(recorded)

    def _part(self) -> None:
        """Say on every rank which ranks did not replay the program of the others, and forget all programs. Collective
        over the grid."""
        own = self._replayed
        because = f", because {self.problem}" if self.problem else ""
        mine = f"ran it as usual{because}" if own is None else f"replayed program {own.number}"
        everyone = self._grid.comm.allgather(mine)
        common = max(everyone, key=lambda did: (everyone.count(did), did.startswith("replayed")))
        ranks = self._grid.everyone.ranks
        apart = [f"rank {rank} {did}" for rank, did in zip(ranks, everyone) if did != common]
        logger.warning(
            "step %d was not the same program on all ranks: %s; the others %s. Change attributes of modules, and what "
            "learns, on all ranks alike. The step is recorded again",
            self._steps,
            "; ".join(apart),
            common,
        )
        for place, each in enumerate(self._all):
            each.forget(int(place == 0))


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
    """Return the facts on which a recorded step depends, or the reason why the step cannot be replayed.

    factor: of the losses. Whether it is 1 is a fact, because a scaled loss cannot be 16-bit. Its value is none."""
    tape, own = Tape.of(network.grid), vars(network).get("replays", False)
    if network.grid.dry_run is not None:
        return "it is a dry run"
    function, *given = (loss.func, *loss.args, *loss.keywords.items()) if isinstance(loss, partial) else (loss,)
    if function not in LOSSES and not own:
        return "the loss is a function of your own; see nn.replay"
    if tape.inspect is not None or not tape.is_plain:
        traced = network.grid.workspace.trace is not None
        return "the memory of the step is traced" if traced else "the tape packs or inspects arrays"
    facts = [factor != 1, function, *map(_fixed, given), len(batches), *vars(tape.parallel.overlap).values()]
    facts += tape.parallel.compression, tape.forms, tape.pack, tape.unpack, *tape.facts
    if not (library := batches[0][0].library).on_host:
        here = library.current_stream()
        facts.append((here.device, here.key))  # the order of a stream keeps kernels that share memory apart
    for batch in batches:
        facts += of_matrices(batch)
    walked = _of_network(network, own, gradients=True)
    return walked if isinstance(walked, str) else facts + walked


def facts_of_pass(network: Module) -> list[Any] | str:
    """Return the facts of a network on which a recorded forward pass depends, or the reason why the pass cannot be
    replayed. Inputs, and kept blocks of weights (`Weights.blocks`), are further facts."""
    tape, own = Tape.of(network.grid), vars(network).get("replays", False)
    if network.grid.dry_run is not None:
        return "it is a dry run"
    if tape.inspect is not None or tape.recording:
        return "operations are recorded for a backward pass, or layers are inspected"
    walked = _of_network(network, own, gradients=False)
    own_facts = *vars(tape.parallel.overlap).values(), tape.parallel.compression
    return walked if isinstance(walked, str) else [*own_facts, *walked]


def of_matrices(matrices: Sequence[DistMatrix]) -> list[Any]:
    """Facts of the arguments of a program."""
    return [fact for each in matrices for fact in (each.grid, each.shape, each.layout, each.dtype, each.library.kind)]


def _of_network(network: Module, own: bool, gradients: bool) -> list[Any] | str:
    """Facts of the parameters and attributes, or the reason why a module is not recorded. own: whether functions of
    the user are recorded; gradients: whether the memory of gradients is a fact."""
    facts, waiting, seen = list[Any](), list[Any]([network]), set[Module]()
    for part in waiting:
        if isinstance(part, Parameter):
            value, buffer = part._value, part.grad_buffer
            memory = value._memory
            facts += part, value, memory, getattr(memory, "data_ptr", int)()  # torch's .data may be replaced
            if gradients:
                facts += part.node is not None, buffer, buffer.array, buffer.split_over, buffer.scattered
                facts.append(getattr(buffer.feedback, "error", None))
        elif isinstance(part, Module):
            kind = type(part)
            if not vars(kind).get("replays") and not vars(part).get("replays"):
                return part.varies or f"{kind.__name__} is not recorded; see nn.replay"
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


def names_of(network: Module) -> dict[Module, str]:
    """Names of the layers, for the instructions of a program."""
    return {module: name for name, module in network.named_modules() if name}


def _note_checks(batches: Sequence[Batch], copies: Sequence[Batch]) -> None:
    """Note that labels were checked, so that they are checked once on a device."""
    for given, own in zip(batches, copies):
        for matrix, copy in zip(given, own):
            matrix.labels_below = copy.labels_below


class State(NamedTuple):
    """A gradient after the passes of a step: name of its parameter, buffer, layout, and whether it has contributions of
    losses with a known scale."""

    name: str
    buffer: GradientBuffer
    layout: Layout | None
    is_scaled: bool


def _states(named: Sequence[tuple[str, GradientBuffer]]) -> list[State]:
    """Wait for the sums of gradients."""
    for _, buffer in named:
        buffer.wait()
    return [State(name, buffer, buffer.layout, bool(buffer.scales)) for name, buffer in named]


def _digests(states: Sequence[State], losses: Sequence[Any]) -> dict[str, bytes]:
    """Name -> digest of the bits of each gradient and loss."""
    arrays = {f"the loss of micro-batch {number}": loss.shard for number, loss in enumerate(losses)}
    arrays |= {f"the gradient of {each.name}": each.buffer.local for each in states if each.layout is not None}
    return {name: digest_of(each) for name, each in arrays.items()}


def digest_of(array: Any) -> bytes:
    """Digest of the bits of an array."""
    return blake2b(library_of(array).to_numpy(array).tobytes(), digest_size=16).digest()
