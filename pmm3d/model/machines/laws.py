"""The time of a collective that was not measured, by its messages and bytes: a law with five figures.

The law is linear in its figures, so least squares find them. `terms` are their factors.
"""

from __future__ import annotations

from typing import NamedTuple

from ..node_map import GATHERS_FROM
from ..schedule import SMALL_BYTES
from ..stages import stages
from .groups import Group

DEFAULT = "default"
"""Name of the figures of all operations, or passes, without figures of their own."""
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift")
"""Collectives that are priced, by the names that the ledger gives them."""
BY_NODES = ("all_gather", "reduce_scatter", "all_reduce")
"""Of them those that may go by nodes."""
PASSES = ("add", "subtract", "multiply", "divide", "scale", "cast", "copy", "fill", "elementwise", "bias",
          "columns", "split", "relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid", "dropout", "dropout mask",
          "sum", "mean", "norm", "take", "put", "log", "softmax", "log_softmax", "layer_norm", "rms_norm", "rotary",
          "embedding", "add columns", "attention", "mse", "mae", "cross_entropy", "accuracy", "r2", "sgd", "adam",
          "adamw", "clip")
"""Passes of the library, by the names that dry runs give them; after most of them comes "... backward"."""


class Terms(NamedTuple):
    """Counts of a collective by which the figures of a law are multiplied: of starts, messages and bytes of a rank
    within its node, messages of a rank between nodes, and bytes into its node, for all groups of the axis together."""

    starts: float
    messages_inside: float
    messages_across: float
    bytes_inside: float
    bytes_across: float


class Law(NamedTuple):
    """seconds = start + messages inside and across + bytes inside and across, each times its figure.

    start             seconds
    message_inside    seconds for each message within a node
    message_across    seconds for each message between nodes
    byte_inside       seconds for each byte that a rank receives within a node
    byte_across       seconds for each byte that a node receives from others
    misfit            relative error of the fit; for people
    """

    start: float
    message_inside: float
    message_across: float
    byte_inside: float
    byte_across: float
    misfit: float = 0.0

    def seconds(self, operation: str, group: Group, nbytes: float, by_nodes: bool | None = None) -> float:
        """Seconds of a collective in which a rank receives, or sends, at most `nbytes` bytes.

        by_nodes   whether it goes by nodes (`pmm3d.model.node_map`). If left out, as the library does it where no
                   machine was measured

            >>> Law(0.5, 0, 0, 1, 2).seconds("all_gather", Group(size=2, inside=1, nodes=2, sharers=4), 1000)
            8000.5
        """
        return sum(figure * term for figure, term in zip(self, terms_of(operation, group, nbytes, by_nodes)))


def terms(operation: str, group: Group, nbytes: float) -> Terms:
    """Of each rank's size - 1 others, size - inside are on other nodes, and so is that share of messages and bytes.
    All ranks of a node in all its groups receive at once: inside * sharers times as much comes into the node. Of a
    shift only the last rank in a node receives from another, and that is the one that all wait for.

        >>> terms("all_gather", Group(size=4, inside=2, nodes=2, sharers=2), 300)
        Terms(starts=1.0, messages_inside=1.0, messages_across=2.0, bytes_inside=100.0, bytes_across=800.0)
    """
    if group.size < 2 or nbytes <= 0:
        return Terms(0.0, 0.0, 0.0, 0.0, 0.0)
    if operation == "shift":
        inside, across, at_once = float(group.nodes == 1), float(group.nodes > 1), group.sharers
    else:
        others, at_once = group.size - 1, group.inside * group.sharers
        inside, across = (group.inside - 1) / others, (group.size - group.inside) / others
    count = messages(operation, group.size, nbytes)
    return Terms(1.0, count * inside, count * across, nbytes * inside, nbytes * across * at_once)


def terms_of(operation: str, group: Group, nbytes: float, by_nodes: bool | None = None) -> Terms:
    """As the library does it, or by nodes, or not: see `Law.seconds`."""
    if by_nodes is None:
        large = operation != "all_gather" or nbytes * group.size >= GATHERS_FROM * (group.size - 1)
        by_nodes = large and group.even and operation in BY_NODES
    return terms_by_nodes(operation, group, nbytes) if by_nodes else terms(operation, group, nbytes)


def terms_by_nodes(operation: str, group: Group, nbytes: float) -> Terms:
    """Of a collective that goes by nodes: of the group.size - 1 parts that a rank receives, nodes - 1 come from other
    nodes. It takes two rounds where the flat one takes one.

        >>> terms_by_nodes("all_gather", Group(size=4, inside=2, nodes=2, sharers=2), 300)
        Terms(starts=2.0, messages_inside=2.0, messages_across=1.0, bytes_inside=200.0, bytes_across=400.0)
    """
    if nbytes <= 0:
        return Terms(0.0, 0.0, 0.0, 0.0, 0.0)
    inside, nodes = group.inside, group.nodes
    share, counts = (nodes - 1) / (group.size - 1), [messages(operation, size) for size in (inside, nodes)]
    if operation == "all_reduce":
        both = inside + nodes - 2
        if nbytes * max(inside, nodes) <= SMALL_BYTES * both:
            share, counts = (nodes - 1) / both, [count // 2 for count in counts]
    else:
        counts[0] *= nodes
    return Terms(2.0, float(counts[0]), float(counts[1]), nbytes - nbytes * share,
                 nbytes * share * inside * group.sharers)


def messages(operation: str, size: int, nbytes: float = float("inf")) -> int:
    """Number of messages that a rank receives in a collective in which it receives `nbytes` bytes: one from each other
    rank of its stages (`pmm3d.model.stages`), and twice as many in an all-reduce. An all-reduce of a small array, which
    is sent whole, takes half as many.

        >>> [messages("all_gather", size) for size in (2, 16, 64)], messages("all_reduce", 16), messages("shift", 16)
        ([1, 15, 14], 30, 1)
    """
    if operation == "shift":
        return min(size - 1, 1)
    if operation == "all_to_all":
        return size - 1
    peers = sum(stages(size))
    once = peers - len(stages(size))
    return 2 * once if operation == "all_reduce" and nbytes * peers > SMALL_BYTES * once else once
