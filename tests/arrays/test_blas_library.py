"""pmm3d.arrays.blas_library and blas_choice: the choice of the BLAS, refused libraries, and the use of the chosen
one."""

import ctypes
import ctypes.util
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock, call

import numpy as np
import pytest
from loops import looped

from pmm3d import Pmm3dError
from pmm3d.arrays import blas_choice, blas_library
from pmm3d.arrays.blas_library import ILP64_LARGEST, LP64_LARGEST, named_blas

[NUMPYS] = (Path(np.__file__).parents[1] / "numpy.libs").glob("libscipy_openblas64_-*.so")
"""An OpenBLAS with 64-bit integers, whose routines have names such as scipy_dgemm_64_."""
PRODUCT = """
    import numpy as np
    from mpi4py import MPI
    from pmm3d import DistMatrix, Grid, Layout, matmul
    from pmm3d.arrays.blas_choice import chosen
    from pmm3d.model import machine
    from pmm3d.arrays import library_named

    kind = "torch" if "torch" in chosen_library else "numpy"
    with Grid(MPI.COMM_WORLD, (1, 1, 2)) as grid:
        a = DistMatrix.random(grid, (60, 50), seed=1, library=kind)
        b = DistMatrix.random(grid, (50, 40), seed=2, layout=Layout.B, library=kind)
        whole = [np.asarray(part) for part in (a.gather(), b.gather(), matmul(a, b).gather())]
        if grid.rank == 0:
            print(np.allclose(whole[0] @ whole[1], whole[2]), chosen().file, machine.blas_of(a.library).name)
"""


@pytest.fixture(autouse=True)
def fresh():
    named_blas.cache_clear()
    yield
    named_blas.cache_clear()


def test_integers_are_wide_enough_for_either_kind():
    """A library with the usual names and 64-bit integers reads all 8 bytes."""
    found = named_blas(str(NUMPYS))
    assert found.file == str(NUMPYS.resolve()) and found.largest == ILP64_LARGEST > LP64_LARGEST
    value = ctypes.pointer(blas_library.integer(5)._obj)
    assert [ctypes.cast(value, ctypes.POINTER(kind))[0] for kind in (ctypes.c_int64, ctypes.c_int32)] == [5, 5]


