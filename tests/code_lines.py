"""Size of each room: `make lines`. Code lines are lines without docstrings, comments and blank lines."""

import ast
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

WITHOUT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
SUBROOMS = "pmm3d/nn"


def is_text(node: ast.AST) -> bool:
    """True for docstrings, and for texts below constants that document them."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def size_of(path: Path) -> tuple[int, int]:
    """(code lines, statements). Unlike lines, statements do not depend on the format."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    texts = {line for node in nodes if is_text(node) for line in range(node.lineno, node.end_lineno + 1)}
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in WITHOUT_CODE]
    lines = {line for token in tokens[1:] for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - texts), sum(isinstance(node, ast.stmt) and not is_text(node) for node in nodes)


def room_of(path: Path) -> str:
    parts = path.parent.parts
    return "/".join(parts[: 3 if "/".join(parts[:2]) == SUBROOMS else 2])


def main() -> None:
    lines, statements = Counter(), Counter()
    tracked = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True).stdout.split("\n")
    for path in map(Path, filter(None, tracked)):
        if path.exists():
            size = size_of(path)
            for name in {path.parts[0], room_of(path)} - {"."}:
                lines[name] += size[0]
                statements[name] += size[1]
    print(f"{'code lines':>10} {'statements':>10}")
    for name in sorted(lines):
        print(f"{lines[name]:10,} {statements[name]:10,} {name}")


if __name__ == "__main__":
    main()
