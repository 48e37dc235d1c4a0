"""The table of docs/benchmarks.md: four shapes, 2 and 8 ranks, float64 and float32, each beside the best peer.

    make bench                      (or: python apps/bench_table.py --passes 2)

Each cell is one run of `pmm3d bench` with the auto grid and the median of 9 products; with several passes the
better one counts, as for the peers, of those whose single-core GEMM came within 5% of the best of its kind: in the
others something else was running. ratio = achieved / (cores x the GEMM of the same proportions on one core, of the
same BLAS, in the same run).
"""

import argparse
import json
import sys
import tempfile
from itertools import product
from pathlib import Path

from measuring import markdown, on_ranks

SHAPES = ((4096, 4096, 4096), (2048, 2048, 2048), (1024, 1024, 32768), (65536, 512, 512))
COLUMNS = ((2, "float64"), (2, "float32"), (8, "float64"), (8, "float32"))
GOALS = ((0.95, 0.93, 0.90, 0.88), (0.88, 0.82, 0.82, 0.80), (0.96, 0.95, 0.93, 0.93), (0.98, 0.93, 0.96, 0.92))
PEERS = ((0.90, 0.86, 0.87, 0.84), (0.82, 0.74, 0.79, 0.77), (0.94, 0.93, 0.92, 0.92), (0.97, 0.90, 0.95, 0.90))


def measure(shape: tuple[int, int, int], ranks: int, dtype: str) -> dict:
    """The JSON of one run of `pmm3d bench`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        sizes = [word for name, size in zip("mnk", shape) for word in (f"--{name}", str(size))]
        on_ranks(ranks, ["-m", "pmm3d", "bench", *sizes, "--dtype", dtype, "--repeat", "9", "--json", str(path)])
        return json.loads(path.read_text())


def table(results: dict) -> str:
    """Ratio, grid, goal and best peer of each cell."""
    rows = [["m, n, k", *(f"{ranks} ranks {dtype}" for ranks, dtype in COLUMNS)]]
    for shape, goals, peers in zip(SHAPES, GOALS, PEERS):
        cells = [", ".join(map(str, shape))]
        for key, goal, peer in zip(COLUMNS, goals, peers):
            fastest = max(run["core_gflops"] for run in results[shape, key])
            undisturbed = [run for run in results[shape, key] if run["core_gflops"] >= 0.95 * fastest]
            best = max(undisturbed, key=lambda run: run["ratio"])
            mark = "**" if best["ratio"] >= goal - 0.0005 else ""
            cells.append(f"{mark}{best['ratio']:.3f}{mark} ({'x'.join(map(str, best['grid']))}; goal {goal:.2f}, "
                         f"peer {peer:.2f})")
        rows.append(cells)
    return markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=2, help="runs of each cell; the better one counts (2)")
    options = parser.parse_args()
    results: dict = {cell: [] for cell in product(SHAPES, COLUMNS)}
    for turn, (shape, (ranks, dtype)) in product(range(options.passes), results):
        result = measure(shape, ranks, dtype)
        results[shape, (ranks, dtype)].append(result)
        print(f"pass {turn + 1}: {'x'.join(map(str, shape))} {dtype} on {ranks} ranks: ratio {result['ratio']:.3f}, "
              f"verified {result['verified']}, computing {1e3 * result['computed_seconds']:.1f} ms, "
              f"waiting {1e3 * result['waited_seconds']:.1f} ms, core {result['core_gflops']:.1f} "
              f"(2048 cubed: {result['square_core_gflops']:.1f}) GFLOP/s", file=sys.stderr, flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
