"""The errors of pmm3d. Each is raised on every rank of the grid, with the same text, unless it says otherwise."""


class Pmm3dError(Exception):
    """Base of all errors of the library.

    everywhere   True once the ranks of a grid have agreed to raise this error together; `Grid.__exit__` then lets it
                 through instead of ending the job.
    """

    everywhere = False


class GridError(Pmm3dError):
    """The process grid does not fit the communicator, or grids do not belong together."""


class LauncherError(GridError):
    """There is no usable mpiexec, or it belongs to another MPI: it started N separate worlds of one rank."""


class LayoutError(Pmm3dError, ValueError):
    """A layout, a shape or a memory order that the operation cannot take."""


class DTypeError(Pmm3dError, TypeError):
    """An element type that the operation or the array library cannot take, or operands of different types."""


class MemoryLimitError(Pmm3dError, MemoryError):
    """The product cannot be done within `max_workspace` bytes."""


class OutOfMemoryError(Pmm3dError, MemoryError):
    """Memory could not be had. The text says what was asked for, what is held, and what the plans had predicted."""


class DataError(Pmm3dError):
    """A file of samples, or what it holds, that cannot be used."""


class CheckpointError(Pmm3dError):
    """A checkpoint, or a file of tensors, that cannot be written, cannot be read, or is of another network."""


class DisagreementError(Pmm3dError):
    """The ranks passed different arguments to one collective call. The text lists who passed what."""