@pytest.fixture
def extra(tmp_path, monkeypatch):
    """extra(library) makes libmkl_rt of an imitated extra `mkl` this library, or a damaged file."""
    monkeypatch.delenv("PMM3D_BLAS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path / "site")
    forget()

    def install(library=None):
        file = tmp_path / "lib" / "libmkl_rt.so.2"
        file.parent.mkdir()
        file.symlink_to(library) if library else file.write_text("no library")
        metadata = tmp_path / "site" / "mkl-2026.2.0.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text("Metadata-Version: 2.1\nName: mkl\nVersion: 2026.2.0\n")
        forget()

    yield install
    forget()


def forget():
    """Let this process choose its BLAS again."""
    for chosen_once in (blas_choice.chosen, blas_choice._tell, blas_library.mkl_file):
        chosen_once.cache_clear()


def test_mkl_is_used_by_itself_if_the_extra_is_installed(extra, tmp_path, monkeypatch):
    assert blas_library.mkl_file() == "" and blas_choice.take_blas() == "scipy"
    extra(NUMPYS)
    assert blas_choice.take_blas().split()[0] == "mkl" and blas_choice.chosen().file == str(NUMPYS.resolve())
    assert blas_choice.blas_file() == "", "torch has its own, unless PMM3D_BLAS names one"
    monkeypatch.setenv("PMM3D_BLAS", "scipy")
    blas_choice.chosen.cache_clear()
    assert blas_choice.take_blas() == blas_choice.chosen().name == "scipy"
    (tmp_path / "site" / "mkl-2026.2.0.dist-info").rename(tmp_path / "site" / "other-1.dist-info")
    forget()
    assert blas_library.mkl_file() == "", "a libmkl of others is not the extra"


def test_what_was_measured_comes_before_the_extra(extra):
    extra(NUMPYS)
    blas_choice.remember(
        blas_choice.Choice({"PMM3D_BLAS": "scipy", "OPENBLAS_CORETYPE": "Haswell"}, ""), blas_choice.asked_threads()
    )
    assert blas_choice.take_blas() == "scipy"


def test_an_extra_that_is_refused_is_told_once_and_scipys_is_used(extra, caplog, monkeypatch):
    extra()
    names = [blas_choice.take_blas(tell=True) for _ in range(2)]
    assert names[0] == names[1] and names[0].startswith("scipy") and "file too short" in names[0]
    assert blas_choice.chosen().name == "scipy" and caplog.text.count("SciPy's BLAS is used, because") == 1
    monkeypatch.setenv("PMM3D_BLAS", "mkl")
    blas_choice.chosen.cache_clear()
    with pytest.raises(Pmm3dError, match="PMM3D_BLAS=mkl: no such BLAS can be loaded here"):
        blas_choice.take_blas()


THREADS = [call.MKL_Set_Dynamic(0), call.MKL_Set_Num_Threads(2)]
OWN = {"MKL_THREADING_LAYER": "TBB", "MKL_CBWR": "COMPATIBLE"}


@looped(
    "threads, environ, calls",
    [
        (1, {}, [call.MKL_Set_Threading_Layer(1), call.MKL_Set_Dynamic(0), call.MKL_Set_Num_Threads(1)]),
        (2, {}, [call.MKL_Set_Threading_Layer(3), *THREADS]),
        (2, OWN, THREADS),
    ],
)
def test_mkl_has_the_threads_of_the_rank_and_shares_libgomp(monkeypatch, threads, environ, calls):
    """The environment takes precedence. Without libgomp, several threads are refused."""
    for name in ("MKL_THREADING_LAYER", "MKL_CBWR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(blas_library, "asked_threads", lambda: threads)
    monkeypatch.setattr(ctypes, "CDLL", Mock())
    blas_library._set_mkl(mkl := Mock(), "mkl")
    assert sorted(mkl.mock_calls) == sorted(calls + [call.MKL_CBWR_Set(2)] * (not environ))
    monkeypatch.setattr(ctypes, "CDLL", Mock(side_effect=OSError("no libgomp")))
    if threads > 1 and not environ:
        with pytest.raises(Pmm3dError, match="MKL needs libgomp.so.1 for 2 threads"):
            blas_library._set_mkl(Mock(), "mkl")


@looped(
    "asked, said",
    [
        ("nonesuch", r"no such BLAS can be loaded here \(.*\)\. It is one of scipy, mkl, auto, or the path"),
        ("/no/such/libblas.so", "no such BLAS can be loaded here"),
        (__file__, "no such BLAS can be loaded here .*invalid ELF header"),
        (ctypes.util.find_library("m"), "has no sgemm, dgemm, cgemm, zgemm, by any of the usual names"),
    ],
)
def test_what_is_no_blas_is_refused(asked, said):
    with pytest.raises(Pmm3dError, match=f"^PMM3D_BLAS={asked}: .*{said}"):
        named_blas(asked)


ROUTINE = blas_library._routine
NOTHING = ctypes.CFUNCTYPE(None, *blas_library.ARGUMENTS)(lambda *arguments: None), False


@looped(
    "name, instead, words",
    [
        *((name, None, f"has no {name}, by any") for name in ("cgemm", "sgemm")),
        *((name, NOTHING, rf"{name} of \S+ gives wrong results \(NN, 37 x 29 x 131\)") for name in ("sgemm", "zgemm")),
    ],
)
def test_one_that_lacks_a_routine_or_is_wrong_is_refused(monkeypatch, name, instead, words):
    """For example, it does not conjugate, or does not write C."""
    named = lambda handle, each: instead if each == name else ROUTINE(handle, each)
    monkeypatch.setattr(blas_library, "_routine", named)
    with pytest.raises(Pmm3dError, match=words):
        named_blas(str(NUMPYS))


def test_one_whose_threads_are_wrong_is_refused(monkeypatch):
    """As MKL with libiomp5 if libgomp is loaded: each thread computes everything."""
    monkeypatch.setattr(blas_library, "asked_threads", lambda: 2)
    right = blas_library.call
    wrong = lambda sizes, alpha: alpha * (2 if sizes[0] > 200 else 1)
    monkeypatch.setattr(
        blas_library,
        "call",
        lambda routine, dtype, a_read, b_read, sizes, alpha, *more: right(
            routine, dtype, a_read, b_read, sizes, wrong(sizes, alpha), *more
        ),
    )
    with pytest.raises(Pmm3dError, match=r"gives wrong results \(NN, 257 x 263 x 259\)"):
        named_blas(str(NUMPYS))


@pytest.mark.parametrize("kind", ["numpy", pytest.param("torch", marks=pytest.mark.nightly)])
def test_products_are_those_of_the_blas_that_is_named(job, kind):
    done = job(2, f"    chosen_library = {kind!r}" + PRODUCT, env={"PMM3D_BLAS": str(NUMPYS)})
    assert done.returncode == 0 and done.stdout == f"True {NUMPYS.resolve()} openblas\n", done.stdout + done.stderr


def test_ranks_that_name_different_ones_are_told(job):
    program = f"""
        import os
        from mpi4py import MPI
        if MPI.COMM_WORLD.rank == 1:
            os.environ["PMM3D_BLAS"] = {str(NUMPYS)!r}
        from pmm3d import Grid
        with Grid(MPI.COMM_WORLD):
            pass
    """
    done = job(3, program)
    assert done.returncode != 0 and "scipy" in done.stderr and str(NUMPYS) in done.stderr, done.stderr


def test_one_that_a_rank_cannot_load_is_refused_by_all_and_said_once(job):
    program = "from mpi4py import MPI\nfrom pmm3d import Grid\nGrid(MPI.COMM_WORLD)\n"
    done = job(3, program, env={"PMM3D_BLAS": "nonesuch"})
    assert done.returncode != 0 and done.stderr.count("PMM3D_BLAS=nonesuch: no such BLAS") == 1, done.stderr


@pytest.mark.parametrize("own", [None, "20"])
def test_the_environment_is_left_as_it_was(monkeypatch, own):
    """OpenBLAS reads the spin time of its threads when it is loaded."""
    name, seen = blas_choice.SHORT_SPIN[0], []
    monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("PMM3D_BLAS", raising=False)
    if own is not None:
        monkeypatch.setenv(name, own)
    monkeypatch.setattr(blas_choice, "scipy_blas", lambda: seen.append(os.environ[name]))
    blas_choice.chosen.__wrapped__()
    assert seen == [own or "16"] and os.environ.get(name) == own


@pytest.mark.parametrize("named", ["scipy", str(NUMPYS)])
def test_where_no_address_space_is_left_for_it_the_blas_is_an_error(named):
    """OpenBLAS would retry forever. Run in a child process whose limit is slightly above its address space."""
    code = """
import resource
import numpy as np
from pmm3d.arrays import blas_choice
limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + 2**26
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    blas_choice.chosen()
except MemoryError as error:
    print(error)
"""
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OPENBLAS_NUM_THREADS": "1",
        "PMM3D_BLAS": named,
    }
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert "the BLAS needs 160 MiB of address space" in done.stdout, done
