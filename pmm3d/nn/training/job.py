"""A training run as a job of a batch system: what it resumes from, what it refuses, how it ends."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mpi4py import MPI

from ...errors import CheckpointError, Pmm3dError, printable
from ...model.environment import job_restarts
from .best_effort import attempt
from .signals import Signals

if TYPE_CHECKING:
    from .config import Config
    from .trainer import Trainer


def train_job(config: Config, comm: MPI.Intracomm, resume: str, trace: Path | None,
              accept: frozenset[str] = frozenset(), again: str = "") -> bool:
    """Train as a Config says, on the ranks of comm; False if a signal ended it before its end.

    resume   "auto", "never" or the path of a checkpoint;   accept   "network", "data": what may be another one than
             the checkpoint's;   trace   where to write a Chrome trace, or None
    again    the command that resumes the run, for the summary of one that a signal ended
    """
    with Signals() as signals:
        from .build import trainer  # signals count from before the long imports on

        with trainer(config, comm, signals, trace=bool(trace)) as run, run.owning():
            finished = _train_on(run, config, resume, trace, accept, again)
        if finished:
            signals.retire()
        return finished


def _train_on(run: Trainer, config: Config, resume: str, trace: Path | None, accept: frozenset[str],
              again: str) -> bool:
    if resume == "never":
        _refuse_to_overwrite(run)
    elif resume != "auto":
        run.resume(Path(resume), accept)
    elif not run.resume(accept=accept):
        _refuse_if_requeued(run)
        _refuse_if_retired(run)
    if run.auto is not None and run.log is not None:
        resumed = f". The run goes on with it from step {run.step}" if run.step else ""
        run.log.say(printable(run.auto.said() + resumed))
    _end_with_run(run)
    _warm_start(run)
    if run.log is not None:
        run.log.say(printable(_targets(run, config)))
        run.log.say(printable(run.describe()))
    finished = run.run()
    _refuse_to_stand_still(run, finished)
    if run.grid.rank == 0:
        attempt("the summary could not be printed", lambda: print(printable(run.summary(again)), flush=True))
    if trace:
        attempt(f"the trace {trace} could not be written", lambda: run.grid.write_trace(trace))
    if finished and run.log is not None:
        run.log.draw_at_exit()
    return finished


def _targets(run: Trainer, config: Config) -> str:
    """How the targets were taken, in a line."""
    from ...text import names_in_words
    from .samples import SAMPLES

    found = run.settings[SAMPLES]
    if found["loss"] != "cross_entropy":
        return f"targets {config.data.targets!r}: {found['outputs']} values a row, by the loss {found['loss']}"
    classes = f"targets {config.data.targets!r}: labels of {found['outputs']} classes"
    if found["class_names"]:
        return f"{classes} ({names_in_words(found['class_names'])})"
    return classes + ("" if config.training.loss == "cross_entropy" or config.data.classes else
                      ", because they are integers; if they are values, set training.loss = \"mse\"")


def _end_with_run(run: Trainer) -> None:
    """The schedule comes to its end with the run. Where epochs have another number of steps than they had, as after a
    change of accumulate or of the data, that is not after as many as if all of them had been as now."""
    schedule, optimizer = run.state.schedule, run.state.optimizer
    if schedule is None or not run.step or not run.steps_left():
        return
    before, end = optimizer.lr, run.step + run.steps_left()
    schedule.end_at(end)
    if optimizer.lr != before and run.log is not None:
        run.log.say(f"the schedule ends with the run, at step {end}: the learning rate of step {run.step + 1} is "
                    f"{optimizer.lr:.6g}")


def _warm_start(run: Trainer) -> None:
    """Begin with the weights of training.weights, unless the run goes on from a checkpoint of its own."""
    weights = run.settings["training"]["weights"]
    if weights and not run.step:
        from ..exchange import ENDING, fill_weights, find_checkpoint, import_torch
        from .samples import SAMPLES, compare_classes

        path, network, optimizer = Path(weights), run.state.network, run.state.optimizer
        if path.suffix == ENDING:
            import_torch(network, path, optimizer)
        else:
            found, keeper = find_checkpoint(run.grid, path)
            with run.grid.collective_call("training.weights", weights, always=True):
                compare_classes(found, run.settings[SAMPLES]["class_names"])
            fill_weights(network, found, keeper, optimizer)
    if weights and run.log is not None:
        said = f"not used: the run goes on from step {run.step}" if run.step else "loaded"
        run.log.say(printable(f"training.weights = {weights}: {said}"))


def _refuse_to_overwrite(run: Trainer) -> None:
    """A new run would remove what an earlier one left."""
    latest = run.checkpoints and run.checkpoints.latest()
    with run.grid.collective_call("training", str(latest)):
        if latest:
            raise Pmm3dError(f"{latest} is there from an earlier run: go on with --resume auto, or choose another "
                             "training.folder")


def _refuse_if_retired(run: Trainer) -> None:
    """A start that went back to an earlier checkpoint, and ended before it saved one, has left nothing else."""
    names: list[str] = []
    if run.checkpoints is not None and run.grid.rank == 0:
        names = sorted(path.name for path in run.checkpoints.folder.glob("retired-step-*"))
    names = run.grid.comm.bcast(names)
    from ...text import names_in_words

    with run.grid.collective_call("training"):
        if names and run.checkpoints is not None:
            raise CheckpointError(f"{run.checkpoints.folder} holds retired checkpoints only: {names_in_words(names)}. "
                                  "Go on from one with --resume PATH, or choose another training.folder")


def _refuse_to_stand_still(run: Trainer, finished: bool) -> None:
    """A job that Slurm started again and that was stopped before a step would be started again for ever."""
    with run.grid.collective_call("training", always=True):
        if not finished and not run.passes.steps and job_restarts():
            raise Pmm3dError(f"this start of the job (restart {job_restarts()}) was asked to end before its first "
                             "step: the time limit leaves no time to train between starting and the signal. Raise it, "
                             "or have the signal later (sbatch --signal). Nothing is lost")


def _refuse_if_requeued(run: Trainer) -> None:
    """A job that Slurm started again is to go on: beginning anew each time would never end."""
    with run.grid.collective_call("training", always=True):
        if job_restarts() and run.checkpoints is not None:
            raise CheckpointError(f"this job was requeued (restart {job_restarts()}) and there is no checkpoint in "
                                  f"{run.checkpoints.folder}: the start before ended before it wrote one, or "
                                  "training.folder is another. Submit a new job to begin from the start; for "
                                  "checkpoints more often, lower training.checkpoint_every")
