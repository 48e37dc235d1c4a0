"""Make the pictures of the pages, in docs/pictures.

    python docs/pictures.py                             all pictures; minutes
    python docs/pictures.py collectives.svg 1f1b.svg    only these

A picture on a page is made by the commands in the block below it. A picture without such a block is made by the
function of this program with its name, from the tables of the library or from benchmarks/results.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from itertools import product
from math import prod
from pathlib import Path

import mpi4py

mpi4py.rc.initialize = False
DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

import numpy as np  # noqa: E402
from matplotlib.patches import Patch, Polygon, Rectangle  # noqa: E402

from pmm3d import Grid, GridShape, Layout, nn  # noqa: E402
from pmm3d.layout import batch_layout  # noqa: E402
from pmm3d.model import schedule  # noqa: E402
from pmm3d.model.machines import groups_of, load  # noqa: E402
from pmm3d.model.plan import ProductPlan  # noqa: E402
from pmm3d.model.rounds import count  # noqa: E402
from pmm3d.model.simulation import PROCESSOR, simulate  # noqa: E402
from pmm3d.model.simulation.replay import tasks  # noqa: E402
from pmm3d.nn.dry import Facts  # noqa: E402
from pmm3d.nn.transformer import token_layout  # noqa: E402
from pmm3d.nn.transformer.visible import Rows, Visible, block_pairs  # noqa: E402
from pmm3d.tools.plots import COLOURS, INK, Part, bars, draw_schedules, picture  # noqa: E402

PICTURES = DOCS / "pictures"
RESULTS = DOCS.parent / "benchmarks" / "results"
SHOWN = re.compile(r"^!\[[^]]*\]\((?:[\w./]*/)?pictures/(?P<file>[\w.-]+)\)\n\n(?P<commands>(?:    .*\n)*)", re.M)
LARGEST = 150_000
"""Bytes of a picture."""
OF = {"A": "#4477aa", "B": "#ccbb44", "C": "#aa3377"}
"""Colours of the matrices."""
RANKS = ["#4477aa", "#66ccee", "#228833", "#aadd88", "#ccbb44", "#ee8866", "#aa3377", "#dd99bb"]
CUBE = GridShape(2, 2, 2)
RIGHT, DOWN, BACK = (1.0, -0.28), (0.0, -1.0), (0.62, 0.42)
"""Directions of x, z and y on paper."""


def on_paper(x, y, z):
    return tuple(x * right + y * back + z * down for right, back, down in zip(RIGHT, BACK, DOWN))


def empty(axes, title=""):
    axes.set_title(title)
    axes.set_aspect("equal")
    axes.axis("off")


def arrow(axes, start, end, style="-|>", colour=INK, width=1.6, shrink=0):
    look = {"arrowstyle": style, "linewidth": width, "color": colour, "shrinkA": shrink, "shrinkB": shrink}
    axes.annotate("", end, start, arrowprops=look)


def grid(path):
    """The cube of ranks, and its faces with A, B and C."""
    with picture(path, 8, 3.9) as figure:
        axes = figure.subplots()
        empty(axes)
        for i, j in product(range(2), repeat=2):
            for name, corners in (
                ("C", [(j, 0, i), (j + 1, 0, i), (j + 1, 0, i + 1), (j, 0, i + 1)]),
                ("A", [(2, j, i), (2, j + 1, i), (2, j + 1, i + 1), (2, j, i + 1)]),
                ("B", [(j, i, 0), (j + 1, i, 0), (j + 1, i + 1, 0), (j, i + 1, 0)]),
            ):
                corners = [on_paper(*corner) for corner in corners]
                axes.add_patch(Polygon(corners, facecolor=OF[name], edgecolor="white", linewidth=2, alpha=0.85))
                middle = np.mean(corners, axis=0)
                ink = "black" if name == "B" else "white"
                axes.text(*middle, f"{name}{i}{j}", ha="center", va="center", color=ink, fontweight="bold")
        for end, text, start, offset in (
            ((2.1, 0, 2.12), "x  (columns of B and C)", (0, 0, 2.12), (-0.05, -0.2)),
            ((-0.12, 0, 2.1), "z\n(rows of\nA and C)", (-0.12, 0, 0), (-0.15, 0.5)),
            ((-0.1, 2.1, 0), "y  (contracted:\ncolumns of A,\nrows of B)", (-0.1, 0.05, 0), (-0.65, -0.02)),
        ):
            arrow(axes, on_paper(*start), on_paper(*end))
            axes.text(*np.add(on_paper(*end), offset), text, fontsize=12, ha="right", va="center")
        for row, (name, text) in enumerate((
            ("A", "gathered over x: each rank along x\nbrings a part of the rows of A's block"),
            ("B", "gathered over z: each rank along z\nbrings a part of the rows of B's block"),
            ("C", "partial sums reduce-scattered over y: each\nrank along y keeps a part of the rows"),
        )):  # fmt: skip
            axes.text(4.05, 0.2 - 1.05 * row, name, fontsize=20, color=OF[name], fontweight="bold", va="center")
            axes.text(4.45, 0.2 - 1.05 * row, text, fontsize=11, va="center")
        axes.set(xlim=(-1.3, 7.9), ylim=(-3.05, 1.3))


def collectives(path):
    """The messages of a product on 2 x 2 x 2, from the schedules of its plan."""
    plan = ProductPlan(12, 12, 12, "float64", CUBE)
    ranks = [plan.on_rank(CUBE.coords(rank)) for rank in range(CUBE.size)]
    steps = (
        ("A", "x", "1. all-gather of A over x", lambda rank: schedule.all_gather(tuple(rank.a.counts), rank.a.index)),
        ("B", "z", "2. all-gather of B over z", lambda rank: schedule.all_gather(tuple(rank.b.counts), rank.b.index)),
        (
            "C",
            "y",
            "3. reduce-scatter of C over y",
            lambda rank: schedule.reduce_scatter(tuple(rank.c_counts), rank.k_index),
        ),
    )
    with picture(path, 11, 4.4) as figure:
        for axes, (name, axis, title, table_of) in zip(figure.subplots(1, 3), steps):
            tables = [table_of(rank) for rank in ranks]
            for rank, table in enumerate(tables):
                here = CUBE.coords(rank)
                axes.text(*on_paper(here.x, here.y, here.z), rank, ha="center", va="center", color="white", zorder=3)
                axes.plot(*on_paper(here.x, here.y, here.z), "o", markersize=20, color=OF[name], zorder=2)
                group = CUBE.group((axis,), here)
                for peer in {peer for each in table.rounds for peer, _ in each.sends}:
                    there = CUBE.coords(group[peer])
                    if rank < group[peer]:
                        ends = on_paper(here.x, here.y, here.z), on_paper(there.x, there.y, there.z)
                        arrow(axes, *ends, "<|-|>", OF[name], 2, shrink=11)
            for one, other in product(range(CUBE.size), repeat=2):
                if one < other and sum(map(int.__ne__, CUBE.coords(one), CUBE.coords(other))) == 1:
                    lines = [on_paper(*CUBE.coords(each)[:3]) for each in (one, other)]
                    axes.plot(*zip(*lines), color="#cccccc", linewidth=0.8, zorder=0)
            received = count(tables[0], 12 // 2).received  # a row of a block has 6 numbers
            empty(axes, title)
            axes.text(0.8, -1.65, f"rank 0 receives {received} of {12 * 12 // 4} numbers", ha="center", fontsize=9)
            axes.set(xlim=(-0.4, 2), ylim=(-1.8, 0.75))


def nodes(path):
    """The messages of an all-reduce by nodes."""
    draw_schedules([schedule.all_reduce(64, 8, rank, per_node=4) for rank in range(8)], path, per_node=4)


def layouts(path):
    """The rows and columns of a 12 x 12 matrix that each rank of 2 x 2 x 2 stores, in four layouts."""
    shown = (
        ("Layout.A", Layout.A), ("Layout.B", Layout.B), ("Layout.C", Layout.C), ('Layout("z", "y")', Layout("z", "y")),
    )  # fmt: skip
    with picture(path, 8, 8.6) as figure:
        for axes, (name, layout) in zip(figure.subplots(2, 2).flat, shown):
            boxes = dict[tuple, list[int]]()
            for rank in range(CUBE.size):
                boxes.setdefault(layout.box((12, 12), CUBE, CUBE.coords(rank)), []).append(rank)
            for box, ranks in boxes.items():
                height, width = box.shape
                colour = RANKS[ranks[0]]
                axes.add_patch(
                    Rectangle((box.c0, box.r0), width, height, facecolor=f"{colour}a0", edgecolor="white", linewidth=2)
                )
                here = CUBE.coords(ranks[0])
                fixed = ", ".join(f"{axis}={getattr(here, axis)}" for axis in layout.rows + layout.cols)
                text = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {' and '.join(map(str, ranks))}"
                axes.text(box.c0 + width / 2, box.r0 + height / 2, f"{text}\n{fixed}", ha="center", va="center")
            axes.set_title(f"{name}\nrows {', then '.join(layout.rows)}; columns {', '.join(layout.cols)}")
            axes.set(
                xlim=(-0.1, 12.1), ylim=(12.1, -0.1), aspect="equal", xticks=range(0, 13, 3), yticks=range(0, 13, 3)
            )
            axes.spines[:].set_visible(False)


def swap(path):
    """The layouts of two linear layers on 2 x 2 x 1, from a network of a dry run."""
    with Grid.dry((2, 2, 1)) as dry, picture(path, 8, 6.4) as figure:
        net = nn.MLP(dry, [8, 8, 8], nn.relu)
        first, second = (each for each in net.parameters() if not each.is_vector)
        between = Layout("z", first.layout.cols)
        shown = (
            ("I\nrows z; columns y", Layout("z", "y")), ("W1\nrows y; columns x", first.layout),
            ("O1\nrows z; columns x", between), ("O1\nrows z; columns x", between),
            ("W2\nrows x; columns y", second.layout), ("O2\nrows z; columns y", net.output_layout),
        )  # fmt: skip
        colours = {("x", 0): "#ee9988", ("x", 1): "#993322", ("y", 0): "#eedd88", ("y", 1): "#776611"}
        axes = figure.subplots()
        empty(axes)
        middle = {"ha": "center", "va": "center", "fontsize": 10}
        for place, (name, layout) in enumerate(shown):
            left, top, shape = 13 * (place % 3), -13.6 * (place // 3), dry.shape
            rows, cols = ([each for each in dim if getattr(shape, each) > 1] for dim in (layout.rows, layout.cols))
            for rank in range(shape.size):
                box, here = layout.box((8, 8), shape, shape.coords(rank)), shape.coords(rank)
                look = {"facecolor": "#f0f0f0", "edgecolor": INK, "linewidth": 0.8}
                axes.add_patch(Rectangle((left + box.c0, top - box.r1), box.c1 - box.c0, box.r1 - box.r0, **look))
                strips = [(axis, (left + box.c0, top + 0.25), (box.c1 - box.c0, 1), 0) for axis in cols]
                strips += [(axis, (left - 1.25, top - box.r1), (1, box.r1 - box.r0), 90) for axis in rows]
                for axis, (x, y), (width, height), rotation in strips:
                    index = getattr(here, axis)
                    axes.add_patch(Rectangle((x, y), width, height, facecolor=colours[axis, index]))
                    look = {"rotation": rotation, "color": ("black", "white")[index], **middle}
                    axes.text(x + width / 2, y + height / 2, f"{axis}={index}", **look)
            axes.text(left + 4, top - 9.6, name, **middle)
            if place % 3 < 2:
                axes.text(left + 9.9, top - 4, "×→"[place % 3], ha="center", va="center", fontsize=16)
        axes.set(xlim=(-1.5, 34.5), ylim=(-25, 1.5))


def overlap(path):
    """A step of three layers on 2 x 1 x 2 without overlaps and with each of them, by the simulation of plans."""
    variants = (
        ("no overlap", {}), ("OAR", {"oar": True}), ("OAR, ORS", {"oar": True, "ors": True}),
        ("OAR, ORS, OAG", {"oar": True, "ors": True, "oag": True}),
    )  # fmt: skip
    machine, rows = load("perlmutter"), list[tuple[str, list[Part]]]()
    for name, switches in variants:
        rows += [(f"{name}: computes", []), ("messages", [])]
        switches = {"oar": False, "ors": False, "oag": False, "buckets": False} | switches
        timeline = step(machine, nn.Overlap(**switches, reshard_after_forward=True))
        for row, is_processor in (rows[-2], True), (rows[-1], False):
            now = 0.0
            for task, begun, ended in zip(timeline.table, timeline.begun, timeline.ended):
                seconds = ended - begun
                if (task.resource == PROCESSOR) != is_processor or task.kind == "wait" or not seconds:
                    continue
                kind = "GEMM" if task.kind == "gemm" else f"messages along {task.axis}" if task.axis else "other work"
                row[1].extend((Part("", 1e3 * (begun - now)), Part(kind, 1e3 * seconds)))
                now = ended
    colours = {"GEMM": COLOURS["gemm"], "other work": COLOURS["elementwise"]}
    colours |= {f"messages along {axis}": COLOURS[axis] for axis in "xz"}
    with picture(path, 10, 4) as figure:
        axes = figure.subplots()
        bars(axes, rows, colours)
        axes.set_xlabel(
            "ms of a step of three linear layers, simulated for 4 GPUs of Perlmutter on 2 nodes, grid 2x1x2"
        )


def step(machine, overlap):
    """Timeline of the second step of rank 0: its dry run, priced by the machine."""
    with Grid.dry((2, 1, 2), hosts=2) as dry:
        nn.Tape.of(dry).parallel.overlap = overlap
        net = nn.MLP(dry, [8192] * 4, nn.relu)
        optimizer = nn.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):  # the order of the weights, which OAG needs, is known after the first step
            dry.dry_run.actions.clear()
            x, y = (
                Facts((2048, 8192), each, "float32", "numpy").on(dry) for each in (batch_layout("y"), net.output_layout)
            )
            nn.mse(net(x), y).backward()
            optimizer.step()
        groups = groups_of(dry.shape, 2)
        return simulate(tasks(dry.dry_run.actions, machine, groups))


def ring(path):
    """The scores that each of 4 ranks computes, for a causal mask and two orders of rows."""
    length, ranks = 64, 4
    with Grid.dry((1, 1, 1), seq=ranks) as dry, picture(path, 9, 4.3) as figure:
        for axes, order in zip(figure.subplots(1, 2), ("plain", "zigzag")):
            layout = token_layout(dry, length, order=order)
            stored = [stored_positions(layout, dry.shape, rank, length) for rank in range(ranks)]
            work = list[float]()
            for rank, queries in enumerate(stored):
                work.append(0.0)
                for owner, keys in enumerate(stored):
                    turn = (rank - owner) % ranks
                    for _, *lists in block_pairs(Rows(queries), Rows(keys), Visible(block=8)):
                        for pair in (each for pairs in lists for each in pairs):
                            q, k = queries[pair.queries], keys[pair.keys]
                            work[-1] += prod((len(q), len(k))) / (2 if pair.seen == "causal" else 1)
                            look = {"facecolor": f"{RANKS[2 * rank]}a0", "edgecolor": "white"}
                            axes.add_patch(Rectangle((k[0], q[0]), len(k), len(q), **look))
                            axes.text(k[0] + 4, q[0] + 4, turn + 1, ha="center", va="center", fontsize=8)
            busiest = max(work) / (sum(work) / ranks)
            axes.set_title(f'order="{order}": the busiest rank has {busiest:.2f} of the mean')
            axes.set(
                xlim=(0, length),
                ylim=(length, 0),
                aspect="equal",
                xlabel="position of a key",
                ylabel="position of a query",
            )
            axes.set(xticks=range(0, 65, 16), yticks=range(0, 65, 16))
        figure.legend(
            handles=[Patch(color=f"{RANKS[2 * rank]}a0", label=f"rank {rank}") for rank in range(ranks)],
            loc="outside lower center", ncols=4,
        )  # fmt: skip


def stored_positions(layout, shape, rank, length):
    """Positions of the rows of a sequence that a rank stores, in their order."""
    from pmm3d.layout.layout import order_of

    box, order = layout.box((length, 1), shape, shape.coords(rank)), order_of(layout.units[0])
    return np.array(order.positions if order else range(length))[box.r0 : box.r1]


def ratios(path):
    """Times of COSMA over times of pmm3d, from benchmarks/results/product-zen5.json."""
    record = json.loads((RESULTS / "product-zen5.json").read_text())
    head, *rows = record["tables"][0]["rows"]
    with picture(path, 9, 3.6) as figure:
        axes = figure.subplots()
        for column, name in enumerate(head[1:]):
            figures = [list(map(float, re.findall(r"\d+\.\d+", row[column + 1])[:3])) for row in rows]
            places = np.arange(len(rows)) + 0.2 * (column - 1.5)
            middle, low, high = np.array(figures).T
            look = {
                "color": RANKS[2 * column],
                "label": name,
                "ecolor": INK,
                "capsize": 2,
                "error_kw": {"linewidth": 0.8},
            }
            axes.bar(places, middle - 1, 0.18, bottom=1, yerr=(middle - low, high - middle), **look)
        axes.axhline(1, color=INK, linewidth=1)
        axes.set_xticks(range(len(rows)), [row[0].replace(", ", " x ") for row in rows])
        axes.set(ylim=(0.8, 1.35), ylabel="time of COSMA / time of pmm3d")
        axes.set_title(
            f"{record['machine']['cpu'].split('(')[1].split(',')[0]}, {record['date']}; above 1, pmm3d is faster"
        )
        figure.legend(loc="outside lower center", ncols=4)


def ranks(path):
    """CPU time of one rank by the number of ranks, from benchmarks/results/scale.json."""
    record = json.loads((RESULTS / "scale.json").read_text())
    _, setup, collective, _ = (
        [dict(zip(table["rows"][0], row)) for row in table["rows"][1:]] for table in record["tables"]
    )
    lines = (
        ("set-up of a Grid", setup, "Grid, ms"), ("plan of a product", setup, "plan, ms"),
        ("reduce-scatter", collective, "reduce-scatter, CPU ms"),
        ("sum of a number", collective, "sum of a number, CPU ms"),
    )  # fmt: skip
    with picture(path, 7, 3.8) as figure:
        axes = figure.subplots()
        for name, rows, column in lines:
            axes.plot(
                [int(row["ranks"]) for row in rows],
                [float(row[column]) for row in rows],
                "o-",
                label=name,
                markersize=4,
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_yticks([0.1, 1, 10], ["0.1", "1", "10"])
        counts = [8, 64, 512, 4096, 32768]
        axes.set_xticks(counts, [f"{each:,}" for each in counts])
        axes.set(
            xlabel="ranks",
            ylabel="CPU ms of one rank, without MPI",
            title=f"{record['machine']['cpu']}, {record['date']}",
        )
        axes.grid(alpha=0.3)
        axes.legend()


DRAWN = {
    "grid.png": grid, "collectives.svg": collectives, "nodes.svg": nodes, "layouts.svg": layouts,
    "swap.svg": swap, "overlap.svg": overlap,
    "ring.svg": ring, "ratios.svg": ratios, "ranks.svg": ranks,
}  # fmt: skip
"""Pictures that this program draws."""


def shown():
    """Name of each picture on a page -> its commands, or []."""
    pages = [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]
    found = [each for page in pages for each in SHOWN.finditer(page.read_text() + "\n")]
    commands = {
        each["file"]: re.sub(r"\\\n *", "", each["commands"]).split("\n")
        for each in sorted(found, key=lambda one: len(one["commands"]))
    }
    return {name: [line.strip() for line in lines if line.strip()] for name, lines in commands.items()}


def make(name, commands):
    """Make a picture in docs/pictures. Raises SystemExit if it is too large."""
    target = PICTURES / name
    if name in DRAWN:
        DRAWN[name](target)
    else:
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        with tempfile.TemporaryDirectory() as folder:
            for linked in ("apps", "benchmarks"):
                Path(folder, linked).symlink_to(DOCS.parent / linked)
            for command in commands:
                subprocess.run(command, shell=True, cwd=folder, env=environment, check=True)
            shutil.copyfile(Path(folder, name), target)
    if target.stat().st_size > LARGEST:
        raise SystemExit(f"{target} has {target.stat().st_size:,} bytes; at most {LARGEST:,} are stored")
    print(f"wrote {target}")


def main(names):
    """Make these pictures, or all. Raises SystemExit for an unknown name."""
    known = shown()
    if unknown := {*names} - {*known}:
        raise SystemExit(f"no page shows {', '.join(sorted(unknown))}. The pictures are {', '.join(sorted(known))}")
    for name in names or known:
        make(name, known[name])


if __name__ == "__main__":
    main(sys.argv[1:])
