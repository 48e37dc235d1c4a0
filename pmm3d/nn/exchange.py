"""Networks to and from torch: state dicts in safetensors files.

Names are those that torch gives the same layers in an nn.Sequential ("0.weight", "2.bias"); weights of Linear are
transposed to torch's (outputs, inputs), vectors are 1D, and a LayerNorm's gain is called weight.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ..comm import Grid
from ..errors import CheckpointError
from ..io import Checkpoints, export_safetensors, import_safetensors
from ..io.checkpoint import Checkpoint
from ..io.disk import file_errors
from ..io.shards import CHECKPOINT_FILE
from ..product import DistMatrix
from ..text import names_in_words
from .masters import REMAINDER, is_state, state_name
from .module import Module
from .optimizer import Optimizer
from .stored import convert, fill

__all__ = ["export_torch", "import_torch", "load_weights"]

StrPath = str | os.PathLike[str]
ENDING = ".safetensors"


def export_torch(network: Module, path: StrPath, metadata: Mapping[str, str] | None = None) -> None:
    """Write the weights so that network.load_state_dict(safetensors.torch.load_file(path)) takes them in torch.

    metadata   of the file

    Collective; each rank receives and writes its share of the rows. Raises CheckpointError, on every rank.

        >>> import tempfile; from mpi4py import MPI; from pmm3d import nn
        >>> with Grid(MPI.COMM_SELF) as grid, tempfile.NamedTemporaryFile() as file:
        ...     export_torch(nn.Linear(grid, 3, 2), file.name)
    """
    matrices, vectors = _torch_tensors(network)
    export_safetensors(network.grid, path, matrices, transpose=matrices.keys() - vectors, vectors=vectors,
                       metadata=metadata)


def import_torch(network: Module, path: StrPath, optimizer: Optimizer | None = None) -> None:
    """Take the weights of a torch state dict saved with safetensors. Collective; each rank reads its shards only.

    optimizer   of the network: it keeps what weights of low precision lack of those in the file

    Raises CheckpointError, on every rank, with the names and shapes that do not fit.

        >>> import tempfile; from mpi4py import MPI; from pmm3d import nn
        >>> with Grid(MPI.COMM_SELF) as grid, tempfile.NamedTemporaryFile() as file:
        ...     net = nn.Linear(grid, 3, 2)
        ...     export_torch(net, file.name)
        ...     import_torch(net, file.name)
    """
    (matrices, vectors), remainders = _torch_tensors(network), _remainders(network, optimizer)
    wide = {torch_name(name): DistMatrix.empty(network.grid, weight.shape, dtype=remainders[name].dtype,
                                               layout=weight.layout, library=weight.library)
            for name, weight in network.matrices().items() if name in remainders}
    import_safetensors(network.grid, path, matrices | wide, transpose=matrices.keys() - vectors, vectors=vectors)
    for name, remainder in remainders.items():
        convert(matrices[torch_name(name)], remainder, [wide.pop(torch_name(name))])
    network.loaded()


def _torch_tensors(network: Module) -> tuple[dict[str, DistMatrix], set[str]]:
    """(values of the parameters by torch's names, names of those that are vectors)."""
    named = {torch_name(name): parameter for name, parameter in network.named_parameters().items()}
    vectors = {name for name, parameter in named.items() if parameter.is_vector}
    return {name: parameter.stored for name, parameter in named.items()}, vectors


def torch_name(name: str) -> str:
    """Torch's name of a parameter."""
    stem, _, last = name.rpartition(".")
    return f"{stem}.weight".lstrip(".") if last == "gain" else name


def _remainders(network: Module, optimizer: Optimizer | None) -> dict[str, DistMatrix]:
    """Name of a parameter -> its remainder, of those that have one."""
    named = network.named_parameters()
    kept = {} if optimizer is None else optimizer.matrices(named)
    return {name: kept[state_name(name, REMAINDER)] for name in named if state_name(name, REMAINDER) in kept}


def load_weights(network: Module, path: StrPath, optimizer: Optimizer | None = None) -> Path:
    """A warm start: fill the weights from a checkpoint's folder, from a run's (its newest good checkpoint), or from a
    .safetensors file, in torch's names. An optimizer's state that is there too is left out. Returns what was read.

    optimizer   of the network: it keeps what weights of low precision lack of those in the file; without it they begin
                rounded

    Weights of low precision become float32 with what their optimizer kept of them (the remainders), and the other way
    round. Collective, on any grid. Raises CheckpointError, on every rank, before anything is changed, if names, shapes
    or types are not those of the network. A network of one's own settles first (`Module.settle`).

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
    found, keeper = find_checkpoint(network.grid, path)
    fill_weights(network, found, keeper, optimizer)
    return found.path


def fill_weights(network: Module, found: Checkpoint, keeper: Checkpoints, optimizer: Optimizer | None = None) -> None:
    """As `load_weights` does."""
    matrices = network.matrices()
    with network.grid.collective_call("load_weights", str(found.path), always=True):
        if more := sorted({name for name in found.contents if not is_state(name)} - matrices.keys()):
            raise CheckpointError(f"{found.path} is the checkpoint of another network. It also has "
                                  f"{names_in_words(map(repr, more))}")
    remainders = {state_name(name, REMAINDER): each for name, each in _remainders(network, optimizer).items()}
    fill(keeper, found, matrices | remainders, partial=True)
    network.loaded()


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
