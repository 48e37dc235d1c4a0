"""An installation without extras: the product works, and an error about a missing package names the extra."""

import json
import tomllib
from pathlib import Path

from loops import given

EXTRAS = (
    "h5py",
    "safetensors",
    "typer",
    "rich",
    "threadpoolctl",
    "pydantic",
    "array_api_compat",
    "jinja2",
    "matplotlib",
    "pyarrow",
    "tokenizers",
    "torch",
)
WITHOUT = f"""
import sys
sys.modules |= dict.fromkeys({EXTRAS!r})
"""

PRODUCT = """
import numpy as np
from mpi4py import MPI
import pmm3d
for name in pmm3d.__all__:
    getattr(pmm3d, name)
with pmm3d.Grid(MPI.COMM_WORLD) as grid:
    a = pmm3d.DistMatrix.random(grid, (30, 20), seed=1, distribution="integers")
    b = pmm3d.DistMatrix.random(grid, (20, 10), seed=2, distribution="integers", layout=pmm3d.Layout.B)
    whole_a, whole_b = a.gather(), b.gather()
    print("right:", np.array_equal((a @ b).gather(), whole_a @ whole_b))
"""


def test_without_any_extra_two_matrices_are_multiplied(job):
    done = job(2, WITHOUT + PRODUCT)
    assert done.returncode == 0 and done.stdout.count("right: True") == 2, done.stderr


COMMAND = "sys.argv = ['pmm3d', {!r}]; from pmm3d.tools.cli import main; main()"
MISSING = [
    ("with pmm3d.Grid() as grid: pmm3d.DistMatrix.from_file(grid, 'a.h5', 'x')", "", "h5py", "io"),
    ("from pmm3d.io import DataSet", "data sets: ", "h5py", "io"),
    ("from pmm3d.io import Checkpoints", "checkpoints: ", "h5py", "io"),
    ("from pmm3d.io import convert; convert('none.csv', 'none.h5')", "HDF5 files: ", "h5py", "io"),
    (
        "from pathlib import Path; from pmm3d.io import table\n"
        "with table.opened(Path('a.parquet'), '', None) as rows: [*rows]",
        "Parquet files: ",
        "pyarrow",
        "parquet",
    ),
    ("from pmm3d.io import Tokenizer; Tokenizer('{}').vocabulary", "a tokenizer: ", "tokenizers", "text"),
    (
        "from pmm3d.io import import_safetensors; import_safetensors(pmm3d.Grid(), 'none', {})",
        "reading none: ",
        "safetensors",
        "io",
    ),
    ("from pmm3d import nn; nn.MLP", "", "array_api_compat", "train"),
    (
        "from pmm3d.tools.page import write_page; from pathlib import Path; "
        "Path('metrics.jsonl').write_text(line); write_page('.')",
        "",
        "pydantic",
        "report",
    ),
    (COMMAND.format("bench"), "", "typer", "cli"),
    (COMMAND.format("doctor"), "", "typer", "cli"),
    (
        "sys.modules.pop('array_api_compat'); from pmm3d.nn.training import config",
        "a configuration: ",
        "pydantic",
        "train",
    ),
]
ALL_OF_THEM = """
import json
import pmm3d
line = json.dumps({"step": 1, "loss": 0.5})
for program in json.loads(sys.argv[1]):
    try:
        exec(program)
        print(json.dumps("no error"))
    except BaseException as error:
        print(json.dumps(str(error)), file=sys.__stdout__, flush=True)
"""


def test_a_missing_package_names_its_extra(job):
    done = job(1, WITHOUT + ALL_OF_THEM, json.dumps([program for program, *_ in MISSING]))
    assert done.returncode == 0, done.stderr
    for (program, what, package, extra), said in zip(MISSING, done.stdout.splitlines(), strict=True):
        with given(program=program):
            text = f'{what}the package {package} is missing. pip install "pmm3d[{extra}]"'
            assert text in json.loads(said)


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_benchmark(job):
    bench = "['pmm3d', 'bench', '--m', '64', '--n', '64', '--k', '64', '--plot', 'a.png', '--json', 'a.json']"
    done = job(
        2, f"import sys; sys.modules['matplotlib'] = None; sys.argv = {bench}; from pmm3d.tools.cli import main; main()"
    )
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.count('the package matplotlib is missing. pip install "pmm3d[report]"') == 1, done.stderr


def test_what_a_product_needs_is_little():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    names = {need.split(">")[0] for need in project["dependencies"] if "python_version" not in need}
    assert names == {"numpy", "scipy", "mpi4py"}
