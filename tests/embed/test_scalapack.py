"""Block-cyclic products compared with ScaLAPACK's, and programs of ScaLAPACK with the drop-in for its p?gemm."""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from callers import AS_ROOT_ON_FEW_CORES, ENVIRONMENT, FOREIGN, LIBRARIES, ROOT, Caller

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


def with_drop_in(log: Path, below: str = "0", routines: str = "") -> dict[str, str]:
    """Variables that preload the drop-in; below "0": pmm3d computes all calls of the routines, by default p?gemm."""
    return {
        "LD_PRELOAD": str(LIBRARIES / "libpmm3d_scalapack.so"),
        "PMM3D_EMBED_LOG": str(log),
        "PMM3D_SCALAPACK_BELOW": below,
        "PMM3D_SCALAPACK_ROUTINES": routines,
    }


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
    log, routines = tmp_path / "log", ["gemm", "symm", "syrk", "syr2k", "trmm", "trsm", "geadd"]
    routines += ["hemm", "herk", "her2k"] if kind in "cz" else []
    written = scalapack_test(f"PBLAS/{kind}pb3tst", f"PBLAS/P{kind.upper()}BLAS3TST.dat").written(
        4, **with_drop_in(log, "0", "all"), seconds=600
    )
    rows = re.findall(rf"P{kind.upper()}(\w+) +(\d+) +(\d+) +(\d+) +0$", written, re.M)
    assert {name.lower() for name, *_ in rows} == {*routines, "tradd"}
    assert all((total, passed, failed) == ("16", "16", "0") for _, total, passed, failed in rows)
    assert not re.search(r"FAILED +\*", written)
    assert len(re.findall(r"check: P\w+ +PASSED", written)) == 32 * len(rows)  # unchanged inputs, and the result
    for name in routines:  # one line per rank; p?trmm also checks p?trsm
        assert done_by(log, f"p{kind}{name}")["pmm3d"] == (16 + 8 + 8 + 16) * (2 if name == "trmm" else 1)


@pytest.mark.parametrize(
    "program, file, tests, routines",
    [
        ("xdlu", "LU.dat", 240, {"gemm": 500, "trsm": 100}),  # calls of p?getrf
        ("xdllt", "LLT.dat", 432, {"potrf": 100, "potrs": 1000}),
        ("xzllt", "LLT.dat", 432, {"potrf": 100, "potrs": 1000}),
    ],
)
def test_scalapacks_own_tests_of_factorisations_pass(scalapack_test, tmp_path, program, file, tests, routines):
    log, kind, tester = tmp_path / "log", program[1], scalapack_test(program, file)
    given = tmp_path / file
    given.write_text(re.sub(r"^T( +\(T or F\) Test Cond)", r"F\1", given.read_text(), flags=re.M))  # 10,000 of p?potrs
    written = tester.written(4, **with_drop_in(log, "0", "all"), seconds=600)
    assert f"{tests} tests completed and passed residual checks" in written
    assert re.search("^ +0 tests completed and failed residual checks", written, re.M)
    for name, calls in routines.items():
        by = done_by(log, f"p{kind}{name}")
        assert by["pmm3d"] > calls and not by["scalapack"]


def test_scalapacks_own_test_of_inverses_passes(scalapack_test, tmp_path):
    """Of general, triangular and positive definite matrices."""
    log = tmp_path / "log"
    written = scalapack_test("xdinv", "INV.dat").written(4, **with_drop_in(log, "0", "all"), seconds=600)
    assert re.search("^ +0 tests completed and failed residual checks", written, re.M)
    assert "PASSED" in written and "FAILED" not in written
    for name in ("trtri", "trmm", "trsm", "potrf", "gemm"):
        assert done_by(log, f"pd{name}")["pmm3d"] > 0, name


@pytest.mark.parametrize("routine", ["tran", "geadd", "gemr2d", "syrk", "trsm", "potrf", "potrs", "trtri"])
def test_each_routine_and_scalapacks_own_in_one_process(program, tmp_path, routine):
    """The program checks the results of both."""
    log, timed = tmp_path / "log", program("benchmarks/drop_in.c", flags=SCALAPACK)
    written = timed.written(2, routine, 96, 16, 1, **with_drop_in(log, "0", routine))
    assert float(re.search(r"^error (\S+)$", written, re.M)[1]) < 1e-12
    assert done_by(log, f"pd{routine}") == {"pmm3d": 4}


