"""Libraries and types of the tests of GEMMs."""

from contextlib import contextmanager

from pmm3d.arrays import Workspace, library_named
from pmm3d.arrays.torch_library import TorchLibrary
from pmm3d.layout import LOW_PRECISION, MATRIX_DTYPES


class AsOnDevice(TorchLibrary):
    """torch's code for devices, on host memory."""

    on_host = False


TORCH_DEVICE = AsOnDevice("cpu")
FACES = ["numpy", "torch", "standin", TORCH_DEVICE]
CASES = [
    (library, dtype)
    for library in FACES
    for dtype in MATRIX_DTYPES
    if dtype != "bfloat16" or library in ("torch", TORCH_DEVICE)
]
LOW = [case for case in CASES if case[1] in LOW_PRECISION and case[0] is not TORCH_DEVICE]
NOT_HALF = [case for case in CASES if case[1] != "float16"]
SCALES = [(1, 0), (1, 1), (2, -1), (0, 3), (-1, 0), (3, 2)]


class NewArrays:
    """In place of a Workspace: new arrays."""

    @contextmanager
    def borrow(self, shape, dtype, library):
        yield library.empty(shape, dtype)


def with_work(library):
    """The library, and a workspace. On a device a GEMM needs none, if the types are equal or C is float32."""
    face = library_named(library)
    return face, Workspace() if face.on_host else None
