"""A product with operands, or a training step with weights, in memory that the ranks of a node share, compared with
messages, in turns.

    python -m pmm3d.launcher -n 8 benchmarks/shared_operands.py         m = n = k = 12288 in float32: 6 GB
    python -m pmm3d.launcher -n 2 benchmarks/shared_operands.py --size 2048 2048 2048 --dtype float64 --rounds 9
    python -m pmm3d.launcher -n 8 benchmarks/shared_operands.py --network 8 2048 1024        layers, width, rows

For each, the program prints the median of the times, the bytes that a rank receives for operands and C, or for weights,
and the memory of all ranks of the first node after it. A shared page is counted once (Pss of Linux). Then it prints the
ratios. A network uses only z (FSDP), and keeps its gathered weights for the backward pass.
"""

import argparse
import math
import re
from pathlib import Path
from statistics import median

from mpi4py import MPI
from records import parser, report
from timing import all_rounds, slowest

from pmm3d import DistMatrix, Grid, Layout, matmul, nn
from pmm3d.layout import batch_layout
from pmm3d.nn import optim

GIB = 2**30


def held() -> int:
    """Bytes that this process holds, with its share of shared pages."""
    return 1024 * int(re.search(r"^Pss: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.M)[1])


def operands(grid: Grid, size: list[int], dtype: str, shared: bool) -> list[DistMatrix]:
    m, n, k = size
    made = [
        DistMatrix.empty(grid, shape, dtype=dtype, layout=layout, shared=shared)
        for shape, layout in (((m, k), Layout.A), ((k, n), Layout.B))
    ]
    for matrix in made:
        matrix.local[...] = 1
    return made


def measured(options: argparse.Namespace, shared: bool) -> dict:
    """Figures of a product or a step, after another one as warm-up, on a new grid, whose memory is freed."""
    if options.network:
        with Grid(MPI.COMM_WORLD, shape="fsdp") as grid:
            return {"grid": grid.shape, **of_step(grid, *options.network, shared)}
    with Grid(MPI.COMM_WORLD, options.grid, product=tuple(options.size), dtype=options.dtype) as grid:
        return {"grid": grid.shape, **figures(grid, options, shared)}


def figures(grid: Grid, options: argparse.Namespace, shared: bool) -> dict:
    before = sum(grid.comm.allgather(held()))
    a, b = operands(grid, options.size, options.dtype, shared)
    c = matmul(a, b)
    grid.ledger.reset()
    seconds = slowest(grid.comm, lambda: matmul(a, b, out=c))
    assert (c.local == options.size[2]).all(), "the product is wrong"
    received = sum(grid.ledger.total(phase=phase).received for phase in ("gather A", "gather B", "reduce C"))
    return {
        "seconds": seconds,
        "received": max(grid.comm.allgather(received)),
        "held": sum(grid.comm.allgather(held())) - before,
    }


def of_step(grid: Grid, layers: int, width: int, batch: int, shared: bool) -> dict:
    before = sum(grid.comm.allgather(held()))
    kept = {"shared_weights": True} if shared else {"reshard_after_forward": False}
    nn.Tape.of(grid).parallel.overlap = nn.Overlap(**kept)
    net = nn.MLP(grid, [width] * (layers + 1), bias=False, seed=1)
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    x = DistMatrix.random(grid, (batch, width), seed=2, dtype="float32", layout=batch_layout("y"))
    y = DistMatrix.random(grid, (batch, width), seed=3, dtype="float32", layout=net.output_layout)

    def step() -> None:
        nn.mse(net(x), y).backward()
        optimizer.step()

    step()
    grid.ledger.reset()
    seconds = slowest(grid.comm, step)
    return {
        "seconds": seconds,
        "received": max(grid.comm.allgather(grid.ledger.total(phase="gather W").received)),
        "held": sum(grid.comm.allgather(held())) - before,
    }


def title(options: argparse.Namespace) -> str:
    if not options.network:
        return f"{'x'.join(map(str, options.size))} {options.dtype}"
    layers, width, batch = options.network
    return f"{layers} layers of {width}, batch {batch}, float32"


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--size", type=int, nargs=3, default=[12288] * 3, metavar=("M", "N", "K"))
    made.add_argument(
        "--network",
        type=int,
        nargs=3,
        metavar=("LAYERS", "WIDTH", "ROWS"),
        help="a step of training in place of a product",
    )
    made.add_argument("--dtype", default="float32")
    made.add_argument("--grid", default="auto", help="GxxGyxGz (auto)")
    made.add_argument("--rounds", type=int, default=5)
    options = made.parse_args()
    if options.network:
        made.refuse(options, "--size --dtype --grid", "--network")
    if options.quick:
        options.size, options.rounds, options.network = [96, 64, 80], 1, options.network and [2, 128, 32]
    found = all_rounds((False, True), lambda shared: measured(options, shared), options.rounds)
    if MPI.COMM_WORLD.rank:
        return
    what = "weights" if options.network else "operands"
    rows = [[what, "ms", "received a rank (MB)", "held by the node (GiB)"]]
    for shared, name in ((False, "messages"), (True, "shared")):
        seconds, received, nbytes = (
            median(turn[figure] for turn in found[shared]) for figure in ("seconds", "received", "held")
        )
        rows.append([name, f"{1e3 * seconds:.1f}", f"{received / 1e6:.1f}", f"{nbytes / GIB:.2f}"])
    time, memory = (
        median(shared[figure] / (messages[figure] or math.nan) for messages, shared in zip(found[False], found[True]))
        for figure in ("seconds", "held")
    )
    report(
        options,
        (
            f"{title(options)} on {found[True][0]['grid']}, {options.rounds} rounds; shared / messages, "
            f"medians of the rounds: time {time:.3f}, memory {memory:.3f}",
            rows,
        ),
    )


if __name__ == "__main__":
    main()