def test_routines_are_switched_on_by_name(program, tmp_path):
    """A factorisation calls p?syrk and p?trsm too. Python is not started for routines that are off."""
    log, timed = tmp_path / "log", program("benchmarks/drop_in.c", flags=SCALAPACK)
    for routines, said in (("", 0), ("trtri,gemr2d", 0), ("potrf,getrf", 1)):
        log.unlink(missing_ok=True)
        done = timed(2, "cholesky", 96, 16, 1, **with_drop_in(log, "0", routines), PMM3D_PYTHON="/no/such/python")
        assert done.returncode == 0 and "left to ScaLAPACK" not in done.stderr, done.stderr
        assert done.stderr.count("PMM3D_SCALAPACK_ROUTINES=potrf,getrf is no list of routines") == said
        assert done_by(log, "pdpotrf") == {"scalapack": 4} and done_by(log, "pdtrsm")["scalapack"] > 4
        assert "scalapack, " in log.read_text() and "not switched on (PMM3D_SCALAPACK_ROUTINES)" in log.read_text()


def test_routines_inside_scalapacks_own_cholesky_factorisation(program, tmp_path):
    """They read and write parts of one array."""
    log, timed = tmp_path / "log", program("benchmarks/drop_in.c", flags=SCALAPACK)
    written = timed.written(2, "cholesky", 96, 16, 0, **with_drop_in(log, "0", "syrk,trsm"))
    assert float(re.search(r"^error (\S+)$", written, re.M)[1]) < 1e-12
    assert done_by(log, "pdpotrf") == {"scalapack": 2} and done_by(log, "pdsyrk") == {"pmm3d": 10}
    assert done_by(log, "pdtrsm") == {"pmm3d": 10 + 4}  # and two in the solution


def test_calls_of_8_byte_integers_reach_scalapack_as_they_are(program, tmp_path):
    log, library = tmp_path / "log", tmp_path / "libwide.so"
    source = ROOT / "tests" / "embed" / "wide.c"
    subprocess.run(["mpicc.openmpi", "-shared", "-fPIC", "-DLIBRARY", source, "-o", library], check=True)
    wide = program("tests/embed/wide.c", flags=("-lpmm3d_scalapack", str(library), f"-Wl,-rpath,{tmp_path}"))
    done = wide(2, PMM3D_EMBED_LOG=str(log), PMM3D_SCALAPACK_BELOW="0", PMM3D_SCALAPACK_ROUTINES="all")
    assert done.stdout == "A 2, INFO 1099511627777\n" * 6, done.stdout + done.stderr
    assert done.stderr.count("pmm3d: pdpotrf is left to ScaLAPACK") == 1
    assert log.read_text().count(" L 3: scalapack, ") == 6 and "of integers of 8 bytes" in log.read_text()


def test_a_program_that_is_linked_with_it(program, tmp_path):
    log = tmp_path / "log"
    linked = program("benchmarks/pgemm.c", flags=("-lpmm3d_scalapack", *SCALAPACK))
    for kind, ranks, rows, columns in (("d", 4, 2, 2), ("s", 3, 1, 2)):  # one of three ranks is not in the grid
        settings = {"PMM3D_EMBED_LOG": str(log), "PMM3D_SCALAPACK_BELOW": "0"}
        done = linked(ranks, 100, 90, 80, kind, rows, columns, 7, 3, 1, **settings)
        assert done.returncode == 0 and "wrong" not in done.stdout and not done.stderr, done.stdout + done.stderr
        assert done_by(log, f"p{kind}gemm") == {"pmm3d": 6 * rows * columns}


