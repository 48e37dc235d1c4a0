"""Code that runs when Python is started in a caller's process. cffi embeds this file in libpmm3d_python.so."""

import os
import sys
import traceback

from _pmm3d_embedded import ffi

ERROR_MPI, ERROR_PYTHON, ERROR_OTHER = 4, 5, 8
OTHER_MPI = (
    "Python has another MPI than this process, {}: {}. mpi4py must use the caller's MPI: leave MPI4PY_MPIABI "
    "and MPI4PY_LIBMPI unset, and let PMM3D_PYTHON name an environment whose mpi4py was built for it, without "
    "an MPI of its own"
)
LACKING = (  # also for start.c
    "the Python of %s lacks a package: %s. Install the library again: make embed or make install, or name another "
    "Python in PMM3D_PYTHON"
)


class Refused(Exception):
    """An error with (code, text)."""


class Embedded:
    """Calls of methods of the Host by name. The first call makes the Host."""

    host = None

    def call(self, name, arguments):
        """Return (code, whether all ranks have it, text, results)."""
        if name == "load":
            return self.load(*arguments)
        return self.host.call(name, arguments)

    def load(self, version, library, world):
        version, library = (ffi.string(ffi.cast("char *", text)).decode() for text in (version, library))
        chosen = os.environ.get("MPI4PY_LIBMPI")
        os.environ.setdefault("MPI4PY_LIBMPI", library)  # it need not be global in the process, nor that of a wheel
        try:
            check_mpi(version, world)
            from pmm3d.embedding.host import Host
        except ImportError as error:
            raise Refused(ERROR_PYTHON, LACKING % (sys.executable, error)) from error
        finally:
            if chosen is None:
                del os.environ["MPI4PY_LIBMPI"]
        self.host = Host()
        return 0, False, "", ()


def check_mpi(version, world):
    """Raise Refused if mpi4py has another MPI than this process."""
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("mpi4py"):
            raise
        raise Refused(ERROR_MPI, OTHER_MPI.format(in_short(version), error)) from error
    theirs = MPI.Get_library_version().rstrip("\0")
    if not MPI.Is_initialized() or theirs != version or MPI.COMM_WORLD.py2f() != world:
        raise Refused(ERROR_MPI, OTHER_MPI.format(in_short(version), in_short(theirs)))


def in_short(version):
    return version.partition(",")[0].partition("\n")[0]


embedded = Embedded()


@ffi.def_extern()
def pmm3d_python_call(name, arguments, count, results, code, everywhere, text, size):
    try:
        code[0], everywhere[0], said, found = embedded.call(ffi.string(name).decode(), ffi.unpack(arguments, count))
        results[0 : len(found)] = found
    except Refused as refused:
        code[0], said = refused.args
    except BaseException:
        code[0], said = ERROR_OTHER, traceback.format_exc()
    if said:
        encoded = said.encode(errors="replace")[: size - 1]
        ffi.memmove(text, encoded + b"\0", len(encoded) + 1)
    return 1
