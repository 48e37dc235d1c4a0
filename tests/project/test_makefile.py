"""The Makefile, the workflow of CI and the version: they agree; targets that need no environment."""

import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path

from loops import looped
from outer_make import without_outer_make

import pmm3d

ROOT = Path(__file__).parents[2]


@looped("launcher, code", (("false", 2), ("true", 0)))
def test_a_launcher_of_the_site_that_starts_nothing_is_refused_with_the_remedy(launcher, code):
    """For example Open MPI's, which refuses root, and more ranks than cores."""
    command = ["make", "site-launcher", "MPI=site", f"LAUNCH={launcher}"]
    done = subprocess.run(command, cwd=ROOT, env=without_outer_make(), capture_output=True, text=True)
    assert done.returncode == code and ("OMPI_ALLOW_RUN_AS_ROOT=1" in done.stdout) == bool(code)


def planned(*words):
    return subprocess.run(
        ["make", "-n", *words], cwd=ROOT, env=without_outer_make(), capture_output=True, text=True, check=True
    ).stdout


def test_make_test_names_tests_that_exist_and_runs_chosen_ones_alone():
    whole, one = planned("test", "N=4"), planned("test", "ARGS=-x")
    named = [word.partition("::") for word in whole.split() if word.startswith("tests/")]
    assert "PMM3D_TESTED_LIBRARY=torch" in whole and len(named) > 5
    assert all(f"def {test}(" in (ROOT / file).read_text() for file, _, test in named)
    runs = [line for line in whole.splitlines() if "-m pytest" in line]
    assert len(runs) == 3 and "--all" not in whole
    assert all(sum(text in line for line in runs) == 1 for text in ('-m "not parallel"', "-m parallel"))
    assert one.count("-m pytest") == 1 and "-m pytest -x\n" in one


def test_make_test_all_leaves_nothing_out():
    whole = planned("test-all")
    runs = [line for line in whole.splitlines() if "-m pytest" in line]
    for text in ('-m "not parallel"', "-m parallel", "PMM3D_TESTED_LIBRARY=torch", "tests/slurm", "tests/embed"):
        assert any(text in line and "--all" in line for line in runs), text
    assert any("tests/versions" in line for line in runs) and any(".venv-mpich/" in line for line in runs)


def test_a_compiler_that_is_missing_is_one_line_with_the_remedy():
    done = subprocess.run(
        ["make", "-j4", "-k", "embed", "MPICC=nomp"], cwd=ROOT, env=without_outer_make(), capture_output=True, text=True
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr and "installing" not in done.stdout
    [line] = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert line.startswith("embed: there is no C compiler nomp. ") and "make embed MPICC=/path/to/mpicc" in line


def test_the_compiler_of_a_python_environment_is_taken_with_a_note(tmp_path, monkeypatch):
    """For example of .venv, whose MPI is from PyPI. No note if it was named by its path."""
    spec = importlib.util.spec_from_file_location("build", ROOT / "embed" / "build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    compiler = tmp_path / "bin" / "mpicc"
    compiler.parent.mkdir()
    compiler.touch(0o755)
    monkeypatch.setenv("PATH", str(compiler.parent))
    assert build.check_compiler("mpicc") == ""
    (tmp_path / "pyvenv.cfg").touch()
    note = build.check_compiler("mpicc")
    assert f"mpicc is {compiler}, of a Python environment" in note and "make embed MPICC=/path/to/mpicc" in note
    assert build.check_compiler(str(compiler)) == ""


def test_a_prefix_that_cannot_be_written_is_refused_with_the_remedy():
    command = ["make", "install", "PREFIX=/proc/none", "MPICC=true"]
    done = subprocess.run(command, cwd=ROOT, env=without_outer_make(), capture_output=True, text=True)
    assert done.returncode == 2 and "installing" not in done.stdout
    assert "/proc/none/lib cannot be written. " in done.stdout and "make install PREFIX=$HOME/.local" in done.stdout


def test_the_version_is_the_same_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert pmm3d.__version__ == version
    assert re.search(r"^## (\S+)", (ROOT / "CHANGES.md").read_text(), re.M)[1] == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_workflow_runs_what_ci_runs():
    command = re.compile(r"^(?:suite \d+ | *- run: )?(make [^|\n]*?)(?: \|\| .*)?$", re.M)
    own, commands = (command.findall((ROOT / path).read_text()) for path in (".ci/run", ".github/workflows/ci.yml"))
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert len(own) > 3 and {*own} <= {*commands} and all(line.split()[1] in targets for line in commands)


def test_the_workflow_and_pre_commit_have_the_versions_of_the_project():
    text = lambda name: (ROOT / name).read_text()
    classified = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text("pyproject.toml"))
    [tested] = re.findall(r"^ +python: \[(.*)\]$", text(".github/workflows/ci.yml"), re.M)
    assert classified and classified == [version.strip('"') for version in tested.split(", ")]
    [ruff] = re.findall(r"^ruff==(.*)$", text("constraints.txt"), re.M)
    assert f"/ruff-pre-commit\n    rev: v{ruff}\n" in text(".pre-commit-config.yaml")
