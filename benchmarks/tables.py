"""The tables of docs/benchmarks.md, from the results in benchmarks/results.

    python benchmarks/tables.py                              print the page with its tables made anew
    python benchmarks/tables.py --write docs/benchmarks.md   write it

The text of a section is edited in the page. Below it, between the comments `result: NAME` and `end`, this program puts
the date, the machine, the commit, the command and the tables of benchmarks/results/NAME.json.
"""

import argparse
import json
import re
from pathlib import Path

from records import RESULTS, markdown

PAGE = Path(__file__).parent.parent / "docs/benchmarks.md"
MARKED = re.compile(r"<!-- result: (\S+) -->\n.*?<!-- end -->", re.S)


def section(record: dict) -> str:
    """Where and how a result was measured, and its tables."""
    machine = record["machine"]
    where = [record["date"], machine["cpu"], *([f"{machine['cores']} cores"] if machine.get("cores") else []),
             *([machine["mpi"]] if machine.get("mpi") else []),
             *(f"{name} {version}" for name, version in machine.get("software", {}).items()),
             f"commit {record['commit']}" if record.get("commit") else "commit not recorded"]
    parts = [", ".join(where) + "."]
    if record.get("command"):
        parts.append("\n".join(f"    {line}" for line in record["command"].splitlines()))
    for table in record["tables"]:
        parts += [table["title"]] if table["title"] else []
        parts.append(markdown(table["rows"]))
    return "\n\n".join(parts)


def page(text: str, results: Path = RESULTS) -> str:
    """The text with every marked section made anew. Raises FileNotFoundError for a result that is missing."""
    made = lambda found: (f"<!-- result: {found[1]} -->\n\n" + section(json.loads(
        (results / f"{found[1]}.json").read_text())) + "\n\n<!-- end -->")
    return MARKED.sub(made, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="change this page in place")
    options = parser.parse_args()
    made = page((options.write or PAGE).read_text())
    if options.write:
        options.write.write_text(made)
    else:
        print(made, end="")


if __name__ == "__main__":
    main()
