"""Write tests/durations.md: where the time of the tests goes.

    python tests/durations.py RUN.json [RUN.json ...] [--into tests/durations.md]

Each RUN is a file of `pytest --record-durations RUN.json`. It may also be the output of `pytest --durations=0`, which
contains neither processes nor machine.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path

SLOWEST = 100
PHASE = re.compile(r"^\s*([\d.]+)s (?:setup|call|teardown)\s+(\S.*)$", re.MULTILINE)
RANKS = re.compile(r"\[n(\d+)[-\]]")


def read(path: Path) -> dict:
    """A run: its head and its cases."""
    text = path.read_text()
    if text.startswith("{"):
        return json.loads(text)
    cases: dict[str, dict] = {}
    for seconds, nodeid in PHASE.findall(text):
        ranks = RANKS.search(nodeid)
        case = cases.setdefault(nodeid, {"seconds": 0.0, "ranks": int(ranks[1]) if ranks else 0, "processes": 0})
        case["seconds"] += float(seconds)
    took = re.findall(r" in ([\d.]+)s", text)
    return {"command": path.name, "seconds": float(took[-1]) if took else 0.0, "cases": cases}


def table(head: list[str], rows: list[list]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def page(runs: list[dict]) -> str:
    text = "# Where the time of the tests goes\n\nWritten by tests/durations.py (`make durations`). Do not edit.\n"
    for run in runs:
        text += "\n" + section(run)
    return text


def section(run: dict) -> str:
    cases = run["cases"]
    head = [f"`{run['command']}`", *(run[name] for name in ("date", "commit", "machine") if name in run)]
    folders: dict[str, list] = defaultdict(lambda: [0, 0, 0, 0.0])
    for nodeid, case in cases.items():
        values = 1, case["ranks"], case["processes"], case["seconds"]
        for name in (str(Path(nodeid.partition("::")[0]).parent), "all"):
            folders[name] = [total + value for total, value in zip(folders[name], values)]
    rows = [[name, *figures[:3], f"{figures[3]:.1f}"] for name, figures in sorted(folders.items(), key=by_seconds)]
    slowest = sorted(cases.items(), key=lambda entry: -entry[1]["seconds"])[:SLOWEST]
    return (
        f"## {', '.join(head)}: {run['seconds']:.0f} s\n\n"
        "Seconds of cases that ran beside each other add up to more than the seconds of the run.\n\n"
        + table(["folder", "cases", "rank-executions", "processes", "seconds"], rows)
        + f"\nThe {len(slowest)} slowest cases:\n\n"
        + table(["case", "seconds"], [[f"`{nodeid}`", f"{case['seconds']:.2f}"] for nodeid, case in slowest])
    )


def by_seconds(entry: tuple[str, list]) -> float:
    return -entry[1][3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--into", type=Path, default=Path(__file__).with_suffix(".md"), help="default: %(default)s")
    arguments = parser.parse_args()
    arguments.into.write_text(page([read(path) for path in arguments.runs]))


if __name__ == "__main__":
    main()
