"""Schedules of pipelines: functions of the numbers of ranks and micro-batches that return a table.

A pipeline has p ranks, m micro-batches, and v chunks (stages) on each rank. F, B and W are the times of a rank's
forward pass, backward pass for the input, and backward pass for the weights. A bubble is the time in which a rank
waits. A peak is the largest number of micro-batches that a rank holds. The W of a stage are in ascending order of
micro-batches, so all schedules add gradients in the same order. All functions raise PipelineError for numbers below 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ...layout import part_sizes
from ...text import counted
from .table import PipelineAction, PipelineError, PipelineSchedule, check_sizes
from .v_shaped import v_half, v_min, zb_v
from .zero_bubble import zb_1p, zb_2p

Order = list[tuple[int, int]]
"""(chunk, micro-batch) of a rank's passes, in order."""


def gpipe(ranks: int, micro_batches: int) -> PipelineSchedule:
    """GPipe: all forward passes, then all backward passes (Huang et al., arXiv 1811.06965).

    Bubble (p-1)(F+B+W), peak m. Arguments as in `one_f_one_b`.
    """
    check_sizes(ranks=ranks, micro_batches=micro_batches)
    micros = range(micro_batches)
    return PipelineSchedule.of(
        "gpipe", [[PipelineAction(kind, rank, micro) for kind in "FB" for micro in micros] for rank in range(ranks)]
    )


def one_f_one_b(ranks: int, micro_batches: int) -> PipelineSchedule:
    """1F1B: alternating forward and backward passes (PipeDream-Flush, Narayanan et al., arXiv 2006.09503).

    Parameters
    ----------
    ranks, micro_batches : int
        Numbers of ranks and of micro-batches.

    Notes
    -----
    Rank r begins with p - 1 - r forward passes. Bubble (p-1)(F+B+W), peak min(p-r, m).

    Examples
    --------
    >>> from pmm3d.nn.pipeline import one_f_one_b
    >>> print(one_f_one_b(2, 2), end="")
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
    """
    check_sizes(ranks=ranks, micro_batches=micro_batches)
    return PipelineSchedule.of(
        "1f1b",
        [
            _in_turns(
                rank,
                [(0, micro) for micro in range(micro_batches)],
                [(0, micro) for micro in range(micro_batches)],
                ranks - 1 - rank,
                ranks,
            )
            for rank in range(ranks)
        ],
    )


def interleaved(ranks: int, micro_batches: int, chunks: int = 2) -> PipelineSchedule:
    """1F1B with several chunks on each rank (Narayanan et al., arXiv 2104.04473).

    Parameters
    ----------
    ranks, micro_batches : int
        Numbers of ranks and of micro-batches.
    chunks : int
        Number of stages of a rank. Rank r holds the stages r, r + p, ... Default: 2.

    Notes
    -----
    Micro-batches pass in groups of p, or in slightly larger groups if m is not a multiple of p. Bubble (p-1)(F+B+W)/v,
    peak (2(p-1-r) + (v-1)p + 1)/v. The number of messages is v times the number of 1F1B.
    """
    check_sizes(ranks=ranks, micro_batches=micro_batches, chunks=chunks)
    sizes = _group_sizes(ranks, micro_batches)
    ahead = (chunks - 1) * max(sizes)
    return PipelineSchedule.of(
        f"interleaved-{chunks}",
        [
            _in_turns(
                rank,
                _grouped(sizes, range(chunks)),
                _grouped(sizes, range(chunks)[::-1]),
                2 * (ranks - 1 - rank) + ahead if chunks > 1 else ranks - 1 - rank,
                ranks,
            )
            for rank in range(ranks)
        ],
    )


def interleaved_zero_bubble(ranks: int, micro_batches: int, chunks: int = 2) -> PipelineSchedule:
    """`interleaved` with delayed W, as in PyTorch's ScheduleInterleavedZeroBubble.

    A rank begins with fewer forward passes than in `interleaved`. On rank r, each W is r backward passes late.
    """
    check_sizes(ranks=ranks, micro_batches=micro_batches, chunks=chunks)
    sizes = _group_sizes(ranks, micro_batches)
    tables = []
    for rank in range(ranks):
        first = (chunks - 1) * max(sizes) + ranks - 1 - rank
        table, late = list[PipelineAction](), list[PipelineAction]()
        for action in _in_turns(
            rank, _grouped(sizes, range(chunks)), _grouped(sizes, range(chunks)[::-1]), first, ranks
        ):
            if action.kind == "B":
                late.append(action._replace(kind="W"))
                action = action._replace(kind="I")
            table.append(action)
            if action.kind == "I" and len(late) > rank:
                table.append(late.pop(0))
        tables.append(table + late)
    return PipelineSchedule.of(f"interleaved-zero-bubble-{chunks}", tables)


