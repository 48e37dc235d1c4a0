"""Results as JSON: tables with the machine, the commit, the date and the command that printed them."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from timing import ProgramError, output_of

from pmm3d.model.environment import task_rank, tasks_in_environment
from pmm3d.tools import launcher

RESULTS = Path(__file__).parent / "results"
Rows = Sequence[Sequence[str]]


def markdown(rows: Rows) -> str:
    """A table; its first row is the heading."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


class Parser(argparse.ArgumentParser):
    """Prints on rank 0 only. Checks --json and --add before the measurement."""

    def parse_args(self, *words: Any) -> Any:  # type: ignore[override]
        options = super().parse_args(*words)
        if options.add and not options.json:
            self.error("--add needs --json FILE")
        if options.json:
            options.json = options.json.absolute()
            if not options.json.parent.is_dir():
                self.error(f"--json {options.json}: there is no folder {options.json.parent}. Make it first")
            if options.add and not options.json.is_file():
                self.error(f"--add: there is no {options.json}. Leave --add out in the first run")
            if options.add and (known := json.loads(options.json.read_text())["commit"]) != (here := commit()):
                self.error(
                    f"--add: {options.json} is of commit {known or 'unknown'}, and this is {here}. To replace "
                    "the file, leave --add out"
                )
        return options

    def refuse(self, options: argparse.Namespace, names: str, case: str) -> None:
        """End with an error if one of the options, such as "--size --dtype", is not its default. case: the part of the
        program that does not use them."""
        for name in names.split():
            key = name[2:].replace("-", "_")
            if getattr(options, key) != self.get_default(key):
                self.error(f"{name} has no effect on {case}. Leave it out")

    def _print_message(self, message: str, file: Any = None) -> None:
        if not task_rank(os.environ):
            super()._print_message(message, file)


def parser(text: str) -> Parser:
    """A parser with the options that all benchmarks have."""
    made = Parser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    made.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the tables to FILE; the pages show the files in benchmarks/results",
    )
    made.add_argument(
        "--add",
        action="store_true",
        help="add the tables to the file; a table with the same title and heading gets more rows",
    )
    made.add_argument("--quick", action="store_true", help="smallest sizes, only to test the benchmark")
    return made


def report(options: argparse.Namespace, *tables: tuple[str, Rows]) -> None:
    """Print (title, rows) of each table and, with --json, write them. Call it on one rank."""
    for title, rows in tables:
        print(f"\n{title}\n\n{markdown(rows)}", flush=True)
    if options.json:
        record = {
            "machine": machine(),
            "date": date.today().isoformat(),
            "commit": commit(),
            "command": command(),
            "tables": [{"title": title, "rows": [*rows]} for title, rows in tables],
        }
        if options.add:
            record = added(json.loads(options.json.read_text()), record)
        options.json.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def added(before: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """The record of an earlier run with the command and the tables of another one. Rows are added to the table with the
    same title and heading."""
    for table in record["tables"]:
        same = [old for old in before["tables"] if (old["title"], old["rows"][0]) == (table["title"], table["rows"][0])]
        if same:
            same[0]["rows"] += table["rows"][1:]
        else:
            before["tables"].append(table)
    return before | {"command": f"{before['command']}\n{record['command']}"}


def command() -> str:
    """The command line with its launcher, without --json and --add."""
    words = re.sub(r"\0--(add|json(=|\0)[^\0]*)(?=\0|$)", "", "\0".join(sys.argv)).split("\0")
    tasks = tasks_in_environment(os.environ)
    if not tasks:
        return shlex.join(["python", *words])
    ranks, variable = tasks
    return shlex.join(
        ["srun", "-n", str(ranks), "python", *words]
        if variable.startswith("SLURM")
        else ["python", "-m", "pmm3d.launcher", "-n", str(ranks), *words]
    )


def machine() -> dict[str, Any]:
    """CPU, cores of this node that the job may use, MPI, and software."""
    import mpi4py

    mpi4py.rc.initialize = False
    from pmm3d.comm.nodes import mpi_name
    from pmm3d.model.machine import cpu, usable_cores

    return {"cpu": cpu().name, "cores": usable_cores(), "mpi": mpi_name(), "software": software()}


def software() -> dict[str, str]:
    """Versions of numpy and torch, and the BLAS with its kernel: of this rank, or else of a `pmm3d` command."""
    found = {}
    for name in ("numpy", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    with suppress(ImportError, ProgramError):
        on_rank = tasks_in_environment(os.environ)
        program = (
            "from pmm3d.model.machine import set_blas_environment; set_blas_environment(); import sys; "
            f"sys.path.append({str(RESULTS.parent)!r}); import records; print(records.blas())"
        )
        found["BLAS"] = (
            blas() if on_rank else output_of([sys.executable, "-c", program], launcher.environment(1)).strip()
        )
    return found


def blas() -> str:
    """Name, version and kernel of the BLAS that multiplies numpy arrays in this process."""
    from pmm3d.arrays import NumpyLibrary
    from pmm3d.model.machine import blas_of

    found = blas_of(NumpyLibrary())
    return " ".join(filter(None, (found.name, found.version, found.kernel)))


def commit() -> str:
    """Commit of this folder; "-dirty" if files were changed, other than results and the pages that show them."""
    git = lambda *words: subprocess.run(["git", *words], cwd=RESULTS.parent, text=True, capture_output=True)
    name = git("rev-parse", "--short", "HEAD").stdout.strip()
    pages = (f":(top,exclude){page}" for page in ("README.md", "docs/benchmarks.md", "docs/embedding.md"))
    changed = git("diff", "--quiet", "HEAD", "--", ":/", ":(exclude)results", *pages)
    return name + "-dirty" * bool(changed.returncode) if name else "unknown"
