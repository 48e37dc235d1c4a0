"""Start and end of a training run as a batch job."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from ...errors import CheckpointError, Pmm3dError, printable
from ...model.environment import job_restarts
from ...text import counted, names_in_words
from .signals import Signals

if TYPE_CHECKING:
    from .config import Config
    from .loop import Trainer


def train_job(
    config: Config,
    comm: MPI.Intracomm,
    resume: str,
    trace: Path | None,
    accept: frozenset[str] = frozenset(),
    again: str = "",
    starting: AbstractContextManager[object] = nullcontext(),
) -> bool:
    """Train by a Config on the ranks of comm. Return False if a signal ended the run early.

    resume: "auto", "never" or the path of a checkpoint; trace: path of a Chrome trace, or None; accept: as in
    `TrainState.resume`, also for initial weights and validation; again: the command that resumes the run, for its
    summary; starting: context in which the grid is planned, the data opened and the network made.
    """
    with Signals() as signals:
        from .build import trainer  # imported late, because signals must be collected during the long import

        with ExitStack() as stack:
            with starting:
                run = stack.enter_context(trainer(config, comm, signals, accept, trace=bool(trace)))
            stack.enter_context(run.owning())
            finished = _train_on(run, config, resume, trace, accept, again)
        if finished:
            signals.retire()
        return finished


def _train_on(
    run: Trainer, config: Config, resume: str, trace: Path | None, accept: frozenset[str], again: str
) -> bool:
    from ..pipeline import simulated_events
    from .log import attempt

    resumed = resume != "never" and run.resume(None if resume == "auto" else Path(resume), accept)
    if not resumed:
        _check_new(run, resume)
    lines = (
        []
        if run.auto is None
        else [run.auto.line() + (f". The run continues on this grid from step {run.step}" if run.step else "")]
    )
    lines += _end_schedule_with_run(run)
    if weights := config.training.weights:
        lines.append(
            f"training.weights = {weights}: "
            + (
                f"not used, because the run continues from step {run.step}"
                if run.step
                else _load_weights(run, Path(weights), accept)
            )
        )
    if run.log is not None:
        for line in (*lines, *_without_effect(run, config), *_draws(run), _targets(run, config), run.describe()):
            run.log.say(printable(line))
    finished = run.run()
    with run.grid.collective_call("training", always=True):  # without an error, the job would be requeued for ever
        if not finished and not run.counts["steps"] and job_restarts():
            raise Pmm3dError(
                f"restart {job_restarts()} of this job received the signal to end before its first step: "
                "the time limit is too short for start-up and training. Raise it, or send the signal "
                "later (sbatch --signal). Nothing is lost"
            )
    if run.grid.rank == 0:
        attempt("the summary could not be printed", lambda: print(printable(run.summary(again)), flush=True))
    if trace:
        simulated = simulated_events(run.grid)
        attempt(f"the trace {trace} could not be written", lambda: run.grid.write_trace(trace, simulated))
    return finished


def _check_new(run: Trainer, resume: str) -> None:
    """Raises Pmm3dError, on every rank, if the run must not begin at step 0: it would overwrite checkpoints, or a
    requeued job would start from scratch each time."""
    if run.checkpoints is None:
        return
    folder, latest = run.checkpoints.folder, run.checkpoints.latest()
    retired: list[str] = []
    if run.grid.rank == 0:
        retired = sorted(path.name for path in folder.glob("retired-step-*"))
    retired = run.grid.comm.bcast(retired)
    with run.grid.collective_call("training", always=True):
        if resume == "never" and latest:
            raise Pmm3dError(
                f"an earlier run wrote {latest}: continue it with --resume auto, or choose another training.folder"
            )
        if resume == "auto" and job_restarts():
            raise CheckpointError(
                f"this job was requeued (restart {job_restarts()}) and there is no checkpoint in "
                f"{folder}: the previous start ended before it wrote one, or training.folder has "
                "changed. Submit a new job to start from scratch. For more frequent checkpoints, "
                "lower training.checkpoint_every"
            )
        if resume == "auto" and retired:
            raise CheckpointError(
                f"{folder} contains only retired checkpoints: {names_in_words(retired)}. Continue "
                "from one with --resume PATH, or choose another training.folder"
            )


def _without_effect(run: Trainer, config: Config) -> list[str]:
    """Return a line for each codec of messages that this grid does not send."""
    shape, memory = run.grid.shape, config.memory
    return [
        f"memory.{key} has no effect on this grid: {reason}"
        for key, codec, ranks, reason in (
            ("gradients", memory.gradients, shape.size // (shape.x * shape.y * shape.z * shape.stages), "data is 1"),
            ("weights", memory.weights, shape.z, "z is 1"),
            ("stages", memory.stages, shape.stages, "it has no pipeline"),
        )
        if codec and ranks == 1
    ]


def _draws(run: Trainer) -> list[str]:
    """Return a line about the rows of an epoch of a mixture."""
    draws = run.loader.draws
    return [f"an epoch draws {names_in_words(f'{count} rows of {name}' for name, count in draws)}"] if draws else []


def _targets(run: Trainer, config: Config) -> str:
    """Return a line about the targets."""
    from .samples import SAMPLES

    samples, section = run.settings[SAMPLES], config.data
    if section.sequence is not None:
        return f"tokens {section.inputs!r}: a vocabulary of {samples['outputs']}, sequences of {section.sequence}"
    scaling = run.loader.scaling
    scaled = ". Samples are standardised" if scaling else ""
    if run.loader.data.classes is None:
        names = f" ({names_in_words(map(repr, samples['target_names']))})" if samples["target_names"] else ""
        if scaling and scaling.targets:
            scaled = ". Samples and targets are standardised, also in the loss"
        return (
            f"targets {section.targets!r}: {samples['outputs']} values a row{names}, by the loss "
            f"{samples['loss']}{scaled}"
        )
    classes = f"targets {config.data.targets!r}: labels of {counted(samples['outputs'], 'class')}"
    weights = samples["class_weights"]
    weighed = f". Weights of the classes are {min(weights):.3g} to {max(weights):.3g}" if weights else ""
    if samples["class_names"]:
        return f"{classes} ({names_in_words(samples['class_names'])}){scaled}{weighed}"
    return classes + (
        weighed
        if config.training.loss != "auto" or config.data.classes or weighed
        else ', because they are integers; if they are values, set training.loss = "mse"'
    )


def _end_schedule_with_run(run: Trainer) -> list[str]:
    """Move the end of the schedule to the end of the run, because epochs of other data have another number of steps.
    Return a line if the learning rate changes."""
    schedule, optimizer = run.state.schedule, run.state.optimizer
    if schedule is None or not run.step or not run.steps_left():
        return []
    before, end = optimizer.lr, run.step + run.steps_left()
    schedule.end_at(end)
    return (
        []
        if optimizer.lr == before
        else [
            f"the schedule ends with the run, at step {end}: the learning rate of "
            f"step {run.step + 1} is {optimizer.lr:.6g}"
        ]
    )


def _load_weights(run: Trainer, path: Path, accept: frozenset[str]) -> str:
    """Load initial weights, and the scales of the samples that they were trained with. Return a line for the log."""
    from ...io.scaling import Scaling
    from ..exchange import read_weights
    from .log import AVERAGED

    state, facts = run.state, run.loader.data.facts
    checkpoint, averaged = read_weights(state.network, path, state.optimizer, accept=accept, facts=facts)
    loaded = "loaded" + AVERAGED * averaged
    with run.grid.collective_call("training", str(path), always=True):
        scales = _scales_in(checkpoint) if run.grid.rank == 0 else None
    known, raw, targets = run.grid.comm.bcast(scales)
    scaling, here = Scaling.of(known), run.loader.scaling
    with run.grid.collective_call("training", str(path), always=True):
        if scaling is not None and here is None:
            raise Pmm3dError(
                f"training.weights = {path}: a network with standardised samples: set data.standardize = true"
            )
        if raw and here is not None:
            raise Pmm3dError(
                f"training.weights = {path}: a network for samples in the units of the data. If it was exported from a "
                "run with standardised samples, name this run or its checkpoint; else set data.standardize = false"
            )
    if scaling is None or here is None:
        return loaded if here is None else f"{loaded}; the scales of the samples are those of this run's rows"
    fits = scaling.targets is not None and here.targets is not None
    fits = fits and targets in (None, run.loader.data.facts.get("targets", targets))
    scaling = Scaling(scaling.inputs, scaling.targets if fits else here.targets)
    for loader in (run.loader, *([] if run.validation is None else [run.validation])):
        loader.standardize(scaling)
    return f"{loaded}, with the scales of its samples"


def _scales_in(path: Path) -> tuple[dict[str, Any] | None, bool, list[str] | None]:
    """Return the scales in a checkpoint or in an exported file, or None; whether its samples are known to have the
    units of the data; and the names of its targets, or None."""
    from ...io.safetensors import contents_of
    from ...io.shards import CHECKPOINT_FILE, read_master
    from ..exchange import ENDING, OWN
    from ..facts import facts_in
    from .export import SCALED

    if (path / CHECKPOINT_FILE).exists():
        meta = read_master(path)[1]
        loader = (meta.get("loader") if isinstance(meta, dict) else None) or {}
        scales, raw = loader.get("scaling"), bool(loader) and "scaling" not in loader
    else:
        meta = json.loads(contents_of(path)[1].get(OWN, "{}")) if path.suffix == ENDING else {}
        scales, raw = meta.get(SCALED), SCALED in meta and meta[SCALED] is None
    return scales, raw, facts_in(meta).get("targets")
