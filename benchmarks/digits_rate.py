"""The digits of `make run`, trained by this version of pmm3d and by another one in turns: samples a second, and where
the time goes.

    python apps/digits_bench.py --beside ../before/.venv/bin/python       (or: --turns 5 --passes 2)

Samples a second are those of a run's lines of metrics.jsonl, of which the median is taken, and then that of the turns.
A turn runs each version once, in another order than the one before; all is done as many times as there are passes. Time
is that of a step of a rank: computing, waiting for messages by their kind, and the rest, Python and the machine's other
ranks; medians of the turns, means over ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import mean, median

import digits
from measuring import markdown, on_ranks

RANKS = 8
CONFIG = Path(__file__).with_name("digits.toml")
HERE, BESIDE = "here", "beside"
Figures = dict[str, float]


def trained(python: str, data: Path, folder: Path, epochs: int) -> Figures:
    """Of one run: samples a second, and milliseconds of a step by what they went to."""
    text = CONFIG.read_text().replace("runs/digits.h5", str(data)).replace("runs/digits", str(folder))
    config = folder.with_suffix(".toml")
    config.write_text(text.replace("epochs = 15", f"epochs = {epochs}"))
    on_ranks(RANKS, ["-m", "pmm3d", "train", str(config)], os.environ, python)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = [line["samples_per_second"] for line in lines if "loss" in line][1:]
    record = json.loads((folder / "run.json").read_text())
    return {"samples/s": median(rates)} | step_of(record)


def step_of(record: dict) -> Figures:
    """Milliseconds of a step of the run, evaluations and checkpoints too."""
    share = 1e3 / record["passes"]["steps"]
    spent = {f"computing {name}": share * mean(seconds) for name, seconds in record["ranks"]["computed"].items()}
    for moved in record["moved"]:
        what = moved["phase"] or moved["operation"]
        spent[f"waiting {what}"] = spent.get(f"waiting {what}", 0.0) + share * mean(moved["waited"])
    total = share * mean(record["ranks"]["seconds"])
    return {"all": total, **spent, "Python and other ranks": total - sum(spent.values())}


def shown(runs: dict[str, list[Figures]]) -> str:
    """A table of the medians, of what takes a hundredth of a step or more."""
    names = dict.fromkeys(name for each in runs.values() for run in each for name in run)
    medians = {name: {who: median(run.get(name, 0.0) for run in each) for who, each in runs.items()} for name in names}
    least = 0.01 * max(medians["all"].values())
    rows = [[name, *(f"{value:,.2f}" for value in found.values())] for name, found in medians.items()
            if max(found.values()) >= least]
    return markdown([["ms of a step, but for samples/s", *runs], *rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", metavar="PYTHON", help="of an environment with another version of pmm3d")
    parser.add_argument("--turns", type=int, default=5, help="runs of each version in a pass (5)")
    parser.add_argument("--passes", type=int, default=2, help="how often all of it is done (2)")
    parser.add_argument("--epochs", type=int, default=15, help="of a run (15)")
    options = parser.parse_args()
    versions = {HERE: sys.executable} | ({BESIDE: os.path.abspath(options.beside)} if options.beside else {})
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)  # where there is no pmm3d that `python -m` would find before that of the environment
        data = Path(scratch) / "digits.h5"
        digits.main(str(data))
        for number in range(options.passes):
            runs: dict[str, list[Figures]] = {who: [] for who in versions}
            for turn in range(options.turns):
                for who in [*versions][:: 1 - 2 * (turn % 2)]:
                    folder = Path(scratch) / f"{who}-{number}-{turn}"
                    runs[who].append(trained(versions[who], data, folder, options.epochs))
                    print(f"pass {number + 1}, turn {turn + 1}, {who}: {runs[who][-1]['samples/s']:,.0f} samples/s",
                          file=sys.stderr, flush=True)
            print(f"\npass {number + 1}, medians of {options.turns} turns\n\n{shown(runs)}")
            if options.beside:
                ratios = [mine["samples/s"] / other["samples/s"] for mine, other in zip(runs[HERE], runs[BESIDE])]
                print(f"\nsamples/s here / beside: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
