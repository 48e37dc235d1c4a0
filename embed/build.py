"""Build libpmm3d.so, libpmm3d_python.so, which it loads, and libpmm3d_scalapack.so, the drop-in for ScaLAPACK.

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
from collections.abc import Sequence
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
    # A program that calls p?potrf needs no symbol of the drop-in.
    "pmm3d_scalapack": (
        "drop-in for routines of ScaLAPACK: link it before ScaLAPACK",
        "-Wl,--push-state,--no-as-needed -lpmm3d_scalapack -Wl,--pop-state",
    ),
}
CMAKE = """# Targets: pmm3d::pmm3d, for C and C++; pmm3d::fortran, the same with the Fortran module, which is compiled
# with the program; pmm3d::scalapack, the drop-in, which is named before ScaLAPACK.
if(NOT TARGET pmm3d::pmm3d)
  add_library(pmm3d::pmm3d SHARED IMPORTED)
  set_target_properties(pmm3d::pmm3d PROPERTIES
    IMPORTED_LOCATION "{libraries}/libpmm3d.so"
    IMPORTED_SONAME "{soname}"
    INTERFACE_INCLUDE_DIRECTORIES "{headers}"
    INTERFACE_LINK_OPTIONS "LINKER:-rpath,{libraries}")
  add_library(pmm3d::fortran INTERFACE IMPORTED)
  set_target_properties(pmm3d::fortran PROPERTIES
    INTERFACE_SOURCES "{headers}/pmm3d.f90"
    INTERFACE_LINK_LIBRARIES pmm3d::pmm3d)
  add_library(pmm3d::scalapack INTERFACE IMPORTED)
  set_target_properties(pmm3d::scalapack PROPERTIES
    INTERFACE_LINK_LIBRARIES
    "-Wl,--push-state,--no-as-needed,{libraries}/libpmm3d_scalapack.so,--pop-state"
    INTERFACE_LINK_OPTIONS "LINKER:-rpath,{libraries}")
endif()
"""
CMAKE_VERSION = """# Versions with another {part} are not compatible.
set(PACKAGE_VERSION {version})
if(PACKAGE_FIND_VERSION VERSION_LESS_EQUAL PACKAGE_VERSION AND PACKAGE_FIND_VERSION VERSION_GREATER_EQUAL {compatible})
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
endif()
if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)
  set(PACKAGE_VERSION_EXACT TRUE)
endif()
"""
SOURCES = ["pmm3d.c", "routines.c", "routines_64.c"]
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
        folder = options.into.absolute()
        describe(folder, HERE, folder, folder / "cmake")
        return
    prefix = options.prefix.absolute()
    libraries, headers = prefix / "lib", prefix / "include"
    build(options.mpicc, libraries)
    for folder in (headers, packages := libraries / "pkgconfig"):
        folder.mkdir(exist_ok=True)
    for name in ("pmm3d.h", "pmm3d.f90"):
        shutil.copy2(HERE / name, headers / name)
    describe(libraries, headers, packages, libraries / "cmake" / "pmm3d")
    print(
        f"embed: installed in {prefix}. pkg-config finds it with PKG_CONFIG_PATH={packages}, "
        f"CMake with CMAKE_PREFIX_PATH={prefix}"
    )


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
        compiled(mpicc, SOURCES, made, "pmm3d", "-ldl")
        # Symbols of BLACS are those of the program's ScaLAPACK, undefined if a program without it is preloaded.
        linked = f"-L{made}", "-lpmm3d", "-ldl", "-Wl,-rpath,$ORIGIN,-z,lazy"
        compiled(mpicc, ["scalapack.c"], made, "pmm3d_scalapack", *linked)
        for old in into.glob("libpmm3d*.so*"):
            old.unlink()
        for path in made.iterdir():
            path.rename(into / path.name)


def describe(libraries: Path, headers: Path, for_pkg_config: Path, for_cmake: Path) -> None:
    """Write the files from which pkg-config and CMake get the arguments of compiler and linker. Their paths are
    absolute."""
    for name, (description, linked) in DESCRIBED.items():
        text = PKG_CONFIG.format(
            name=name,
            description=description,
            linked=linked,
            libraries=libraries,
            headers=headers,
            version=version("pmm3d"),
        )
        (for_pkg_config / f"{name}.pc").write_text(text)
    for_cmake.mkdir(parents=True, exist_ok=True)
    text = CMAKE.format(libraries=libraries, headers=headers, soname=f"libpmm3d.so.{compatible()}")
    (for_cmake / "pmm3dConfig.cmake").write_text(text)
    part = "first number" if "." not in compatible() else "first or second number"
    text = CMAKE_VERSION.format(version=version("pmm3d"), compatible=compatible(), part=part)
    (for_cmake / "pmm3dConfigVersion.cmake").write_text(text)


def compatible() -> str:
    """The numbers of the version that compatible versions have in common: X.Y, because Y rises if something breaks, and
    from 1.0.0 on X."""
    major, minor = version("pmm3d").split(".")[:2]
    return f"{major}.{minor}" if major == "0" else major


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


def compiled(mpicc: str, names: Sequence[str], into: Path, name: str, *libraries: str) -> None:
    """Compile a library, lib{name}.so.X.Y.Z, and links to it. Programs load the one with the `compatible` version."""
    target = into / f"lib{name}.so"
    whole, loaded = f"{target.name}.{version('pmm3d')}", f"{target.name}.{compatible()}"
    defined = f'-DPMM3D_BUILT_WITH="{sys.executable}"', f"-Wl,-soname,{loaded}"
    sources = [str(HERE / source) for source in names]
    done = subprocess.run([mpicc, *FLAGS, *defined, *sources, "-o", str(into / whole), *libraries])
    if done.returncode:
        raise SystemExit(
            f"embed: {mpicc} cannot compile {sources[0]}; what it says is above. It must be the C "
            "compiler of an MPI: make embed MPICC=/path/to/mpicc"
        )
    for link in (target, into / loaded):
        link.symlink_to(whole)


if __name__ == "__main__":
    main()
