"""A job under an mpiexec, from its start to its end: signals are passed on, nothing is left behind."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from ..model.environment import JOB_FOLDER
from .processes import LocalRanks, RankProcess, end_job

TIMED_OUT = 124
"""What timeout(1) returns."""
POLL_SECONDS = 0.25
GRACE_SECONDS = 10.0
"""Left to mpiexec once the job is over, and to ranks once mpiexec is."""
SHOWN = 8
"""Ranks that are told of where a job does not end."""
MAPS_SECONDS = 5.0
"""Between two looks at what ranks have mapped."""
PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
OF_THE_TERMINAL = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGCONT)
"""A terminal, or its shell, sends these to mpiexec as well: without one they are passed on too."""
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
ASKING = (signal.SIGTERM, signal.SIGINT)
"""By which a program is asked to end: ranks may still write a checkpoint. Open MPI's mpiexec, if it gets one of them,
kills its ranks a moment later: there the ranks get it themselves, and mpiexec only the second."""
SHARED_MEMORY = Path("/dev/shm")
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


class Job:
    """An mpiexec and its ranks.

    own_files   variables of the MPI that can keep its files in a folder of the job: name -> "shm" or "tmp"
    ranks       how many it has, where all are on this machine; None: not known here
    """

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str], own_files: Mapping[str, str],
                 ranks: int | None = None):
        self._arguments, self._count = arguments, ranks
        self._folders = {"tmp": Path(tempfile.mkdtemp(prefix="pmm3d-job-"))}
        self._note = self._folders["tmp"] / "code"
        self._segments: set[str] = set()
        self._looked, self._asked, self._over_since = 0.0, 0, 0.0
        variables = {name: str(self._folder(kind)) for name, kind in own_files.items() if name not in environ}
        self._asks_ranks = bool(own_files)
        self._attached = sys.stdin is not None and os.isatty(0)
        self._early: list[signal.Signals] = []
        self._before = self._take_signals(lambda number, frame: self._early.append(signal.Signals(number)))
        try:
            self.process = subprocess.Popen(
                arguments, env=dict(environ) | variables | {JOB_FOLDER: str(self._folders["tmp"])},
                preexec_fn=partial(_before_mpiexec, self._asks_ranks, self._attached))
        except BaseException:
            self._leave_signals()
            self._remove_folders()
            raise
        self._ranks = LocalRanks(self.process.pid)

    def _folder(self, kind: str) -> Path:
        """A folder of this job's own: "tmp", or "shm" in /dev/shm where there is one."""
        if kind not in self._folders:
            base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
            self._folders[kind] = Path(tempfile.mkdtemp(prefix="pmm3d-job-", dir=base))
        return self._folders[kind]

    def run(self, timeout: float | None) -> int:
        """Wait for its end, for at most so many seconds; its exit code, 124 if they were not enough."""
        self._take_signals(self._pass_on)
        for number in self._early:
            self._pass_on(number, None)
        try:
            code = self._wait(time.monotonic() + timeout if timeout is not None else float("inf"))
            self._wait_for_ranks()
            self._name_killed(code)
            return self._own_code() or code
        except subprocess.TimeoutExpired:
            print(f"pmm3d.launcher: ended after {timeout:g} s: {shlex.join(self._arguments)}", file=sys.stderr)
            print(self._left(), file=sys.stderr)
            return TIMED_OUT
        finally:
            end_job(self.process)
            self._leave_signals()
            self._clean_up()

    def _take_signals(self, handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
        """Signals to this process are mpiexec's, but for those that are ignored here. Returns their handlers before."""
        numbers = (*PASSED_ON, signal.SIGINT) if self._attached else PASSED_ON + OF_THE_TERMINAL
        taken = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        return {number: signal.signal(number, handler) for number in taken}

    def _leave_signals(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._asked += number in ENDING
        if number in ASKING and self._asks_ranks:
            self._ask(number)
        elif not (self._attached and number in OF_THE_TERMINAL):
            with suppress(ProcessLookupError):
                self.process.send_signal(number)
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)

    def _ask(self, number: int) -> None:
        """The ranks, at first; mpiexec if there are none yet, and when asked again."""
        running = list(self._ranks.running) if self._asked == 1 else []
        for pid in [rank.pid for rank in running] or [self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, number if running else signal.SIGTERM)

    def _wait(self, deadline: float) -> int:
        while (code := self.process.poll()) is None:
            now = time.monotonic()
            if now > deadline:
                raise subprocess.TimeoutExpired(self._arguments, deadline)
            self._ranks.look()
            self._note_segments(now)
            self._over_since = (self._over_since or now) if self._is_over() and _output_is_taken() else 0.0
            if self._over_since and now - self._over_since > GRACE_SECONDS:
                return self._end_mpiexec()
            self._ranks.wait(POLL_SECONDS)
        return code if code >= 0 else 128 - code

    def _is_over(self) -> bool:
        """A rank has ended the job, or none is left here and one went wrong, or that were all of them. On other nodes
        there may be more."""
        nobody = bool(self._ranks.seen) and not any(True for _ in self._ranks.running)
        wrong = self._first_wrong() is not None
        return self._note.exists() or nobody and (wrong or len(self._ranks.ended) == self._count)

    def _first_wrong(self) -> RankProcess | None:
        """The first rank that is known to have ended by a signal or with an error."""
        return next((rank for rank in self._ranks.ended if (rank.status or 0) > 0), None)

    def _end_mpiexec(self) -> int:
        print(f"pmm3d.launcher: the job is over, and mpiexec has not ended within {GRACE_SECONDS:g} s of that: it is "
              "ended (a node, or the network to it, may be gone)", file=sys.stderr)
        end_job(self.process)
        if len(self._ranks.ended) == self._count and all(rank.status == 0 for rank in self._ranks.ended):
            return 0
        first = self._first_wrong()
        status = first.status or 0 if first else 256
        return 128 + (status & 127) if status & 127 else status >> 8

    def _left(self) -> str:
        """Of a job that does not end: what its ranks on this machine do, some lines at most."""
        left = sorted(self._ranks.running, key=lambda rank: rank.rank)
        if not left:
            return "  none of its ranks is left on this machine" if self._ranks.seen else "  no rank was seen here"
        lines = [f"  rank {rank.rank} (pid {rank.pid}): {rank.doing()}" for rank in left[:SHOWN]]
        return "\n".join([*lines, *([f"  and {len(left) - SHOWN} others"] if len(left) > SHOWN else [])])

    def _own_code(self) -> int:
        """The exit code with which a rank ended the job; 0 if none did. mpiexec may have another."""
        with suppress(OSError, ValueError):
            return int(self._note.read_text())
        return 0

    def _wait_for_ranks(self) -> None:
        """For those that mpiexec has left. When asked to they end by themselves (a checkpoint is written); otherwise,
        and when asked again, they are killed."""
        deadline, asked = time.monotonic() + GRACE_SECONDS, self._asked
        while left := list(self._ranks.running):
            if self._asked > asked or time.monotonic() > deadline and not asked:
                print(f"pmm3d.launcher: {len(left)} of its ranks had not ended {GRACE_SECONDS:g} s after mpiexec, "
                      "and are killed", file=sys.stderr)
                for rank in left:
                    with suppress(ProcessLookupError):
                        os.kill(rank.pid, signal.SIGKILL)
                return
            self._ranks.wait(POLL_SECONDS)

    def _name_killed(self, code: int) -> None:
        """The rank that a signal ended, if nobody asked for an end; mpiexec kills the others."""
        suspects = self._ranks.suspects
        if not suspects or self._asked or self._own_code():
            return
        status = suspects[0].status or 0
        number = status & 127 if status > 0 else max(0, code - 128)
        if number and code in (number, 128 + number):
            named = [f"rank {rank.rank} (pid {rank.pid}{self._stage_of(rank.rank)})" for rank in suspects
                     if rank.status in (status, None)]
            who = named[0] if len(named) == 1 else f"one of {', '.join(named)}, which ended at once,"
            hint = " (out of memory? see dmesg)" if number == signal.SIGKILL else ""
            print(f"pmm3d.launcher: {who} was killed by {_name_of(number)}{hint}", file=sys.stderr)

    def _stage_of(self, rank: int) -> str:
        """What a rank of a pipeline has told of its stage (`note_stage`)."""
        with suppress(OSError):
            return ", " + (self._folders["tmp"] / f"rank-{rank}").read_text()
        return ""

    def _note_segments(self, now: float) -> None:
        """Of one rank: those of a node map the same files. Until there are some, at every look."""
        if now - self._looked > (MAPS_SECONDS if self._segments else 0.0):
            self._looked = now
            self._segments |= next((rank.segments() for rank in self._ranks.running), set())

    def _clean_up(self) -> None:
        """Remove the job's own files: its folders, and what its ranks had mapped."""
        self._ranks.close()
        for path in self._segments:
            with suppress(OSError):
                os.unlink(path)
        self._remove_folders()

    def _remove_folders(self) -> None:
        for folder in self._folders.values():
            shutil.rmtree(folder, ignore_errors=True)


def _output_is_taken() -> bool:
    """Whether a write to stdout and to stderr would not wait: else mpiexec may still have what the ranks have said."""
    with suppress(OSError, ValueError):
        return len(select.select([], [1, 2], [], 0)[1]) == 2
    return True


def _name_of(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _before_mpiexec(asks_ranks: bool, attached: bool) -> None:
    """In the child: SIGTERM when this process ends, however it does (Linux). Ctrl-C of a terminal does not reach an
    mpiexec whose ranks are asked; it is open to SIGINT again in them.

    Without a terminal it has a process group of its own, and no session: Linux shares cores out among sessions
    (autogroups), and ranks in another one kept both cores for up to 55 s while this process was to pass on a signal.
    """
    if not attached:
        os.setpgrp()
        with suppress(OSError):  # nor a terminal that it would be stopped for asking
            terminal = os.open("/dev/tty", os.O_RDWR)
            fcntl.ioctl(terminal, termios.TIOCNOTTY)
            os.close(terminal)
    if sys.platform.startswith("linux"):
        LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if asks_ranks:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
