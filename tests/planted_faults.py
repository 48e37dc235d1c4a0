"""Insert faults into a copy of the package, one at a time, and print which test finds each.

    python tests/planted_faults.py                      all faults of planted_faults.toml, with the tests of `make test`
    python tests/planted_faults.py --list               their names
    python tests/planted_faults.py --only comm --all    the faults whose name contains "comm", with every grid
    python tests/planted_faults.py --unplanted          run the named tests without faults first; stop if one fails
    python tests/planted_faults.py --draw 20 --seed 48  print faults at random places, for planted_faults.toml

Each fault names tests. They run until the first failure. A fault that they do not find is tried with the tests of its
room. If those do not find it either, it counts as missed. The exit status is 1 if a fault was missed. The repository
is not changed. A drawn fault changes a comparison, an operator, a condition or a number; some change nothing that
matters.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import subprocess
import sys
import tempfile
import textwrap
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

from pmm3d.tools import launcher

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 1800.0
"""Seconds that the tests of one fault may take. A fault that makes them hang is found."""
USAGE_ERROR = 4
"""Exit status of pytest if a named test does not exist, an option is invalid, or a conftest cannot be imported."""
NO_TESTS = 5
"""Exit status of pytest if it collects no test."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="only faults whose name contains the text")
    parser.add_argument("--all", action="store_true", help="with every grid and the tests marked thorough")
    parser.add_argument("--unplanted", action="store_true", help="run the named tests without faults first")
    parser.add_argument("--list", action="store_true", help="print the names of the faults")
    parser.add_argument("--draw", type=int, metavar="N", help="print N faults at random places")
    parser.add_argument("--seed", type=int, default=0, help="of --draw (0)")
    options = parser.parse_args()
    if options.draw:
        for path, node, new in random.Random(options.seed).sample(list(possible()), options.draw):
            lines = path.read_text().split("\n")[node.lineno - 1 : node.end_lineno]
            changed = lines[0][: node.col_offset] + ast.unparse(new) + lines[-1][node.end_col_offset :]
            print(f'[[fault]]\nname = ""\nfile = "{path.relative_to(ROOT)}"  # line {node.lineno}')
            print("old = '''" + "\n".join(lines).strip() + "'''\nnew = '''" + changed.strip() + "'''\ntests = []\n")
        return 0
    table = tomllib.loads((ROOT / "tests" / "planted_faults.toml").read_text())["fault"]
    faults = [fault for fault in table if options.only in fault["name"]]
    if options.list:
        print(*(fault["name"] for fault in faults), sep="\n")
        return 0
    missed, everywhere = [], ["--all"] if options.all else []
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        tree = copy(Path(folder))
        if options.unplanted and faults:
            by = first_failure(tree, [*dict.fromkeys(test for fault in faults for test in fault["tests"]), *everywhere])
            if by:
                print(f"Without a fault: {by}")
                return 1
        for number, fault in enumerate(faults, 1):
            begun = time.monotonic()
            by = planted(tree, fault, everywhere)
            missed += [] if by else [fault["name"]]
            print(
                f"{number:3} of {len(faults)}  {time.monotonic() - begun:5.0f} s  {fault['name']}\n"
                f"           {by or 'MISSED'}",
                flush=True,
            )
    print(f"{len(faults) - len(missed)} of {len(faults)} faults were found.")
    return bool(missed)


OTHER = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
"""Operator -> the one that replaces it."""


