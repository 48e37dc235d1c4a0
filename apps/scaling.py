"""Strong and weak scaling from the figures of `jobs/scaling.sbatch`: a table, and a picture of efficiency by ranks.

    python apps/scaling.py runs/scaling-1234 --plot scaling.png

Reads strong-*.json and weak-*.json, as `pmm3d bench --json` writes them. Two efficiencies: the share of the limit,
which is the ranks' cores times the GEMM of one core in the same run, and the rate per rank beside that of the fewest
ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

KINDS = {"strong": "the same product", "weak": "the same work per rank"}


@dataclass(frozen=True)
class Point:
    """One run: of which sweep, on how many ranks, and what it reached. ratio: of the limit; relative: of the rate per
    rank on the fewest ranks of its sweep."""

    kind: str
    shape: tuple[int, int, int]
    ranks: int
    hosts: int
    grid: str
    seconds: float
    gflops: float
    ratio: float
    relative: float
    verified: bool


def read(folder: Path) -> tuple[list[Point], list[str]]:
    """The points of both sweeps by number of ranks, and what was wrong with files that could not be read."""
    points, problems = [], []
    for kind in KINDS:
        results = []
        for path in sorted(folder.glob(f"{kind}-*.json")):
            try:
                found = json.loads(path.read_text())
                fastest = min(found, key=lambda one: median(one["seconds"])) if isinstance(found, list) else found
                results.append(Point(kind, (fastest["m"], fastest["n"], fastest["k"]), fastest["ranks"],
                                     len(fastest["environment"]["hosts"]), "x".join(map(str, fastest["grid"])),
                                     median(fastest["seconds"]), fastest["gflops"], fastest["ratio"], 1.0,
                                     fastest["verified"]))
            except (OSError, ValueError, LookupError) as error:
                problems.append(f"{path} is not a result of pmm3d bench --json: {type(error).__name__}: {error}")
        points += relative(sorted(results, key=lambda point: point.ranks))
    return points, problems


def relative(points: list[Point]) -> list[Point]:
    """The points of one sweep with their rate per rank beside the first one's."""
    if not points:
        return []
    first = points[0].gflops / points[0].ranks
    return [Point(**{**vars(point), "relative": point.gflops / point.ranks / first}) for point in points]


def table(points: list[Point]) -> Table:
    found = Table(title="[bold]Scaling[/]", title_justify="left")
    for column in ("sweep", "ranks", "hosts", "m, n, k", "grid", "median ms", "GFLOP/s", "of the limit",
                   "of the fewest ranks", "ok"):
        found.add_column(column, justify="left" if column in ("sweep", "grid") else "right")
    for point in points:
        found.add_row(point.kind, str(point.ranks), str(point.hosts), ", ".join(map(str, point.shape)), point.grid,
                      f"{1e3 * point.seconds:.2f}", f"{point.gflops:.1f}", f"{point.ratio:.3f}",
                      f"{point.relative:.3f}", "yes" if point.verified else "NO")
    return found


def plot(points: list[Point], path: Path) -> None:
    """A panel for each sweep; 1 is the limit: the GEMM alone, on all cores."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(KINDS), figsize=(9, 3.8), sharey=True, layout="constrained")
    for panel, (kind, meaning) in zip(axes, KINDS.items()):
        of_kind = [point for point in points if point.kind == kind]
        ranks = [point.ranks for point in of_kind]
        panel.axhline(1, color="black", linestyle="--", linewidth=1, label="limit: the GEMM alone on all cores")
        panel.plot(ranks, [point.ratio for point in of_kind], "o-", color="#4477aa", label="achieved, of the limit")
        panel.plot(ranks, [point.relative for point in of_kind], "s:", color="#ee6677",
                   label="rate per rank, of that on the fewest ranks")
        panel.set_xscale("log", base=2)
        panel.set_xticks(ranks, [str(count) for count in ranks])
        panel.minorticks_off()
        panel.set(xlabel="ranks", title=f"{kind}: {meaning}", ylim=(0, max(1.1, *[0, *(p.relative for p in points)])))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    axes[0].set_ylabel("efficiency")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where strong-*.json and weak-*.json are")
    parser.add_argument("--plot", type=Path, help="draw efficiency against ranks here (.png, .pdf, .svg)")
    options = parser.parse_args()
    points, problems = read(options.folder)
    for problem in problems:
        print(f"scaling: {problem}", file=sys.stderr)
    if not points:
        print(f"scaling: no figures in {options.folder}: jobs/scaling.sbatch writes them", file=sys.stderr)
        return 2
    Console(width=None if sys.stdout.isatty() else 130).print(table(points))
    if options.plot:
        plot(points, options.plot)
        print(f"wrote {options.plot}")
    return 1 if problems or not all(point.verified for point in points) else 0


if __name__ == "__main__":
    sys.exit(main())
