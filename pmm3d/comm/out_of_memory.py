"""Memory that could not be had: what was asked for, what is held, what the plans had predicted."""

from __future__ import annotations

from ..arrays import Workspace
from ..errors import MemoryLimitError, OutOfMemoryError
from ..model.machine import available_memory, resident_memory
from .ledger import Ledger
from .words import in_bytes

TORCHS_WORDS = ("OutOfMemoryError", "can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def as_out_of_memory(error: BaseException, rank: int, host: str, ledger: Ledger, workspace: Workspace) -> BaseException:
    """An OutOfMemoryError in place of numpy's, cupy's or torch's; any other error as it is."""
    if not is_out_of_memory(error):
        return error
    held_bytes = resident_memory()
    held = f"This process holds {in_bytes(held_bytes)}, {in_bytes(workspace.allocated)} of it in work arrays"
    free = f"the node has {in_bytes(available_memory())} left{_of_device(error)}"
    predicted = "; ".join(f"{what} {in_bytes(nbytes)}" for what, nbytes in ledger.predicted.items())
    found = OutOfMemoryError(f"rank {rank} (host {host}) is out of memory: {error or 'the allocation failed'}. {held}; "
                             f"{free}. Predicted for a rank: "
                             f"{predicted or 'nothing, since no product or network was planned'}. Use more ranks or "
                             "nodes, another grid, matmul(max_workspace=), fewer rows a batch, or recompute; ulimit "
                             "and the batch system (--mem) may set limits too")
    found.__cause__, found.held = error, int(held_bytes)
    return found


def _of_device(error: BaseException) -> str:
    """What is held and left there; empty if the host ran out."""
    from ..arrays.devices import device_memory, device_of, library_of_error

    if (library := library_of_error(error)) is None:
        return ""
    try:
        memory, device = device_memory(library), device_of(library)
    except Exception as error:
        return f", the device does not say ({type(error).__name__})"
    if memory is None or device is None:
        return ""
    return (f", device {device.number} ({device.name}) {in_bytes(memory.free)} of {in_bytes(memory.total)}, and "
            f"{library.name}'s pool holds {in_bytes(memory.held)} there")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether numpy, cupy or torch could not have some memory."""
    if isinstance(error, MemoryError):
        return not isinstance(error, (MemoryLimitError, OutOfMemoryError))
    return isinstance(error, RuntimeError) and any(mark in f"{type(error).__name__}: {error}" for mark in TORCHS_WORDS)
