"""What the library says when something is wrong, read from its source, and what of it docs/troubleshooting/ leaves out.

    python tests/library_messages.py            the messages that stand on no page, ready to be pasted there
    python tests/library_messages.py --all      every message

A message is the text of an error (a Pmm3dError of any kind, typer.BadParameter, an argument parser's, SystemExit), a
text that begins with "pmm3d: ", one that is handed to `warn` and the like, or a line of a diagnosis (hang.py). It is
quoted with ... for what is filled in. What `pmm3d doctor` finds is left out: it says the remedy itself. On a page, line
ends and spaces do not count.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "troubleshooting"
ERRORS = ("BadParameter", "SystemExit", "ArgumentTypeError", "kind")
SPEAKERS = ("_say", "warn", "_warn", "warning", "error")
OURS = ("pmm3d: ", "pmm3d.launcher: ")
REPORTS = ("hang.py",)
WORDS = 5
FILLED = "..."


class Message(NamedTuple):
    path: str
    line: int
    text: str


def messages(folder: Path = ROOT / "pmm3d") -> list[Message]:
    """Every message in the Python files of a folder, each text once."""
    found: dict[str, Message] = {}
    for path in sorted(folder.rglob("*.py")):
        for line, text in _said(ast.parse(path.read_text()), path.name in REPORTS):
            found.setdefault(text, Message(str(path.relative_to(folder.parent)), line, text))
    return list(found.values())


def unexplained(folder: Path = ROOT / "pmm3d", pages: Path = PAGES) -> list[Message]:
    """The messages that stand on no page."""
    explained = " ".join(_one_line(page.read_text()) for page in sorted(pages.glob("*.md")))
    return [message for message in messages(folder) if f"`{message.text}`" not in explained]


def quoted(text: ast.AST) -> str:
    """An expression that makes a text, with ... for what is filled in."""
    return re.sub(r"(\.\.\.)+", FILLED, _one_line(_flat(text)))


def _flat(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_flat, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _flat(node.left) + _flat(node.right)
    return FILLED


def _said(tree: ast.Module, is_report: bool):
    """(line, message) of each error made and each text for people; in a diagnosis, of each text of some words."""
    wholes = (ast.JoinedStr, ast.BinOp, ast.Expr)  # what is in a text is no text, and a docstring is none either
    within = {id(part) for node in ast.walk(tree) if isinstance(node, wholes) for part in ast.iter_child_nodes(node)}
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.Module))]
    for function in reversed(functions):  # inner ones first, where a name means what it was given there
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and len(node.args) > _position(node) and _speaks(node):
                texts = map(quoted, _given(node.args[_position(node)], function))
            elif isinstance(node, ast.expr) and id(node) not in within and (
                _flat(node).startswith(OURS) or is_report and len(_flat(node).split()) >= WORDS
            ):
                texts = [quoted(node)]
            else:
                continue
            yield from ((node.lineno, text) for text in texts if re.search(r"[a-z]{3}", text.replace("pmm3d", "")))


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _position(call: ast.Call) -> int:
    """Of the text among the arguments."""
    return 2 if _name(call) == "agree" else 0


def _speaks(call: ast.Call) -> bool:
    name = _name(call)
    if name in SPEAKERS:
        return len(call.args) == 1  # with two it is a finding of `pmm3d doctor`, which brings its remedy along
    if name == "agree":
        return len(call.args) == 4  # of pmm3d.comm.agreement; others of that name have no text
    return name in ERRORS or name.endswith("Error") and not hasattr(builtins, name)


def _given(text: ast.AST, function: ast.AST):
    """The expression, or, of a variable, all that the function assigns to it."""
    if not isinstance(text, ast.Name):
        return [text]
    assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
    return [node.value for node in assigned if any(getattr(target, "id", "") == text.id for target in node.targets)]


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    every = "--all" in sys.argv[1:]
    for message in messages() if every else unexplained():
        print(f"- `{message.text}`\n  {message.path}:{message.line}")
    sys.exit(bool(not every and unexplained()))
