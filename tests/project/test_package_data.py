"""Files beside the modules, which pyproject.toml must name: what it leaves out is in no wheel."""

import subprocess
import sys
import venv
import zipfile
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
    assert ROOT / "pmm3d" / "model" / "machines" / "assumed" / "nominal.toml" in installed
    assert beside == installed
    assert all((ROOT.joinpath(*package.split(".")) / "__init__.py").exists() for package in named)


def test_type_checkers_see_an_editable_install(tmp_path):
    """As `make setup` makes one. mypy and editors follow paths, not import hooks."""
    source, environment = tmp_path / "source", tmp_path / "environment"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "pmm3d"):
        (source / name).symlink_to(ROOT / name)
    subprocess.run([sys.executable, "-c", "from setuptools import build_meta; build_meta.build_editable('..')"],
                   cwd=source, capture_output=True, text=True, check=True)
    venv.create(environment, symlinks=True)
    [wheel], [packages] = tmp_path.glob("*.whl"), environment.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    program = tmp_path / "user.py"
    program.write_text("from pmm3d.layout import Layout\nreveal_type(Layout.A)\n")
    done = subprocess.run([sys.executable, "-m", "mypy", "--python-executable", environment / "bin" / "python",
                           "--cache-dir", tmp_path / "cache", program], cwd=tmp_path, capture_output=True, text=True)
    assert 'Revealed type is "pmm3d.layout.layout.Layout"' in done.stdout and not done.returncode, done.stdout
