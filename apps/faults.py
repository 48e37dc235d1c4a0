"""Kinds of faults, each many times, with the victim, the moment and the place by chance: what becomes of the job?

    python apps/faults.py --times 20
    python apps/faults.py --times 3 --only killed,stopped --json outcomes.json

killed    SIGKILL to a rank                              stopped   SIGSTOP to a rank
sigterm   SIGTERM to a rank or to mpiexec                raising   an exception on one rank, in a loop of one's own
memory    a rank whose address space is used up          other     a rank calls another collective, or another axis
none      a rank skips a call, leaves, or never makes the grid
disk      full while checkpoints are written (a small tmpfs, which needs root; else, and at times, ulimit -f)
corrupt   a byte of the data set or of a checkpoint is another, or the file is cut short
ranks     fewer than the grid needs, or the launcher of another MPI
asleep    a rank, or all ranks, sleep for longer than the limit in code of the user's; the job is to go on
pipe      the data file is a named pipe
network   the link of one of two virtual nodes is cut (tests/cluster/cluster.py; needs root)

Each job must end by itself (one that is still there after 90 s is a silent hang), name the rank and the cause, and end
with the documented exit code. Its checkpoints must have their checksums and be all there. Then it is started again
without the fault, and must end with bitwise the weights of a run that nobody disturbed. The exit code is 1 if anything
of this fails. "-" stands where there is nothing to check: a SIGTERM to all, a mistake of all ranks alike.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from random import Random

from fault_lab.judgement import Outcome, table, to_json
from fault_lab.kinds import KINDS
from fault_lab.lab import Lab

RANKS = 4


def study(lab: Lab, options: argparse.Namespace) -> list[Outcome]:
    """The outcomes of all repetitions; each is told of when it is there, and all so far are kept."""
    outcomes = []
    for kind in options.only:
        for repetition in range(options.times):
            lab.random.seed(f"{options.seed} {kind} {repetition}")
            outcomes.append(outcome := KINDS[kind](lab))
            if options.json:
                options.json.write_text(to_json(outcomes))
            print(f"{kind} {repetition + 1} of {options.times}: {outcome.variant}: "
                  f"{'; '.join(outcome.notes) or 'ok'}"[:600], file=sys.stderr, flush=True)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, help="repetitions of each kind (20)")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[*KINDS], metavar="KIND,KIND,...")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write every outcome here, after each repetition")
    options = parser.parse_args()
    if unknown := {*options.only} - {*KINDS}:
        parser.error(f"{', '.join(unknown)}: the kinds are {', '.join(KINDS)}")
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, Lab(Path(folder), RANKS, Random()) as lab:
        outcomes = study(lab, options)
    print(table(outcomes))
    sys.exit(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    main()
