"""What collectives move and what work memory they take: bytes, for any rank of a group of any size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..layout import LOW_PRECISION, aligned, itemsize, part_sizes
from .spread import FLAT, Spread
from .stages import stages, stages_of

SMALL_BYTES = 2**16
"""Up to so many bytes in all, every rank receives whole arrays and adds them itself: half as many rounds, since latency
counts there."""
RING_BYTES = 2**20
"""Parts from which, in a group with pairs (`stages`), a gather goes round the ring: its rounds take longer than they
take to begin, and a pair would move everything twice."""


class Volume(NamedTuple):
    """Bytes that a rank receives and sends in a collective, and those of the work memory that it takes."""

    received: int
    sent: int
    work: int = 0


def accumulator(dtype: str) -> str:
    """The type of sums that are not complete yet."""
    return "float32" if dtype in LOW_PRECISION else dtype


def goes_round(counts: Sequence[int], row_bytes: int) -> bool:
    """Whether the parts of a gather, of so many rows, go round the ring of the ranks."""
    return stages(len(counts)).pairs > 0 and max(counts) * row_bytes >= RING_BYTES


def gathers_by_nodes(counts: Sequence[int], row_bytes: int, spread: Spread) -> bool:
    """Whether a gather of parts of so many rows goes by nodes."""
    return spread.inside > 1 and sum(counts) * row_bytes >= spread.gathers_from


def gather_volume(counts: Sequence[int], rank: int, row_bytes: int, spread: Spread = FLAT) -> Volume:
    """Of an all-gather of parts of so many rows.

        >>> gather_volume([3, 3, 2], 2, 8)
        Volume(received=48, sent=32, work=0)
    """
    if gathers_by_nodes(counts, row_bytes, spread):
        return _gather_by_nodes(counts, rank, row_bytes, spread.inside)
    whole, own = sum(counts), counts[rank]
    if goes_round(counts, row_bytes):
        return Volume(row_bytes * (whole - own), row_bytes * (whole - counts[(rank + 1) % len(counts)]))
    group = stages(len(counts))
    partner = group.partner(rank)
    if not group.acts(rank):
        return Volume(row_bytes * whole, row_bytes * own)
    received, sent = (0, 0) if partner is None else (counts[partner], whole)
    edges = group.actor_offsets(counts)
    for stage in stages_of(len(counts), rank):
        rows = stage.rows(edges)
        mine = rows[stage.digit][1] - rows[stage.digit][0]
        received += rows[-1][1] - rows[0][0] - mine
        sent += (len(rows) - 1) * mine
    return Volume(row_bytes * received, row_bytes * sent)


def _gather_by_nodes(counts: Sequence[int], rank: int, row_bytes: int, inside: int) -> Volume:
    node, own = divmod(rank, inside)
    column = counts[own::inside]
    blocks = [gather_volume(block, own, row_bytes) for block in _of_each_node(counts, inside)]
    received = row_bytes * (sum(column) - column[node]) + sum(block.received for block in blocks)
    return Volume(received, row_bytes * (len(column) - 1) * column[node] + sum(block.sent for block in blocks))


def _of_each_node(counts: Sequence[int], inside: int) -> list[Sequence[int]]:
    return [counts[first : first + inside] for first in range(0, len(counts), inside)]


def reduce_volume(counts: Sequence[int], rank: int, cols: int, dtype: str, spread: Spread = FLAT) -> Volume:
    """Of a reduce-scatter of rows of so many elements, of which each rank keeps so many.

        >>> reduce_volume([2, 1], 0, 10, "float64")
        Volume(received=160, sent=80, work=192)
    """
    if spread.sums:
        return _reduce_by_nodes(counts, rank, cols, dtype, spread)
    group, total = stages(len(counts)), accumulator(dtype)
    row, total_row, partner = cols * itemsize(dtype), cols * itemsize(total), group.partner(rank)
    whole, own = sum(counts), counts[rank]
    if not group.acts(rank):
        return Volume(total_row * own, row * whole, aligned(total_row * own))
    received = sent = work = 0
    if partner is not None:
        received, sent, work = row * whole, total_row * counts[partner], aligned(row * whole)
    if group.pairs and row != total_row:
        row, work = total_row, work + aligned(total_row * whole)
    edges, steps = group.actor_offsets(counts), stages_of(len(counts), rank)
    for stage in steps:
        rows = stage.rows(edges)
        mine = rows[stage.digit][1] - rows[stage.digit][0]
        received += (len(rows) - 1) * mine * row
        sent += (rows[-1][1] - rows[0][0] - mine) * row
        work += aligned((len(rows) - 1) * mine * row)
        work += aligned(total_row * mine) if row != total_row and len(steps) > 1 else 0
        row = total_row
    return Volume(received, sent, work)


def _reduce_by_nodes(counts: Sequence[int], rank: int, cols: int, dtype: str, spread: Spread) -> Volume:
    node, own = divmod(rank, spread.inside)
    column, total, step = counts[own :: spread.inside], accumulator(dtype), spread.blocks_at_once()
    blocks = [reduce_volume(block, own, cols, dtype) for block in _of_each_node(counts, spread.inside)]
    landing = max(sum(block.work for block in blocks[first : first + step]) for first in range(0, len(blocks), step))
    across = reduce_volume(column, node, cols, total)
    return Volume(sum(block.received for block in blocks) + across.received,
                  sum(block.sent for block in blocks) + across.sent,
                  aligned(sum(column) * cols * itemsize(total)) + max(landing, across.work))


@lru_cache(maxsize=4096)
def sums_whole(size: int, dtype: str, ranks: int) -> bool:
    """Whether an all-reduce of that many elements sends whole arrays, since they are small."""
    return size * itemsize(dtype) * sum(stages(ranks).radices) <= SMALL_BYTES


def sums_whole_by_nodes(size: int, dtype: str, ranks: int, inside: int) -> bool:
    """`sums_whole` of a sum that goes by nodes: on both levels, or on neither."""
    total = accumulator(dtype)
    return sums_whole(size, total, inside) and sums_whole(size, total, ranks // inside)


@lru_cache(maxsize=4096)
def all_reduce_volume(size: int, dtype: str, ranks: int, rank: int, spread: Spread = FLAT) -> Volume:
    """Of an all-reduce of that many elements.

        >>> all_reduce_volume(3, "float64", 2, 0), all_reduce_volume(100001, "float64", 2, 1).received
        (Volume(received=24, sent=24, work=64), 800008)
    """
    if spread.sums:
        return _all_reduce_by_nodes(size, dtype, ranks, rank, spread.inside)
    if sums_whole(size, dtype, ranks):
        return _whole_sum_volume(size, dtype, ranks, rank)
    counts = part_sizes(size, ranks)
    down, up = reduce_volume(counts, rank, 1, dtype), gather_volume(counts, rank, itemsize(dtype))
    total = aligned(counts[rank] * itemsize(dtype))
    return Volume(down.received + up.received, down.sent + up.sent, total + down.work)


def _all_reduce_by_nodes(size: int, dtype: str, ranks: int, rank: int, inside: int) -> Volume:
    (node, own), nodes, total = divmod(rank, inside), ranks // inside, accumulator(dtype)
    row, total_row = itemsize(dtype), itemsize(total)
    if sums_whole_by_nodes(size, dtype, ranks, inside):
        steps = _whole_sum_volume(size, total, inside, own), _whole_sum_volume(size, total, nodes, node)
        work = aligned(size * total_row) * (1 + (total != dtype)) + max(step.work for step in steps)
        return Volume(steps[0].received + steps[1].received, steps[0].sent + steps[1].sent, work)
    columns = part_sizes(size, inside)
    parts = part_sizes(columns[own], nodes)
    down, down_across = reduce_volume(columns, own, 1, dtype), reduce_volume(parts, node, 1, total)
    ways = down, down_across, gather_volume(parts, node, row), gather_volume(columns, own, row)
    work = aligned(columns[own] * total_row) + max(down.work, aligned(parts[node] * row) + down_across.work)
    return Volume(sum(way.received for way in ways), sum(way.sent for way in ways), work)


def _whole_sum_volume(size: int, dtype: str, ranks: int, rank: int) -> Volume:
    group, total = stages(ranks), size * itemsize(accumulator(dtype))
    nbytes = row = size * itemsize(dtype)
    if not group.acts(rank):
        return Volume(nbytes, nbytes)
    moved = work = 0
    if group.partner(rank) is not None:
        moved, work = nbytes, aligned(nbytes)
    if group.pairs and row != total:
        row, work = total, work + aligned(total)
    steps = stages_of(ranks, rank)
    for stage in steps:
        others = (len(stage.peers) - 1) * row
        moved, work = moved + others, work + aligned(others)
        work += aligned(total) if row != total and len(steps) > 1 else 0
        row = total
    return Volume(moved, moved, work)
