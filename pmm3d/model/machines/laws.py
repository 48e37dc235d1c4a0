"""The time of a collective that was not measured: a law with five figures, from the numbers of messages and bytes.

The law is linear in its figures, so least squares determine them. `terms` returns their factors.
"""

from __future__ import annotations

from typing import NamedTuple

from ..node_map import GATHERS_FROM
from ..schedule import SMALL_BYTES
from ..stages import stages
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
    "scale",
    "cast",
    "copy",
    "fill",
    "elementwise",
    "bias",
    "columns",
    "split",
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
    "norm",
    "take",
    "put",
    "log",
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
    "cross_entropy",
    "accuracy",
    "r2",
    "clip",
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
        return sum(figure * term for figure, term in zip(self, terms_of(operation, group, nbytes, by_nodes)))


def terms(operation: str, group: Group, nbytes: float) -> Terms:
    """Return the terms of a direct collective.

    A rank exchanges messages with size - 1 other ranks, of which size - inside are on other nodes. The same share of
    its messages and bytes crosses the network. All ranks of a node in all its groups receive at once, so the bytes
    into the node are inside * sharers times those of a rank. In a shift only one rank of a group on a node receives
    from another node, and all ranks wait for it.

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
    """Return the terms of a collective that runs by nodes or not. `by_nodes` is that of `Law.seconds`."""
    if by_nodes is None:
        large = operation != "all_gather" or nbytes * group.size >= GATHERS_FROM * (group.size - 1)
        by_nodes = large and group.even and operation in BY_NODES
    return terms_by_nodes(operation, group, nbytes) if by_nodes else terms(operation, group, nbytes)


def terms_by_nodes(operation: str, group: Group, nbytes: float) -> Terms:
    """Return the terms of a collective that runs by nodes. Of the group.size - 1 parts that a rank receives, nodes - 1
    come from other nodes. The collective takes two rounds for each round of a direct one.

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
    return Terms(
        2.0, float(counts[0]), float(counts[1]), nbytes - nbytes * share, nbytes * share * inside * group.sharers
    )


def messages(operation: str, size: int, nbytes: float = float("inf")) -> int:
    """Return the number of messages that a rank receives in a collective: one from each other rank of its stages
    (`pmm3d.model.stages`), and twice as many in an all-reduce. An all-reduce of a small array sends whole arrays, and
    takes half as many. `nbytes` is the bytes that the rank receives.

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