def test_without_a_python_it_is_scalapack_and_says_so_once(program, tmp_path):
    log = tmp_path / "log"
    linked = program("benchmarks/pgemm.c", flags=("-lpmm3d_scalapack", *SCALAPACK))
    settings = {"PMM3D_EMBED_LOG": str(log), "PMM3D_PYTHON": "/no/such/python", "PMM3D_SCALAPACK_BELOW": "0"}
    done = linked(4, 100, 90, 80, "d", 2, 2, 7, 3, 1, **settings)
    assert done.returncode == 0 and "wrong" not in done.stdout, done.stdout + done.stderr
    assert done.stderr.count("pmm3d: pdgemm is left to ScaLAPACK") == 1 and "Python cannot be started" in done.stderr
    assert done_by(log, "pdgemm") == {"scalapack": 24}


def test_nothing_that_could_do_it_ends_the_program_as_scalapack_does(program):
    """If ScaLAPACK's own routine is not in the process."""
    alone = program("tests/embed/no_pgemm.c", flags=("-lpmm3d_scalapack",))
    done = alone(2, PMM3D_PYTHON="/no/such/python", PMM3D_SCALAPACK_BELOW="0")
    assert done.returncode != 0 and "not reached" not in done.stdout
    assert re.search("On entry to pdgemm: rank 0 on .*: Python cannot be started from /no/such/python", done.stderr)
    assert "blacs_abort of context 5, code 1" in done.stderr


def by(log: Path) -> dict[str, list[int]]:
    """Calls that each rank counted, in its summary, by library. Those of routines that are not switched on do not
    count."""
    found: dict[str, list[int]] = {}
    summary = r"^rank \d+ summary: (\w+) computed (\d+) calls(?!.*not switched on)"
    for library, calls in re.findall(summary, log.read_text(), re.M):
        found.setdefault(library, []).append(int(calls))
    return found


@pytest.mark.parametrize("words, calls", [(("lu", 160, 16, 0), 9), (("scf", 96, 16, 0), 20)])
def test_small_products_are_left_and_python_is_not_started(program, tmp_path, words, calls):
    """Products that ScaLAPACK's own LU calls, and those of a self-consistent field."""
    log, timed = tmp_path / "log", program("benchmarks/drop_in.c", flags=SCALAPACK)
    done = timed(4, *words, **with_drop_in(log, ""), PMM3D_PYTHON="/no/such/python")
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert float(re.search(r"^error (\S+)$", done.stdout, re.M)[1]) < 1e-11
    assert by(log) == {"pmm3d": [0] * 4, "scalapack": [calls] * 4}
    assert (
        len(re.findall(r"^process \d+, drop_in: pmm3d's drop-in for ScaLAPACK is loaded$", log.read_text(), re.M)) == 4
    )
    log.unlink()
    timed.written(4, *words, **with_drop_in(log))
    assert by(log) == {"pmm3d": [calls] * 4}


def test_a_wrong_product_is_seen_by_the_timed_programs(program, tmp_path):
    """One that does nothing, and one with an element that is not a number."""
    for body, error in (("(void)c;", "22"), ("*c = 0 / *c;", "inf")):
        wrong = tmp_path / f"wrong{error}.c"
        wrong.write_text(f"void pdgemm_({'void *, ' * 15}double *c{', void *' * 3}) {{ {body} }}")
        timed = program("benchmarks/drop_in.c", str(wrong), flags=SCALAPACK)
        assert f"error {error}\n" in timed.written(4, "scf", 64, 16, 1)


def test_the_first_rank_decides_for_its_process_grid(program, tmp_path):
    """Products of 64, 63 and 62 rows, of which two are large enough; and values that are no length."""
    log, timed = tmp_path / "log", program("benchmarks/drop_in.c", flags=SCALAPACK)
    for first, others, large, said in (("40.1", "many", 2, 0), ("ten", "40.1", 0, 1), ("nan", "0", 0, 1)):
        script = tmp_path / "script"
        script.write_text(
            f"#!/bin/sh\ntest $OMPI_COMM_WORLD_RANK = 0 && export PMM3D_SCALAPACK_BELOW={first}\n"
            f'exec {timed.path} "$@"\n'
        )
        script.chmod(0o700)
        log.unlink(missing_ok=True)
        done = Caller(script)(4, "rotation", 64, 16, 1, 3, **with_drop_in(log, others))
        assert done.returncode == 0 and "error 0\n" in done.stdout, done.stderr
        assert by(log) == {"pmm3d": [2 * large] * 4, "scalapack": [2 * (3 - large)] * 4}
        assert done.stderr.count(f"PMM3D_SCALAPACK_BELOW={first} is not a length. The default 1024 is used") == said


