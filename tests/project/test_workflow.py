"""The version and the workflow of CI: they agree with pyproject.toml, .ci/run and the Makefile."""

import re
import tomllib
from pathlib import Path

import pmm3d

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
COMMAND = re.compile(r"^(?:exec | *- run: )?(make .*)$", re.M)


def test_the_version_is_the_same_everywhere():
    version = PROJECT["version"]
    assert pmm3d.__version__ == version
    assert re.search(r"^## (\S+)", (ROOT / "CHANGES.md").read_text(), re.M)[1] == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_workflow_runs_what_ci_runs():
    own, commands = COMMAND.findall((ROOT / ".ci" / "run").read_text()), COMMAND.findall(WORKFLOW)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert len(own) > 3 and {*own} <= {*commands} and all(line.split()[1] in targets for line in commands)


def test_the_workflow_tests_every_python_of_pyproject():
    pythons = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)]
    assert "python: [" + ", ".join(f'"{each}"' for each in pythons) + "]" in WORKFLOW
    assert PROJECT["requires-python"] == f">={pythons[0]}"


def test_a_release_follows_the_tests_and_holds_no_token():
    release = WORKFLOW.partition("\n  release:")[2]
    assert "needs: [tests, build]" in release and "startsWith(github.ref, 'refs/tags/v')" in release
    assert "id-token: write" in release and "secrets." not in WORKFLOW
