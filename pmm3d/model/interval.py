"""The interval between checkpoints, from the time of a checkpoint and the mean time between failures."""

from __future__ import annotations

from math import exp, expm1, inf, sqrt
from typing import NamedTuple

from ..errors import Pmm3dError
from ..text import in_time

SURELY = 700.0
"""Exponent from which the probability of a failure is 1 in double precision."""
DAY, HOUR = 86400.0, 3600.0


def young(write: float, mtbf: float) -> float:
    """Return the optimum interval between checkpoints, in seconds of work, to first order.

        T = sqrt(2 delta M)

    write   delta, seconds to write a checkpoint
    mtbf    M, mean seconds between failures of the whole job: those of a node divided by the number of nodes

    Source: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974.

        >>> young(8.0, 10_000.0)
        400.0
    """
    return sqrt(2 * write * mtbf)


def daly(write: float, mtbf: float) -> float:
    """Return the optimum interval to higher order, which is accurate also for long checkpoints.

        T = sqrt(2 delta M) (1 + 1/3 sqrt(delta / 2M) + 1/9 (delta / 2M)) - delta    if delta < 2M
        T = M                                                                        otherwise

    Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation
    Computer Systems 22(3), 2006.

        >>> round(daly(8.0, 10_000.0), 1)
        394.7
    """
    if write >= 2 * mtbf:
        return mtbf
    part = write / (2 * mtbf)
    return young(write, mtbf) * (1 + sqrt(part) / 3 + part / 9) - write


def lost_share(interval: float, write: float, mtbf: float, restart: float = 0.0) -> float:
    """Return the share of a job's time that checkpoints, repeated work and restarts take.

        1 - tau / (M exp(R/M) (exp((tau + delta)/M) - 1))

    interval   tau, seconds of work between checkpoints
    restart    R, seconds from a failure until work continues

    Failures are a Poisson process. Source: Daly 2006.

        >>> round(lost_share(400.0, 8.0, 10_000.0), 3)
        0.039
    """
    exponent = (interval + write) / mtbf + restart / mtbf
    if exponent > SURELY:
        return 1.0
    taken = mtbf * exp(restart / mtbf) * expm1((interval + write) / mtbf)
    return max(0.0, 1 - interval / taken) if taken else 0.0


class Advice(NamedTuple):
    """Seconds and whole steps between checkpoints, the share of time that is lost, and a sentence for the user."""

    seconds: float
    steps: int
    lost: float
    sentence: str


def advice(write_seconds: float, mtbf_seconds: float, step_seconds: float) -> Advice:
    """Return the interval between checkpoints, by Daly. mtbf_seconds: mean time between failures of the whole job.

        >>> advice(3.1, 86400.0, 2.15).sentence  # doctest: +ELLIPSIS
        'With a failure every 24 h on this job, write a checkpoint every 12 min 9 s (Daly), every 339 steps: ...'

    Raises Pmm3dError if a time is negative or infinite, or if a step or the time between failures is 0.
    """
    for name, seconds, positive in (
        ("the time to write a checkpoint", write_seconds, False),
        ("--mtbf", mtbf_seconds, True),
        ("the time of a step", step_seconds, True),
    ):
        if not 0 <= seconds < inf or (positive and not seconds):
            raise Pmm3dError(f"{name} must be {'positive' if positive else '0 or more'}, got {seconds} seconds")
    wanted = daly(write_seconds, mtbf_seconds)
    if not wanted / step_seconds < inf:
        raise Pmm3dError(
            f"steps of {step_seconds} seconds between failures every {mtbf_seconds} seconds cannot be "
            "counted: give times of steps and between failures that are nearer to each other"
        )
    steps = max(1, round(wanted / step_seconds))
    interval = steps * step_seconds
    lost = lost_share(interval, write_seconds, mtbf_seconds)
    how = "every step" if steps == 1 else f"every {in_time(interval)} (Daly), every {steps:,} steps"
    sentence = (
        f"With a failure every {in_time(mtbf_seconds)} on this job, write a checkpoint {how}: "
        f"{100 * lost:.2g}% of the time is lost"
    )
    if write_seconds >= mtbf_seconds:
        sentence += ". A checkpoint takes longer than the mean time between failures: the job makes little progress"
    return Advice(interval, steps, lost, sentence)
