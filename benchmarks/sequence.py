"""Attention of a sequence that all ranks share: the balance of the work, and the cost of waiting for keys.

    python -m pmm3d.launcher -n 4 benchmarks/sequence.py
    python -m pmm3d.launcher -n 8 benchmarks/sequence.py --blocks 32 --milliseconds 10 25

Each pair of a block of queries and a block of keys sleeps in place of its products, so ranks can share cores. The
messages are real. The work is the largest number of pairs on a rank / the mean over the ranks. The efficiency is the
time of all pairs / number of ranks / time of the slowest rank: 100% without waits and with even work. Published for 8
devices compared with flash attention on one of them (github.com/zhuzilin/ring-flash-attention): a plain ring 52 to 54%,
zigzag 85 to 90%, striped 74 to 83%.
"""

from __future__ import annotations

import argparse
import time
from importlib import import_module
from typing import Any

from mpi4py import MPI
from records import parser, report
from timing import slowest

from pmm3d import DistMatrix, Grid, nn
from pmm3d.nn.transformer import attention, token_layout
from pmm3d.nn.transformer.kernel import Rows, Visible, block_pairs

QUICK = {"blocks": 8, "milliseconds": [0.2, 0.4], "rounds": 1}
WAYS = (("plain", "ring"), ("striped", "ring"), ("zigzag", "ring"), ("plain", "ulysses"))
BLOCK, SIZE = 32, 16
"""Rows of a block; columns of a head."""


class Sleeping:
    """A kernel that sleeps the given seconds for each pair of blocks, forward and backward.

    heads   number of all heads. A rank with some of them sleeps this fraction of the seconds
    pairs   number of pairs in forward passes so far, for all heads
    """

    def __init__(self, forward: float, backward: float, heads: int):
        self.seconds, self.heads, self.pairs = {False: forward, True: backward}, heads, 0.0

    def attend(
        self,
        library: Any,
        work: Any,
        q: Any,
        k: Any,
        v: Any,
        queries: Rows,
        keys: Rows,
        visible: Visible,
        scale: float,
        into: Any,
        fresh: bool,
        part: str,
        bound: Any,
    ) -> None:
        """`kernel.attend`, with a result of 0."""
        if fresh:
            into.out[...], into.lse[...] = 0, 0
        self.pairs += self._sleep(False, q.shape[1], bound or block_pairs(queries, keys, visible), part)

    def attend_backward(
        self,
        library: Any,
        work: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        dout: Any,
        queries: Rows,
        keys: Rows,
        visible: Visible,
        scale: float,
        dq: Any,
        dk: Any,
        dv: Any,
        fresh: bool,
        part: str,
        bound: Any,
    ) -> None:
        """`kernel.attend_backward`, with gradients of 0."""
        self._sleep(True, q.shape[1], bound or block_pairs(queries, keys, visible), part)

    def _sleep(self, backward: bool, heads: int, every: Any, part: str) -> float:
        lists = [each for _, *both in every for name, each in zip(("before", "after"), both) if part in ("", name)]
        pairs = sum(map(len, lists)) * heads / self.heads
        time.sleep(pairs * self.seconds[backward])
        return pairs


def row_of(order: str, parallel: str, options: argparse.Namespace) -> list[str]:
    """The row of an order and an algorithm in the table. Collective."""
    ranks, rows = MPI.COMM_WORLD.size, options.blocks * BLOCK
    kernel = Sleeping(*(milliseconds / 1e3 for milliseconds in options.milliseconds), ranks)
    module: Any = import_module(attention.__module__)
    module.attend, module.attend_backward = kernel.attend, kernel.attend_backward
    with Grid(MPI.COMM_WORLD, (1, 1, 1), seq=ranks) as grid:
        layout = token_layout(grid, rows, unit=SIZE, block=BLOCK, order=order)
        q, k, v = (
            nn.Tensor(DistMatrix.random(grid, (rows, ranks * SIZE), layout=layout), requires_grad=True)
            for _ in range(3)
        )
        slope = DistMatrix.random(grid, q.shape, layout=layout)

        def forward() -> nn.Tensor:
            return attention(q, k, v, size=SIZE, parallel=parallel, block=BLOCK)

        forward().backward(slope)
        kernel.pairs = 0
        seconds = [slowest(grid.comm, forward) for _ in range(options.rounds)]
        pairs = [number / options.rounds for number in grid.comm.allgather(kernel.pairs)]
        both = [slowest(grid.comm, lambda: forward().backward(slope)) for _ in range(options.rounds)]
    mean = sum(pairs) / ranks
    of_forward, of_both = mean * kernel.seconds[False], mean * sum(kernel.seconds.values())
    figures = max(pairs) / mean, 100 * of_forward / min(seconds), 100 * of_both / min(both)
    return [
        order,
        parallel,
        f"{figures[0]:.2f}",
        f"{1e3 * min(seconds):.0f}",
        f"{figures[1]:.1f}",
        f"{1e3 * min(both):.0f}",
        f"{figures[2]:.1f}",
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--blocks", type=int, default=32, help="blocks; a multiple of twice the ranks (32)")
    options.add_argument(
        "--milliseconds",
        type=float,
        nargs=2,
        default=[10.0, 25.0],
        metavar=("FORWARD", "BACKWARD"),
        help="milliseconds of a pair of blocks (10 25)",
    )
    options.add_argument("--rounds", type=int, default=3)
    chosen = options.parse_args()
    if chosen.quick:
        vars(chosen).update(QUICK)
    heading = ["order", "way", "work", "forward, ms", "efficiency, %", "both, ms", "efficiency, %"]
    rows = [heading, *(row_of(*way, chosen) for way in WAYS)]
    if MPI.COMM_WORLD.rank == 0:
        title = (
            f"{MPI.COMM_WORLD.size} ranks, {chosen.blocks} blocks, a pair of all heads {chosen.milliseconds[0]:g} "
            f"ms forward and {chosen.milliseconds[1]:g} ms backward; least of {chosen.rounds}"
        )
        report(chosen, (title, rows))


if __name__ == "__main__":
    main()
