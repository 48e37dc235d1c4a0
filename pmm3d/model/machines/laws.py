"""The time of a collective that was not measured: a law with five figures, from the numbers of messages and bytes.

The law is linear in its figures, so least squares determine them. `terms` returns their factors.
"""

from __future__ import annotations

from functools import lru_cache
from operator import mul
from typing import NamedTuple

from ..node_map import GATHERS_FROM
from ..rounds import IN, Round, Schedule, Span
from ..schedule import all_gather, all_reduce, all_to_all, is_small, reduce_scatter
from .groups import Group

DEFAULT = "default"
"""Name of the figures for all operations or passes without figures of their own."""
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift")
"""Collectives with a price, by their names in the ledger."""
BY_NODES = ("all_gather", "reduce_scatter", "all_reduce")
"""Collectives that may run by nodes (`pmm3d.model.node_map`)."""
PASSES = (
    "add",
    "subtract",
    "multiply",
    "divide",
    "maximum",
    "minimum",
    "where",
    "exp",
    "log",
    "sqrt",
    "abs",
    "pow",
    "scale",
    "cast",
    "copy",
    "fill",
    "elementwise",
    "bias",
    "columns",
    "rows",
    "split",
    "concat",
    "matrix_transpose",
    "relu",
    "gelu",
    "gelu_tanh",
    "silu",
    "tanh",
    "sigmoid",
    "dropout",
    "dropout mask",
    "sum",
    "mean",
    "max",
    "min",
    "argmax",
    "norm",
    "take",
    "put",
    "offload",
    "scatter_add",
    "grouped_linear",
    "softmax",
    "log_softmax",
    "layer_norm",
    "rms_norm",
    "rotary",
    "embedding",
    "add columns",
    "attention",
    "mse",
    "mae",
    "huber",
    "binary_cross_entropy_with_logits",
    "kl_div",
    "cross_entropy",
    "accuracy",
    "r2",
    "clip",
    "encode",
    "decode",
)
"""Passes of the library by their names in dry runs, without those of optimizers, which begin with `UPDATE`. Most of
them also exist as "... backward"."""


class Terms(NamedTuple):
    """Factors of a law's figures: starts, messages and bytes of a rank within its node, its messages between nodes, and
    bytes into its node, for all groups of the axis together."""

    starts: float
    messages_inside: float
    messages_across: float
    bytes_inside: float
    bytes_across: float


class Law(NamedTuple):
    """seconds = start + messages inside and across + bytes inside and across, each times its figure.

    start             seconds of a start
    message_inside    seconds for each message within a node
    message_across    seconds for each message between nodes
    byte_inside       seconds for each byte that a rank receives within a node
    byte_across       seconds for each byte that a node receives from other nodes
    misfit            relative error of the fit, for information
    """

    start: float
    message_inside: float
    message_across: float
    byte_inside: float
    byte_across: float
    misfit: float = 0.0

    def seconds(self, operation: str, group: Group, nbytes: float, by_nodes: bool | None = None) -> float:
        """Return the seconds of a collective in which a rank receives or sends at most `nbytes` bytes.

        by_nodes   whether it runs by nodes (`pmm3d.model.node_map`). Default: as in a run without a measured machine

            >>> Law(0.5, 0, 0, 1, 2).seconds("all_gather", Group(size=2, inside=1, nodes=2, sharers=4), 1000)
            8000.5
        """
        return sum(map(mul, self, terms(operation, group, nbytes, by_nodes)))


def terms(operation: str, group: Group, nbytes: float, by_nodes: bool | None = None) -> Terms:
    """Return the terms of a collective. `by_nodes` is that of `Law.seconds`.

    Messages and bytes are counted in the schedule of the group's first rank, for equal parts. All ranks of a node in
    all its groups receive at once, so the bytes into the node are inside * sharers times those of a rank. In a shift
    only one rank of a group on a node receives from another node.

        >>> terms("all_gather", Group(size=4, inside=2, nodes=2, sharers=2), 300, by_nodes=False)
        Terms(starts=1.0, messages_inside=1.0, messages_across=2.0, bytes_inside=100.0, bytes_across=800.0)
        >>> terms("all_gather", Group(size=4, inside=2, nodes=2, sharers=2), 300, by_nodes=True)
        Terms(starts=2.0, messages_inside=2.0, messages_across=1.0, bytes_inside=200.0, bytes_across=400.0)
    """
    if group.size < 2 or nbytes <= 0:
        return Terms(0.0, 0.0, 0.0, 0.0, 0.0)
    if by_nodes is None:
        large = operation != "all_gather" or nbytes * group.size >= GATHERS_FROM * (group.size - 1)
        by_nodes = large and group.even and operation in BY_NODES
    kind = operation, group.size, group.inside, group.inside if by_nodes else 1
    received = counted(*kind)
    if operation == "all_reduce":
        of_undivided = counted(*kind, undivided=True)
        if is_small(nbytes / of_undivided.rows, group.size, kind[-1]):
            received = of_undivided
    across = nbytes * received.rows_across / received.rows
    at_once = group.sharers * (1 if operation == "shift" else group.inside)
    messages = float(received.messages - received.messages_across), float(received.messages_across)
    return Terms(2.0 if by_nodes else 1.0, *messages, nbytes - across, across * at_once)


class Received(NamedTuple):
    """Messages that a rank receives, their rows, and how many of each come from other nodes."""

    messages: int
    rows: int
    messages_across: int
    rows_across: int


@lru_cache(maxsize=2**14)
def counted(operation: str, size: int, inside: int, per_node: int = 1, undivided: bool = False) -> Received:
    """Return what rank 0 of `size` ranks receives in a collective of equal parts, if ranks 0:inside are on its node.
    An operation without a price of its own counts as an all-gather.

    per_node, undivided   as in `all_reduce` (`pmm3d.model.schedule`)

        >>> [counted("all_gather", size, size).messages for size in (2, 16, 64)], counted("all_reduce", 16, 16).messages
        ([1, 15, 14], 30)
    """
    parts = (1,) * size
    if operation == "shift":
        schedule = Schedule((Round(receives=((size - 1, Span(IN, 0, 1)),)),))
    elif operation == "all_to_all":
        schedule = all_to_all.__wrapped__(parts, parts, 0)
    elif operation == "all_reduce":
        schedule = all_reduce(1 if undivided else size, size, 0, per_node, undivided=undivided)
    elif operation == "reduce_scatter":
        schedule = reduce_scatter.__wrapped__(parts, 0, per_node)
    else:
        schedule = all_gather.__wrapped__(parts, 0, per_node)
    messages = [(peer, schedule.nbytes(span, 1, 1)) for each in schedule.rounds for peer, span in each.receives]
    across = [rows for peer, rows in messages if peer >= inside]
    return Received(len(messages), sum(rows for _, rows in messages), len(across), sum(across))