def breadth_first(ranks: int, micro_batches: int, chunks: int = 2) -> PipelineSchedule:
    """Breadth-first: all micro-batches pass through a chunk before the next chunk (Lamy-Poirier, arXiv 2211.05953).

    The backward passes are in reverse order. Sharded weights of a chunk are gathered once a pass, because all
    micro-batches use them in a row. Bubble (p-1)(F+B+W)/v, peak m. Arguments as in `interleaved`.
    """
    check_sizes(ranks=ranks, micro_batches=micro_batches, chunks=chunks)
    forward, backward = _grouped([micro_batches], range(chunks)), _grouped([micro_batches], range(chunks)[::-1])
    return PipelineSchedule.of(
        f"breadth-first-{chunks}", [_in_turns(rank, forward, backward, len(forward), ranks) for rank in range(ranks)]
    )


def zb_h1(ranks: int, micro_batches: int) -> PipelineSchedule:
    """ZB-H1: 1F1B with W delayed into the bubble (Qi et al., arXiv 2401.10241).

    Bubble (p-1)(F+B-W). Peak p on each rank to the end of W, and min(p-r, m) to the end of I.
    """
    check_sizes(ranks=ranks, micro_batches=micro_batches)
    return PipelineSchedule.of(
        "zb-h1", [_with_late_weights(rank, micro_batches, ranks - rank, ranks) for rank in range(ranks)]
    )


def zb_h2(ranks: int, micro_batches: int) -> PipelineSchedule:
    """ZB-H2: `zb_h1` that begins with 2(p-r) - 1 forward passes on rank r (Qi et al., arXiv 2401.10241).

    Bubble (p-1)(F+B-2W), which is 0 if F = B = W. Peak 2p - 1.
    """
    check_sizes(ranks=ranks, micro_batches=micro_batches)
    return PipelineSchedule.of(
        "zb-h2",
        [_with_late_weights(rank, micro_batches, 2 * (ranks - rank) - 1, 2 * ranks - 1) for rank in range(ranks)],
    )


