"""Programs that call ScaLAPACK, with and without the drop-in, in turns; and its routines beside ScaLAPACK's own.

    make embed; apt-get install libscalapack-openmpi-dev libopenblas0-pthread     (as root)
    python benchmarks/drop_in.py
    python benchmarks/drop_in.py --cases "lu 4096 64, rotation 2000 64 9" --ranks 4
    python benchmarks/drop_in.py --routines all --sizes 512 1024 2048 4096 8192 --blocks 64 128 --ranks 2 8

A case is a program of drop_in.c with its words: lu or cholesky with the size and the block; rotation with the size, the
block, and the number of products of different size that are computed in turns; scf with the size and the block. Each
run is a job of its own. The order of the two alternates. The drop-in is in LD_PRELOAD. Both use the BLAS in PMM3D_BLAS
(Debian's OpenBLAS), one thread per rank, in LD_PRELOAD of both. The time of a run is the median of its rounds on the
slowest rank; the first round, which may start Python, is a column of its own. Figures are medians of the repeats. The
ratio is the median of the ratios within a repeat, one for each pass; below 1, the drop-in is faster.

With --routines, each job calls the drop-in's routine and ScaLAPACK's own in turns, in float64 on n x n matrices. The
drop-in computes all sizes, or leaves those below --below to ScaLAPACK. The ratio is ScaLAPACK's time / the drop-in's,
the median over the rounds of all repeats of a pass; above 1, the drop-in is faster.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from records import parser, report
from small_products import OPENBLAS
from timing import ProgramError, output_of

SOURCE = Path(__file__).parent / "drop_in.c"
DROP_IN = Path(__file__).parents[1] / "build" / "embed" / "libpmm3d_scalapack.so"
CASES = ", ".join(
    [
        *(f"{name} {n} {block}" for name in ("lu", "cholesky") for n in (960, 2048) for block in (16, 32, 64)),
        *(f"rotation {n} 32 {kinds}" for n in (200, 1000) for kinds in (8, 9, 100)),
        "rotation 2000 64 9",
        *(f"scf {n} 32" for n in (150, 1200)),
    ]
)
ROUTINES = "gemm", "tran", "geadd", "gemr2d", "syrk", "syr2k", "symm", "trmm", "trsm", "potrf", "potrs", "trtri"
ROUNDS, KINDS = 4, 36
"""Number of rounds. A rotation has fewer rounds with more than KINDS / ROUNDS products."""


def compiled(folder: str) -> str:
    """The program. Raises ProgramError if a library is missing."""
    compiler = shutil.which("mpicc.openmpi") or ""
    if not compiler or not Path(blas()).exists():
        raise ProgramError(
            "ScaLAPACK is not here: apt-get install libscalapack-openmpi-dev libopenmpi-dev libopenblas0-pthread"
        )
    if not DROP_IN.exists():
        raise ProgramError(f"there is no {DROP_IN}: make embed MPICC=mpicc.openmpi")
    program = str(Path(folder) / "drop_in")
    output_of(
        [compiler, "-std=gnu11", "-O2", str(SOURCE), "-o", program, "-lscalapack-openmpi", "-lm", "-ldl"], os.environ
    )
    return program


def blas() -> str:
    return os.environ.get("PMM3D_BLAS", OPENBLAS)


def run(program: str, case: str, ranks: int, replaced: bool, rounds: int, **settings: str) -> dict[str, list[float]]:
    """Figures that a run prints: seconds of the first round and of the others, error and MB. Medians: `medians`.

    settings   variables of the drop-in
    """
    name, size, block, *words = case.split()
    preloaded = {"LD_PRELOAD": ":".join([str(DROP_IN)] * replaced + [blas()])}
    settings |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PMM3D_BLAS": blas(), **preloaded}
    command = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
    passed = [word for setting in settings.items() for word in ("-x", "=".join(setting))]
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    printed = output_of([*command, *passed, program, name, size, block, str(rounds), *words], inherited, timeout=3600)
    found: dict[str, list[float]] = {}
    for word, value in re.findall(r"^(\w+) (\S+)$", printed, re.M):
        found.setdefault(word, []).append(float(value))
    if not found["error"][0] <= 1e-6:
        raise ProgramError(f"{case}: the error of a result is {found['error'][0]}")
    return found


def medians(found: dict[str, list[float]]) -> dict[str, float]:
    return {word: median(values) for word, values in found.items()}


def computed_by(program: str, case: str, ranks: int, folder: str, **settings: str) -> str:
    """Number of calls that pmm3d and ScaLAPACK compute in the first round, of routines that are switched on."""
    log = Path(folder) / "log"
    log.unlink(missing_ok=True)
    run(program, case, ranks, True, 0, PMM3D_EMBED_LOG=str(log), **settings)
    summary = r"^rank 0 summary: (\w+) computed (\d+) calls(?!.*not switched on)"
    lines = re.findall(summary, log.read_text(), re.M)
    return ", ".join(f"{by} {calls}" for by, calls in lines if int(calls))


def row(program: str, case: str, ranks: int, repeats: int, passes: int, folder: str) -> list[str]:
    rounds = min(ROUNDS, max(1, KINDS // int((case.split() + ["1"])[3])))
    runs: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for repeat in range(repeats * passes):
        for replaced in (False, True) if repeat % 2 else (True, False):
            runs[replaced].append(medians(run(program, case, ranks, replaced, rounds)))
    ratios = [ours["round"] / theirs["round"] for theirs, ours in zip(runs[False], runs[True])]
    of = lambda replaced, what: median(each[what] for each in runs[replaced])
    return [
        case,
        f"{1e3 * of(False, 'round'):.2f}",
        f"{1e3 * of(True, 'round'):.2f}",
        ", ".join(f"{median(ratios[turn * repeats : (turn + 1) * repeats]):.2f}" for turn in range(passes)),
        f"{1e3 * of(True, 'first'):.0f}",
        computed_by(program, case, ranks, folder),
        f"{of(False, 'MB'):.0f}, {of(True, 'MB'):.0f}",
    ]


def routine_row(program: str, case: str, options: Any, ranks: int, folder: str) -> list[str]:
    """A routine of the drop-in beside ScaLAPACK's. case: name, size and block."""
    settings = {"PMM3D_SCALAPACK_ROUTINES": case.split()[0], "PMM3D_SCALAPACK_BELOW": str(options.below)}
    runs = [run(program, case, ranks, True, ROUNDS, **settings) for _ in range(options.repeats * options.passes)]
    ratios = [[theirs / ours for theirs, ours in zip(each["theirs"], each["round"])] for each in runs]
    in_passes = [ratios[turn * options.repeats : (turn + 1) * options.repeats] for turn in range(options.passes)]
    return [
        *case.split(),
        str(ranks),
        *(f"{1e3 * median(time for each in runs for time in each[side]):.2f}" for side in ("theirs", "round")),
        ", ".join(f"{median(ratio for each in one for ratio in each):.2f}" for one in in_passes),
        f"{1e3 * median(each['first'][0] for each in runs):.0f}",
        computed_by(program, case, ranks, folder, **settings),
    ]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--cases", default=CASES, help="cases, separated by commas")
    made.add_argument("--routines", nargs="+", choices=("all", *ROUTINES), help="time these routines, and no cases")
    made.add_argument("--sizes", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192], help="n of the routines")
    made.add_argument("--blocks", type=int, nargs="+", default=[64, 128], help="block sizes of the routines (64 128)")
    made.add_argument("--below", type=int, default=0, help="PMM3D_SCALAPACK_BELOW of the routines (0)")
    made.add_argument("--ranks", type=int, nargs="+", default=[4], help="numbers of ranks (4)")
    made.add_argument("--repeats", type=int, default=5, help="number of runs of a case in a pass, on each side (5)")
    made.add_argument("--passes", type=int, default=2, help="number of passes, each with a ratio of its own (2)")
    options = made.parse_args()
    if options.quick:
        options.cases, options.ranks, options.repeats, options.passes = "lu 96 16, rotation 64 16 2", [2], 1, 1
        options.sizes, options.blocks = [96], [16]
    cases = [case.strip() for case in options.cases.split(",")]
    heading = ["case", "ScaLAPACK ms", "drop-in ms", "ratio", "first ms", "products computed by", "MB per rank"]
    if options.routines:
        names = ROUTINES if "all" in options.routines else options.routines
        cases = [f"{name} {size} {block}" for name in names for size in options.sizes for block in options.blocks]
        heading = ["routine", "n", "block", "ranks", "ScaLAPACK ms", "drop-in ms", "ScaLAPACK / drop-in", "first ms"]
        heading += ["calls computed by"]
    rows = [heading]
    with tempfile.TemporaryDirectory() as folder:
        try:
            program = compiled(folder)
            for ranks, case in product(options.ranks, cases):
                if options.routines:
                    rows.append(routine_row(program, case, options, ranks, folder))
                else:
                    rows.append(row(program, case, ranks, options.repeats, options.passes, folder))
                done = f"{len(rows) - 1} of {len(cases) * len(options.ranks)}"
                print(f"{done}: {' | '.join(rows[-1])}", file=sys.stderr, flush=True)
        except ProgramError as error:
            sys.exit(str(error))
    ranks = ", ".join(map(str, options.ranks))
    title = f"{ranks} ranks, medians of {options.passes} passes with {options.repeats} repeats"
    report(options, (title, rows))


if __name__ == "__main__":
    main()