def test_a_product_with_a_short_side_is_small(program, tmp_path):
    """Both have enough operations for each of four ranks."""
    log, timed = tmp_path / "log", program("benchmarks/pgemm.c", flags=SCALAPACK)
    for sizes, large in (((64, 64, 26), 2), ((64, 64, 24), 0), ((24, 64, 64), 0), ((64, 24, 64), 0)):
        log.unlink(missing_ok=True)
        timed.written(4, *sizes, "d", 2, 2, 8, 1, 1, **with_drop_in(log, "25"))
        assert by(log) == {"pmm3d": [large] * 4} | ({} if large else {"scalapack": [2] * 4})


def test_each_reason_is_reported_once(program, tmp_path):
    log, mixed = tmp_path / "log", program("tests/embed/mixed.c", flags=SCALAPACK)
    done = mixed(2, **with_drop_in(log))
    assert done.stdout == "C 12\n" * 12, done.stderr
    assert done.stderr.count("pmm3d: pdgemm is left to ScaLAPACK") == 2, done.stderr
    assert "has RSRC -1 and CSRC" in done.stderr and "a descriptor is of another kind" in done.stderr
    assert by(log) == {"pmm3d": [2, 2], "scalapack": [2] * 4}


def test_ranks_that_disagree_end_the_program(program, tmp_path):
    """ScaLAPACK would crash, or compute something else."""
    done = program("tests/embed/mixed.c", flags=SCALAPACK)(2, "disagree", **with_drop_in(tmp_path / "log"))
    assert done.returncode != 0 and "C " not in done.stdout
    assert done.stderr.count("On entry to pdgemm: ") == 1 and "the ranks passed different arguments" in done.stderr


@pytest.mark.parametrize("needed, processes", [("--no-as-needed", 2), ("--as-needed", 0)])
def test_a_program_that_names_no_pgemm(program, tmp_path, needed, processes):
    """A linker with --as-needed drops the library. The log shows whether it is in the process."""
    log, flags = tmp_path / "log", (f"-Wl,{needed}", "-lpmm3d_scalapack", "-Wl,--as-needed", *SCALAPACK)
    linked = program("tests/embed/factors.f90", flags=flags)
    linked.written(2, PMM3D_EMBED_LOG=str(log))
    assert (log.exists() and log.read_text().count("pmm3d's drop-in for ScaLAPACK is loaded")) == processes


def test_the_size_and_the_routines_are_measured():
    """`pmm3d tune scalapack` prints the variables."""
    small = (
        "import sys; from pmm3d.tools.tune.scalapack import measuring; measuring.LENGTHS = (16, 24)\n"
        "measuring.SHORT, measuring.LARGE, measuring.ROUNDS = (8,), 16, 1\n"
        "from pmm3d.tools.cli import main; sys.argv = ['pmm3d', 'tune', 'scalapack', '--block', '8']; main()"
    )
    written = Caller(ENVIRONMENT / "bin" / "python").written(2, "-c", small)
    found = re.search(
        r"^ +gemm +32x8x32 .*^ +trtri +\d+ .*^  export PMM3D_SCALAPACK_BELOW=\d+\n"
        r"  export PMM3D_SCALAPACK_ROUTINES=gemm(,\w+)*$",
        written,
        re.M | re.S,
    )
    assert found, written


@pytest.mark.parametrize(
    "options, row",
    [
        ((), r"^\| lu 96 16 (\|[^|]+){4}\| scalapack 5 \| \d+, \d+ \|$"),
        (("--routines", "tran"), r"^\| tran \| 96 \| 16 \| 2 (\|[^|]+){4}\| pmm3d 1 \|$"),
    ],
)
def test_the_benchmark_of_the_drop_in(options, row):
    [blas] = Path("/usr/lib").glob("*/libblas.so.3")
    settings = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "drop_in.py", "--quick", *options],
        env=settings | AS_ROOT_ON_FEW_CORES | {"PMM3D_BLAS": str(blas)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert re.search(row, done.stdout, re.M), done.stderr
