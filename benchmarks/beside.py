"""Compare this version of pmm3d with another one: times of repeated calls, in turns, and bits of results.

    python benchmarks/beside.py ../before/.venv/bin/python
    python benchmarks/beside.py ../before/.venv/bin/python --cases reduce plan64 --ranks 2,8 --rounds 9
    python benchmarks/beside.py ../before/.venv/bin/python --bits --ranks 1,2,3,4,6,8

Each figure is the time of one call on the slowest rank: the median of the rounds. The ratio is the median of the ratios
within a round, and below 1 if this version is faster. In each round, both versions run every case once, each in an MPI
world of its own. With --bits, nothing is timed: digests of products, redistributions and training steps on all process
grids are compared. Different digests are printed, and the exit status is 1 if there are any. The cases use public names
only. For products of all sizes see `product.py --beside`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import numpy as np
from mpi4py import MPI
from records import parser, report
from timing import on_ranks, repetitions, slowest

from pmm3d import BlockCyclic, DistMatrix, Grid, Layout, MatmulPlan, matmul, nn
from pmm3d.layout import batch_layout
from pmm3d.nn import optim

Work = Callable[[], object]
SECONDS, CALLS = 0.5, 2000
"""Approximate seconds of the repetitions of one case in a round, and their largest number."""


def matrices(grid: Grid, m: int, n: int, k: int, dtype: str = "float64") -> tuple[DistMatrix, DistMatrix]:
    return (
        DistMatrix.random(grid, (m, k), seed=1, layout=Layout.A, dtype=dtype),
        DistMatrix.random(grid, (k, n), seed=2, layout=Layout.B, dtype=dtype),
    )


def cyclic(comm: MPI.Intracomm, shape: tuple[int, int], block: int) -> BlockCyclic:
    rows = max(rows for rows in range(1, comm.size + 1) if comm.size % rows == 0 and rows * rows <= comm.size)
    return BlockCyclic(shape, (block, block), (rows, comm.size // rows))


def network(grid: Grid, width: int, rows: int) -> tuple[Work, nn.MLP]:
    net = nn.MLP(grid, [width, 2 * width, width], nn.relu, seed=3, dtype="float32")
    opt = optim.AdamW(net.parameters(), lr=1e-3)
    x = DistMatrix.random(grid, (rows, width), seed=4, layout=batch_layout("y"), dtype="float32")
    y = DistMatrix.random(grid, (rows, width), seed=5, layout=net.output_layout, dtype="float32")

    def step() -> None:
        nn.mse(net(x), y).backward()
        opt.step()
        opt.zero_grad()

    return step, net


@contextmanager
def case(name: str, comm: MPI.Intracomm) -> Iterator[Work]:
    """Yield the call that a case repeats."""
    with Grid(comm) as grid:
        if name == "reduce":
            part = np.ones(16)
            yield lambda: grid.everyone.all_reduce(part).wait()
        elif name == "gather":
            rows = np.ones((2**15, 16))
            yield lambda: grid.everyone.all_gather(rows).wait()
        elif name.startswith("matmul"):
            a, b = matrices(grid, *[int(name[6:])] * 3)
            c = a @ b
            yield lambda: matmul(a, b, out=c)
        elif name.startswith("plan"):
            with MatmulPlan(*matrices(grid, *[int(name[4:])] * 3)) as plan:
                yield plan
        elif name == "norm":
            a, _ = matrices(grid, 64, 64, 64)
            yield a.norm
        elif name.startswith("step"):
            yield network(grid, int(name[4:]), 4 * int(name[4:]))[0]
        elif name.startswith("cyclic"):
            layout = cyclic(comm, (4096, 4096), int(name[6:]))
            local = DistMatrix.random(grid, layout.shape, seed=1).to_block_cyclic(layout)
            yield lambda: DistMatrix.from_block_cyclic(grid, local, layout)
        elif name == "relayout":
            a = DistMatrix.random(grid, (4096, 4096), seed=1, layout=Layout.A)
            yield lambda: a.redistribute(Layout((), ("z", "y", "x")))
        else:
            raise SystemExit(f"unknown case {name}: one of {', '.join(CASES)}")


CASES = (
    "reduce",
    "gather",
    "norm",
    "matmul64",
    "plan64",
    "matmul256",
    "plan256",
    "matmul1024",
    "step64",
    "step512",
    "cyclic64",
    "cyclic256",
    "relayout",
)


def grids(size: int) -> list[tuple[int, int, int]]:
    return [
        (x, y, size // x // y)
        for x in range(1, size + 1)
        if size % x == 0
        for y in range(1, size // x + 1)
        if size // x % y == 0
    ]


def digests(comm: MPI.Intracomm) -> dict[str, str]:
    """Digests of results on all process grids of the communicator."""
    found: dict[str, str] = {}

    def add(name: str, matrix: DistMatrix) -> None:
        whole = matrix.gather(root=0)
        if comm.rank == 0:
            found[name] = hashlib.sha256(np.ascontiguousarray(whole).tobytes()).hexdigest()[:16]

    for shape in grids(comm.size):
        with Grid(comm, shape) as grid:
            for dtype in ("float64", "float32", "complex64", "float16"):
                for m, n, k in ((13, 11, 17), (64, 48, 80), (257, 129, 1030)):
                    name = f"{shape} {dtype} {m}x{n}x{k}"
                    a, b = matrices(grid, m, n, k, dtype)
                    c = a @ b
                    add(f"{name} matmul", c)
                    add(f"{name} decomposed", matmul(a, b, overlap="decomposed"))
                    add(f"{name} by columns", matmul(a, b, order="F"))
                    add(f"{name} panels", matmul(a, b, panels=3))
                    add(f"{name} dB", a.H @ c)
                    add(f"{name} dA", c @ b.H)
                    with MatmulPlan(a, b, alpha=2) as plan:
                        plan()
                        add(f"{name} plan", plan())
                    if dtype != "float16":
                        add(f"{name} beta", matmul(a, b, out=c.redistribute(Layout((), ("x", "z"))), beta=0.5))
                        layout = cyclic(comm, (m, n), 4)
                        add(f"{name} cyclic", DistMatrix.from_block_cyclic(grid, c.to_block_cyclic(layout), layout))
                    found[f"{name} norm"] = repr(c.norm())
            step, net = network(grid, 24, 40)
            for _ in range(3):
                step()
            for index, weight in enumerate(net.parameters()):
                add(f"{shape} weight {index}", weight.value)
    return found


def main() -> None:
    made = parser(__doc__)
    made.add_argument("python", help="Python of an environment with the other version of pmm3d", metavar="PYTHON")
    made.add_argument(
        "--cases",
        nargs="+",
        choices=CASES,
        default=list(CASES),
        metavar="CASE",
        help=f"some of {', '.join(CASES)} (all)",
    )
    made.add_argument(
        "--ranks",
        type=lambda text: [int(word) for word in text.split(",")],
        default=[2, 8],
        metavar="N,...",
        help="numbers of ranks (2,8)",
    )
    made.add_argument("--rounds", type=int, default=7, help="number of rounds; figures are medians (7)")
    made.add_argument("--bits", action="store_true", help="compare results instead of times")
    options = made.parse_args()
    if options.quick:
        options.rounds, options.cases, options.ranks = 1, ["reduce"], [2]
    if options.python == "-":
        on_these_ranks(options.cases, options.bits)
        return
    mode = ["--bits"] if options.bits else []
    sides = sys.executable, options.python
    rows = [["case", "ranks", "here, us", "beside, us", "here / beside"]]
    differing = compared = 0
    for ranks in options.ranks:
        runs: list[tuple[dict, dict]] = []
        for turn in range(1 if options.bits else options.rounds):
            order = sides if turn % 2 == 0 else sides[::-1]
            outputs = {
                python: json.loads(on_ranks(ranks, [__file__, "-", *mode, "--cases", *options.cases], python=python))
                for python in order
            }
            runs.append((outputs[sides[0]], outputs[sides[1]]))
            print(f"{ranks} ranks, round {turn + 1}", file=sys.stderr, flush=True)
        if options.bits:
            here, there = runs[0]
            compared += len(here)
            for name in sorted(here.keys() | there.keys()):
                if here.get(name) != there.get(name):
                    differing += 1
                    print(f"{ranks} ranks, {name}: {here.get(name)} here, {there.get(name)} beside")
            continue
        for name in options.cases:
            own, other = ([run[side][name] for run in runs] for side in (0, 1))
            ratio = median(here / there for here, there in zip(own, other))
            rows.append([name, str(ranks), f"{1e6 * median(own):.0f}", f"{1e6 * median(other):.0f}", f"{ratio:.3f}"])
    if options.bits:
        print(f"{differing} of {compared} results differ")
        sys.exit(1 if differing else 0)
    report(options, ("Time of one call", rows))


def on_these_ranks(cases: list[str], bits: bool) -> None:
    """Print the digests, or the seconds of each case, as JSON on rank 0."""
    comm = MPI.COMM_WORLD
    found: dict = digests(comm) if bits else {}
    for name in [] if bits else cases:
        with case(name, comm) as work:
            slowest(comm, work, 3)
            found[name] = slowest(comm, work, repetitions(comm, work, SECONDS, CALLS))
    if comm.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
