"""Builds libpmm3d.so, the library with Python that it loads, and the drop-in for p?gemm, libpmm3d_scalapack.so.

    python embed/build.py [--into build/embed] [--mpicc mpicc]

The Python that runs this is the one that the library starts, unless PMM3D_PYTHON names another of its version. It needs
cffi (pip install "pmm3d[embed]") and its own libpython as a shared library.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
OFFERED = """
extern "Python" int pmm3d_python_call(char *, int64_t *, int, int64_t *, int *, int *, char *, int);
"""
FLAGS = ["-std=c11", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--into", type=Path, default=HERE.parent / "build" / "embed", help="folder of the libraries")
    parser.add_argument("--mpicc", default="mpicc", help="the C compiler of the callers' MPI")
    options = parser.parse_args()
    options.into.mkdir(parents=True, exist_ok=True)
    with_python(options.into)
    compiled(options.mpicc, "pmm3d.c", options.into / "libpmm3d.so", "-ldl")
    # Names of BLACS are those of the ScaLAPACK in the program, or of none where a program that has none is preloaded.
    compiled(options.mpicc, "scalapack.c", options.into / "libpmm3d_scalapack.so", f"-L{options.into}", "-lpmm3d",
             "-ldl", "-Wl,-rpath,$ORIGIN,-z,lazy")


def with_python(into: Path) -> None:
    """libpmm3d_python.so, by cffi: linked with this Python's library, which is found where it is now."""
    if not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        raise SystemExit(f"embed/build.py: {sys.executable} has no shared libpython. Take the system's python3, with "
                         "libpython3-dev, or build Python with --enable-shared")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise SystemExit(f"embed/build.py: {sys.executable} has no Python.h. On Debian: apt-get install libpython3-dev")
    try:
        from cffi import FFI
    except ImportError:
        raise SystemExit(f'embed/build.py: {sys.executable} has no cffi: pip install "pmm3d[embed]"') from None
    libraries = sysconfig.get_config_var("LIBDIR")
    ffi = FFI()
    ffi.embedding_api(OFFERED.replace('extern "Python" ', ""))
    ffi.set_source("_pmm3d_embedded", (HERE / "start.c").read_text(), library_dirs=[libraries],
                   extra_link_args=[f"-Wl,-rpath,{libraries}"])
    ffi.embedding_init_code((HERE / "embedded.py").read_text())
    with tempfile.TemporaryDirectory() as folder:
        made = ffi.compile(tmpdir=folder, target="libpmm3d_python.*")
        shutil.move(made, into / "libpmm3d_python.so")


def compiled(mpicc: str, source: str, target: Path, *libraries: str) -> None:
    python = f'-DPMM3D_BUILT_WITH="{sys.executable}"'
    subprocess.run([mpicc, *FLAGS, python, str(HERE / source), "-o", str(target), *libraries], check=True)


if __name__ == "__main__":
    main()
