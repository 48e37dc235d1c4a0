"""A product from C, one from Fortran, and one by ScaLAPACK's drop-in. All others: test_callers.py. The libraries are
built here. They start this Python, and do not use its MPI wheel."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from callers import AS_ROOT_ON_FEW_CORES, FOREIGN, ROOT, compiled, lacks
from missing import skip_or_fail
from tutorial import follow, steps


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    if lacking := lacks():
        skip_or_fail(lacking)
    into = tmp_path_factory.mktemp("libraries")
    build = [sys.executable, ROOT / "embed" / "build.py", "--into", into, "--mpicc", "mpicc.openmpi"]
    done = subprocess.run(build, capture_output=True, text=True)
    if "libpython" in done.stderr:
        skip_or_fail(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    return into


@pytest.mark.parametrize(
    "sources", [("apps/embed/product.c",), ("embed/pmm3d.f90", "apps/embed/product.f90")], ids=["C", "Fortran"]
)
def test_a_product_is_right(libraries, tmp_path, sources):
    written = compiled(tmp_path, *sources, libraries=libraries).written(2)
    assert re.fullmatch(r"2 ranks as \d x \d x \d: right\n", written), written


def test_the_tutorial_in_c_and_fortran(libraries, tmp_path):
    """With the names of the commands in the tutorial, and with the libraries in the folder of `make embed`."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("mpicc", "mpifort", "mpirun"):
        (programs / name).symlink_to(shutil.which(f"{name}.openmpi"))
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "embed").symlink_to(libraries)
    path = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PKG_CONFIG_PATH": f"{tmp_path}/build/embed"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}

    def run(command):
        if command.startswith("export "):
            assert command == "export PKG_CONFIG_PATH=$PWD/build/embed"
            return ""
        done = subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            env=kept | AS_ROOT_ON_FEW_CORES | path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    for language in ("C", "Fortran"):
        follow(steps("tutorials/embed", f"In {language}"), tmp_path, run, exact=True)


def test_the_drop_in_does_a_product_of_scalapack_and_logs_it(libraries, tmp_path):
    """The log is readable by its user alone. A symbolic link is not followed."""
    log = tmp_path / "log"
    linked = compiled(
        tmp_path, "benchmarks/pgemm.c", libraries=libraries, flags=("-lpmm3d_scalapack", "-lscalapack-openmpi")
    )
    done = linked(2, 100, 90, 80, "d", 1, 2, 7, 3, 1, PMM3D_EMBED_LOG=str(log), PMM3D_SCALAPACK_BELOW="0")
    assert done.returncode == 0 and "wrong" not in done.stdout and not done.stderr, done.stdout + done.stderr
    by = re.findall(r"^rank \d+ pdgemm .*?: (pmm3d|scalapack)", log.read_text(), re.M)
    assert len(by) == 12 and set(by) == {"pmm3d"} and log.stat().st_mode & 0o777 == 0o600
    victim, link = tmp_path / "of another program", tmp_path / "link"
    victim.write_text("")
    link.symlink_to(victim)
    done = linked(2, 100, 90, 80, "d", 1, 2, 7, 3, 1, PMM3D_EMBED_LOG=str(link))
    assert done.returncode == 0 and "wrong" not in done.stdout and victim.read_text() == ""
    assert done.stderr.count(f"PMM3D_EMBED_LOG={link} cannot be opened") == 2  # once by each process
