"""Make the pictures of docs/gallery.md by the commands that the page shows under them.

    python docs/gallery.py                  all pictures; minutes
    python docs/gallery.py 1f1b.svg         only these

The commands run in a temporary folder that links to apps/, benchmarks/ and docs/.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PICTURE = re.compile(r"^!\[[^]]*\]\((?P<file>[\w/.-]+)\)\n\n(?P<commands>(?:    .*\n)+)", re.M)
LARGEST = 60_000
"""Bytes of a picture."""


def pictures() -> dict[str, list[str]]:
    """Path of each picture in docs/ -> its commands."""
    return {
        found["file"]: [line.strip() for line in found["commands"].splitlines()]
        for found in PICTURE.finditer((DOCS / "gallery.md").read_text())
    }


def make(picture: str, commands: list[str]) -> None:
    """Run the commands and store the picture that they make. Raises SystemExit if it is too large."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    target = DOCS / picture
    with tempfile.TemporaryDirectory() as folder:
        for name in ("apps", "benchmarks", "docs"):
            Path(folder, name).symlink_to(DOCS.parent / name)
        for command in commands:
            subprocess.run(command, shell=True, cwd=folder, env=environment, check=True)
        for made in Path(folder).rglob(target.name):
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(made, target)
    if target.stat().st_size > LARGEST:
        raise SystemExit(f"{target} has {target.stat().st_size:,} bytes; at most {LARGEST:,} are stored")
    print(f"wrote {target}")


if __name__ == "__main__":
    for path, lines in pictures().items():
        if len(sys.argv) < 2 or Path(path).name in sys.argv[1:]:
            make(path, lines)
