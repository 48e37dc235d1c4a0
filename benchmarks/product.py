"""The product in four shapes, on 2 and 8 ranks, in float64 and float32, each with its goal and COSMA's figure.

    make bench                                                         (or: python benchmarks/product.py --passes 2)
    python benchmarks/product.py --beside ../before/.venv/bin/python   this version and another one, in turns
    python benchmarks/product.py --order F --beside $(which python)     stored by columns, and by rows, in turns

Each cell is one run of `pmm3d bench` with the auto grid and the median of 9 products. The median of the passes counts.

r              achieved rate / (cores x the 2048 cubed GEMM of the same BLAS on one core, the fastest of all runs)
ratio          the same with a GEMM of the proportions of the product, in the same run
at once        the same with that GEMM on all cores at once without messages. They share memory and clock
without a core the share of the computing time in which another process had the core

--beside adds a table: time of one product here / time with the pmm3d of that Python. --cells selects cells, as in
2048x2048x2048:8:float64. --blas auto times the local GEMMs of each cell with each BLAS and kernel of --tried, by `pmm3d
tune blas`, and multiplies with the fastest for the type. --order F stores A, B and C by columns. --shared stores A and
B in memory that the ranks of a node share.
"""

import json
import os
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

from records import Rows, parser, report
from timing import output_of, sizes_of

SHAPES = ((4096, 4096, 4096), (2048, 2048, 2048), (1024, 1024, 32768), (65536, 512, 512))
COLUMNS = ((2, "float64"), (2, "float32"), (8, "float64"), (8, "float32"))
HERE = ["--repeat", "9"]
"""Options of each `pmm3d bench`."""
HEADING = ["m, n, k", *(f"{ranks} ranks {dtype}" for ranks, dtype in COLUMNS)]
HALF_RATE = 75.0
"""GFLOP/s in float64 of a core of the slower kind of machine, Zen 4 with AVX-512 at half rate, at most."""
GOALS = {
    "half-rate": ((0.985, 0.985, 0.965, 0.97), (0.97, 0.97, 0.92, 0.90), (0.97, 0.96, 0.96, 0.955),
                  (0.98, 0.98, 0.965, 0.95)),
    "full-rate": ((0.94, 0.90, 0.91, 0.88), (0.81, 0.77, 0.83, 0.81), (0.98, 0.97, 0.96, 0.96),
                  (1.01, 0.94, 0.99, 0.94))}
COSMA = {
    "half-rate": ((0.928, 0.920, 0.892, 0.907), (0.819, 0.885, 0.858, 0.828), (0.933, 0.949, 0.901, 0.942),
                  (0.972, 0.912, 0.945, 0.921)),
    "full-rate": ((0.90, 0.86, 0.87, 0.84), (0.77, 0.73, 0.79, 0.77), (0.94, 0.93, 0.92, 0.92),
                  (0.97, 0.90, 0.95, 0.90))}
"""r of COSMA in its native layout, measured once on a machine of each kind; the goal on the second is 0.04 above."""


def words_of(shape: tuple[int, int, int]) -> list[str]:
    """The options of a product's sizes."""
    return [word for name, size in zip("mnk", shape) for word in (f"--{name}", str(size))]


class Side(NamedTuple):
    """How one of the two sides multiplies: with the pmm3d of a Python, options of `pmm3d bench`, the BLAS: auto, or ""
    for that of the environment."""

    python: str
    options: list[str]
    blas: str = ""


def tune(cells: list[tuple], tried: list[str]) -> None:
    """Time the GEMMs of those cells with these BLASes. The choice is kept for PMM3D_BLAS=auto:TYPE."""
    asked = [word for name in tried for word in ("--blas", name)]
    for shape, (ranks, dtype) in cells:
        said = output_of([sys.executable, "-m", "pmm3d", "tune", "blas", *words_of(shape), "--ranks", str(ranks),
                          "--dtype", dtype, *asked], os.environ)
        chosen = next(line for line in said.splitlines() if line.startswith("chosen"))
        print(f"{'x'.join(map(str, shape))} {dtype} on {ranks} ranks, {chosen}", file=sys.stderr, flush=True)


def measure(side: Side, shape: tuple[int, int, int], ranks: int, dtype: str) -> dict:
    """The JSON of one run of `pmm3d bench`."""
    environ = os.environ | ({"PMM3D_BLAS": f"{side.blas}:{dtype}"} if side.blas else {})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        output_of([side.python, "-m", "pmm3d.launcher", "-n", str(ranks), "-m", "pmm3d", "bench", *words_of(shape),
                   *side.options, "--dtype", dtype, "--json", str(path), *HERE], environ)
        return json.loads(path.read_text())


