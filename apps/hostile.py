"""Hostile inputs to the commands, and faults around a training: is each refused or said, and is anything lost?

    python apps/hostile.py
    python apps/hostile.py --only report,faults --json verdicts.json

Inputs: files, configurations and arguments that make no sense, to train, convert, export, predict and report. Each must
be refused with exit code 2, or said, in words that name it, once, without a traceback; every file that was there must
stay as it was, and nothing half-written be left.

Faults: of the run's folder, the data and the terminal, before a training or while it is under way. A run that trains to
its end exits with 0; one that does not says why; started again, it must end with the bits of a run that nothing
disturbed. The exit code is 1 if anything of this fails.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from hostile_lab.faults import FAULTS, suffered
from hostile_lab.files import forget_trained
from hostile_lab.inputs import CASES
from hostile_lab.trial import Verdict, table, tried

KINDS = list(dict.fromkeys(case.command for case in CASES)) + ["faults"]


def told(verdict: Verdict) -> Verdict:
    print(f"{verdict.command}: {verdict.name}: {'; '.join(verdict.wrong) or 'ok'}", file=sys.stderr, flush=True)
    return verdict


def inputs(folder: Path, only: list[str]) -> list[Verdict]:
    try:
        return [told(tried(case, folder / f"case-{index}")) for index, case in enumerate(CASES) if case.command in only]
    finally:
        forget_trained()


def faults(folder: Path) -> list[Verdict]:
    verdicts, expected = [], None
    for index, fault in enumerate(FAULTS):
        verdict, bits = suffered(fault, folder / f"fault-{index}", expected if fault.same else None)
        expected = expected or bits
        verdicts.append(told(verdict))
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=KINDS, metavar=",".join(KINDS))
    parser.add_argument("--json", type=Path, help="write every verdict here, with the end of each output")
    options = parser.parse_args()
    if unknown := {*options.only} - {*KINDS}:
        parser.error(f"{', '.join(unknown)}: the kinds are {', '.join(KINDS)}")
    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        verdicts = inputs(Path(name), options.only)
        disturbed = faults(Path(name)) if "faults" in options.only else []
    if options.json:
        options.json.write_text(json.dumps([asdict(verdict) for verdict in verdicts + disturbed], indent=1))
    for title, rows in (("inputs", verdicts), ("faults", disturbed)):
        if rows:
            print(f"{title}: {sum(not row.wrong for row in rows)} of {len(rows)} as they should be\n\n{table(rows)}\n")
    sys.exit(any(verdict.wrong for verdict in verdicts + disturbed))


if __name__ == "__main__":
    main()
