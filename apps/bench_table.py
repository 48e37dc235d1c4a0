"""The table of docs/benchmarks.md: four shapes, 2 and 8 ranks, float64 and float32, each beside the best peer.

    make bench                                                    (or: python apps/bench_table.py --passes 2)
    python apps/bench_table.py --beside ../before/.venv/bin/python    this version and another one, in turns

Each cell is one run of `pmm3d bench` with the auto grid and the median of 9 products; with several passes the
better one counts, as for the peers, of those whose single-core GEMM came within 5% of the best of its kind: in the
others something else was running. ratio = achieved / (cores x the GEMM of the same proportions on one core, of the
same BLAS, in the same run). With --beside a second table follows: time of one product here / its time with the pmm3d
of that Python, the median over the passes; --cells names the ones to measure, as in 2048x2048x2048:8:float64.
"""

import argparse
import json
import os
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import median

from measuring import markdown, output_of

SHAPES = ((4096, 4096, 4096), (2048, 2048, 2048), (1024, 1024, 32768), (65536, 512, 512))
COLUMNS = ((2, "float64"), (2, "float32"), (8, "float64"), (8, "float32"))
HEADING = ["m, n, k", *(f"{ranks} ranks {dtype}" for ranks, dtype in COLUMNS)]
GOALS = ((0.95, 0.93, 0.90, 0.88), (0.88, 0.82, 0.82, 0.80), (0.96, 0.95, 0.93, 0.93), (0.98, 0.93, 0.96, 0.92))
PEERS = ((0.90, 0.86, 0.87, 0.84), (0.82, 0.74, 0.79, 0.77), (0.94, 0.93, 0.92, 0.92), (0.97, 0.90, 0.95, 0.90))


def measure(python: str, shape: tuple[int, int, int], ranks: int, dtype: str) -> dict:
    """The JSON of one run of `pmm3d bench` with the pmm3d of that Python."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        sizes = [word for name, size in zip("mnk", shape) for word in (f"--{name}", str(size))]
        output_of([python, "-m", "pmm3d.launcher", "-n", str(ranks), "-m", "pmm3d", "bench", *sizes, "--dtype", dtype,
                   "--repeat", "9", "--json", str(path)], os.environ)
        return json.loads(path.read_text())


def table(results: dict) -> str:
    """Ratio, grid, goal and best peer of each cell."""
    rows = [HEADING]
    for shape, goals, peers in zip(SHAPES, GOALS, PEERS):
        cells = [", ".join(map(str, shape))]
        for key, goal, peer in zip(COLUMNS, goals, peers):
            if (shape, key) not in results:
                cells.append("")
                continue
            fastest = max(run["core_gflops"] for run in results[shape, key])
            undisturbed = [run for run in results[shape, key] if run["core_gflops"] >= 0.95 * fastest]
            best = max(undisturbed, key=lambda run: run["ratio"])
            mark = "**" if best["ratio"] >= goal - 0.0005 else ""
            cells.append(f"{mark}{best['ratio']:.3f}{mark} ({'x'.join(map(str, best['grid']))}; goal {goal:.2f}, "
                         f"peer {peer:.2f})")
        rows.append(cells)
    return markdown(rows)


def ratios(results: dict, beside: dict) -> str:
    """Time here / time there of each cell."""
    rows = [HEADING]
    for shape in SHAPES:
        pairs = [list(zip(results.get((shape, key), []), beside.get((shape, key), []))) for key in COLUMNS]
        found = [[median(here["seconds"]) / median(there["seconds"]) for here, there in cell] for cell in pairs]
        rows.append([", ".join(map(str, shape)), *(f"{median(ratios):.3f}" if ratios else "" for ratios in found)])
    return markdown(rows)


def one_cell(text: str) -> tuple:
    """A cell of the table: 2048x2048x2048:8:float64."""
    shape, ranks, dtype = text.split(":")
    return tuple(map(int, shape.split("x"))), (int(ranks), dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=2, help="runs of each cell; the better one counts (2)")
    parser.add_argument("--beside", metavar="PYTHON", help="of an environment with another version of pmm3d")
    parser.add_argument("--cells", type=lambda text: [one_cell(word) for word in text.split(",")], metavar="CELL,...",
                        default=list(product(SHAPES, COLUMNS)), help="only these")
    options = parser.parse_args()
    pythons = [sys.executable, *([options.beside] if options.beside else [])]
    results: dict = {python: {cell: [] for cell in options.cells} for python in pythons}
    for turn, (shape, (ranks, dtype)), python in product(range(options.passes), options.cells, pythons):
        result = measure(python, shape, ranks, dtype)
        results[python][shape, (ranks, dtype)].append(result)
        where = f"pass {turn + 1}" + ("" if python == sys.executable else ", beside")
        print(f"{where}: {'x'.join(map(str, shape))} {dtype} on {ranks} ranks: ratio {result['ratio']:.3f}, verified "
              f"{result['verified']}, median {1e3 * median(result['seconds']):.2f} ms, computing "
              f"{1e3 * result['computed_seconds']:.1f} ms, waiting {1e3 * result['waited_seconds']:.1f} ms, core "
              f"{result['core_gflops']:.1f} (2048 cubed: {result['square_core_gflops']:.1f}) GFLOP/s",
              file=sys.stderr, flush=True)
    print(table(results[sys.executable]))
    if options.beside:
        print("\n" + ratios(results[sys.executable], results[options.beside]))


if __name__ == "__main__":
    main()
