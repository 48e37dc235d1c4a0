"""The sdist and the wheel, built from the tracked files: their contents, and an installation into an empty
environment."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from pmm3d.tools import launcher

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = f"pmm3d-{PROJECT['version']}"
ENVIRON = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}

ABOUT = "METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"
BESIDE = {
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "Makefile",
    "constraints.txt",
    "README.md",
    "LICENSE",
    "CHANGES.md",
    "CITATION.cff",
}
BUILD = """
import sys
from setuptools import build_meta
getattr(build_meta, "build_" + sys.argv[1])(sys.argv[2])
"""
PRODUCT = """
import numpy as np
from mpi4py import MPI
import pmm3d
from pmm3d.model.machines import assumed_machines
with pmm3d.Grid(MPI.COMM_WORLD) as grid:
    a = pmm3d.DistMatrix.random(grid, (30, 20), seed=1, distribution="integers")
    b = pmm3d.DistMatrix.random(grid, (20, 10), seed=2, distribution="integers", layout=pmm3d.Layout.B)
    whole_a, whole_b = a.gather(), b.gather()
    right = np.array_equal((a @ b).gather(), whole_a @ whole_b)
    print(right, MPI.COMM_WORLD.size, "nominal" in assumed_machines(), pmm3d.__file__)
"""


def run(*words, cwd, environ=ENVIRON):
    done = subprocess.run(list(map(str, words)), cwd=cwd, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(a folder like a fresh clone, its sdist, the wheel built from the sdist)."""
    folder = tmp_path_factory.mktemp("built")
    tracked = run("git", "ls-files", "-z", cwd=ROOT).rstrip("\0").split("\0")
    clone = folder / "clone"
    for name in tracked:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, clone / name)
    run(sys.executable, "-c", BUILD, "sdist", folder, cwd=clone)
    run("tar", "xzf", f"{NAME}.tar.gz", cwd=folder)
    sources = {
        str(path.relative_to(folder / NAME)): path.read_bytes() for path in (folder / NAME).rglob("*") if path.is_file()
    }
    run(sys.executable, "-c", BUILD, "wheel", folder, cwd=folder / NAME)
    wheel = folder / f"{NAME}-py3-none-any.whl"
    return SimpleNamespace(folder=folder, tracked=tracked, sources=sources, wheel=wheel)


def below(names, *folders):
    return {name for name in names if name.startswith(tuple(f"{folder}/" for folder in folders))}


def test_the_wheel_is_the_package_and_the_sdist_can_build_it_and_the_c_library(built):
    with zipfile.ZipFile(built.wheel) as wheel:
        contents = {name: wheel.read(name) for name in wheel.namelist()}
    package = below(built.tracked, "pmm3d")
    assert {"pmm3d/py.typed", "pmm3d/model/machines/assumed/nominal.toml", "pmm3d/tools/page/page.html"} <= package
    about = {f"{NAME}.dist-info/{name}" for name in ABOUT}
    assert set(contents) == package | about
    assert contents[f"{NAME}.dist-info/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    metadata = contents[f"{NAME}.dist-info/METADATA"].decode()
    assert f"\nVersion: {PROJECT['version']}\n" in metadata and "\nRequires-Python: >=3.11\n" in metadata
    assert all(f"\nProvides-Extra: {extra}\n" in metadata for extra in PROJECT["optional-dependencies"])

    made = {"PKG-INFO", "setup.cfg"} | below(built.sources, "pmm3d.egg-info")
    assert set(built.sources) - made == below(built.tracked, "pmm3d", "embed", "apps", "jobs") | BESIDE
    for name, text in (*contents.items(), *built.sources.items()):
        assert not any(os.fsencode(place) in text for place in (ROOT, built.folder, Path.home())), name


@pytest.mark.nightly
def test_the_wheel_works_in_an_empty_environment(built):
    """An environment with only pmm3d. A path file gives access to the packages of this environment, without a link to
    the clone."""
    environment = built.folder / "environment"
    venv.create(environment, symlinks=True)
    python, pmm3d = environment / "bin" / "python", environment / "bin" / "pmm3d"
    [packages] = environment.glob("lib/python*/site-packages")
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "-q", "--no-index", "--no-deps", built.wheel, cwd=built.folder)
    (packages / "others.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    (built.folder / "product.py").write_text(PRODUCT)
    environ = launcher.environment(2, ENVIRON) | {"PMM3D_MPIEXEC": " ".join(launcher.mpiexec_command())}
    for library in Path(sys.prefix, "lib").glob("libmpi.so.*"):  # of a wheel, which mpi4py finds in its own environment
        environ["MPI4PY_LIBMPI"] = str(library)
    assert run(pmm3d, "--version", cwd=built.folder, environ=environ) == f"pmm3d {PROJECT['version']}\n"
    said = run(python, "-m", "pmm3d.launcher", "-n", 2, "product.py", cwd=built.folder, environ=environ)
    assert said.splitlines() == 2 * [f"True 2 True {packages / 'pmm3d' / '__init__.py'}"]
