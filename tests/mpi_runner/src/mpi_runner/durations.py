"""Print where the time of the tests goes, as a page in Markdown.

    python -m mpi_runner.durations RUN.json [RUN.json ...]

Each RUN is a file of `pytest --record-durations RUN.json`.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

SLOWEST = 100


def table(head: list[str], rows: list[list]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def section(run: dict) -> str:
    """Return the section of one run: a row for each folder of tests, and the slowest cases."""
    cases = run["cases"]
    head = [f"`{run['command']}`", *(run[name] for name in ("date", "commit", "machine") if name in run)]
    folders: dict[str, list] = defaultdict(lambda: [0, 0, 0, 0.0])
    for nodeid, case in cases.items():
        values = 1, case["ranks"], case["processes"], case["seconds"]
        for name in (str(Path(nodeid.partition("::")[0]).parent), "all"):
            folders[name] = [total + value for total, value in zip(folders[name], values)]
    by_seconds = sorted(folders.items(), key=lambda folder: -folder[1][3])
    rows = [[name, *figures[:3], f"{figures[3]:.1f}"] for name, figures in by_seconds]
    slowest = sorted(cases.items(), key=lambda entry: -entry[1]["seconds"])[:SLOWEST]
    return (
        f"## {', '.join(head)}: {run['seconds']:.0f} s\n\n"
        "Cases run in parallel, so their seconds add up to more than the seconds of the run.\n\n"
        + table(["folder", "cases", "rank-executions", "processes", "seconds"], rows)
        + f"\nThe {len(slowest)} slowest cases:\n\n"
        + table(["case", "seconds"], [[f"`{nodeid}`", f"{case['seconds']:.2f}"] for nodeid, case in slowest])
    )


def page(runs: list[dict]) -> str:
    return "\n".join(["# Where the time of the tests goes\n", *map(section, runs)])


if __name__ == "__main__":
    print(page([json.loads(Path(path).read_text()) for path in sys.argv[1:]]), end="")
