"""Everything that needs a GPU, in one go: products and training beside numpy, rates beside torch, and a report.

    make gpu-check
    make gpu-check ARGS='--only rate --ranks 1'
    PYTHONPATH=.:apps python3 -m gpu_check --library torch --small      (on a machine without one)

It needs a Python with torch or cupy and what pmm3d needs, and an MPI with its launcher. Where there is no GPU it says
so and ends well. Checks run in child processes and have time limits: one that dies is told of, and the rest goes on.
The exit code is 1 if something failed or was not run.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from . import found
from .cases import FULL, GRIDS, SMALL, all_cases
from .jobs import Runner
from .outcome import Case
from .report import Report, line_of

BUDGET = 460.0
"""Seconds; ending a job and writing the report come after them, and all is to be done in eight minutes."""


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", nargs="+", metavar="L", help="cupy, torch:cuda; on a host torch, numpy. Left out: "
                                                                  "those that see a GPU")
    parser.add_argument("--ranks", nargs="+", type=int, default=[*GRIDS], choices=[*GRIDS], metavar="N",
                        help="numbers of ranks (1 2 4 8)")
    parser.add_argument("--small", action="store_true", help="small sizes: right results are wanted, no rates")
    parser.add_argument("--only", metavar="WORDS", help="the checks in whose names this regular expression is found")
    parser.add_argument("--mpiexec", default="mpirun -n", metavar="CMD",
                        help="the launcher and its arguments up to the number of ranks (mpirun -n)")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="of wheels; those that are missing here are used")
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="S",
                        help="seconds after which all is ended; what is left counts as not run (460)")
    parser.add_argument("--report", type=Path, default=Path("runs/gpu-check"), metavar="FOLDER",
                        help="where report.json, report.txt and what the jobs print come (runs/gpu-check)")
    return parser.parse_args(arguments)


def main() -> int:
    options, begun = parsed(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as unpacked:
        wheels = _add_to_path(options.wheels, Path(unpacked))
        devices, python = found.of_the_driver(), found.of_python()
        libraries = options.library or python["libraries"]
        if not libraries:
            return _nothing_to_check(devices, python["why"])
        cases = _chosen(all_cases(libraries, options.ranks, SMALL if options.small else FULL), options.only or "")
        report = Report(_facts(devices, python, wheels), [])
        _run(cases, report, options, begun)
    print(f"\n{report.ending()}\n\nwrote {options.report}/report.json and report.txt; {report.summary()}")
    return 1 if report.failed or not report.outcomes else 0


def _add_to_path(wheels: Path | None, into: Path) -> list[str]:
    """Children find this package, pmm3d and what was carried here; the names of those wheels."""
    unpacked = found.unpack_wheels(wheels, into) if wheels else []
    ours = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2]), str(into)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*ours, *filter(None, [os.environ.get("PYTHONPATH")])])
    return unpacked


def _nothing_to_check(devices: list[dict[str, str]], why: dict[str, str]) -> int:
    """Says why; 1 if there is a GPU all the same."""
    reasons = "; ".join(f"{name}: {reason}" for name, reason in why.items())
    if devices:
        print(f"gpu-check: the driver has {devices[0]['name']}, but neither torch nor cupy of {sys.executable} sees it "
              f"({reasons}). GPU_PYTHON names a Python that has one of them", file=sys.stderr)
        return 1
    print(f"gpu-check: no GPU here, nothing was checked ({reasons})")
    return 0


def _chosen(cases: list[Case], words: str) -> list[Case]:
    """Those whose names have what is looked for, and those that they need."""
    chosen = [case for case in cases if re.search(words, case.name)]
    needed = {case.needs for case in chosen}
    return [case for case in cases if case in chosen or case.name in needed]


def _facts(devices: list[dict[str, str]], python: dict[str, Any], wheels: list[str]) -> dict[str, Any]:
    """What a reader of figures must know. The MPI's name comes with the first case."""
    named = {name: value for name, value in os.environ.items() if name.startswith(("PMM3D_", "CUDA_VISIBLE"))}
    return {"date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "command": os.environ.get("GPU_CHECK_COMMAND") or shlex.join(["python3", "-m", "gpu_check", *sys.argv[1:]]),
            "devices": devices or "none that nvidia-smi tells of", "versions": python["versions"],
            "cores": len(os.sched_getaffinity(0))} | ({"wheels": wheels} if wheels else {}) | (
            {"environment": named} if named else {})


def _run(cases: list[Case], report: Report, options: argparse.Namespace, begun: float) -> None:
    """Each outcome is told, and all so far are written, as it is there."""
    folder = options.report
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    mpiexec = shlex.split(options.mpiexec)
    launcher = mpiexec if mpiexec and shutil.which(mpiexec[0]) else []
    for outcome in Runner(launcher, folder, begun + options.budget).run(cases):
        report.outcomes.append(outcome)
        if "MPI" in outcome.figures:
            report.facts["MPI"] = outcome.figures["MPI"]
        report.seconds = time.monotonic() - begun
        print(line_of(outcome), flush=True)
        (folder / "report.json").write_text(report.json())
        (folder / "report.txt").write_text(report.text())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the job under way is ended
    sys.exit(main())
