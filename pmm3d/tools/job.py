"""A job under mpiexec: forwards signals, names a rank that was killed, removes all processes and files of the job."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType

from ..model.environment import JOB_FOLDER
from ..text import counted, shell_command
from .processes import LocalRanks, end_job, kill

TIMED_OUT = 124
"""Exit code after the time limit, as of timeout(1)."""
POLL_SECONDS = 0.25
GRACE_SECONDS = 10.0
"""Time for mpiexec to end after the ranks, and for ranks to end after mpiexec."""
ASKING = (signal.SIGTERM, signal.SIGINT)
"""Signals that ask a program to end. Ranks may still write a checkpoint, but Open MPI's mpiexec kills its ranks soon
after such a signal. So the ranks of Open MPI get the first signal directly, and mpiexec gets the second one."""
ENDING = (*ASKING, signal.SIGHUP)
PASSED_ON = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)
CRASHES = (signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGKILL, signal.SIGSEGV)
"""Signals by which a rank crashes. MPICH's mpiexec exits with the number of the signal; Open MPI's adds 128. Other
small numbers are exit codes of programs, for example of MPI_Abort(7)."""
SHARED_MEMORY = "/dev/shm"
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


class Job:
    """An mpiexec and its ranks.

    own_files   variables that select the folders of this MPI's files: name -> "shm" or "tmp". {} for an MPI that was
                not installed with this Python, or for several nodes
    ranks       number of ranks if all are on this machine, otherwise None
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        own_files: Mapping[str, str],
        ranks: int | None = None,
    ):
        self._arguments, self._environ, self._own_files, self._count = arguments, environ, own_files, ranks
        self._asks_ranks = bool(own_files)
        self._attached = sys.stdin is not None and os.isatty(0)
        self._asked = 0

    def run(self, timeout: float | None) -> int:
        """Start mpiexec and wait for its end. Return its exit code, or 124 if the time is up."""
        with ExitStack() as stack:
            self._folder = self._new_folder(stack)
            self._start(stack)
            try:
                code = self._wait(time.monotonic() + timeout if timeout is not None else float("inf"))
                self._wait_for_ranks()
                self._name_killed(code)
                return self._own_code() or code
            except subprocess.TimeoutExpired:
                print(f"pmm3d.launcher: ended after {timeout:g} s: {shell_command(*self._arguments)}", file=sys.stderr)
                return TIMED_OUT

    def _new_folder(self, stack: ExitStack, base: str | None = None) -> Path:
        return Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="pmm3d-job-", dir=base, ignore_cleanup_errors=True))
        )

    def _start(self, stack: ExitStack) -> None:
        """Start mpiexec. Signals are blocked until their handlers are installed."""
        base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
        kinds = {"tmp": self._folder, "shm": self._new_folder(stack, base) if self._own_files else self._folder}
        folders = {name: str(kinds[kind]) for name, kind in self._own_files.items() if name not in self._environ}
        taken = [
            number
            for number in PASSED_ON
            if signal.getsignal(number) is not signal.SIG_IGN and not (self._attached and number == signal.SIGHUP)
        ]
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, taken)
        try:
            self.process = subprocess.Popen(
                self._arguments,
                env=dict(self._environ) | folders | {JOB_FOLDER: str(self._folder)},
                preexec_fn=lambda: self._before_mpiexec(mask),
            )
            self._ranks = LocalRanks(self.process.pid)
            stack.callback(self._ranks.close)
            for number in taken:
                stack.callback(signal.signal, number, signal.signal(number, self._pass_on))
            stack.callback(end_job, self.process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _before_mpiexec(self, mask: set[int | signal.Signals]) -> None:
        """Prepare the child before it executes mpiexec. On Linux it gets SIGTERM when this process ends in any way.
        SIGINT is blocked if this process signals the ranks itself.

        Without a terminal mpiexec gets its own process group, but not its own session. Linux schedules each session as
        a group. Ranks in another session kept both cores busy, and this process forwarded a signal up to 55 s late.
        """
        if not self._attached:
            os.setpgrp()
        if sys.platform == "linux":
            LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask | ({signal.SIGINT} if self._asks_ranks else set()))

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._asked += number in ENDING
        if number in ASKING and self._asks_ranks:
            running = list(self._ranks.running.values()) if self._asked == 1 else []
            for pid in [rank.pid for rank in running] or [self.process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, number if running else signal.SIGTERM)
        elif not (self._attached and number == signal.SIGINT):  # the terminal sends SIGINT to mpiexec too
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    def _wait(self, deadline: float) -> int:
        over_since = float("inf")
        while (code := self.process.poll()) is None:
            now = time.monotonic()
            if now > deadline:
                raise subprocess.TimeoutExpired(self._arguments, deadline)
            self._ranks.look()
            over_since = min(over_since, now) if self._is_over() and _output_is_taken() else float("inf")
            if now - over_since > GRACE_SECONDS:
                return self._end_mpiexec()
            self._ranks.wait(POLL_SECONDS)
        return code if code >= 0 else 128 - code

    def _is_over(self) -> bool:
        """Return whether a rank has ended the job, or no rank runs here and one has failed or all have ended."""
        nobody = self._ranks.ended and not self._ranks.running
        return (self._folder / "code").exists() or (
            bool(nobody) and (self._failed() > 0 or len(self._ranks.ended) == self._count)
        )

    def _failed(self) -> int:
        """Return the wait(2) status of the first rank that is known to have failed, or 0."""
        return next((rank.status for rank in self._ranks.ended if (rank.status or 0) > 0), None) or 0

    def _end_mpiexec(self) -> int:
        print(
            f"pmm3d.launcher: the job is over, and mpiexec did not end within {GRACE_SECONDS:g} s. The launcher ends "
            "it. A node, or the network to it, may be gone",
            file=sys.stderr,
        )
        end_job(self.process)
        if len(self._ranks.ended) == self._count and all(rank.status == 0 for rank in self._ranks.ended):
            return 0
        status = self._failed() or 256
        return 128 + (status & 127) if status & 127 else status >> 8

    def _own_code(self) -> int:
        """Return the exit code with which a rank ended the job, or 0. That of mpiexec may differ."""
        with suppress(OSError, ValueError):
            return int((self._folder / "code").read_text())
        return 0

    def _wait_for_ranks(self) -> None:
        """Wait for ranks that mpiexec has left behind. After one signal they may take their time for a checkpoint.
        Otherwise they are killed after GRACE_SECONDS, or at a second signal."""
        deadline, asked = time.monotonic() + GRACE_SECONDS, self._asked
        while left := [rank.pid for rank in self._ranks.running.values()]:
            if self._asked > asked or (time.monotonic() > deadline and not asked):
                print(
                    f"pmm3d.launcher: {counted(len(left), 'rank')} had not ended {GRACE_SECONDS:g} s after mpiexec. "
                    "The launcher kills them",
                    file=sys.stderr,
                )
                return kill(left)
            self._ranks.wait(POLL_SECONDS)

    def _name_killed(self, code: int) -> None:
        """Print which rank a signal ended first, unless the job was asked to end. mpiexec kills the other ranks."""
        suspects = self._ranks.suspects
        if not suspects or self._asked or self._own_code():
            return
        status = suspects[0].status or 0
        crash = code if self._ranks.hydra and code in CRASHES else 0
        number = status & 127 if status > 0 else code - 128 if code > 128 else crash
        if number and code in (number, 128 + number):
            named = [
                f"rank {rank.rank} (pid {rank.pid}{self._stage_of(rank.rank)})"
                for rank in suspects
                if rank.status in (status, None)
            ]
            who = named[0] if len(named) == 1 else f"one of {', '.join(named)}, which ended at once,"
            hint = " (out of memory? see dmesg)" if number == signal.SIGKILL else ""
            print(f"pmm3d.launcher: {who} was killed by {_name_of(number)}{hint}", file=sys.stderr)

    def _stage_of(self, rank: int) -> str:
        """Return the stage that a rank of a pipeline has noted (`note_stage`)."""
        with suppress(OSError):
            return ", " + (self._folder / f"rank-{rank}").read_text()
        return ""


def _output_is_taken() -> bool:
    """Return whether stdout and stderr accept output without blocking. If not, mpiexec may still hold ranks' output."""
    with suppress(OSError, ValueError):
        return len(select.select([], [1, 2], [], 0)[1]) == 2
    return True


def _name_of(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
