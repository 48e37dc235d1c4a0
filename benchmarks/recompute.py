"""Recomputation of a GPT under budgets, from that of all arrays to the least one: bytes, work and time of a step.

    python -m pmm3d.launcher -n 2 benchmarks/recompute.py --layers 8 --hidden 256

predicted, held   bytes of the arrays for the backward pass after the forward pass, and in it at most ("peak")
again             operations of the backward pass that recompute, over those of the forward pass
dry, measured     seconds of a forward and a backward pass: flop at the rate of the step that keeps all, and the median
"""

import argparse
from statistics import median
from time import perf_counter

import numpy as np
from mpi4py import MPI
from records import parser, report

from pmm3d import DistMatrix, Grid, nn
from pmm3d.layout import Layout
from pmm3d.model.recomputation import Chain, choose, least_peak
from pmm3d.nn.recompute_budget import operations_of

MEBIBYTE, STEPS, BACKWARD = 2**20, 5, 2
"""Steps that are timed. A backward pass has twice the operations of a forward pass."""


def network(grid: Grid, options: argparse.Namespace, recompute: str) -> nn.GPT:
    sizes = {"vocabulary": 512, "positions": options.sequence, "hidden": options.hidden, "heads": 4}
    return nn.GPT(grid, layers=options.layers, seed=1, recompute=recompute, **sizes)


def passes(net: nn.GPT, x: DistMatrix) -> tuple[int, float]:
    """(bytes that the tape holds after the forward pass, seconds of both passes)."""
    begun = perf_counter()
    out = net(x)
    loss = nn.cross_entropy(out, x)
    forward = perf_counter() - begun
    others = [x.local, out.local, *(each.local for each in net.parameters())]
    held = sum(array.nbytes for array in out.kept() if all(array is not other for other in others)) + out.local.nbytes
    begun = perf_counter()
    del out
    loss.backward()
    net.grid.comm.barrier()
    return held, forward + perf_counter() - begun


def main() -> None:
    made = parser(__doc__)
    for name, default in (("--layers", 8), ("--hidden", 256), ("--sequence", 128), ("--batch", 8)):
        made.add_argument(name, type=int, default=default, help=f"({default})")
    options = made.parse_args()
    if options.quick:
        options.layers, options.hidden, options.sequence, options.batch = 3, 32, 16, 4
    rows = [["budget MiB", "predicted", "held", "peak", "again", "dry", "measured", "choice"]]
    with Grid(MPI.COMM_WORLD, "fsdp") as grid:
        index = np.arange(options.sequence * options.batch)[:, None] % 512
        x = DistMatrix.from_global(grid, index, layout=Layout(("data", "z"), units=(options.sequence, 1)))
        net = network(grid, options, "1 TiB")
        chain = Chain(operations_of(net, net.budget.groups, [nn.Tensor(x)], grid))
        least, most = least_peak([chain]), choose([chain]).peak
        work, rate = sum(each.cost for each in chain.operations), 0.0
        for step in range(5):
            nbytes = most - step * (most - least) // 4
            choice, net = choose([chain], nbytes), network(grid, options, f"{nbytes} B")
            every = [passes(net, x) for _ in range(STEPS + 1)][1:]
            seconds = max(grid.comm.allgather(median(each for _, each in every)))
            rate = rate or (1 + BACKWARD) * work / seconds
            bytes_of = [f"{each / MEBIBYTE:.2f}" for each in (nbytes, choice.kept, every[0][0], choice.peak)]
            dry_seconds = ((1 + BACKWARD) * work + choice.cost) / rate
            again, times = f"{choice.cost / work:.0%}", [f"{each:.3f}" for each in (dry_seconds, seconds)]
            rows.append([*bytes_of, again, *times, net.budget.chosen.split(";")[0]])
    if MPI.COMM_WORLD.rank == 0:
        title = f"GPT of {options.layers} blocks of {options.hidden}, {options.batch} x {options.sequence} tokens"
        report(options, (title, rows))


if __name__ == "__main__":
    main()
