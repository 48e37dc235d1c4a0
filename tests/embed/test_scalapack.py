"""Block-cyclic products compared with ScaLAPACK's, and programs of ScaLAPACK with the drop-in for its p?gemm."""

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from callers import LIBRARIES, Caller

pytestmark = pytest.mark.thorough("ScaLAPACK's programs")
SCALAPACK = ("-lscalapack-openmpi",)
PACKAGES = "scalapack-mpi-test", "scalapack-test-common"
"""Debian packages with ScaLAPACK's own tests, compiled, and their input files."""


@pytest.fixture(scope="session")
def scalapack_tests(tmp_path_factory):
    """Folders of the programs and of their files. Nothing is installed."""
    into = tmp_path_factory.mktemp("scalapack")
    if subprocess.run(["apt-get", "download", "-q", *PACKAGES], cwd=into, capture_output=True).returncode:
        subprocess.run(["apt-get", "update", "-q"], check=True, capture_output=True)
        subprocess.run(["apt-get", "download", "-q", *PACKAGES], cwd=into, check=True)
    for package in into.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, into], check=True)
    [programs] = into.glob("usr/lib/*/scalapack/openmpi-tests")
    return programs, into / "usr" / "share" / "scalapack"


@pytest.fixture
def scalapack_test(scalapack_tests, tmp_path):
    """scalapack_test("xdlu", "LU.dat"): a program of ScaLAPACK, with a copy of its file, and with the drop-in."""
    programs, files = scalapack_tests

    def find(name: str, file: str) -> Caller:
        shutil.copy(programs / name, tmp_path)
        shutil.copy(files / file, tmp_path)
        return Caller(tmp_path / Path(name).name)

    return find


def with_drop_in(log: Path) -> dict[str, str]:
    return {"LD_PRELOAD": str(LIBRARIES / "libpmm3d_scalapack.so"), "PMM3D_EMBED_LOG": str(log)}


def done_by(log: Path, routine: str) -> Counter[str]:
    """Number of calls by "pmm3d", and by "scalapack"."""
    return Counter(re.findall(rf"^rank \d+ {routine} .*?: (pmm3d|scalapack)", log.read_text(), re.M))


@pytest.mark.parametrize("kind", "sdcz")
@pytest.mark.parametrize("ranks, rows, columns", [(1, 1, 1), (4, 2, 2), (3, 1, 3), (6, 3, 2), (5, 2, 2)])
def test_products_and_moves_are_scalapacks_to_rounding(program, kind, ranks, rows, columns):
    written = program("tests/embed/cyclic.c", flags=SCALAPACK).written(ranks, kind, rows, columns)
    [(roundings, moves)] = re.findall(r"^36 products: (\S+) roundings; moves: (\S+)$", written, re.M)
    assert float(roundings) < 4 and float(moves) == 0, written


@pytest.mark.parametrize("ranks, grid", [(1, "1 x 1"), (4, "2 x 2"), (6, "2 x 3")])
def test_the_program_in_fortran_agrees_with_scalapack(program, ranks, grid):
    written = program("embed/pmm3d.f90", "apps/embed/block_cyclic.f90", flags=SCALAPACK).written(ranks)
    [difference] = re.findall(rf"^{grid} ranks: differs from pdgemm by at most +(\S+)$", written, re.M)
    assert float(difference) < 1e-11


@pytest.mark.parametrize("kind", "sdcz")
def test_scalapacks_own_test_of_the_pblas_passes(scalapack_test, tmp_path, kind):
    """On four process grids. It also tests the errors for every wrong argument."""
    log = tmp_path / "log"
    written = scalapack_test(f"PBLAS/{kind}pb3tst", f"PBLAS/P{kind.upper()}BLAS3TST.dat").written(
        4, **with_drop_in(log)
    )
    total, passed, failed = re.findall(rf"P{kind.upper()}GEMM +(\d+) +(\d+) +(\d+) +0$", written, re.M)[0]
    assert int(total) == int(passed) == 16 and failed == "0"
    assert not re.search(r"FAILED +\*", written)
    assert len(re.findall(r"check: P.GEMM +PASSED", written)) == 32  # unchanged inputs, and the result
    assert done_by(log, f"p{kind}gemm")["pmm3d"] == 16 + 8 + 8 + 16  # one line per rank


def test_scalapacks_own_test_of_lu_passes(scalapack_test, tmp_path):
    """Its pdgetrf, inside the library, calls pdgemm."""
    log = tmp_path / "log"
    written = scalapack_test("xdlu", "LU.dat").written(4, **with_drop_in(log), seconds=600)
    assert "240 tests completed and passed residual checks" in written
    assert "0 tests completed and failed residual checks" in written
    calls = done_by(log, "pdgemm")
    assert calls["pmm3d"] > 500 and not calls["scalapack"]


def test_a_program_that_is_linked_with_it(program, tmp_path):
    log = tmp_path / "log"
    linked = program("benchmarks/pgemm.c", flags=("-lpmm3d_scalapack", *SCALAPACK))
    for kind, ranks, rows, columns in (("d", 4, 2, 2), ("s", 3, 1, 2)):  # one of three ranks is not in the grid
        done = linked(ranks, 100, 90, 80, kind, rows, columns, 7, 3, 1, PMM3D_EMBED_LOG=str(log))
        assert done.returncode == 0 and "wrong" not in done.stdout and not done.stderr, done.stdout + done.stderr
        assert done_by(log, f"p{kind}gemm") == {"pmm3d": 6 * rows * columns}


def test_without_a_python_it_is_scalapack_and_says_so_once(program, tmp_path):
    log = tmp_path / "log"
    linked = program("benchmarks/pgemm.c", flags=("-lpmm3d_scalapack", *SCALAPACK))
    done = linked(4, 100, 90, 80, "d", 2, 2, 7, 3, 1, PMM3D_EMBED_LOG=str(log), PMM3D_PYTHON="/no/such/python")
    assert done.returncode == 0 and "wrong" not in done.stdout, done.stdout + done.stderr
    assert done.stderr.count("pmm3d: pdgemm is left to ScaLAPACK") == 1 and "Python cannot be started" in done.stderr
    assert done_by(log, "pdgemm") == {"scalapack": 24}


def test_nothing_that_could_do_it_ends_the_program_as_scalapack_does(program):
    """If ScaLAPACK's own routine is not in the process."""
    alone = program("tests/embed/no_pgemm.c", flags=("-lpmm3d_scalapack",))
    done = alone(2, PMM3D_PYTHON="/no/such/python")
    assert done.returncode != 0 and "not reached" not in done.stdout
    assert re.search("On entry to pdgemm: rank 0 on .*: Python cannot be started from /no/such/python", done.stderr)
    assert "blacs_abort of context 5, code 1" in done.stderr
