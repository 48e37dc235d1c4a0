"""Runs of `pmm3d train` for tests: in separate jobs (`Runs`), or on the ranks of a test (`RunsHere`)."""

import io
import json
import logging
import os
import signal
import sys
from contextlib import contextmanager, nullcontext

import h5py
import numpy as np
import pytest
from mpi_runner import stacks
from mpi_runner.script_job import JobResult

COMMAND = """
import os, signal, sys, threading, time
from pmm3d.tools.cli import main
{before}
sys.argv = ["pmm3d", "train", *sys.argv[1:]]
main()
"""


def floats_in(path) -> dict[str, np.ndarray]:
    """Name -> array of each data set of floats in an HDF5 file."""
    found = {}
    is_float = lambda item: isinstance(item, h5py.Dataset) and item.dtype.kind == "f"
    with h5py.File(path) as file:
        file.visititems(lambda key, item: found.update({key: item[...]}) if is_float(item) else None)
    return found


class Runs:
    """Trainings in one folder."""

    def __init__(self, folder, job):
        self.folder, self.job = folder, job
        self._prepare()

    def _prepare(self):
        random = np.random.default_rng(0)
        x = random.standard_normal((330, 12)).astype("float32")
        with h5py.File(self.folder / "data.h5", "w") as file:
            file["x"], file["y"] = x, (x[:, :3].argmax(1)).astype("int64")
            file["field"] = x @ random.standard_normal((12, 4)).astype("float32")

    def config(self, name="run", data="", training="", hidden=(16, 8), batch_size=50, **sections) -> str:
        text = f'[data]\nfile = "{self.folder}/data.h5"\nbatch_size = {batch_size}\n{data}\n'
        text += f'[training]\nfolder = "{self.folder}/{name}"\nlog_every = 1\n{training}\n'
        text += f"[network]\nhidden = {list(hidden)}\n" + sections.pop("network", "") + "\n"
        text += "\n".join(f"[{section}]\n{lines}" for section, lines in sections.items())
        path = self.folder / f"{name}.toml"
        path.write_text(text)
        return str(path)

    def train(self, config, *arguments, ranks=2, before=""):
        return self.job(ranks, COMMAND.format(before=before), config, *arguments, timeout=60)

    def finish(self, config, *arguments, **options) -> JobResult:
        """Train to the end: the exit code is 0."""
        done = self.train(config, *arguments, **options)
        assert done.returncode == 0, done.stderr
        return done

    def metrics(self, name="run") -> list[dict]:
        return [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]

    def checkpoints(self, name="run"):
        return sorted(path.name for path in (self.folder / name / "checkpoints").glob("step-*[0-9]"))

    def weights(self, name="run") -> dict[str, np.ndarray]:
        return floats_in(self.folder / name / "checkpoints" / self.checkpoints(name)[-1] / "checkpoint.h5")

    def record(self, name="run") -> dict:
        return json.loads((self.folder / name / "run.json").read_text())

    def assert_same_weights(self, one, other) -> None:
        """Assert that the newest checkpoints of two runs have equal bits, of weights and of states."""
        expected, found = self.weights(one), self.weights(other)
        assert expected.keys() == found.keys() and any("/" in name for name in expected)
        assert all(np.array_equal(expected[name], found[name]) for name in expected)


class RunsHere(Runs):
    """Trainings on the ranks of a test: the same command as in a job, without new processes.

    handlers   signal -> handler at the end of the last training
    """

    def __init__(self, folder, comm):
        self.comm, self.handlers = comm, {}
        super().__init__(folder, None)

    def _prepare(self):
        if self.comm.rank == 0:
            super()._prepare()
        self.comm.barrier()

    def config(self, *arguments, **sections) -> str:
        path = super().config(*arguments, **sections) if self.comm.rank == 0 else None
        return self.comm.bcast(path)

    def train(self, config, *arguments, ranks=None, **options) -> JobResult:
        return self.run("train", str(config), *arguments, ranks=ranks, **options)

    def run(self, *arguments, ranks=None, **options) -> JobResult:
        """Run a command on the first `ranks` ranks (default: all). Collective. options: see `run_here`."""
        members = self.comm.Split(self.comm.rank < (ranks or self.comm.size), self.comm.rank)
        done = None
        if self.comm.rank < (ranks or self.comm.size):
            done = run_here(members, *arguments, handlers=self.handlers, **options)
        done = self.comm.bcast(done)
        members.Free()  # not in `finally`: Free is collective, and an error may be raised on one rank only
        return done


def run_here(comm, *arguments, encoding="utf-8", handlers=None) -> JobResult:
    """Run a command of pmm3d on the ranks of comm, and capture its streams.

    encoding   encoding of the standard streams
    handlers   a dict that receives the handlers of signals at the end of the command
    """
    from pmm3d.model.notes import StderrHandler
    from pmm3d.tools import ranks
    from pmm3d.tools.commands import app

    out, err = (io.TextIOWrapper(io.BytesIO(), encoding, "backslashreplace") for _ in range(2))
    ending, notes = comm.Dup(), logging.getLogger("pmm3d")
    handler, level = StderrHandler(), notes.level
    with pytest.MonkeyPatch.context() as patch, kept_signals({} if handlers is None else handlers):
        for name, stream in (("stdout", out), ("stderr", err), ("__stderr__", err)):
            patch.setattr(sys, name, stream)
        patch.setattr(ranks, "_started", lambda: (comm, ending))
        patch.setattr(ranks, "no_hang", nullcontext)  # its timer is also that of the test runner
        notes.addHandler(handler)
        notes.setLevel(logging.INFO)
        code = 0
        try:
            app(arguments)
        except SystemExit as end:
            code = end.code or 0
        finally:
            notes.removeHandler(handler)
            notes.setLevel(level)
            if comm.rank:
                out.seek(0)
                out.truncate()
    ending.Free()
    text = lambda stream: (stream.flush(), stream.buffer.getvalue().decode(encoding))[1]
    said = comm.allgather((code, text(out), text(err)))
    assert len({code for code, _, _ in said}) == 1, said
    return JobResult(code, *("".join(texts) for texts in list(zip(*said))[1:]))


@contextmanager
def kept_signals(left):
    """As a context: restore the handlers of signals at the end, because a finished training ignores these signals.

    left   a dict that receives the handlers before they are restored
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        left[signal.SIGUSR1] = signal.getsignal(signal.SIGUSR1)
        stacks.listen()  # faulthandler handles SIGUSR1, which Python's table of handlers does not contain
        for number, handler in handlers.items():
            left[number] = signal.getsignal(number)
            signal.signal(number, handler)


@contextmanager
def signal_at(comm, owner, name, number, which=signal.SIGTERM):
    """As a context: rank 1 sends itself a signal at the start of call number `number` of owner.name. Its value is the
    list of the signals that this rank sent."""
    done, calls, sent = getattr(owner, name), [], []

    def counted(*arguments, **options):
        calls.append(name)
        if len(calls) == number and comm.rank == 1:
            sent.append(which)
            os.kill(os.getpid(), which)
        return done(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, counted)
        yield sent


def fails(done, text):
    """Assert that a job failed, and that it printed one error, which contains the text."""
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("pmm3d: ") and "Error" in line]
    assert len(said) == 1 and text in said[0], done.stderr
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr, done.stderr
