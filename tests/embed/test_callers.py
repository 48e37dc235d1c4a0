"""C and Fortran programs that call the product: right results, on any number of ranks, repeatedly. `make
test-embed`."""

import re
import subprocess
import sys

import pytest
from callers import ENVIRONMENT, LIBRARIES, ROOT, Caller

pytestmark = pytest.mark.thorough("all calls from C and Fortran")
IN_PYTHON = """
import ctypes
import os
import sys
from mpi4py import MPI

library = ctypes.CDLL(sys.argv[1])
code, grid, shape = library.pmm3d_start(), ctypes.c_int(), (ctypes.c_int * 3)()
code += library.pmm3d_grid_f(MPI.COMM_WORLD.py2f(), 1, 1, MPI.COMM_WORLD.size, ctypes.byref(grid))
code += library.pmm3d_grid_shape(grid, shape)
os.write(1, f"code {code} {list(shape)}\\n".encode())
"""


C, FORTRAN = ("apps/embed/product.c",), ("embed/pmm3d.f90", "apps/embed/product.f90")
SIZES = (300, 200, 100), (13, 5, 7), (1, 1, 1), (4, 3, 0), (0, 6, 6)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 7])
@pytest.mark.parametrize("sources, sizes", [*((C, sizes) for sizes in SIZES), (FORTRAN, ())])
def test_the_programs_are_right(program, ranks, sources, sizes):
    written = program(*sources).written(ranks, *sizes)
    assert re.fullmatch(rf"{ranks} ranks as \d x \d x \d: right\n", written), written


@pytest.mark.parametrize("ranks", [1, 4])
def test_uneven_blocks_in_fortran(program, ranks):
    written = program("embed/pmm3d.f90", "tests/embed/blocks.f90").written(ranks)
    assert written.splitlines()[-1] == "right"
    assert ranks == 1 or "counted from 1, is in the blocks of rank 0 and of rank 1: the blocks must" in written


def test_the_header_is_cs_and_c_plus_pluss(tmp_path):
    for name, compiler in (("a.c", ["mpicc.openmpi", "-std=c99"]), ("a.cc", ["mpic++.openmpi", "-std=c++11"])):
        (tmp_path / name).write_text("#include <pmm3d.h>\nint main(void) { return pmm3d_start() == PMM3D_OK; }\n")
        strict = ["-Wall", "-Wextra", "-Wstrict-prototypes"][: 3 if name == "a.c" else 2]
        subprocess.run(
            [
                *compiler,
                *strict,
                "-pedantic",
                "-Werror",
                "-DOMPI_SKIP_MPICXX",
                name,
                f"-I{ROOT / 'embed'}",
                f"-L{LIBRARIES}",
                "-lpmm3d",
                f"-Wl,-rpath,{LIBRARIES}",
                "-o",
                "a",
            ],
            cwd=tmp_path,
            check=True,
        )
        assert Caller(tmp_path / "a")(1).returncode == 0  # before MPI_Init


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_thousand_calls_leave_no_memory_behind(program, ranks):
    written = program("benchmarks/embed_calls.c").written(ranks, 200)
    for name in ("matmul", "pgemm"):
        found = re.findall(rf"{name} after (\d+) calls: VmData (\d+) KiB, VmRSS (\d+) KiB", written)
        data, resident = ({calls: int(values[which]) for calls, *values in found} for which in (0, 1))
        assert data["1000"] <= data["200"] + 2048, written  # malloc and Python may each add an arena of 1 MiB
        assert resident["2000"] <= resident["1000"] + 256, written
        assert f"{name} from C" in written and f"{name} from Python" in written


@pytest.mark.parametrize("kind", "sdcz")
@pytest.mark.parametrize("ranks", [1, 4])
def test_every_type_transpose_and_order_is_exact(program, ranks, kind):
    written = program("tests/embed/forms.c").written(ranks, kind)
    assert re.fullmatch(r"\d+ products, \d+ moves, 0 wrong\n", written), written


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_qr_factorisation(program, ranks):
    written = program("tests/embed/qr.c", flags=("-lm",)).written(ranks)
    assert written.count(" factors 0 1 1 1\n") == 2 * ranks and written.count(" refused 1 1 1 1 1 kept 1\n") == ranks, (
        written
    )


@pytest.mark.parametrize("ranks, limits, shapes", [(1, "000 00 11", "1x1x1"), (4, "333 00 11", "2x1x2")])
def test_plans_of_every_operation_give_the_same_bits(program, ranks, limits, shapes):
    """Also work memory beyond a limit (code 3), and grids for a large cube and for a small product."""
    written = program("tests/embed/plans.c").written(ranks)
    assert f"limits: {limits}, everywhere {int(ranks > 1)}\n" in written
    assert re.search(rf"^740 runs, 0 wrong; grids {shapes} and 1x1x1$", written, re.M), written


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("kind, ranks, rows, columns", [("s", 3, 1, 2), ("d", 4, 2, 2), ("c", 4, 1, 3), ("z", 4, 2, 2)])
def test_routines_agree_with_scalapack(program, kind, ranks, rows, columns, wide):
    """On some or all ranks, with integers of 4 and of 8 bytes."""
    flags = ("-lscalapack-openmpi", *["-DPMM3D_ILP64"] * wide)
    written = program("tests/embed/routines.c", flags=flags).written(ranks, kind, rows, columns)
    [roundings] = re.findall(rf"^52 calls with integers of {8 if wide else 4} bytes: (\S+) roundings, info 1$", written)
    assert float(roundings) < 8, written


