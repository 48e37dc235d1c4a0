"""How ranks wait for each other without taking the cores from those still at work."""

from __future__ import annotations

import functools
import sys
import time
import traceback

import pytest
from mpi4py import MPI


class FailedElsewhere(AssertionError):
    """This rank was content with a Hypothesis example on which another rank failed."""


def wait(request: MPI.Request) -> None:
    """Complete a nonblocking operation, sleeping a little longer after each look at it."""
    pause = 0.0
    while not request.Test():
        time.sleep(pause)
        pause = min(pause + 2e-5, 2e-3)


def any_rank(flag: bool, comm: MPI.Comm) -> bool:
    """Whether the flag is true on some rank."""
    mine, all_of_them = bytearray([flag]), bytearray(1)
    wait(comm.Iallreduce([mine, MPI.BYTE], [all_of_them, MPI.BYTE], MPI.BOR))
    return bool(all_of_them[0])


def agree_in_hypothesis(item, comm: MPI.Comm) -> None:
    """Let a Hypothesis test fail on every rank if an example fails on one.

    Otherwise that rank would replay its example while the others go on to the next: their
    collectives would meet those of another example.
    """
    handle = getattr(getattr(item, "obj", None), "hypothesis", None)
    if handle is None or getattr(handle.inner_test, "agrees", False):
        return
    from hypothesis.errors import StopTest, UnsatisfiedAssumption

    test = handle.inner_test
    not_failures = (StopTest, UnsatisfiedAssumption, pytest.skip.Exception)

    @functools.wraps(test)
    def agreeing(*args, **kwargs):
        __tracebackhide__ = True
        error = None
        try:
            test(*args, **kwargs)
        except BaseException as raised:
            error = raised
        failed = error is not None and not isinstance(error, not_failures)
        if failed:  # said now, since the others may never come to agree
            print(f"rank {comm.rank}:", *traceback.format_exception(error), file=sys.stderr)
        failed_somewhere = any_rank(failed, comm)
        if error is not None:
            raise error
        if failed_somewhere:
            raise FailedElsewhere("another rank failed on this example")

    agreeing.agrees = True
    handle.inner_test = agreeing
