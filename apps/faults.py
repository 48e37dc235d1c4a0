"""Ten kinds of faults, each many times, with the victim, the moment and the place by chance: what becomes of the job?

    python apps/faults.py --times 20
    python apps/faults.py --times 3 --only killed,stopped --markdown

killed    SIGKILL to a rank                              stopped   SIGSTOP to a rank
sigterm   SIGTERM to a rank or to mpiexec                raising   an exception on one rank, in a loop of one's own
memory    a rank whose address space is used up          other     a rank calls another collective, or another axis
none      a rank sleeps, skips a call, leaves, or never makes the grid
disk      full while checkpoints are written (a small tmpfs, which needs root; else, and at times, ulimit -f)
corrupt   a byte of the data set or of a checkpoint is another, or the file is cut short
ranks     fewer than the grid needs, or the launcher of another MPI
early     SIGSTOP before the ranks have made a grid, only if asked for: MPI_Init has no time limit, so the job stays

Each job must end by itself (one that is still there after 90 s is a silent hang), name the rank and the cause, and end
with the documented exit code. Its checkpoints must have their checksums and be all there. Then it is started again
without the fault, and must end with bitwise the weights of a run that nobody disturbed. The exit code is 1 if anything
of this fails. "-" stands where there is nothing to check: a SIGTERM to all, a mistake of all ranks alike.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from fault_lab.judgement import TITLES, from_json, markdown, row, to_json
from fault_lab.kinds import KINDS, MORE
from fault_lab.lab import Lab
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


def study(lab: Lab, kinds: list[str], times: int, seed: int, keep=lambda outcomes: None) -> list:
    """The outcomes of all repetitions, with a progress bar; keep is called after each with those so far."""
    outcomes = []
    bar = Progress(TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(),
                   TextColumn("{task.fields[said]}"), TimeElapsedColumn(), console=Console(file=sys.stderr))
    with bar:
        task = bar.add_task("", total=len(kinds) * times, said="")
        for kind in kinds:
            for repetition in range(times):
                lab.random.seed(f"{seed} {kind} {repetition}")
                bar.update(task, description=kind)
                outcome = (KINDS | MORE)[kind](lab)
                outcomes.append(outcome)
                keep(outcomes)
                said = f"{outcome.variant}: {'; '.join(outcome.notes) or 'ok'}"
                bar.update(task, advance=1, said=f"{sum(bool(found.failed) for found in outcomes)} failed")
                bar.console.print(f"{outcome.kind}: {said}"[:600], highlight=False, markup=False)
    return outcomes


def rows_of(outcomes) -> list:
    kinds = list(dict.fromkeys(outcome.kind for outcome in outcomes))
    return [row(kind, [outcome for outcome in outcomes if outcome.kind == kind]) for kind in kinds]


def print_table(rows) -> None:
    table = Table(*TITLES)
    for found in rows:
        table.add_row(*found.words(), style=None if found.good else "bold red")
    Console(width=140 if not sys.stdout.isatty() else None).print(table)


def chosen(text: str) -> list[str]:
    kinds = [word.strip() for word in text.split(",")]
    unknown = [word for word in kinds if word not in KINDS | MORE]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: the kinds are {', '.join(KINDS | MORE)}")
    return kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, help="repetitions of each kind (20)")
    parser.add_argument("--ranks", type=int, default=4, help="a multiple of 4 (4)")
    parser.add_argument("--only", type=chosen, default=list(KINDS), help="kinds, with commas between them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", type=Path, help="write every outcome here, after each repetition")
    parser.add_argument("--table", type=Path, nargs="+", metavar="JSON", help="run nothing; the table of those files")
    options = parser.parse_args()
    if options.ranks < 4 or options.ranks % 4:
        parser.error("--ranks is a multiple of 4")
    if options.table:
        outcomes = [outcome for path in options.table for outcome in from_json(path.read_text())]
    else:
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            keep = lambda outcomes: options.json and options.json.write_text(to_json(outcomes))
            lab = Lab(Path(folder), options.ranks, random.Random())
            try:
                outcomes = study(lab, options.only, options.times, options.seed, keep)
            finally:
                lab.close()
    rows = rows_of(outcomes)
    if options.markdown:
        print(markdown(rows))
    else:
        print_table(rows)
    sys.exit(0 if all(found.good for found in rows) else 1)


if __name__ == "__main__":
    main()
