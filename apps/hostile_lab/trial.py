"""One hostile thing, done to a command in a folder of its own: what it must say, how it must end, what must be left."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from measuring import markdown

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0
"""Seconds after which a command that is still there counts as a silent hang."""
REFUSED, FINISHED, NOT_FINISHED = 2, 0, 75
LEFTOVER = re.compile(r"\.(partial|writing|tmp)$|^(writing|removing)-")
"""Names under which files are written before they are whole."""
OF_THE_SYSTEM = "/proc", "/sys", "/etc"


@dataclass(frozen=True)
class Case:
    """command, name   which command, and what is hostile, for the table
    prepare   makes what is needed in an empty folder, the working folder; returns the arguments of pmm3d
    says      regular expression, some of the output: the cause, and where there is one the remedy
    code      the exit code that is right;   ranks: 0 for a command without mpiexec
    """

    command: str
    name: str
    prepare: Callable[[Path], Sequence[str | Path]]
    says: str
    code: int = REFUSED
    ranks: int = 0
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Verdict:
    command: str
    name: str
    code: int | None
    wrong: list[str] = field(default_factory=list)
    output: str = ""


Ended = tuple[int | None, str]
"""Exit code (None: it hung) and output."""


def run(arguments: Sequence[str | Path], folder: Path, ranks: int, environ: Mapping[str, str]) -> Ended:
    """A pmm3d command in a folder, on so many ranks."""
    launcher = ["-m", "pmm3d.launcher", "-n", str(ranks)] if ranks else []
    path = os.pathsep.join(filter(None, (environ.get("PYTHONPATH"), str(ROOT))))
    try:
        done = subprocess.run([sys.executable, *launcher, "-m", "pmm3d", *map(str, arguments)], cwd=folder,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              timeout=PATIENCE, env=os.environ | dict(environ) | {"PYTHONPATH": path})
    except subprocess.TimeoutExpired as error:
        return None, (error.output or b"").decode(errors="replace")
    return done.returncode, done.stdout.decode(errors="replace")


def tried(case: Case, folder: Path) -> Verdict:
    """Do it, and see whether it was refused, or said, as it should, and nothing was lost."""
    folder.mkdir()
    arguments = case.prepare(folder)
    before = dict(contents(folder))
    code, output = run(arguments, folder, case.ranks, case.environ)
    verdict = Verdict(case.command, case.name, code, output=output[-3000:])
    if code is None:
        verdict.wrong.append("a silent hang")
    elif code != case.code:
        verdict.wrong.append(f"exit code {code} in place of {case.code}")
    verdict.wrong += said_wrongly(output, case.says)
    verdict.wrong += lost(folder, before)
    return verdict


def said_wrongly(output: str, says: str) -> list[str]:
    """What is wrong with what was said."""
    wrong = ["a bare traceback"] if "Traceback (most recent call last)" in output else []
    if not re.search(says, " ".join(output.split()), re.I):
        wrong.append(f"does not say {says!r}")
    lines = [line for line in output.splitlines() if line.startswith("pmm3d: ")]
    return wrong + (["says it more than once"] if len(lines) != len(set(lines)) else [])


def lost(folder: Path, before: Mapping[str, str]) -> list[str]:
    """What has changed or gone of the files that were there, and what is left half-written."""
    after = dict(contents(folder))
    changed = [name for name, known in before.items() if after.get(name) != known and not name.startswith("runs/")]
    leftovers = [name for name in after if LEFTOVER.search(Path(name).name)]
    return [f"changed or lost {name}" for name in changed] + [f"left {name}" for name in leftovers]


def contents(folder: Path) -> Iterator[tuple[str, str]]:
    """(path, what is there) of all that is in a folder; links as what they say."""
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            yield name, f"link to {os.readlink(path)}"
        elif path.is_file():
            yield name, hashlib.blake2b(path.read_bytes()).hexdigest()


def table(verdicts: Sequence[Verdict]) -> str:
    """In Markdown, a row each."""
    rows = [["command", "what is hostile", "exit", "verdict"]]
    rows += [[one.command, one.name, "hangs" if one.code is None else str(one.code), "; ".join(one.wrong) or "ok"]
             for one in verdicts]
    return markdown(rows)
