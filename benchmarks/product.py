"""The product in four shapes, on 2 and 8 ranks, in float64 and float32, alone or in turns with COSMA.

    make bench                                                         (or: python benchmarks/product.py --passes 2)
    python benchmarks/product.py --cosma /usr/local                    this version and COSMA, in turns
    python benchmarks/product.py --beside ../before/.venv/bin/python   this version and another one, in turns
    python benchmarks/product.py --order F --beside $(which python)     stored by columns, and by rows, in turns

Each cell is one run of `pmm3d bench` with the auto grid: the median of 9 products. The tables show medians of passes.

r              achieved rate / (cores x rate of a 2048 x 2048 x 2048 GEMM of the same BLAS on one core, the fastest of
               all runs)
ratio          the same with a GEMM of the proportions of the product, in the same run
at once        the same with that GEMM on all cores at the same time, without messages. Cores share memory and clock
without a core fraction of the computing time in which another process had the core

--cosma adds a table: time of COSMA / time of pmm3d. FOLDER contains COSMA and COSTA, built with the mpicxx of this
environment. COSMA stores the matrices in its own layout, and uses the same MPI, binding, BLAS and kernel. --beside adds
a table: time of a product here / time with the pmm3d of that Python. --cells selects cells, such as
2048x2048x2048:8:float64. --blas auto times the local GEMMs of each cell with each BLAS and kernel of --tried, by `pmm3d
tune blas`, and uses the fastest for the type. --order F stores A, B and C by columns. --shared stores A and B in memory
that the ranks of a node share.
"""

import json
import os
import sys
import tempfile
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import geometric_mean, median
from typing import NamedTuple

from records import Rows, parser, report
from timing import ProgramError, on_ranks, output_of, sizes_of

from pmm3d.model.machine import set_blas_environment

SHAPES = ((4096, 4096, 4096), (2048, 2048, 2048), (1024, 1024, 32768), (65536, 512, 512))
COLUMNS = ((2, "float64"), (2, "float32"), (8, "float64"), (8, "float32"))
HERE = ["--repeat", "9"]
"""Options of each `pmm3d bench`."""
HEADING = ["m, n, k", *(f"{ranks} ranks {dtype}" for ranks, dtype in COLUMNS)]
SOURCE = Path(__file__).parent / "cosma.cpp"


def words_of(shape: tuple[int, int, int]) -> list[str]:
    """Options with the sizes of a product."""
    return [word for name, size in zip("mnk", shape) for word in (f"--{name}", str(size))]


class Side(NamedTuple):
    """One of the two compared sides: the Python with a pmm3d, options of `pmm3d bench`, and the BLAS (auto, or "" for
    that of the environment)."""

    python: str
    options: list[str]
    blas: str = ""


def tune(cells: list[tuple], tried: list[str]) -> None:
    """Time the GEMMs of these cells with these BLAS libraries. The choice is stored for PMM3D_BLAS=auto:TYPE."""
    asked = [word for name in tried for word in ("--blas", name)]
    for shape, (ranks, dtype) in cells:
        said = output_of(
            [
                sys.executable,
                "-m",
                "pmm3d",
                "tune",
                "blas",
                *words_of(shape),
                "--ranks",
                str(ranks),
                "--dtype",
                dtype,
                *asked,
            ],
            os.environ,
        )
        chosen = next(line for line in said.splitlines() if line.startswith("chosen"))
        print(f"{'x'.join(map(str, shape))} {dtype} on {ranks} ranks, {chosen}", file=sys.stderr, flush=True)


def measure(side: Side, shape: tuple[int, int, int], ranks: int, dtype: str) -> dict:
    """The JSON of one run of `pmm3d bench`."""
    environ = os.environ | ({"PMM3D_BLAS": f"{side.blas}:{dtype}"} if side.blas else {})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        output_of(
            [
                side.python,
                "-m",
                "pmm3d.launcher",
                "-n",
                str(ranks),
                "-m",
                "pmm3d",
                "bench",
                *words_of(shape),
                *side.options,
                "--dtype",
                dtype,
                "--json",
                str(path),
                *HERE,
            ],
            environ,
        )
        return json.loads(path.read_text())


