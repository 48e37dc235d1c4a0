"""Networks to and from torch: state dicts in safetensors files.

Names are those that torch gives the same layers in an nn.Sequential ("0.weight", "2.bias"); weights of Linear are
transposed to torch's (outputs, inputs), vectors are 1D, and a LayerNorm's gain is called weight.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ..comm import Grid
from ..errors import CheckpointError, Pmm3dError
from ..io import Checkpoints, export_safetensors, import_safetensors
from ..io.checkpoint import Checkpoint, Partial
from ..io.disk import file_errors
from ..io.shards import CHECKPOINT_FILE
from ..layout import LOW_PRECISION
from ..product import DistMatrix
from .module import Module
from .optimizer import STATE, Optimizer, is_state

__all__ = ["export_torch", "import_torch", "load_weights"]

StrPath = str | os.PathLike[str]
ENDING = ".safetensors"


def export_torch(network: Module, path: StrPath, metadata: Mapping[str, str] | None = None) -> None:
    """Write the weights so that network.load_state_dict(safetensors.torch.load_file(path)) takes them in torch.

    Of weights of low precision the master weights are written, if an optimizer made them.

    metadata   of the file

    Collective; each rank receives and writes its share of the rows. Raises CheckpointError, on every rank.

        >>> import tempfile; from mpi4py import MPI; from pmm3d import nn
        >>> with Grid(MPI.COMM_SELF) as grid, tempfile.NamedTemporaryFile() as file:
        ...     export_torch(nn.Linear(grid, 3, 2), file.name)
    """
    matrices, vectors = _torch_tensors(network)
    export_safetensors(network.whole, path, matrices, transpose=matrices.keys() - vectors, vectors=vectors,
                       metadata=metadata)


def import_torch(network: Module, path: StrPath, optimizer: Optimizer | None = None) -> None:
    """Take the weights of a torch state dict saved with safetensors. Collective; each rank reads its shards only.

    optimizer   of the network: its master weights of low precision become those of the file; without it, or before it
                made master weights, the weights are rounded

    Raises CheckpointError, on every rank, with the names and shapes that do not fit.

        >>> import tempfile; from mpi4py import MPI; from pmm3d import nn
        >>> with Grid(MPI.COMM_SELF) as grid, tempfile.NamedTemporaryFile() as file:
        ...     net = nn.Linear(grid, 3, 2)
        ...     export_torch(net, file.name)
        ...     import_torch(net, file.name)
    """
    _make_masters(network, optimizer)
    matrices, vectors = _torch_tensors(network)
    import_safetensors(network.whole, path, matrices, transpose=matrices.keys() - vectors, vectors=vectors)
    network.loaded()


def _make_masters(network: Module, optimizer: Optimizer | None) -> None:
    if optimizer is not None:
        optimizer.matrices(network.named_parameters())


def _torch_tensors(network: Module) -> tuple[dict[str, DistMatrix], set[str]]:
    """(what a checkpoint holds of the parameters by torch's names, names of those that are vectors)."""
    named = {torch_name(name): parameter for name, parameter in network.named_parameters().items()}
    vectors = {name for name, parameter in named.items() if parameter.is_vector}
    return {name: parameter.in_checkpoint for name, parameter in named.items()}, vectors


def torch_name(name: str) -> str:
    """Torch's name of a parameter."""
    stem, _, last = name.rpartition(".")
    return f"{stem}.weight".lstrip(".") if last == "gain" else name


def load_weights(network: Module, path: StrPath, optimizer: Optimizer | None = None) -> Path:
    """A warm start: fill the weights from a checkpoint's folder, from a run's (its newest good checkpoint), or from a
    .safetensors file, in torch's names. An optimizer's state that is there too is left out. Returns what was read.

    optimizer   as in `import_torch`

    A checkpoint holds the float32 master weights of a run in low precision, so a network of any precision takes them.
    Collective, on any grid. Raises CheckpointError, on every rank, before anything is changed, if names, shapes or
    types are not those of the network. A network of one's own settles first (`Module.settle`).

        >>> import tempfile; from mpi4py import MPI; from pmm3d import nn
        >>> with tempfile.TemporaryDirectory() as folder, Grid(MPI.COMM_SELF) as grid:
        ...     net = nn.Linear(grid, 3, 2)
        ...     _ = Checkpoints(grid, folder).save(5, net.matrices())
        ...     load_weights(net, folder).name
        'step-00000005'
    """
    path = Path(path)
    if path.suffix == ENDING:
        import_torch(network, path, optimizer)
        return path
    found, keeper = find_checkpoint(network.whole, path)
    fill_weights(network, found, keeper, optimizer)
    return found.path


def fill_weights(network: Module, found: Checkpoint, keeper: Checkpoints, optimizer: Optimizer | None = None) -> None:
    """As `load_weights` does."""
    _make_masters(network, optimizer)
    fill(keeper, found, network.matrices(), partial=is_state)
    network.loaded()


def fill(keeper: Checkpoints, found: Checkpoint, matrices: Mapping[str, DistMatrix], *,
         check: Callable[[Any], None] | None = None, partial: Partial = False) -> Any:
    """Fill the matrices of a network, or of a training, from a checkpoint. Return the checkpoint's meta. Collective.

    check, partial: as in `Checkpoints.fill`. Weights of low precision are converted from and to other types. A weight
    without a state in the checkpoint, because it was frozen, begins with a state of zeros. Raises CheckpointError, on
    every rank, for matrices that do not fit.
    """
    path, stored = str(found.path), {name: dtype for name, (_, dtype) in found.contents.items()}
    with keeper.grid.collective_call("load: types", path, always=True):
        _refuse_remainders(path, stored)
        zeros = _without_state(stored, matrices)
        sources = {name: _like(matrix, stored[name]) for name, matrix in matrices.items()
                   if name in stored and _converts(stored[name], matrix.dtype)}
    meta = keeper.fill(found, {name: sources.get(name, matrix) for name, matrix in matrices.items()
                               if name not in zeros}, check=check, partial=partial)
    with keeper.grid.collective_call("load: converting", path, always=True):
        while sources:
            name, source = sources.popitem()
            library, array = matrices[name].library, source.local
            matrices[name].local[...] = array if library == source.library else library.from_numpy(
                source.library.to_numpy(array), matrices[name].dtype)
        for name in zeros:
            matrices[name].local[...] = 0
    return meta


def _refuse_remainders(path: str, stored: Collection[str]) -> None:
    """Raises CheckpointError for a checkpoint of before there were master weights."""
    if any(is_state(name) and name.endswith("/remainder") for name in stored):
        raise CheckpointError(f"{path} holds weights of low precision with remainders, as pmm3d wrote them "
                              "before it had master weights: pmm3d export of that version writes a .safetensors file "
                              "with all digits, from which a run begins (training.weights)")


def _without_state(stored: Collection[str], matrices: Mapping[str, DistMatrix]) -> set[str]:
    """Names of the state arrays of weights of which the checkpoint has no state."""
    has_state = {name.rpartition("/")[0] for name in stored if is_state(name)}
    weights = {name: name.rpartition("/")[0] for name in matrices if is_state(name)}
    return {name for name, weight in weights.items()
            if weight not in has_state and weight.removeprefix(STATE) in stored}


def _converts(stored: str, dtype: str) -> bool:
    """Whether a weight is converted: from or to low precision."""
    return stored != dtype and (stored in LOW_PRECISION or dtype in LOW_PRECISION)


def _like(matrix: DistMatrix, dtype: str) -> DistMatrix:
    """A new matrix of another type; of bfloat16 in torch's library. Raises CheckpointError if torch is missing."""
    try:
        torch = dtype == "bfloat16" and matrix.library.name != "torch"
        library = matrix.grid.library("torch") if torch else matrix.library
    except Pmm3dError as error:
        raise CheckpointError(f"the checkpoint's weights are of bfloat16, which torch reads: {error}") from None
    return DistMatrix(matrix.grid, library.empty(matrix.box.shape, dtype), matrix.shape, matrix.layout)


def find_checkpoint(grid: Grid, path: Path) -> tuple[Checkpoint, Checkpoints]:
    """An undamaged checkpoint: that of this folder, or the newest of a run's folder, or of a folder of checkpoints.
    Collective. Raises CheckpointError, on every rank, if there is none."""
    with grid.collective_call("checkpoint", str(path), always=True), file_errors(path, "looked at"):
        place = _place_of(path) if grid.rank == 0 else None
    folder, is_one = grid.comm.bcast(place)
    keeper = Checkpoints(grid, folder)
    found = keeper.undamaged(path) if is_one else keeper.newest_undamaged()
    with grid.collective_call("checkpoint", str(path), always=True):
        if found is None:
            raise CheckpointError(f"there is no checkpoint in {path}: name a checkpoint's folder, or a run's whose "
                                  "checkpoints/ has one")
    return found, keeper


def _place_of(path: Path) -> tuple[Path, bool]:
    """(the folder of checkpoints, whether the path is itself a checkpoint), as the file system has it."""
    folder = path / "checkpoints"
    return folder if folder.is_dir() else path, os.path.lexists(path / CHECKPOINT_FILE)
