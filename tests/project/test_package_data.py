"""Files beside the modules, which pyproject.toml must name: what it leaves out is in no wheel."""

import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


def test_every_file_of_the_package_is_installed_with_it():
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    installed = {path for package, patterns in named.items() for pattern in patterns
                 for path in ROOT.joinpath(*package.split(".")).glob(pattern)}
    beside = {path for path in (ROOT / "pmm3d").rglob("*")
              if path.is_file() and path.suffix not in (".py", ".pyc") and "__pycache__" not in path.parts}
    assert ROOT / "pmm3d" / "model" / "machines" / "known" / "nominal.toml" in installed
    assert beside == installed
    assert all((ROOT.joinpath(*package.split(".")) / "__init__.py").exists() for package in named)
