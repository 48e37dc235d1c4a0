"""Faults and hostile inputs: every job must end by itself, name the cause, and lose nothing.

    python tests/faults injected --times 20
    python tests/faults injected --times 3 --only killed,stopped --json outcomes.json
    python tests/faults hostile --only report,train

injected: faults in jobs of 4 ranks, each several times, with a random victim, moment and place. Jobs of killed,
stopped and sigterm may be pipelines

    killed   SIGKILL to a rank, also while it resumes     stopped  SIGSTOP to a rank
    sigterm  SIGTERM to a rank or to mpiexec              raising  an exception on one rank, in a user's loop
    memory   a rank whose address space is exhausted      other    a rank calls another collective or another axis
    none     a rank skips a call, or leaves
    disk     a full disk under checkpoints: a small tmpfs (needs root), or ulimit -f
    corrupt  a changed byte in the data or a checkpoint, or a file cut short
    network  the link between two virtual nodes is cut (needs root)

A job that still runs after 120 s is a silent hang. The job must name the rank and the cause, and end with the
documented exit code. Its checkpoints must be complete. The job is then resumed without the fault: it must end with the
weights of an undisturbed run, bit by bit.

hostile: bad files, configurations and arguments for train, export, predict and report

A command must refuse the input with exit code 2, or report it, in words that name it, once, without a traceback. No
file may change, and no incomplete file may be left.

The exit code is 1 if a check fails. "-" in the table: the check does not apply.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

if not __package__:  # python tests/faults
    sys.path[0] = str(Path(__file__).parents[1])

from faults.files import forget_trained
from faults.injected import KINDS
from faults.inputs import CASES, tried
from faults.judgement import Outcome, table, to_json
from faults.lab import Lab

RANKS = 4
HOSTILE = [*dict.fromkeys(case.command for case in CASES)]


def injected(folder: Path, only: list[str], times: int = 1, seed: int = 0) -> Iterator[Outcome]:
    """Each of these kinds, several times."""
    with Lab(folder, RANKS, Random()) as lab:
        for kind in only:
            for repetition in range(times):
                lab.random.seed(f"{seed} {kind} {repetition}")
                yield KINDS[kind](lab)


def hostile(folder: Path, only: list[str]) -> Iterator[Outcome]:
    """Each input to these commands."""
    try:
        yield from (tried(case, folder / f"case-{index}") for index, case in enumerate(CASES) if case.command in only)
    finally:
        forget_trained()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python tests/faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    catalogues = parser.add_subparsers(dest="catalogue", required=True)
    of_injected, of_hostile = (catalogues.add_parser(name) for name in ("injected", "hostile"))
    for each in of_injected, of_hostile:
        each.add_argument("--only", type=lambda text: text.split(","), metavar="KIND,...", help="these kinds (all)")
        each.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes here, after each one")
    of_injected.add_argument("--times", type=int, default=20, help="repetitions of each kind (20)")
    of_injected.add_argument("--seed", type=int, default=0, help="seed of the random choices (0)")
    options = parser.parse_args()
    kinds = [*KINDS] if options.catalogue == "injected" else HOSTILE
    if unknown := {*(options.only or ())} - {*kinds}:
        parser.error(f"unknown kind {', '.join(sorted(unknown))}: the kinds are {', '.join(kinds)}")
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder, only = Path(name), options.only or kinds
        cases = (
            hostile(folder, only)
            if options.catalogue == "hostile"
            else injected(folder, only, options.times, options.seed)
        )
        for outcome in cases:
            outcomes.append(outcome)
            if options.json:
                options.json.write_text(to_json(outcomes))
            print(
                f"{outcome.kind}: {outcome.variant}: {'; '.join(outcome.notes) or 'ok'}"[:600],
                file=sys.stderr,
                flush=True,
            )
    print(table(outcomes))
    sys.exit(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    main()
