"""Build libpmm3d.so, libpmm3d_python.so, which it loads, and libpmm3d_scalapack.so, the drop-in for p?gemm.

    python embed/build.py [--into build/embed] [--mpicc mpicc]
    python embed/build.py --install PREFIX [--into build/embed]

The library starts the Python that runs this program, unless PMM3D_PYTHON contains the path of another one of the same
version. This Python needs cffi (pip install ".[embed]") and libpython as a shared library. --install copies the
libraries, the header and the Fortran module to PREFIX. They still start the same Python, so keep its environment.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
OFFERED = """
extern "Python" int pmm3d_python_call(char *, int64_t *, int, int64_t *, int *, int *, char *, int);
"""
LIBRARIES = ("libpmm3d.so", "libpmm3d_python.so", "libpmm3d_scalapack.so")
PKG_CONFIG = """libdir={libraries}
includedir={headers}

Name: pmm3d
Description: distributed matrix products from C, C++ and Fortran
Version: {version}
Cflags: -I${{includedir}}
Libs: -L${{libdir}} -lpmm3d -Wl,-rpath,${{libdir}}
"""
FLAGS = ["-std=c11", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--into", type=Path, default=HERE.parent / "build" / "embed", help="folder of the libraries")
    parser.add_argument("--mpicc", default="mpicc", help="the C compiler of the callers' MPI")
    parser.add_argument("--check", action="store_true", help="only look whether the C compiler is there")
    parser.add_argument(
        "--install", type=Path, metavar="PREFIX", help="copy what was built to PREFIX/lib and PREFIX/include"
    )
    options = parser.parse_args()
    if options.install:
        install(options.into, options.install.absolute())
        return
    note = check_compiler(options.mpicc)
    if options.check:
        return
    if note:
        print(note, file=sys.stderr)
    options.into.mkdir(parents=True, exist_ok=True)
    with_python(options.into)
    compiled(options.mpicc, "pmm3d.c", options.into / "libpmm3d.so", "-ldl")
    # Symbols of BLACS are those of the program's ScaLAPACK. They are undefined if a program without it is preloaded.
    compiled(
        options.mpicc,
        "scalapack.c",
        options.into / "libpmm3d_scalapack.so",
        f"-L{options.into}",
        "-lpmm3d",
        "-ldl",
        "-Wl,-rpath,$ORIGIN,-z,lazy",
    )
    describe(options.into.absolute(), HERE, options.into)


def check_compiler(mpicc: str) -> str:
    """Return a note about the compiler, or "". Raises SystemExit if there is none."""
    found = shutil.which(mpicc)
    if found is None:
        raise SystemExit(
            f"embed: there is no C compiler {mpicc}. Install that of the MPI which your programs use (on "
            "Debian: apt-get install libopenmpi-dev), or name it: make embed MPICC=/path/to/mpicc"
        )
    if found == mpicc or not (Path(found).parent.parent / "pyvenv.cfg").exists():
        return ""
    return (
        f"embed: {mpicc} is {found}, of a Python environment. Compile and run your programs with this MPI too; it "
        "has no Fortran compiler. For another MPI leave the environment (deactivate), or name its C compiler: make "
        "embed MPICC=/path/to/mpicc"
    )


def install(built: Path, prefix: Path) -> None:
    """Copy the libraries to PREFIX/lib, with their pkg-config file, and the header and the module to PREFIX/include."""
    if missing := [name for name in LIBRARIES if not (built / name).exists()]:
        raise SystemExit(f"embed: {built} lacks {', '.join(missing)}. Build them first: make embed")
    libraries, headers = prefix / "lib", prefix / "include"
    try:
        for source, folder in ((built, libraries), (HERE, headers)):
            folder.mkdir(parents=True, exist_ok=True)
            for name in LIBRARIES if source is built else ("pmm3d.h", "pmm3d.f90"):
                shutil.copy2(source / name, folder / name)
        (libraries / "pkgconfig").mkdir(exist_ok=True)
        describe(libraries, headers, libraries / "pkgconfig")
    except OSError as error:
        raise SystemExit(
            f"embed: {prefix} cannot be written: {error}. Name another folder: make install PREFIX=$HOME/.local"
        ) from None
    print(f"embed: installed in {prefix}. pkg-config finds it with PKG_CONFIG_PATH={libraries}/pkgconfig")


def describe(libraries: Path, headers: Path, into: Path) -> None:
    """Write pmm3d.pc, from which pkg-config gets the arguments of compiler and linker. Its paths are absolute."""
    (into / "pmm3d.pc").write_text(PKG_CONFIG.format(libraries=libraries, headers=headers, version=version("pmm3d")))


def with_python(into: Path) -> None:
    """Build libpmm3d_python.so by cffi, linked with libpython of this Python by its absolute path."""
    if not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        raise SystemExit(
            f"embed/build.py: {sys.executable} has no shared libpython. Take the system's python3, with "
            "libpython3-dev, or build Python with --enable-shared"
        )
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise SystemExit(f"embed/build.py: {sys.executable} has no Python.h. On Debian: apt-get install libpython3-dev")
    try:
        from cffi import FFI
    except ImportError:
        raise SystemExit(f'embed/build.py: {sys.executable} has no cffi: pip install ".[embed]"') from None
    libraries = sysconfig.get_config_var("LIBDIR")
    ffi = FFI()
    ffi.embedding_api(OFFERED.replace('extern "Python" ', ""))
    ffi.set_source(
        "_pmm3d_embedded",
        (HERE / "start.c").read_text(),
        library_dirs=[libraries],
        extra_link_args=[f"-Wl,-rpath,{libraries}"],
    )
    ffi.embedding_init_code((HERE / "embedded.py").read_text())
    with tempfile.TemporaryDirectory() as folder:
        made = ffi.compile(tmpdir=folder, target="libpmm3d_python.*")
        shutil.move(made, into / "libpmm3d_python.so")


def compiled(mpicc: str, source: str, target: Path, *libraries: str) -> None:
    python = f'-DPMM3D_BUILT_WITH="{sys.executable}"'
    done = subprocess.run([mpicc, *FLAGS, python, str(HERE / source), "-o", str(target), *libraries])
    if done.returncode:
        raise SystemExit(
            f"embed: {mpicc} cannot compile {HERE / source}; what it says is above. It must be the C "
            "compiler of an MPI: make embed MPICC=/path/to/mpicc"
        )


if __name__ == "__main__":
    main()
