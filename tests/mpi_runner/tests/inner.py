"""An inner pytest with the plugin, in a folder of its own."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

CONFTEST = """
pytest_plugins = ("mpi_runner.plugin",)

def pytest_mpi_parametrize(metafunc, counts):
    if "half" in metafunc.fixturenames:
        cases = [(n, n / 2) for n in counts]
        metafunc.parametrize("nranks,half", cases, indirect=["nranks"], scope="session")
        return True
"""


class Outcomes:
    """Results of an inner pytest run, from its junit file."""

    def __init__(self, folder: Path, process: subprocess.CompletedProcess):
        self.durations = folder / "durations.json"
        self.returncode = process.returncode
        self.output = process.stdout
        self.of = {}
        self.text = {}
        if (folder / "junit.xml").exists():
            for case in ElementTree.parse(folder / "junit.xml").iter("testcase"):
                children = [child for child in case if child.tag in ("failure", "error", "skipped")]
                self.of[case.get("name")] = children[0].tag if children else "passed"
                self.text[case.get("name")] = "\n".join(child.text or "" for child in case)


def run_pytest(folder: Path, *arguments: str, **files: str) -> Outcomes:
    """Run pytest with the plugin on these test modules, in a new folder."""
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "--junitxml=junit.xml", "-o", "junit_logging=all", "--color=no", *arguments],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    return Outcomes(folder, process)
