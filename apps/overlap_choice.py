"""Which way of overlap is fastest, and which one the model chooses: a product and its two adjoints, in eight shapes.

    python tests/cluster/cluster.py run --nodes 2 --rate 4gbit -- -m pmm3d tune machine        once, for the model
    python tests/cluster/cluster.py run --nodes 2 --rate 4gbit -- apps/overlap_choice.py --grid 2x1x1
    python tests/cluster/cluster.py run --nodes 4 --rate 4gbit -- apps/overlap_choice.py --grid 2x2x1 --shapes 512x256x256

For each of C = A B, dA = dC B^T and dB = A^T dC: milliseconds of the slowest rank with no overlap, in panels, and
decomposed, in turns, medians over the rounds; the part of the first that is waiting; what `matmul` takes by itself; how
much longer that takes than the fastest. At the end: how often the choice is the fastest or within 5% of it, and what
the best way gains where 30 to 60% of the time is communication. Across nodes with one rank each: there is no choice on
one node, and axes that go by nodes are not decomposed.
"""

import argparse
import sys

from measuring import Figures, in_turns, markdown, slowest
from mpi4py import MPI
from rich.console import Console

from pmm3d import DistMatrix, Grid, Layout, LayoutError, matmul
from pmm3d.layout import parse_shape
from pmm3d.product.multiply import plan_for

SHAPES = ("4096x512x512,8192x1024x512,2048x2048x2048,1024x4096x1024,512x4096x4096,1024x1024x8192,4096x1024x1024,"
          "2048x512x4096")
WAYS = ("none", "panels", "decomposed")
NEAR = 1.05
SHARE = (0.3, 0.6)
HEADING = ["m, n, k", "product", *(f"{way} ms" for way in WAYS), "waiting", "chosen", "over the fastest"]


def ways_of(a: DistMatrix, b: DistMatrix, out: DistMatrix) -> list[str]:
    """Those that differ for this product: panels where something is cut, decomposed where it can be."""
    found = []
    for way in WAYS:
        try:
            if plan_for(a, b, out, None, None, way).overlap == way:
                found.append(way)
        except LayoutError:
            continue
    return found


def measure(grid: Grid, a: DistMatrix, b: DistMatrix, rounds: int) -> dict[str, Figures]:
    """Way -> seconds of the slowest rank, and the mean that a rank waits."""
    out = matmul(a, b)

    def product(way: str) -> Figures:
        grid.ledger.reset()
        seconds = slowest(grid.comm, lambda: matmul(a, b, out=out, overlap=way))
        return {"seconds": seconds, "waited": grid.comm.allreduce(grid.ledger.total().waited) / grid.size}

    return in_turns(ways_of(a, b, out), product, rounds)


def products_of(grid: Grid, size: tuple[int, int, int], dtype: str) -> list[tuple[str, DistMatrix, DistMatrix]]:
    m, n, k = size
    a, b, c = (DistMatrix.random(grid, shape, seed=seed, dtype=dtype, layout=layout) for seed, (shape, layout) in
               enumerate((((m, k), Layout.A), ((k, n), Layout.B), ((m, n), Layout.C))))
    return [("C = A B", a, b), ("dA = dC B^T", c, b.T), ("dB = A^T dC", a.T, c)]


def row_of(size: tuple[int, int, int], name: str, found: dict[str, Figures], chosen: str) -> tuple[list[str], dict]:
    """A line of the table; and what is counted."""
    seconds = {way: figures["seconds"] for way, figures in found.items()}
    fastest, share = min(seconds.values()), found["none"]["waited"] / seconds["none"]
    over = seconds[chosen] / fastest
    row = [", ".join(map(str, size)), name, *(f"{1e3 * seconds[way]:.1f}" if way in seconds else "" for way in WAYS),
           f"{100 * share:.0f}%", chosen, f"{100 * (over - 1):.1f}%"]
    return row, {"near": over <= NEAR, "share": share, "gain": seconds["none"] / fastest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default="2x1x1")
    parser.add_argument("--shapes", default=SHAPES, help="m x n x k, with commas between them")
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--rounds", type=int, default=5, help="of which the medians count (5)")
    options = parser.parse_args()
    rows, counted, console = [HEADING], [], Console(stderr=True)
    with Grid(MPI.COMM_WORLD, parse_shape(options.grid)[:3], dtype=options.dtype) as grid:
        if grid.hosts == 1 and grid.rank == 0:
            print("one node: matmul has no choice here, see --help", file=sys.stderr)
        for size in (tuple(map(int, text.split("x"))) for text in options.shapes.split(",")):
            for name, a, b in products_of(grid, size, options.dtype):
                found = measure(grid, a, b, options.rounds)
                row, figures = row_of(size, name, found, plan_for(a, b, None, None, None).overlap)
                rows.append(row)
                counted.append(figures)
                if grid.rank == 0:
                    console.print(" | ".join(row), highlight=False)
        if grid.rank == 0:
            where = "the machine that was measured" if grid.machine else "no measured machine"
            print(f"grid {grid.shape} on {grid.hosts} nodes, {options.dtype}, by {where}\n\n{markdown(rows)}\n")
            print(f"choice the fastest or within 5%: {sum(each['near'] for each in counted)} of {len(counted)}")
            gains = [each["gain"] for each in counted if SHARE[0] <= each["share"] <= SHARE[1]]
            print("best over none where 30 to 60% is waiting: " + (
                f"{min(gains):.2f} to {max(gains):.2f} in {len(gains)} products" if gains else "no such product"))


if __name__ == "__main__":
    main()
