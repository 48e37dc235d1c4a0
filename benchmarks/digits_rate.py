"""Train on the digits of `make run` with this version of pmm3d and another one, in turns: samples per second, and parts
of the time.

    python benchmarks/digits_rate.py --beside ../before/.venv/bin/python       (or: --turns 5)
    python benchmarks/digits_rate.py --ranks 1 2 8

Samples per second are the median of the lines of metrics.jsonl in a run, and then the median of the turns. A turn runs
each version once on each number of ranks; the order changes from turn to turn. A first turn is not counted. The grid of
8 ranks is that of apps/digits.toml. On other numbers of ranks the grid is "ddp". Times are of a step of a rank:
computing, waiting by kind of message, and the rest, which is Python and other ranks on the same core. They are medians
of the turns, and means over the ranks.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from itertools import count, product
from pathlib import Path
from statistics import mean, median

from records import Rows, parser, report
from timing import all_rounds, on_ranks, output_of

from pmm3d.text import counted

RANKS = 8
"""Ranks of the grid in CONFIG."""
APPS = Path(__file__).parent.parent / "apps"
CONFIG = APPS / "digits.toml"
HERE, BESIDE = "here", "beside"
Figures = dict[str, float]


def trained(python: str, data: Path, folder: Path, epochs: int, ranks: int) -> Figures:
    """Figures of a run: samples per second, and milliseconds of a step by activity."""
    text = CONFIG.read_text().replace("runs/digits.h5", str(data)).replace("runs/digits", str(folder))
    if ranks != RANKS:
        text = text.replace('shape = "2x2x1"', 'shape = "ddp"').replace("data = 2\n", "data = 1\n")
    config = folder.with_suffix(".toml")
    config.write_text(text.replace("epochs = 15", f"epochs = {epochs}"))
    on_ranks(ranks, ["-m", "pmm3d", "train", str(config)], os.environ, python)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = [line["samples_per_second"] for line in lines if "loss" in line]
    rates = rates[1:] or rates
    record = json.loads((folder / "run.json").read_text())
    return {"samples/s": median(rates)} | step_of(record)


def step_of(record: dict) -> Figures:
    """Milliseconds of a step of the run, with evaluations and checkpoints."""
    share = 1e3 / record["passes"]["steps"]
    spent = {f"computing {name}": share * mean(seconds) for name, seconds in record["ranks"]["computed"].items()}
    for moved in record["moved"]:
        what = moved["phase"] or moved["operation"]
        spent[f"waiting {what}"] = spent.get(f"waiting {what}", 0.0) + share * mean(moved["waited"])
    total = share * mean(record["ranks"]["seconds"])
    return {"all": total, **spent, "Python and other ranks": total - sum(spent.values())}


def shown(runs: dict[str, list[Figures]]) -> Rows:
    """Medians of the parts that take at least 1% of a step."""
    names = dict.fromkeys(name for each in runs.values() for run in each for name in run)
    medians = {name: {who: median(run.get(name, 0.0) for run in each) for who, each in runs.items()} for name in names}
    least = 0.01 * max(medians["all"].values())
    rows = [
        [name, *(f"{value:,.2f}" for value in found.values())]
        for name, found in medians.items()
        if max(found.values()) >= least
    ]
    return [["ms of a step, but for samples/s", *runs], *rows]


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--beside", metavar="PYTHON", help="Python of an environment with another version of pmm3d")
    made.add_argument("--ranks", nargs="+", type=int, default=[RANKS], metavar="N", help=f"numbers of ranks ({RANKS})")
    made.add_argument("--turns", type=int, default=5, help="runs of each version (5)")
    made.add_argument("--epochs", type=int, default=15, help="epochs of a run (15)")
    options = made.parse_args()
    if options.quick:
        options.turns, options.epochs = 1, 2
    versions = {HERE: sys.executable} | ({BESIDE: os.path.abspath(options.beside)} if options.beside else {})
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)  # so that `python -m` finds the pmm3d of the environment, and not that of this folder
        data = Path(scratch) / "digits.h5"
        output_of([sys.executable, str(APPS / "digits.py"), str(data)])
        number = count()

        def run(kind: tuple[int, str]) -> Figures:
            ranks, who = kind
            folder = Path(scratch) / f"{who}-{next(number)}"
            found = trained(versions[who], data, folder, options.epochs, ranks)
            print(f"{who}, {counted(ranks, 'rank')}: {found['samples/s']:,.0f} samples/s", file=sys.stderr, flush=True)
            return found

        found = all_rounds(product(options.ranks, versions), run, options.turns)
        tables = []
        for ranks in options.ranks:
            runs = {who: found[ranks, who] for who in versions}
            title = f"{counted(ranks, 'rank')}; medians of {counted(options.turns, 'turn')}"
            if options.beside:
                ratios = [mine["samples/s"] / other["samples/s"] for mine, other in zip(runs[HERE], runs[BESIDE])]
                title += f"; samples/s here / beside: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            tables.append((title, shown(runs)))
        report(options, *tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())