def compiled(folder: str, installed: Path) -> str:
    """Compile the driver of COSMA, and return its path. Raises ProgramError if COSMA or SciPy's OpenBLAS is missing."""
    libraries = Path(find_spec("scipy").origin).parents[1] / "scipy.libs"
    blas = next(libraries.glob("libscipy_openblas-*"), None)
    if not blas:
        raise ProgramError(f"{libraries} has no OpenBLAS. Install a wheel of SciPy")
    program = str(Path(folder) / "cosma")
    output_of(
        [
            str(Path(sys.executable).parent / "mpicxx"),
            "-std=c++17",
            "-O2",
            "-fopenmp",
            str(SOURCE),
            "-o",
            program,
            f"-I{installed}/include",
            f"-L{installed}/lib",
            "-lcosma",
            "-lcosta",
            str(blas),
            f"-Wl,-rpath,{libraries}",
        ]
    )
    return program


def of_cosma(program: str, shape: tuple[int, int, int], ranks: int, dtype: str) -> dict:
    """Seconds of each product of COSMA, and whether the results are right."""
    letter = "s" if dtype == "float32" else "d"
    printed = on_ranks(ranks, [program, *map(str, shape), letter, HERE[-1]]).split()
    return {"seconds": [float(word) for word in printed if word != "wrong"], "verified": "wrong" not in printed}


def table(results: dict) -> tuple[str, Rows]:
    """(title, rows): r, ratio, grid and noise of each cell."""
    square = {
        dtype: max(
            run["square_core_gflops"] for (_, (_, other)), runs in results.items() for run in runs if other == dtype
        )
        for dtype in {dtype for _, (_, dtype) in results}
    }
    cell = lambda shape, key: _cell(results[shape, key], square[key[1]]) if (shape, key) in results else ""
    rows = [HEADING, *([_name(shape), *(cell(shape, key) for key in COLUMNS)] for shape in _shapes(results))]
    rates = ", ".join(f"{dtype} {rate:.1f} GFLOP/s" for dtype, rate in sorted(square.items()))
    return f"r of pmm3d; 2048 cubed on one core: {rates}", rows


def _shapes(results: dict) -> list:
    return [*dict.fromkeys(shape for shape, _ in results)]


def _name(shape: tuple[int, int, int]) -> str:
    return ", ".join(map(str, shape))


def _cell(runs: list[dict], square: float) -> str:
    shares = sorted(run["gflops"] / (run["cores"] * square) for run in runs)
    r, ratio = median(shares), median(run["ratio"] for run in runs)
    at_once = median(run["gflops"] / run["at_once_gflops"] for run in runs)
    off_core = median(run["off_core_seconds"] / run["computed_seconds"] for run in runs if run["computed_seconds"])
    noise = f", {shares[0]:.3f} to {shares[-1]:.3f}" if len(shares) > 1 else ""
    grids = " or ".join(sorted({"x".join(map(str, run["grid"])) for run in runs}))
    stored = " or ".join(sorted({run["orders"] for run in runs}))
    grids += "" if stored == "CCC" else f" {stored}"
    read = " or ".join(sorted({run.get("in_place", "") for run in runs}))
    grids += f", {read} in place" if read else ""
    return f"{r:.3f}{noise} (ratio {ratio:.3f}, at once {at_once:.3f}; without a core {100 * off_core:.0f}%; {grids})"


def with_cosma(results: dict, cosma: dict) -> tuple[str, Rows]:
    """(title, rows): time of COSMA / time of pmm3d, median and range of the passes, and both in ms. Bold: at least
    1."""
    rows, found = [HEADING], []
    for shape in _shapes(results):
        cells = []
        for key in COLUMNS:
            pairs = [
                (median(here["seconds"]), median(there["seconds"]))
                for here, there in zip(results.get((shape, key), []), cosma.get((shape, key), []))
            ]
            if not pairs:
                cells.append("")
                continue
            ratios = sorted(there / here for here, there in pairs)
            here, there = (median(column) * 1e3 for column in zip(*pairs))
            mark = "**" if median(ratios) >= 0.995 else ""
            cells.append(
                f"{mark}{median(ratios):.2f}{mark}, {ratios[0]:.2f} to {ratios[-1]:.2f} ({here:.4g} and {there:.4g} ms)"
            )
            found.append(round(median(ratios), 2))  # the mean is that of the ratios in the table
        rows.append([_name(shape), *cells])
    return (
        f"Time of COSMA / time of pmm3d, in turns; in brackets the time of pmm3d and of COSMA. Geometric mean "
        f"{geometric_mean(found):.2f}"
    ), rows


