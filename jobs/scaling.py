"""Strong and weak scaling from the figures of `jobs/scaling.sbatch`: a table, and a picture of efficiency by ranks.

    python jobs/scaling.py runs/scaling-1234 --plot scaling.png

Reads strong-*.json and weak-*.json, as `pmm3d bench --json` writes them. The table contains two efficiencies: the share
of the limit, which is the number of cores times the GEMM rate of one core in the same run; and the rate per rank,
relative to the rate per rank of the fewest ranks.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

KINDS = {"strong": "the same product", "weak": "the same work per rank"}


class Point(NamedTuple):
    """The fastest grid of one run. ratio: share of the limit."""

    ranks: int
    hosts: int
    shape: str
    grid: str
    seconds: float
    gflops: float
    ratio: float
    verified: bool


def point(path: Path) -> Point:
    found = json.loads(path.read_text())
    best = min(found, key=lambda one: median(one["seconds"])) if isinstance(found, list) else found
    return Point(
        best["ranks"],
        len(best["environment"]["hosts"]),
        f"{best['m']}, {best['n']}, {best['k']}",
        "x".join(map(str, best["grid"])),
        median(best["seconds"]),
        best["gflops"],
        best["ratio"],
        best["verified"],
    )


def read(folder: Path) -> tuple[dict[str, list[Point]], list[str]]:
    """Return the points of both sweeps in order of ranks, and a sentence about each file that cannot be read."""
    sweeps: dict[str, list[Point]] = {kind: [] for kind in KINDS}
    problems = []
    for kind, points in sweeps.items():
        for path in sorted(folder.glob(f"{kind}-*.json")):
            try:
                points.append(point(path))
            except (OSError, ValueError, LookupError) as error:
                problems.append(f"{path} is not a result of pmm3d bench --json: {type(error).__name__}: {error}")
        points.sort(key=lambda one: one.ranks)
    return sweeps, problems


def relative(points: list[Point]) -> list[float]:
    """Return the rates per rank of a sweep, relative to the rate per rank of the fewest ranks."""
    return [one.gflops / one.ranks / (points[0].gflops / points[0].ranks) for one in points]


def table(sweeps: dict[str, list[Point]]) -> Table:
    found = Table(title="[bold]Scaling[/]", title_justify="left")
    for column in (
        "sweep",
        "ranks",
        "hosts",
        "m, n, k",
        "grid",
        "median ms",
        "GFLOP/s",
        "of the limit",
        "of the fewest ranks",
        "ok",
    ):
        found.add_column(column, justify="left" if column in ("sweep", "grid") else "right")
    for kind, points in sweeps.items():
        for one, beside_first in zip(points, relative(points)):
            found.add_row(
                kind,
                str(one.ranks),
                str(one.hosts),
                one.shape,
                one.grid,
                f"{1e3 * one.seconds:.2f}",
                f"{one.gflops:.1f}",
                f"{one.ratio:.3f}",
                f"{beside_first:.3f}",
                "yes" if one.verified else "NO",
            )
    return found


def plot(sweeps: dict[str, list[Point]], path: Path) -> None:
    """Draw a panel for each sweep. Efficiency 1 is the limit: the GEMM alone on all cores."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes = figure.subplots(1, len(KINDS), sharey=True)
    for panel, (kind, points) in zip(axes, sweeps.items()):
        ranks, beside_first = [one.ranks for one in points], relative(points)
        panel.axhline(1, color="black", linestyle="--", linewidth=1, label="limit: the GEMM alone on all cores")
        panel.plot(ranks, [one.ratio for one in points], "o-", color="#4477aa", label="achieved, of the limit")
        panel.plot(ranks, beside_first, "s:", color="#ee6677", label="rate per rank, of that on the fewest ranks")
        panel.set_xscale("log", base=2)
        panel.set_xticks(ranks, [str(count) for count in ranks])
        panel.minorticks_off()
        panel.set(xlabel="ranks", title=f"{kind}: {KINDS[kind]}")
    highest = max(value for points in sweeps.values() for value in relative(points))
    axes[0].set(ylabel="efficiency", ylim=(0, max(1.1, highest)))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of strong-*.json and weak-*.json")
    parser.add_argument("--plot", type=Path, help="draw efficiency over ranks into this file (.png, .pdf, .svg)")
    options = parser.parse_args()
    sweeps, problems = read(options.folder)
    for problem in problems:
        print(f"scaling: {problem}", file=sys.stderr)
    if not any(sweeps.values()):
        print(f"scaling: {options.folder} contains no figures of jobs/scaling.sbatch", file=sys.stderr)
        return 2
    Console(width=None if sys.stdout.isatty() else 130).print(table(sweeps))
    if options.plot:
        plot(sweeps, options.plot)
        print(f"wrote {options.plot}")
    return 1 if problems or not all(one.verified for points in sweeps.values() for one in points) else 0


if __name__ == "__main__":
    sys.exit(main())
