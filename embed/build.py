"""Build libpmm3d.so, libpmm3d_python.so, which it loads, and libpmm3d_scalapack.so, the drop-in for p?gemm.

    python embed/build.py [--into build/embed] [--mpicc mpicc]
    python embed/build.py --prefix PREFIX [--mpicc mpicc]

The library starts the Python that runs this program, unless PMM3D_PYTHON contains the path of another one of the same
version. This Python needs cffi (pip install ".[embed]") and libpython as a shared library. --prefix builds the
libraries in PREFIX/lib, and copies the header and the Fortran module to PREFIX/include.
"""

from __future__ import annotations

import argparse
import ast
import json
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
PKG_CONFIG = """libdir={libraries}
includedir={headers}

Name: {name}
Description: {description}
Version: {version}
Cflags: -I${{includedir}}
Libs: -L${{libdir}} {linked} -Wl,-rpath,${{libdir}}
"""
DESCRIBED = {
    "pmm3d": ("distributed matrix products from C, C++ and Fortran", "-lpmm3d"),
    # A program that calls p?gemm only inside ScaLAPACK needs no symbol of the drop-in.
    "pmm3d_scalapack": (
        "drop-in for ScaLAPACK's p?gemm: link it before ScaLAPACK",
        "-Wl,--push-state,--no-as-needed -lpmm3d_scalapack -Wl,--pop-state",
    ),
}
FLAGS = ["-std=c11", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--into", type=Path, default=HERE.parent / "build" / "embed", help="folder of the libraries")
    parser.add_argument("--mpicc", default="mpicc", help="the C compiler of the callers' MPI")
    parser.add_argument("--check", action="store_true", help="only look whether the C compiler is there")
    parser.add_argument("--prefix", type=Path, help="build into PREFIX/lib, and copy headers to PREFIX/include")
    options = parser.parse_args()
    note = check_compiler(options.mpicc)
    if options.check:
        return
    if note:
        print(note, file=sys.stderr)
    if not options.prefix:
        build(options.mpicc, options.into)
        describe(options.into.absolute(), HERE, options.into)
        return
    prefix = options.prefix.absolute()
    libraries, headers = prefix / "lib", prefix / "include"
    build(options.mpicc, libraries)
    for folder in (headers, libraries / "pkgconfig"):
        folder.mkdir(exist_ok=True)
    for name in ("pmm3d.h", "pmm3d.f90"):
        shutil.copy2(HERE / name, headers / name)
    describe(libraries, headers, libraries / "pkgconfig")
    print(f"embed: installed in {prefix}. pkg-config finds it with PKG_CONFIG_PATH={libraries}/pkgconfig")


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


def build(mpicc: str, into: Path) -> None:
    """Build all libraries, then replace those in the folder. Those of another version are removed: all start the same
    Python."""
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into) as folder:
        made = Path(folder)
        with_python(made)
        compiled(mpicc, "pmm3d.c", made, "pmm3d", "-ldl")
        # Symbols of BLACS are those of the program's ScaLAPACK, undefined if a program without it is preloaded.
        linked = f"-L{made}", "-lpmm3d", "-ldl", "-Wl,-rpath,$ORIGIN,-z,lazy"
        compiled(mpicc, "scalapack.c", made, "pmm3d_scalapack", *linked)
        for old in into.glob("libpmm3d*.so*"):
            old.unlink()
        for path in made.iterdir():
            path.rename(into / path.name)


def describe(libraries: Path, headers: Path, into: Path) -> None:
    """Write the files from which pkg-config gets the arguments of compiler and linker. Their paths are absolute."""
    for name, (description, linked) in DESCRIBED.items():
        text = PKG_CONFIG.format(
            name=name,
            description=description,
            linked=linked,
            libraries=libraries,
            headers=headers,
            version=version("pmm3d"),
        )
        (into / f"{name}.pc").write_text(text)


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
    embedded = (HERE / "embedded.py").read_text()
    [lacking] = (
        ast.literal_eval(line.value)
        for line in ast.parse(embedded).body
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "LACKING"
    )
    ffi.set_source(
        "_pmm3d_embedded",
        f"#define LACKING {json.dumps(lacking)}\n" + (HERE / "start.c").read_text(),
        library_dirs=[libraries],
        extra_link_args=[f"-Wl,-rpath,{libraries}"],
    )
    ffi.embedding_init_code(embedded)
    with tempfile.TemporaryDirectory() as folder:
        made = ffi.compile(tmpdir=folder, target="libpmm3d_python.*")
        shutil.move(made, into / "libpmm3d_python.so")


def compiled(mpicc: str, source: str, into: Path, name: str, *libraries: str) -> None:
    """Compile a library, lib{name}.so.X.Y.Z, and links to it. Programs load lib{name}.so.X.Y, because Y rises if
    something breaks, and from 1.0.0 on lib{name}.so.X."""
    target, major, minor = into / f"lib{name}.so", *version("pmm3d").split(".")[:2]
    whole, loaded = f"{target.name}.{version('pmm3d')}", f"{target.name}.{major}{f'.{minor}' * (major == '0')}"
    defined = f'-DPMM3D_BUILT_WITH="{sys.executable}"', f"-Wl,-soname,{loaded}"
    done = subprocess.run([mpicc, *FLAGS, *defined, str(HERE / source), "-o", str(into / whole), *libraries])
    if done.returncode:
        raise SystemExit(
            f"embed: {mpicc} cannot compile {HERE / source}; what it says is above. It must be the C "
            "compiler of an MPI: make embed MPICC=/path/to/mpicc"
        )
    for link in (target, into / loaded):
        link.symlink_to(whole)


if __name__ == "__main__":
    main()
