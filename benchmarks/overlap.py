"""Time saved by the overlap of communication with computation: products in panels, decomposed products, training steps.

    python tests/cluster/cluster.py run --nodes 2 --rate 4gbit -- benchmarks/overlap.py panels --grids 1x1x2 1x2x1 2x1x1
    python tests/cluster/cluster.py run --nodes 2 --rate 4gbit -- benchmarks/overlap.py choice --grids 2x1x1
    python tests/cluster/cluster.py run --nodes 2 --rate 4gbit -- \\
        benchmarks/overlap.py training --grids 2x1x1x1 1x1x2x1 1x1x1x2 --check

Run it on several nodes, because inside one node messages take little time.
On a cluster: srun -N 2 --ntasks-per-node=1 python benchmarks/overlap.py ...

panels    one product with 1, 2, 4 and 8 panels: its time, and the time that a rank waits for messages
choice    C = A B, dA = dC B^T and dB = A^T dC in eight shapes, without overlap and decomposed; the mode that `matmul`
          selects, and its time compared with the fastest
training  a step without overlap, then with OAR, ORS, OAG and the buckets of the data axis added; with sharded
          activations also decomposed. Computing and waiting are means over the ranks. --check compares the weights of
          all stages bit by bit
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from mpi4py import MPI
from records import parser, report
from timing import Figures, in_turns, sizes_of, slowest

from pmm3d import DistMatrix, Grid, Layout, LayoutError, matmul, nn
from pmm3d.layout import GridShape, batch_layout
from pmm3d.nn import optim
from pmm3d.product.multiply import plan_for

PANELS = (1, 2, 4, 8)
SHAPES = (
    "4096x512x512",
    "8192x1024x512",
    "2048x2048x2048",
    "1024x4096x1024",
    "512x4096x4096",
    "1024x1024x8192",
    "4096x1024x1024",
    "2048x512x4096",
)
WAYS = ("none", "decomposed")
NEAR = 1.05
SHARE = (0.3, 0.6)
QUICK = {"shapes": ["96x130x80"], "size": 64, "layers": 2, "width": 32, "batch": 16, "rounds": 1}
NONE = nn.Overlap.none(reshard_after_forward=True, bucket_bytes=2**22)
"""Gathered weights are freed after the forward pass, so that all stages have the same messages."""
STAGES = {
    "none": NONE,
    "+ OAR": replace(NONE, oar=True),
    "+ ORS": replace(NONE, oar=True, ors=True),
    "+ OAG": replace(NONE, oar=True, ors=True, oag=True),
    "+ buckets": replace(NONE, oar=True, ors=True, oag=True, buckets=True),
}
SHARDED = STAGES | {"+ decomposed": replace(STAGES["+ buckets"], decomposed=True)}
KINDS = ("gather W", "gather I", "gather dO", "reduce O", "reduce dI", "reduce dW", "reduce data")
Table = tuple[str, list[list[str]]]


def timed(grid: Grid, work) -> Figures:
    """(seconds of the slowest rank, mean seconds that a rank waits). Collective."""
    grid.ledger.reset()
    seconds = slowest(grid.comm, work)
    return {"seconds": seconds, "waited": grid.comm.allreduce(grid.ledger.total().waited) / grid.size}


def panels(options: argparse.Namespace) -> Iterator[Table]:
    rows = [["grid", *(f"{number} panels: ms, waiting" for number in PANELS)]]
    for shape in options.grids:
        with Grid(MPI.COMM_WORLD, shape, product=(options.size,) * 3, dtype=options.dtype) as grid:
            a, b = (
                DistMatrix.random(grid, (options.size,) * 2, seed=seed, dtype=options.dtype, layout=layout)
                for seed, layout in ((1, Layout.A), (2, Layout.B))
            )
            c = a @ b
            found = in_turns(
                PANELS, lambda number: timed(grid, lambda: matmul(a, b, out=c, panels=number)), options.rounds
            )
            rows.append(
                [str(grid.shape), *(f"{1e3 * one['seconds']:.1f}, {1e3 * one['waited']:.1f}" for one in found.values())]
            )
            title = f"{options.size} cubed, {options.dtype}, {grid.hosts} nodes; medians of {options.rounds}"
    yield title, rows


def ways_of(a: DistMatrix, b: DistMatrix, out: DistMatrix) -> list[str]:
    """The different overlap modes of this product."""
    found = []
    for way in WAYS:
        try:
            if plan_for(a, b, out, None, None, way).overlap == way:
                found.append(way)
        except LayoutError:
            continue
    return found


def row_of(size: tuple[int, ...], name: str, found: dict[str, Figures], chosen: str) -> tuple[list[str], Figures]:
    """(a line of the table, its figures)."""
    seconds = {way: figures["seconds"] for way, figures in found.items()}
    fastest, share = min(seconds.values()), found["none"]["waited"] / seconds["none"]
    over = seconds[chosen] / fastest
    row = [
        ", ".join(map(str, size)),
        name,
        *(f"{1e3 * seconds[way]:.1f}" if way in seconds else "" for way in WAYS),
        f"{100 * share:.0f}%",
        chosen,
        f"{100 * (over - 1):.1f}%",
    ]
    return row, {"near": over <= NEAR, "share": share, "gain": seconds["none"] / fastest}


def choice(options: argparse.Namespace) -> Iterator[Table]:
    for text in options.grids:
        rows = [["m, n, k", "product", *(f"{way} ms" for way in WAYS), "waiting", "chosen", "over the fastest"]]
        counted = []
        with Grid(MPI.COMM_WORLD, text, dtype=options.dtype) as grid:
            for m, n, k, _ in map(sizes_of, options.shapes):
                a, b, c = (
                    DistMatrix.random(grid, shape, seed=seed, dtype=options.dtype, layout=layout)
                    for seed, (shape, layout) in enumerate((((m, k), Layout.A), ((k, n), Layout.B), ((m, n), Layout.C)))
                )
                for name, left, right in (("C = A B", a, b), ("dA = dC B^T", c, b.T), ("dB = A^T dC", a.T, c)):
                    out = matmul(left, right)
                    found = in_turns(
                        ways_of(left, right, out),
                        lambda way: timed(grid, lambda: matmul(left, right, out=out, overlap=way)),
                        options.rounds,
                    )
                    row, figures = row_of((m, n, k), name, found, plan_for(left, right, None, None, None).overlap)
                    rows.append(row)
                    counted.append(figures)
            gains = [each["gain"] for each in counted if SHARE[0] <= each["share"] <= SHARE[1]]
            best = f"{min(gains):.2f} to {max(gains):.2f} in {len(gains)} products" if gains else "no such product"
            yield (
                (
                    f"Grid {grid.shape} on {grid.hosts} nodes, {options.dtype}: the choice is the fastest or "
                    f"within 5% in {sum(each['near'] for each in counted)} of {len(counted)}; time without overlap / "
                    f"best time if 30 to 60% is waiting: {best}"
                ),
                rows,
            )


class Training:
    """A network and one batch on a grid, with the same numbers each time."""

    def __init__(self, grid: Grid, options: argparse.Namespace, width: int, batch: int, activations: str):
        self.grid, self.stages = grid, SHARDED if activations == "sharded" else STAGES
        self.net = nn.MLP(grid, [width] * (options.layers + 1), nn.relu, bias=False, seed=1, activations=activations)
        self.optimizer = optim.SGD(self.net.parameters(), lr=0.1)
        self.x = DistMatrix.random(grid, (batch, width), seed=2, dtype="float32", layout=batch_layout("y"))
        self.y = DistMatrix.random(grid, (batch, width), seed=3, dtype="float32", layout=self.net.output_layout)

    def step(self, stage: str) -> Figures:
        """Milliseconds of a step on the slowest rank; computing and waiting are means over the ranks."""
        comm, ledger = self.grid.comm, self.grid.ledger
        nn.Tape.of(self.grid).parallel.overlap = self.stages[stage]
        ledger.entries.clear()
        seconds = slowest(comm, self._step)
        waited = {kind: ledger.total(phase=kind).waited for kind in KINDS}
        spent = {"computing": ledger.total().computed, **waited, "waiting": sum(waited.values())}
        return {"step": 1e3 * seconds, **{name: 1e3 * comm.allreduce(one) / comm.size for name, one in spent.items()}}

    def _step(self) -> None:
        nn.mse(self.net(self.x), self.y).backward()
        self.optimizer.step()

    def digest(self) -> str:
        """The weights of this rank."""
        return hashlib.blake2b(b"".join(parameter.local.tobytes() for parameter in self.net.parameters())).hexdigest()


def same_weights(shape: GridShape, *arguments) -> bool:
    """Whether three steps from the same start have the same bits on every rank in each stage. Collective."""
    digests, comm = set(), MPI.COMM_WORLD
    for stage in SHARDED if arguments[-1] == "sharded" else STAGES:
        with Grid(comm, shape[:3], shape.data) as grid:
            made = Training(grid, *arguments)
            for _ in range(3):
                made.step(stage)
            digests.add(tuple(comm.allgather(made.digest())))
    return len(digests) == 1


def stages_table(results: dict[str, Figures]) -> list[list[str]]:
    kinds = [kind for kind in KINDS if any(figures[kind] > 0.05 for figures in results.values())]
    return [
        ["overlap", "step", "computing", *(f"wait {kind}" for kind in kinds), "waiting"],
        *(
            [stage, *(f"{figures[name]:.1f}" for name in ("step", "computing", *kinds, "waiting"))]
            for stage, figures in results.items()
        ),
    ]


def saved(results: dict[str, Figures]) -> str:
    first, last = results["none"], list(results.values())[-1]
    return (
        f"communication {first['waiting'] / first['step']:.0%} of the step without overlap; "
        f"{1 - last['waiting'] / max(1e-9, first['waiting']):.0%} of it hidden; the step is "
        f"{1 - last['step'] / first['step']:.1%} shorter"
    )


def beside(grid: Grid, options: argparse.Namespace, width: int, batch: int) -> Table:
    """Steps with replicated and with sharded activations, in turns, each with all its overlaps; and their memory."""
    steps, held = dict[str, Callable[[], Figures]](), dict[str, int]()
    for activations in ("replicated", "sharded"):
        made = Training(grid, options, width, batch, activations)
        steps[activations] = partial(made.step, list(made.stages)[-1])
        loss = nn.mse(made.net(made.x), made.y)
        held[activations] = sum(array.nbytes for array in loss.kept())
        del loss
    results = in_turns(steps, lambda activations: steps[activations](), options.rounds)
    rows = stages_table(results)
    rows[0].append("kept for backward, MB")
    for row, size in zip(rows[1:], held.values()):
        row.append(f"{size / 1e6:.1f}")
    ratio = results["sharded"]["step"] / results["replicated"]["step"]
    return (
        f"Grid {grid.shape}, {grid.hosts} nodes: {options.layers} layers of {width}, batch {batch}, float32; "
        f"medians of {options.rounds}, ms; sharded takes {ratio:.2f} of replicated"
    ), rows


def training(options: argparse.Namespace) -> Iterator[Table]:
    for text in options.grids:
        grid_text, *sizes = text.split(":")
        width, batch = map(int, sizes or (options.width, options.batch))
        shape = GridShape(*map(int, grid_text.split("x")))
        with Grid(MPI.COMM_WORLD, shape[:3], shape.data, trace=bool(options.trace)) as grid:
            if options.activations == "both":
                yield beside(grid, options, width, batch)
                continue
            made = Training(grid, options, width, batch, options.activations)
            results = in_turns(made.stages, made.step, options.rounds)
            title = (
                f"Grid {grid.shape}, {grid.hosts} nodes: {options.layers} layers of {width}, batch {batch}, "
                f"float32; medians of {options.rounds}, ms; {saved(results)}"
            )
            if options.trace and text == options.grids[-1]:
                grid.ledger.reset()
                made.step(list(made.stages)[-1])
                grid.write_trace(options.trace)
        if options.check:
            same = same_weights(shape, options, width, batch, options.activations)
            title += f"; weights bitwise equal in all stages: {'yes' if same else 'NO'}"
        yield title, stages_table(results)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("part", choices=("panels", "choice", "training"))
    made.add_argument(
        "--grids",
        nargs="+",
        required=True,
        help="GxxGyxGz; for training GxxGyxGzxGdata, such as 1x1x2x1, or with width and batch, 1x1x2x1:1024:1536",
    )
    made.add_argument("--rounds", type=int, default=5, help="number of rounds; figures are medians (5)")
    made.add_argument("--dtype", default="float64", help="element type of products (float64)")
    made.add_argument("--size", type=int, default=4096, help="for panels: m = n = k (4096)")
    made.add_argument("--shapes", nargs="+", default=SHAPES, metavar="MxNxK", help="for choice")
    made.add_argument("--layers", type=int, default=8)
    made.add_argument("--width", type=int, default=1024)
    made.add_argument("--batch", type=int, default=1024, help="rows over the whole grid (1024)")
    made.add_argument(
        "--activations",
        choices=("replicated", "sharded", "both"),
        default="replicated",
        help="layout over the summed axis of a layer (replicated); both: in turns, with all overlaps",
    )
    made.add_argument("--check", action="store_true", help="for training: compare the weights of all stages")
    made.add_argument("--trace", help="for training: write a Chrome trace of a step with all overlaps on the last grid")
    options = made.parse_args()
    network = "--layers --width --batch --activations --check --trace"
    made.refuse(
        options,
        {"panels": f"--shapes {network}", "choice": f"--size {network}", "training": "--dtype --size --shapes"}[
            options.part
        ],
        options.part,
    )
    if options.quick:
        vars(options).update(QUICK)
    tables = [*{"panels": panels, "choice": choice, "training": training}[options.part](options)]
    if MPI.COMM_WORLD.rank == 0:
        report(options, *tables)
    return 1 if any("NO" in title for title, _ in tables) else 0


if __name__ == "__main__":
    sys.exit(main())