def table(results: dict) -> tuple[str, Rows]:
    """(title, rows): r, ratio, grid and noise of each cell, with the goal and COSMA's figure. Bold: the goal is met."""
    square = {dtype: max(run["square_core_gflops"] for (_, (_, other)), runs in results.items() for run in runs
                         if other == dtype) for dtype in {dtype for _, (_, dtype) in results}}
    kind = "half-rate" if square.get("float64", square.get("float32", 0.0) / 2) < HALF_RATE else "full-rate"
    rows = [HEADING]
    for shape, goals, cosma in zip(SHAPES, GOALS[kind], COSMA[kind]):
        if not any((shape, key) in results for key in COLUMNS):
            continue
        cells = [_cell(results[shape, key], square[key[1]], goal, peer) if (shape, key) in results else ""
                 for key, goal, peer in zip(COLUMNS, goals, cosma)]
        rows.append([", ".join(map(str, shape)), *cells])
    rates = ", ".join(f"{dtype} {rate:.1f} GFLOP/s" for dtype, rate in sorted(square.items()))
    cpu = next(run["environment"]["cpu"] for runs in results.values() for run in runs)
    extra = [["x".join(map(str, shape)), f"{runs[0]['gflops']:.3g} GFLOP/s", *[""] * (len(COLUMNS) - 1)]
             for (shape, _), runs in results.items() if shape not in SHAPES]
    return f"On {cpu}, with goals for {kind} AVX-512; 2048 cubed on one core: {rates}", rows + extra


def _cell(runs: list[dict], square: float, goal: float, peer: float) -> str:
    shares = sorted(run["gflops"] / (run["cores"] * square) for run in runs)
    r, ratio = median(shares), median(run["ratio"] for run in runs)
    at_once = median(run["gflops"] / run["at_once_gflops"] for run in runs)
    off_core = median(run["off_core_seconds"] / run["computed_seconds"] for run in runs if run["computed_seconds"])
    noise = f", {shares[0]:.3f} to {shares[-1]:.3f}" if len(shares) > 1 else ""
    mark = "**" if r >= goal - 0.0005 else ""
    grids = " or ".join(sorted({"x".join(map(str, run["grid"])) for run in runs}))
    stored = " or ".join(sorted({run["orders"] for run in runs}))
    grids += "" if stored == "CCC" else f" {stored}"
    read = " or ".join(sorted({run.get("in_place", "") for run in runs}))
    grids += f", {read} in place" if read else ""
    return (f"{mark}{r:.3f}{mark}{noise} (ratio {ratio:.3f}, at once {at_once:.3f}; without a core "
            f"{100 * off_core:.0f}%; {grids}; goal {goal:.3f}, COSMA {peer:.3f})")


def ratios(results: dict, beside: dict) -> Rows:
    """Time here / time there of each cell."""
    rows = [HEADING]
    for shape in SHAPES:
        pairs = [list(zip(results.get((shape, key), []), beside.get((shape, key), []))) for key in COLUMNS]
        found = [[median(here["seconds"]) / median(there["seconds"]) for here, there in cell] for cell in pairs]
        rows.append([", ".join(map(str, shape)), *(f"{median(ratios):.3f}" if ratios else "" for ratios in found)])
    return rows


def one_cell(text: str) -> tuple:
    """A cell of the table: 2048x2048x2048:8:float64."""
    shape, ranks, dtype = text.split(":")
    return sizes_of(shape)[:3], (int(ranks), dtype)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--passes", type=int, default=3, help="runs of each cell, of which the median counts (3)")
    made.add_argument("--beside", metavar="PYTHON", help="of an environment with another version of pmm3d")
    made.add_argument("--cells", type=lambda text: [one_cell(word) for word in text.split(",")], metavar="CELL,...",
                      default=list(product(SHAPES, COLUMNS)), help="only these")
    made.add_argument("--order", choices=("C", "F"), default="C", help="of A, B and C here (C)")
    made.add_argument("--blas", choices=("auto",), help="what pmm3d tune blas finds fastest for each type here; left "
                                                        "out: that of PMM3D_BLAS, or SciPy's")
    made.add_argument("--tried", nargs="+", metavar="BLAS",
                      help="BLASes that are timed, each with all kernels that this CPU runs (that of PMM3D_BLAS, or "
                           "SciPy's)")
    made.add_argument("--shared", action="store_true", help="A and B here in memory that the ranks share")
    options = made.parse_args()
    stored = (["--order", options.order] if options.order != "C" else []) + ["--shared"] * options.shared
    if options.blas:
        tune(options.cells, options.tried or [os.environ.get("PMM3D_BLAS", "scipy")])
    elif options.tried:
        made.error("--tried is for --blas auto: nothing is timed without it")
    sides = {"": Side(sys.executable, stored, options.blas or "")}
    sides |= {", beside": Side(options.beside, [])} if options.beside else {}
    if options.quick:
        options.passes, options.cells = 1, [((64, 64, 64), (2, "float64"))]
        HERE.extend(["--repeat", "1"])
    results: dict = {side: {cell: [] for cell in options.cells} for side in sides}
    for turn, (shape, (ranks, dtype)), (side, how) in product(range(options.passes), options.cells, sides.items()):
        result = measure(how, shape, ranks, dtype)
        results[side][shape, (ranks, dtype)].append(result)
        print(f"pass {turn + 1} of {options.passes}, {'x'.join(map(str, shape))}, {ranks} ranks, {dtype}{side}: ratio "
              f"{result['ratio']:.3f}, verified {result['verified']}", file=sys.stderr, flush=True)
    tables = [table(results[""])]
    if options.beside:
        tables.append(("Time here / time beside, medians of the passes", ratios(results[""], results[", beside"])))
    report(options, *tables)
    if not all(run["verified"] for side in results.values() for runs in side.values() for run in runs):
        sys.exit("a product is wrong")


if __name__ == "__main__":
    main()
