"""The architecture: imports run down one list of rooms, names have types, docstrings have examples that run."""

import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import pmm3d

ROOT = Path(__file__).parents[2]
ROOMS = ("layout", "arrays", "model", "comm", "product", "linalg", "io", "nn", "torch", "tools", "embedding")
PUBLIC = ("pmm3d", *(f"pmm3d.{room}" for room in ROOMS), "pmm3d.nn.optim", "pmm3d.nn.exchange", "pmm3d.nn.training")


def checker(*command, folder=ROOT):
    return subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from importlib.metadata import entry_points as e;"
            "sys.argv = sys.argv[1:];"
            "sys.exit([s for s in e(group='console_scripts') if s.name == sys.argv[0]][0].load()())",
            *map(str, command),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
    )


def test_imports_run_down_the_list_of_rooms():
    done = checker("lint-imports", "--no-cache")
    assert done.returncode == 0 and " 0 broken" in done.stdout, done.stdout + done.stderr


USERS_PROGRAM = """
import pmm3d, pmm3d.io, pmm3d.nn, pmm3d.nn.training
{imports}
with pmm3d.Grid() as grid:
    a = pmm3d.DistMatrix.random(grid, (3, 3))
    reveal_type(pmm3d.matmul(a, a))
"""


@pytest.mark.nightly("mypy: a minute")
def test_types_are_right_and_a_strict_checker_knows_the_public_names(tmp_path):
    rooms = [importlib.import_module(room) for room in ("pmm3d", "pmm3d.io", "pmm3d.nn", "pmm3d.nn.training")]
    imported = {name: room.__name__ for room in reversed(rooms) for name in room.__all__}  # of two, that of pmm3d
    lines = [f"from {room} import {name} as {name}" for name, room in imported.items()]
    lines += [f"{room.__name__}.{name}" for room in rooms for name in room.__all__ if imported[name] != room.__name__]
    imports = "\n".join(lines)
    (tmp_path / "program.py").write_text(USERS_PROGRAM.format(imports=imports))
    # in another folder, so that the checker finds the package through the editable install
    done = checker(
        "mypy",
        "--config-file",
        ROOT / "pyproject.toml",
        "--cache-dir",
        ROOT / ".mypy_cache",
        "-p",
        "pmm3d",
        "-m",
        "program",
        folder=tmp_path,
    )
    assert done.returncode == 0 and '"pmm3d.product.matrix.DistMatrix"' in done.stdout, done.stdout + done.stderr


def test_every_public_name_is_explained():
    """Each has a docstring with an example. An error has none, because it cannot be shown without raising it."""
    explained = lambda text, thing: (
        text and (">>> " in text or (isinstance(thing, type) and issubclass(thing, Exception)))
    )
    missing = []
    for module in map(importlib.import_module, PUBLIC):
        things = {name: getattr(module, name) for name in getattr(module, "__all__", ())}
        own = {name: each for name, each in things.items() if getattr(each, "__module__", "").startswith("pmm3d")}
        missing += [module.__name__] * (not module.__doc__)
        missing += [name for name, each in own.items() if callable(each) and not explained(inspect.getdoc(each), each)]
    assert not missing


EXAMPLES = """
import doctest, importlib, sys
from mpi4py import MPI
for name in sys.argv[1:]:
    found = doctest.testmod(importlib.import_module(name))
    print("failed" if found.failed else "right", found.attempted, name)
"""


def with_examples():
    modules = [
        found
        for found in pkgutil.walk_packages(pmm3d.__path__, "pmm3d.")
        if not found.name.startswith(("pmm3d.tools", "pmm3d.__main__", "pmm3d.launcher"))
    ]
    return [
        found.name for found in modules if ">>> " in Path(found.module_finder.find_spec(found.name).origin).read_text()
    ]


@pytest.mark.parametrize(
    "ranks",
    [
        1,
        pytest.param(2, marks=pytest.mark.nightly("the same examples on more ranks")),
        pytest.param(4, marks=pytest.mark.thorough("the same examples on more ranks")),
    ],
)
def test_the_examples_of_docstrings_are_right(job, ranks):
    modules = with_examples()
    done = job(ranks, EXAMPLES, *modules, timeout=300)
    assert done.returncode == 0 and "failed" not in done.stdout, done.stdout + done.stderr
    attempted = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("right ")]
    assert len(attempted) == ranks * len(modules) and sum(attempted) > 400 * ranks