def dualpipe(ranks: int, micro_batches: int) -> PipelineSchedule:
    """DualPipe: micro-batches enter at both ends of two copies of the network (DeepSeek-V3, arXiv 2412.19437).

    Ranks and micro-batches are even numbers, with at least two micro-batches for each rank. Raises PipelineError for
    other numbers.

    Notes
    -----
    Stages 0 to p-1 are one copy, and stages p to 2p-1 the other copy. The forward pass of one direction is paired with
    the backward pass of the other direction, which hides messages. The bubble is (p/2 - 1)(F&B + B - 2W). Here F&B is
    the time of a pair of passes, and B the time of a whole backward pass. Peak p + 1.
    """
    check_sizes(ranks=ranks, micro_batches=micro_batches)
    if ranks % 2 or micro_batches % 2 or micro_batches < 2 * ranks:
        raise PipelineError(
            "dualpipe needs an even number of ranks, an even number of micro-batches, and at least two "
            f"micro-batches for each rank; got {counted(ranks, 'rank')} and "
            f"{counted(micro_batches, 'micro-batch')}"
        )
    tables = []
    for rank in range(ranks):
        stages, firsts = (rank, 2 * ranks - 1 - rank), (0, micro_batches // 2)
        if rank >= ranks // 2:
            stages, firsts = stages[::-1], firsts[::-1]
        tables.append(_both_ways(ranks // 2, min(rank, ranks - 1 - rank), micro_batches // 2, stages, firsts))
    return PipelineSchedule.of("dualpipe", tables)


def dualpipe_v(ranks: int, micro_batches: int) -> PipelineSchedule:
    """DualPipeV: `dualpipe` with one copy of the network in 2p stages. Rank r holds the stages r and 2p-1-r.

    At least two micro-batches for each rank are needed. Raises PipelineError for fewer. Peak 2p + 1 passes through a
    stage.
    """
    check_sizes(ranks=ranks, micro_batches=micro_batches)
    if micro_batches < 2 * ranks:
        raise PipelineError(
            f"dualpipe-v needs at least two micro-batches for each rank; got {counted(ranks, 'rank')} "
            f"and {counted(micro_batches, 'micro-batch')}"
        )
    return PipelineSchedule.of(
        "dualpipe-v",
        [_both_ways(ranks, rank, micro_batches, (rank, 2 * ranks - 1 - rank), (0, 0)) for rank in range(ranks)],
    )


def _group_sizes(ranks: int, micro_batches: int) -> list[int]:
    """Sizes of groups of micro-batches: the number of ranks, or slightly more."""
    return part_sizes(micro_batches, max(1, micro_batches // ranks))


def _grouped(sizes: Sequence[int], chunks: Sequence[int]) -> Order:
    """Order in which each group of micro-batches passes through all chunks before the next group."""
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [
        (chunk, micro) for start, size in zip(starts, sizes) for chunk in chunks for micro in range(start, start + size)
    ]


def _in_turns(rank: int, forward: Order, backward: Order, first: int, ranks: int) -> Iterator[PipelineAction]:
    """Yield `first` forward passes, then forward and whole backward passes in turns."""
    passes = [PipelineAction("F", chunk * ranks + rank, micro) for chunk, micro in forward]
    yield from passes[:first]
    for number, (chunk, micro) in enumerate(backward):
        yield from passes[first + number : first + number + 1]
        yield PipelineAction("B", chunk * ranks + rank, micro)


def _with_late_weights(rank: int, micro_batches: int, first: int, most: int) -> Iterator[PipelineAction]:
    """Yield `first` forward passes, then I and F in turns. W waits until the rank holds `most` micro-batches."""
    forwards, weights = min(first, micro_batches), 0
    yield from (PipelineAction("F", rank, micro) for micro in range(forwards))
    for micro in range(micro_batches):
        yield PipelineAction("I", rank, micro)
        if forwards - weights >= most or forwards == micro_batches:
            yield PipelineAction("W", rank, weights)
            weights += 1
        if forwards < micro_batches:
            yield PipelineAction("F", rank, forwards)
            forwards += 1
    yield from (PipelineAction("W", rank, micro) for micro in range(weights, micro_batches))


def _both_ways(
    ranks: int, rank: int, micro_batches: int, stages: tuple[int, int], firsts: tuple[int, int]
) -> Iterator[PipelineAction]:
    """Yield the actions of DualPipe's eight loops. ranks, rank: number of ranks to the middle of the pipeline, and
    place among them. stages, firsts: stage of this rank and first micro-batch, for each direction."""
    forwards, backwards, late = list(firsts), list(firsts), list[tuple[int, int]]()
    outside, inside = ranks - 1 - rank, rank + 1

    def forward(way: int) -> PipelineAction:
        forwards[way] += 1
        return PipelineAction("F", stages[way], forwards[way] - 1)

    def backward(way: int, split: bool = False) -> PipelineAction:
        backwards[way] += 1
        late.extend([(stages[way], backwards[way] - 1)] * split)
        return PipelineAction("I" if split else "B", stages[way], backwards[way] - 1)

    def weight() -> PipelineAction:
        return PipelineAction("W", *late.pop(0))

    for _ in range(2 * outside):
        yield forward(0)
    for _ in range(inside):
        yield from (forward(0), forward(1))
    for _ in range(outside):
        yield from (backward(1, split=True), weight(), forward(1))
    for number in range(micro_batches - 2 * ranks + inside):
        first = forward(0), backward(1)
        yield from first if number == 0 and outside == 0 else [PipelineAction.both(*first)]
        yield PipelineAction.both(forward(1), backward(0))
    for _ in range(outside):
        yield backward(1)
        yield PipelineAction.both(forward(1), backward(0))
    for number in range(2 * inside):  # the second half of these backward passes delay W
        yield backward(1 - number % 2, split=number >= inside)
    for _ in range(outside):
        yield from (weight(), backward(0, split=True))
    for _ in range(inside):
        yield weight()


BY_NAME: dict[str, Callable[..., PipelineSchedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "breadth-first": breadth_first,
    "interleaved-zero-bubble": interleaved_zero_bubble,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-1p": zb_1p,
    "zb-2p": zb_2p,
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe": dualpipe,
    "dualpipe-v": dualpipe_v,
}
"""Name -> function (ranks, micro_batches, options of the schedule) -> table."""