def test_the_calls_of_the_page_are_those_of_a_right_program(program):
    """Cholesky in C, with integers of 8 bytes."""
    [shown] = re.findall("```c\n(.*?)```", (ROOT / "docs" / "embedding.md").read_text(), re.S)
    assert shown in (ROOT / "apps" / "embed" / "solve.c").read_text()
    written = program("apps/embed/solve.c").written(3)
    assert written == "3 ranks: info 0, every element of Y is right\n"


@pytest.mark.parametrize("flags, width", [((), 4), (("-fdefault-integer-8",), 8)])
def test_routines_plans_and_requests_in_fortran(program, flags, width):
    written = program("embed/pmm3d.f90", "tests/embed/routines.f90", flags=flags).written(2)
    assert written == f"{width} bytes, wrong: 0\n" * 2


def test_several_contexts_and_a_thread_in_fortran(program):
    flags = "-lscalapack-openmpi", "-fopenmp"
    written = program("embed/pmm3d.f90", "tests/embed/contexts.f90", flags=flags).written(4)
    [difference] = re.findall(r"^differs by at most +(\S+)$", written, re.M)
    assert float(difference) < 1e-12


def test_types_and_sections_in_fortran(program, tmp_path):
    """The module needs Fortran 2018, without a warning."""
    strict = ["mpifort.openmpi", "-std=f2018", "-Wall", "-Wextra", "-pedantic", "-Werror", "-c"]
    subprocess.run([*strict, ROOT / "embed" / "pmm3d.f90"], cwd=tmp_path, check=True)
    written = program("embed/pmm3d.f90", "tests/embed/types.f90").written(3)
    assert sorted(re.findall(r"^\d right T$", written, re.M)) == ["0 right T", "1 right T", "2 right T"], written
    for name, text in {
        "section": "a section of an array with gaps",
        "type": "shard has the type 's', and the matrix has the type 'd'",
        "sizes": "sizes and boxes are integers of 4 or 8 bytes",
        "padded": "the first dimension of the shard has 16 elements; in this layout it has 8 rows",
        "by rows": "the first dimension of the shard has 16 elements; in this layout it has 16 rows and 4 columns",
        "dimensions": "an array of three dimensions or more",
        "for": "sizes are integers of 4 or 8 bytes",
        "for type": "rank 2",
        "a": "a has the type 's', and the matrix has the type 'd'",
        "moved": "b has the type 's'",
        "cyclic": "a has the type 's'",
        "to cyclic": "a has the type 'z'",
        "block": "block has the type 's'",
        "tiny": "sizes and boxes are integers",
        "gaps at once": "a section of an array with gaps",
        "few": "the shard has 8 elements; in this layout it has 8 rows and 8 columns on this rank",
        "alpha": "alpha has the type 'd', and the matrix has the type 'z'",
        "beta": "beta has the type 's'",
        "integer": "alpha has none of the types",
        "pgemm": "alpha has the type 'd'",
        "gaps": "a section of an array with gaps",
    }.items():
        told = re.findall(rf"^\d {name} [12] 1 (.*)$", written, re.M)
        assert len(told) == 3 and all(text in each for each in told), (name, written)
    for name, text in {"limit": "integers of 4 or 8", "box": "integers of 4 or 8", "long": "of 8 bytes"}.items():
        told = re.findall(rf"^\d {name} 1 0 (.*)$", written, re.M)
        assert len(told) == 3 and all(text in each for each in told), (name, written)


@pytest.mark.parametrize(
    "ranks, which, texts",
    [
        (2, "untouched", ["untouched: 1 1 1"] * 2),  # MPI's error handlers, signals, the locale
        (3, "subset", ["lives on: right", "lives on: right", "1 stays out"]),  # a subset of the ranks calls
        (2, "numbers differ", ["lives on: right"] * 2),  # of the same objects, on two ranks
        (2, "not finalized", ["ended"] * 2),  # MPI_Finalize does what the program did not
    ],
)
def test_what_the_program_does_is_left_alone(program, ranks, which, texts):
    done = program("tests/embed/faults.c")(ranks, which)
    assert done.returncode == 0 and (not done.stderr or which != "not finalized"), done.stdout + done.stderr
    assert all(done.stdout.count(text) == texts.count(text) for text in texts), done.stdout


def test_a_python_that_is_there_is_used(tmp_path):
    """Nothing is called in it after its end, which is before that of MPI."""
    (tmp_path / "in_python.py").write_text(IN_PYTHON)
    done = Caller(ENVIRONMENT / "bin" / "python")(2, tmp_path / "in_python.py", LIBRARIES / "libpmm3d.so")
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    assert done.stdout == "code 0 [1, 1, 2]\n" * 2


def test_an_mpi_of_its_own_in_the_environment_is_left_alone(program):
    """The environment of these tests, with the wheel of another Open MPI."""
    written = program("apps/embed/product.c").written(2, PMM3D_PYTHON=sys.executable)
    assert written.endswith(": right\n")
