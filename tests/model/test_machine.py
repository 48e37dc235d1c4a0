"""pmm3d.model.machine: the right kernel of OpenBLAS, from invented descriptions of processors."""

import importlib
import os
import subprocess
import sys

import pytest
from loops import looped
from threadpoolctl import threadpool_info

from pmm3d.arrays import library_named
from pmm3d.arrays.blas_choice import blas_here
from pmm3d.arrays.torch_library import TorchLibrary
from pmm3d.model import machine

AVX512 = "avx512f avx512dq avx512cd avx512bw avx512vl"
PROCESSOR = """\
processor\t: 0
vendor_id\t: {vendor}
model name\t: {name}
flags\t\t: fpu sse2 avx2 {flags}

processor\t: 1
vendor_id\t: other
flags\t\t: none
"""


@pytest.fixture
def cpuinfo(tmp_path):
    """cpuinfo(vendor, flags): the Cpu that is read from a file with this content."""

    def read(vendor, flags="", name="Model"):
        path = tmp_path / "cpuinfo"
        path.write_text(PROCESSOR.format(vendor=vendor, name=name, flags=flags))
        machine.cpu.cache_clear()
        return machine.cpu(str(path))

    return read


def blas(kernel, name="openblas"):
    return machine.Blas(name, "0.3.30", kernel, 1)


def test_the_first_processor_is_described(cpuinfo):
    found = cpuinfo("GenuineIntel", AVX512, "Xeon: a name with a colon")
    assert (found.vendor, found.name) == ("GenuineIntel", "Xeon: a name with a colon")
    assert found.has_avx512 and "sse2" in found.flags and "none" not in found.flags
    assert not cpuinfo("GenuineIntel", "avx512f avx512bw").has_avx512
    assert machine.cpu("/no/such/file") == machine.Cpu("", "", frozenset())


@looped(
    "vendor, flags, kernel",
    [
        ("AuthenticAMD", AVX512, "SkylakeX"),
        ("AuthenticAMD", "", None),
        ("AuthenticAMD", "avx512f", None),
        ("GenuineIntel", AVX512, None),
        ("", AVX512, None),
    ],
)
def test_only_amd_with_avx512_is_taken_for_less(cpuinfo, monkeypatch, vendor, flags, kernel):
    """The environment of the BLAS is set, unless the user has set it."""
    found = cpuinfo(vendor, flags)
    assert machine.better_kernel(found) == kernel
    monkeypatch.setattr(machine, "cpu", lambda: found)
    for own in ({}, {"OPENBLAS_CORETYPE": "Zen"}):
        environ = dict(own)
        machine.set_blas_environment(environ)
        assert environ == ({"OPENBLAS_CORETYPE": kernel} if kernel else {}) | own


def test_advice_names_the_kernel_and_the_variable(cpuinfo):
    amd, intel = cpuinfo("AuthenticAMD", AVX512), cpuinfo("GenuineIntel", AVX512)
    own, set_by_environment = blas("Zen").advice(amd, ""), blas("Zen").advice(amd, "zen")
    assert "its Zen kernel on a CPU with AVX-512: set OPENBLAS_CORETYPE=SkylakeX before Python starts" in own
    assert (
        "the environment sets OPENBLAS_CORETYPE=zen: set OPENBLAS_CORETYPE=SkylakeX in its place" in set_by_environment
    )
    assert blas("Zen").advice(amd, "SkylakeX") == own  # set after OpenBLAS was loaded
    assert blas("SkylakeX").advice(amd, "") is None and blas("Cooperlake").advice(amd, "") is None
    assert blas("Haswell").advice(intel, "Haswell") is None
    assert blas("Zen", name="mkl").advice(amd, "") is None


def test_torch_arrays_are_multiplied_by_a_blas_of_torchs_own():
    torch = importlib.import_module("torch")
    found = machine.blas_of(library_named("torch"))
    assert found.name.endswith(" of torch") and (found.version, found.threads) == (
        torch.__version__,
        torch.get_num_threads(),
    )
    assert machine.blas_of(library_named("numpy")) == blas_here()


def test_the_version_of_the_blas_is_that_of_its_library():
    assert blas_here().version in {library["version"] for library in threadpool_info()}


def test_arrays_of_a_device_are_multiplied_by_cublas_which_has_no_threads(monkeypatch):
    assert machine.blas_of(library_named("standin")) == machine.Blas("cuBLAS", "13.1.0", "", 0)
    torch = importlib.import_module("torch")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = machine.blas_of(TorchLibrary("cuda"))
    assert found == machine.Blas("cuBLAS", f"of CUDA 13.0, torch {torch.__version__}", "", 0)


def test_figures_of_this_process():
    assert 1 <= len(machine.cores()) <= os.cpu_count()
    assert 0 < machine.resident_memory() <= machine.peak_memory() * 1.1


def test_nothing_is_loaded_before_the_environment_is_set():
    """The command sets OPENBLAS_CORETYPE before numpy loads its BLAS, so importing it must not load numpy."""
    code = (
        "import pmm3d.model.machine, pmm3d.tools.cli, sys; "
        "sys.exit(bool({'numpy', 'scipy', 'mpi4py'} & set(sys.modules)))"
    )
    path = os.pathsep.join(filter(None, sys.path))
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}).returncode == 0
