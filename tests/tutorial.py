"""Execution of a tutorial or how-to: its files are saved, its commands run, and their output compared with the page."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
STEP = re.compile(r"^```(\w+)\n(.*?)^```$|((?:^    +\S[^\n]*\n)+)", re.M | re.S)
SET_UP = ("module ", "python3 -m venv", "pip install", "make embed")
"""Commands that install. A test runs in an installed environment."""


class Step(NamedTuple):
    """A step of a page: a file with its name and text, a command, or the output of the previous commands."""

    kind: str
    text: str
    name: str = ""


def steps(page: str, section: str = "") -> list[Step]:
    """The steps of a page of docs/, such as "tutorials/table", or of one of its sections.

    A block of code is a file, whose name is in the text before it.
    """
    whole = (DOCS / f"{page}.md").read_text()
    if section:
        [whole] = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", whole, re.M | re.S)
    found, end = [], 0
    for match in STEP.finditer(whole):
        language, block, commands = match.groups()
        if commands:
            lines = [line.strip() for line in re.sub(r"\\\n\s*", "", commands).splitlines()]
            found += [Step("command", line) for line in lines if not line.startswith(SET_UP)]
        elif language == "text":
            found.append(Step("output", block))
        else:
            found.append(Step("file", block, re.findall(r"`([\w./]+\.\w+)`", whole[end : match.start()])[-1]))
        end = match.end()
    return found


def follow(page: list[Step], folder: Path, run: Callable[[str], str], exact: bool = False) -> None:
    """Save each file and run each command. Assert that the commands print each line of the output on the page.

    Without `exact`, only the beginnings of lines are compared, up to the first digit, the first two spaces or "...".
    """
    printed, last = "", ""
    for step in page:
        if step.kind == "file":
            (folder / step.name).write_text(step.text)
        elif step.kind == "command":
            printed = run(step.text) if last != "command" else printed + run(step.text)
        elif exact:
            assert printed == step.text
        else:
            got = [_label(line) for line in printed.splitlines()]
            missing = [line for line in step.text.splitlines() if not any(has.startswith(_label(line)) for has in got)]
            assert not missing, f"{missing} is not in:\n{printed}"
        last = step.kind


def _label(line: str) -> str:
    """The beginning of a line, without the verdict of `pmm3d doctor`, the name of a CPU, and "no core", which a quiet
    machine does not print. "" for continuation lines, and for the rule of a table, whose width depends on figures."""
    if line.startswith("    ") or set(line) <= set(" ─"):
        return ""
    same = re.sub(r"^(ok|note|warning|failure) +|^.*(?=, \d+ ranks? a node)", "", line.strip())
    return re.split(r"\d|\s{2,}|\.\.\.|, no core", same)[0].strip()


SHORTER = {"12000": "360", "10000": "300", "1000": "60"}
"""Numbers of steps in the tutorial on Slurm -> numbers in its tests."""


def quick(page: list[Step]) -> list[Step]:
    """The page, with fewer points of each measurement of a machine."""
    return [step._replace(text=re.sub(r"(tune machine)", r"\1 --budget 0.01", step.text)) for step in page]


def follow_under_slurm(folder: Path, jobs: Any) -> None:
    """Follow the tutorial on Slurm with a shorter training.

    jobs   an object with submit(nodes, tasks), which returns the number of the job; stop(), after which the job is
           requeued; wait() for its end; and run(command)
    """
    for name in ("apps", "jobs"):
        (folder / name).symlink_to(ROOT / name)
    page, shown, job = [], 0, "1"
    for step in steps("tutorials/slurm"):
        text = step.text
        for long, short in SHORTER.items() if step.kind != "output" else ():
            text = text.replace(long, short)
        page.append(step._replace(text=text))

    def run(command: str) -> str:
        nonlocal shown, job
        command = command.replace("JOB", job)
        if found := re.match(r"sbatch --nodes=(\d) --ntasks-per-node=(\d) jobs/train.sbatch digits.toml$", command):
            job = jobs.submit(*map(int, found.groups()))
            return f"Submitted batch job {job}\n"
        if command == f"scancel --batch --signal=USR1 {job}":
            jobs.stop()
            return ""
        if command == f"cat pmm3d-train-{job}.out":
            shown += 1
            if shown == 1:  # the reader sees the first lines, later the whole output
                until(lambda: "wrote" in read(folder / f"pmm3d-train-{job}.out"))
            elif shown > 2:
                jobs.wait()
        return jobs.run(command)

    follow(page, folder, run)
    assert shown == 4 and (folder / "predicted.csv").exists()


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def until(true: Callable[[], bool], seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)
