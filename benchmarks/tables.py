"""The tables of the pages, from the results in benchmarks/results.

    python benchmarks/tables.py            print all tables of all results, as docs/results.md shows them on the site
    python benchmarks/tables.py --write    replace the tables in README.md and in pages of docs

A page contains its text, and a pair of comments for each result. Between them, this program writes the date, the
machine, the commit, the command and the tables of benchmarks/results/NAME.json:

    <!-- result: NAME tables=1 rows=1,3-5 columns=1-4 brief -->
    <!-- end -->

tables, rows, columns    those with these numbers, from 1; by default all
brief                    no command, no versions and no titles
ratios                   the first figure of each cell
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

from records import RESULTS, markdown

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "docs/benchmarks.md", "docs/embedding.md")]
MARKED = re.compile(r"<!-- result: (\S+)((?: \S+)*) -->\n.*?<!-- end -->", re.S)
GOAL = re.compile(r"goal [\d.]+, ")
"""What a measurement had to reach: the results keep it, and no page shows it."""
WORD = re.compile(r"(tables|rows|columns)=[\d,-]+|brief|ratios")
RATIO = re.compile(r"\*{0,2}(\d+\.\d+)\b.*")


def section(record: dict, words: list[str]) -> str:
    """Date, machine and command of a result, and its tables. words: of the comment, which select them."""
    if unknown := [word for word in words if not WORD.fullmatch(word)]:
        raise ValueError(f"unknown: {' '.join(unknown)}. A result has tables=, rows=, columns=, brief and ratios")
    chosen = dict(word.split("=") for word in words if "=" in word)
    pick = lambda what, found: [found[number - 1] for number in numbers(chosen[what])] if what in chosen else found
    machine = record["machine"]
    where = [
        record["date"],
        machine["cpu"],
        *([f"{machine['cores']} cores"] if machine.get("cores") else []),
        *([machine["mpi"]] if machine.get("mpi") else []),
        *([] if "brief" in words else versions(record)),
    ]
    commands = ", ".join(f"`{line.strip()}`" for line in record["command"].replace("\\\n", "").splitlines())
    parts = [", ".join(where) + ("." if "brief" in words else f": {re.sub(' +', ' ', commands)}")]
    for table in pick("tables", record["tables"]):
        head, *body = table["rows"]
        rows = [[GOAL.sub("", cell) for cell in pick("columns", row)] for row in (head, *pick("rows", body))]
        if "ratios" in words:
            rows = [[RATIO.sub(r"\1", cell) for cell in row] for row in rows]
        parts += [table["title"]] if table["title"] and "brief" not in words else []
        parts.append(markdown(rows))
    return "\n\n".join(parts)


def versions(record: dict) -> list[str]:
    """Versions of the packages, and the commit."""
    found = [f"{name} {version}" for name, version in record["machine"].get("software", {}).items()]
    return [*found, f"commit {record['commit']}" if record.get("commit") else "commit not recorded"]


def numbers(text: str) -> list[int]:
    """1, 3, 4, 5 from "1,3-5"."""
    ends = (part.partition("-") for part in text.split(","))
    return [number for low, _, high in ends for number in range(int(low), int(high or low) + 1)]


def page(text: str, results: Path = RESULTS) -> str:
    """The text with new tables. Raises FileNotFoundError if a result is missing, ValueError for an unknown word."""
    made = lambda found: (
        f"<!-- result: {found[1]}{found[2]} -->\n"
        + section(json.loads((results / f"{found[1]}.json").read_text()), found[2].split())
        + "\n\n<!-- end -->"
    )
    return MARKED.sub(made, text)


def all_sections() -> Iterator[tuple[str, str]]:
    """Name and text of every result."""
    for path in sorted(RESULTS.glob("*.json")):
        yield path.stem, section(json.loads(path.read_text()), [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the tables in the pages")
    if parser.parse_args().write:
        for path in PAGES:
            path.write_text(page(path.read_text()))
    else:
        print("\n\n".join(f"## {name}\n\n{text}" for name, text in all_sections()))


if __name__ == "__main__":
    main()
