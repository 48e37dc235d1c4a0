"""Waits of ranks for each other. A waiting rank sleeps, because the others need its core."""

from __future__ import annotations

import functools
import sys
import time
import traceback
from array import array

import pytest
from mpi4py import MPI


class FailedElsewhere(AssertionError):
    """A Hypothesis example passed on this rank and failed on another rank."""


def wait(request: MPI.Request) -> None:
    """Complete a nonblocking operation. Sleep between tests: up to 2 ms after 0.1 s, up to 20 ms after 10 s."""
    pause = 0.0
    while not request.Test():
        time.sleep(pause)
        pause = min(pause + 2e-5, 2e-2)


def largest(numbers: list[int], comm: MPI.Comm) -> list[int]:
    """The largest of each number over the ranks."""
    mine, found = array("q", numbers), array("q", numbers)
    wait(comm.Iallreduce(mine, found, MPI.MAX))
    return found.tolist()


def agree_in_hypothesis(item, comm: MPI.Comm) -> None:
    """Let a Hypothesis test fail on every rank of comm if an example fails on one of them.

    Otherwise this rank would repeat the example and the others continue with the next one, so that collectives of
    different examples would be matched.
    """
    handle = getattr(getattr(item, "obj", None), "hypothesis", None)
    if handle is None:
        return
    if hasattr(handle.inner_test, "comm"):  # wrapped for an earlier case, perhaps in another block
        handle.inner_test.comm = comm
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
        if failed:  # printed before the agreement, which the other ranks may never reach
            print(f"rank {agreeing.comm.rank}:", *traceback.format_exception(error), file=sys.stderr)
        (failed_somewhere,) = largest([int(failed)], agreeing.comm)
        if error is not None:
            raise error
        if failed_somewhere:
            raise FailedElsewhere("another rank failed on this example")

    agreeing.comm = comm
    handle.inner_test = agreeing
