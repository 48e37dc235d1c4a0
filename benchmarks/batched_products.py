"""Small products of a list, one after the other and with their messages together, in turns.

    python benchmarks/batched_products.py
    python benchmarks/batched_products.py --sizes 64,256 --ranks 8 --products 32 --passes 5

matmul      `matmul` with out= for each pair
plan        one MatmulPlan, called with the matrices of each pair
new plan    the same, with a plan that binds each set of matrices anew: the cost of a set that was not used before
batched     one `matmul_batched`

All pairs have equal sizes, on a grid of all ranks, with one BLAS thread per rank. Each figure is the time of all
products on the slowest rank, divided by their number: medians of the rounds of all passes.
The ratio is the median of the ratios within a pass; below 1, matmul_batched is faster than matmul.
"""

from __future__ import annotations

import sys
from itertools import product
from statistics import median

from records import parser, report
from timing import Figures, all_rounds, on_ranks, one_thread, slowest

SIZES, RANKS = (64, 128, 256), (2, 4, 8)
KINDS = "matmul", "plan", "new plan", "batched"
ROUNDS = 7


def of_pmm3d(size: int, ranks: int, products: int) -> Figures:
    """Milliseconds of a product by kind, and the number of messages that a rank sends in all of them."""
    printed = on_ranks(ranks, [__file__, "--here", f"{size}:{products}"], one_thread())
    return dict(zip((*KINDS, "messages", "messages batched"), map(float, printed.split()[-len(KINDS) - 2 :])))


def here(size: int, products: int) -> None:
    """On the ranks of a job: print the figures of `of_pmm3d`."""
    from mpi4py import MPI

    from pmm3d import DistMatrix, Grid, Layout, MatmulPlan, matmul, matmul_batched
    from pmm3d.comm import Link
    from pmm3d.product import matmul_plan

    sent, post_all = [0], Link.post_all

    def counted(link, library, sends, receives):
        sent[0] += len(sends)
        return post_all(link, library, sends, receives)

    matmul_plan.BOUND = max(matmul_plan.BOUND, products)
    with Grid(MPI.COMM_WORLD) as grid:
        pairs = [
            [
                DistMatrix.random(grid, (size, size), seed=2 * number + which, distribution="integers", layout=layout)
                for which, layout in enumerate((Layout.A, Layout.B))
            ]
            for number in range(products)
        ]
        outs = matmul_batched(pairs)
        right = all((c.gather() == a.gather() @ b.gather()).all() for (a, b), c in zip(pairs, outs))
        assert right, "a product is wrong"

        def unplanned() -> None:
            for (a, b), c in zip(pairs, outs):
                matmul(a, b, out=c)

        with MatmulPlan(*pairs[0], out=outs[0]) as plan:

            def planned() -> None:
                for (a, b), c in zip(pairs, outs):
                    plan(a, b, out=c)

            def rebound() -> None:
                plan._bound = []
                planned()

            batched = lambda: matmul_batched(pairs, out=outs)
            calls = dict(zip(KINDS, (unplanned, planned, rebound, batched)))
            found = all_rounds(KINDS, lambda kind: slowest(grid.comm, calls[kind]), ROUNDS)
            messages = list[int]()
            Link.post_all = counted
            for call in (unplanned, batched):
                sent[0] = 0
                call()
                messages.append(sent[0])
        if grid.rank == 0:
            print(f"{grid.shape}", *(1e3 * median(found[kind]) / products for kind in KINDS), *messages)


def main() -> None:
    made = parser(__doc__)
    numbers = lambda text: tuple(map(int, text.split(",")))
    made.add_argument("--sizes", type=numbers, default=SIZES, help="m = n = k of the products")
    made.add_argument("--ranks", type=numbers, default=RANKS)
    made.add_argument("--products", type=int, default=32, help="number of products of the list")
    made.add_argument("--passes", type=int, default=5)
    made.add_argument("--here", metavar="SIZE:PRODUCTS", help="internal, on every rank: prints the figures")
    options = made.parse_args()
    if options.here:
        return here(*map(int, options.here.split(":")))
    if options.quick:
        options.sizes, options.ranks, options.products, options.passes = (16,), (2,), 3, 1
    rows = [["n cubed", "ranks", *(f"{kind} ms" for kind in KINDS), "ratio", "messages", "batched"]]
    for size, ranks in product(options.sizes, options.ranks):
        passes = [of_pmm3d(size, ranks, options.products) for _ in range(options.passes)]
        middle = lambda name: median(each[name] for each in passes)
        ratio = median(each["batched"] / each["matmul"] for each in passes)
        rows.append(
            [
                str(size),
                str(ranks),
                *(f"{middle(kind):.3f}" for kind in KINDS),
                f"{ratio:.2f}",
                f"{middle('messages'):.0f}",
                f"{middle('messages batched'):.0f}",
            ]
        )
        print(f"{' | '.join(rows[-1])}", file=sys.stderr, flush=True)
    title = f"{options.products} products, float64; medians of {options.passes} passes; messages of rank 0"
    report(options, (title, rows))


if __name__ == "__main__":
    main()
