"""Results as JSON: tables with the machine, the commit, the date and the command that printed them."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from pmm3d.model.environment import task_rank

RESULTS = Path(__file__).parent / "results"
Rows = Sequence[Sequence[str]]


def markdown(rows: Rows) -> str:
    """A table; its first row is the heading."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


class Parser(argparse.ArgumentParser):
    """Prints on rank 0 only."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if not task_rank(os.environ):
            super()._print_message(message, file)


def parser(text: str) -> Parser:
    """A parser with the options that all benchmarks have."""
    made = Parser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="FILE",
                      help="write the tables here; docs/benchmarks.md shows those in benchmarks/results")
    made.add_argument("--quick", action="store_true", help="smallest sizes: whether the benchmark works, no figures")
    return made


def report(options: argparse.Namespace, *tables: tuple[str, Rows]) -> None:
    """Print (title, rows) of each table and, with --json, write them. Call it on one rank."""
    for title, rows in tables:
        print(f"\n{title}\n\n{markdown(rows)}", flush=True)
    if options.json:
        record = {"machine": machine(), "date": date.today().isoformat(), "commit": commit(),
                  "command": shlex.join(["python", *sys.argv]),
                  "tables": [{"title": title, "rows": rows} for title, rows in tables]}
        options.json.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def machine() -> dict[str, Any]:
    """CPU, cores of this process, and MPI."""
    import mpi4py

    mpi4py.rc.initialize = False
    from pmm3d.comm.hosts import mpi_name
    from pmm3d.model.machine import cpu

    return {"cpu": cpu().name, "cores": len(os.sched_getaffinity(0)), "mpi": mpi_name()}


def commit() -> str:
    """Of the files of this folder; "-dirty" if they are changed."""
    done = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=RESULTS.parent, text=True,
                          capture_output=True)
    return done.stdout.strip() or "unknown"