def ratios(results: dict, beside: dict) -> Rows:
    """(title, rows): time of one side / time of the other, for each cell."""
    rows = [HEADING]
    for shape in _shapes(results):
        pairs = [list(zip(results.get((shape, key), []), beside.get((shape, key), []))) for key in COLUMNS]
        found = [[median(here["seconds"]) / median(there["seconds"]) for here, there in cell] for cell in pairs]
        rows.append([_name(shape), *(f"{median(ratios):.3f}" if ratios else "" for ratios in found)])
    return rows


def one_cell(text: str) -> tuple:
    """A cell of the table: 2048x2048x2048:8:float64."""
    shape, ranks, dtype = text.split(":")
    if (int(ranks), dtype) not in COLUMNS:
        raise ValueError(text)
    return sizes_of(shape)[:3], (int(ranks), dtype)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--passes", type=int, default=3, help="runs of each cell; figures are medians (3)")
    made.add_argument("--cosma", metavar="FOLDER", type=Path, help="folder of an installed COSMA, such as /usr/local")
    made.add_argument("--beside", metavar="PYTHON", help="Python of an environment with another version of pmm3d")
    made.add_argument(
        "--cells",
        type=lambda text: [one_cell(word) for word in text.split(",")],
        metavar="CELL,...",
        default=list(product(SHAPES, COLUMNS)),
        help="only these",
    )
    made.add_argument("--order", choices=("C", "F"), default="C", help="storage order of A, B and C here (C)")
    made.add_argument(
        "--blas",
        choices=("auto",),
        help="the fastest BLAS for each type here, by pmm3d tune blas (default: that of PMM3D_BLAS, or SciPy's)",
    )
    made.add_argument(
        "--tried",
        nargs="+",
        metavar="BLAS",
        help="timed BLAS libraries, each with all kernels of this CPU (that of PMM3D_BLAS, or SciPy's)",
    )
    made.add_argument("--shared", action="store_true", help="store A and B here in memory that the ranks share")
    options = made.parse_args()
    stored = (["--order", options.order] if options.order != "C" else []) + ["--shared"] * options.shared
    if options.cosma:
        made.refuse(options, "--blas", "--cosma, which uses SciPy's BLAS on both sides")
        os.environ["PMM3D_BLAS"] = "scipy"
    if options.blas:
        tune(options.cells, options.tried or [os.environ.get("PMM3D_BLAS", "scipy")])
    elif options.tried:
        made.error("--tried is for --blas auto: nothing is timed without it")
    sides = {"": Side(sys.executable, stored, options.blas or "")}
    sides |= {", beside": Side(options.beside, [])} if options.beside else {}
    if options.quick:
        options.passes, options.cells = 1, [((64, 64, 64), (2, "float64"))]
        HERE.extend(["--repeat", "1"])
    set_blas_environment()
    names = [*sides, *[", COSMA"] * bool(options.cosma)]
    results: dict = {side: {cell: [] for cell in options.cells} for side in names}
    with tempfile.TemporaryDirectory() as folder:
        program = compiled(folder, options.cosma) if options.cosma else ""
        for turn, (shape, (ranks, dtype)), side in product(range(options.passes), options.cells, results):
            result = (
                measure(sides[side], shape, ranks, dtype) if side in sides else of_cosma(program, shape, ranks, dtype)
            )
            results[side][shape, (ranks, dtype)].append(result)
            print(
                f"pass {turn + 1} of {options.passes}, {_name(shape)}, {ranks} ranks, {dtype}{side}: "
                f"{1e3 * median(result['seconds']):.4g} ms, verified {result['verified']}",
                file=sys.stderr,
                flush=True,
            )
    tables = [table(results[""])]
    if options.cosma:
        tables.insert(0, with_cosma(results[""], results[", COSMA"]))
    if options.beside:
        tables.append(("Time here / time beside, medians of the passes", ratios(results[""], results[", beside"])))
    report(options, *tables)
    if not all(run["verified"] for side in results.values() for runs in side.values() for run in runs):
        sys.exit("a product is wrong")


if __name__ == "__main__":
    main()