def possible() -> Iterator[tuple[Path, ast.expr, ast.expr]]:
    """All faults that can be drawn: (module, expression, what replaces it). None is in a message or an annotation."""
    for path in sorted((ROOT / "pmm3d").rglob("*.py")):
        stack: list[ast.AST] = [ast.parse(path.read_text())]
        while stack:
            node = stack.pop()
            if isinstance(node, (ast.Raise, ast.JoinedStr, ast.arguments)):
                continue
            stack += [
                part for name, part in ast.iter_fields(node) if isinstance(part, ast.AST) and name != "annotation"
            ]
            stack += [
                each
                for _, part in ast.iter_fields(node)
                if isinstance(part, list)
                for each in part
                if isinstance(each, ast.AST)
            ]
            if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
                yield path, node, ast.Compare(node.left, [OTHER[type(node.ops[0])](), *node.ops[1:]], node.comparators)
            elif isinstance(node, ast.BinOp) and type(node.op) in OTHER:
                yield path, node, ast.BinOp(node.left, OTHER[type(node.op)](), node.right)
            elif isinstance(node, ast.BoolOp):
                yield path, node, ast.BoolOp(OTHER[type(node.op)](), node.values)
            elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
                yield path, node, node.operand
            elif isinstance(node, ast.Constant) and type(node.value) is int:
                yield path, node, ast.Constant(node.value + 1)


def copy(folder: Path) -> Path:
    """Copy the files of the working tree that git tracks or does not ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


def planted(tree: Path, fault: dict, options: list[str]) -> str:
    """The first test that fails with the fault; "" if no test fails."""
    path = tree / fault["file"]
    right, named = path.read_text(), fault["tests"]
    places = places_of(fault["old"], right)
    if len(places) != 1:
        raise SystemExit(f"{fault['name']}: {fault['file']} has its text {len(places)} times, not once")
    room = f"tests/{Path(fault['file']).parts[1]}"
    write(path, replaced(right, places[0], fault["new"]))
    try:
        for tests in (named, [room] if (tree / room).is_dir() and room not in named else []):
            if tests and (by := first_failure(tree, [*tests, *options])):
                return by
        return ""
    finally:
        write(path, right)


def essential(text: str) -> tuple[str, list[int]]:
    """The characters that a formatter keeps, and their positions: without whitespace, and commas before a bracket."""
    at = [index for index, char in enumerate(text) if not char.isspace()]
    ends = zip(at, at[1:] + [-1])
    kept = [index for index, following in ends if text[index] != "," or following < 0 or text[following] not in ")]}"]
    return "".join(text[index] for index in kept).replace("'", '"'), kept


def places_of(old: str, text: str) -> list[tuple[int, int]]:
    """Each place (begin, end) of the text that a formatter may have made of `old`."""
    (wanted, _), (searched, kept) = essential(old), essential(text)
    found = [match.start() for match in re.finditer(f"(?={re.escape(wanted)})", searched)]
    return [(kept[begin], kept[begin + len(wanted) - 1] + 1) for begin in found]


def replaced(text: str, place: tuple[int, int], new: str) -> str:
    """The text with `new` at the place, as deeply indented as the line of the place."""
    begin, end = place
    line = text[text.rfind("\n", 0, begin) + 1 :]
    indent = line[: len(line) - len(line.lstrip())]
    return text[:begin] + textwrap.indent(textwrap.dedent(new), indent).strip() + text[end:]


def write(path: Path, text: str) -> None:
    """Write a module with another modification time, so that Python does not use its old bytecode."""
    later = max(time.time(), path.stat().st_mtime + 2)
    path.write_text(text)
    os.utime(path, (later, later))


def first_failure(tree: Path, arguments: list[str]) -> str:
    """The first test that fails, or another reason why pytest ended; "" if all tests pass or none was collected."""
    environ = os.environ | {"PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", *arguments]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(command, cwd=tree, env=environ, stdout=output, stderr=subprocess.STDOUT)
        try:
            status = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            launcher.end_job(process)  # also ends the ranks, which have separate process groups
            return f"no end within {LIMIT:g} s"
        output.seek(0)
        text = output.read()
    named = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.M)
    if named:
        return named[0]
    if status == 0:
        return ""
    print(text, file=sys.stderr)
    if status == NO_TESTS:
        return ""
    if status == USAGE_ERROR and "while loading conftest" not in text:  # a fault can make a conftest fail
        raise SystemExit(text)
    return f"pytest ended with {status} and no test that failed"


if __name__ == "__main__":
    sys.exit(main())
