"""Networks to and from torch: state dicts in safetensors files.

Names are those that torch gives the same layers in an nn.Sequential ("0.weight", "2.bias"); weights of Linear are
transposed to torch's (outputs, inputs), vectors are 1D, and a LayerNorm's gain is called weight.
"""

from __future__ import annotations

import os
from pathlib import Path

from mpi4py import MPI

from ..comm import Grid
from ..io import Checkpoints, export_safetensors, import_safetensors
from ..layout import Layout
from ..product import DistMatrix
from .module import Module

__all__ = ["export_torch", "import_torch"]

StrPath = str | os.PathLike[str]


def export_torch(network: Module, path: StrPath) -> None:
    """Write the weights so that network.load_state_dict(safetensors.torch.load_file(path)) takes them in torch.

    Collective; each rank receives and writes its share of the rows. Raises CheckpointError, on every rank.

        >>> import tempfile; from pmm3d import nn
        >>> with Grid(MPI.COMM_SELF) as grid, tempfile.NamedTemporaryFile() as file:
        ...     export_torch(nn.Linear(grid, 3, 2), file.name)
    """
    matrices, vectors = _torch_tensors(network)
    export_safetensors(network.grid, path, matrices, transpose=matrices.keys() - vectors, vectors=vectors)


def import_torch(network: Module, path: StrPath) -> None:
    """Take the weights of a torch state dict saved with safetensors. Collective; each rank reads its shards only.

    Raises CheckpointError, on every rank, with the names and shapes that do not fit.

        >>> import tempfile; from pmm3d import nn
        >>> with Grid(MPI.COMM_SELF) as grid, tempfile.NamedTemporaryFile() as file:
        ...     net = nn.Linear(grid, 3, 2)
        ...     export_torch(net, file.name)
        ...     import_torch(net, file.name)
    """
    matrices, vectors = _torch_tensors(network)
    import_safetensors(network.grid, path, matrices, transpose=matrices.keys() - vectors, vectors=vectors)
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


def export_checkpoint(comm: MPI.Intracomm, checkpoint: Path, target: Path) -> None:
    """Write the weights of a checkpoint, or of a run's newest one, as `export_torch` does. Collective over comm.

    Each rank holds its share of the rows. Raises CheckpointError, on every rank.
    """
    with Grid(comm, "fsdp") as grid:
        run = next((folder for folder in (checkpoint / "checkpoints", checkpoint) if folder.is_dir()), checkpoint)
        keeper = Checkpoints(grid, run)
        path = keeper.latest() or checkpoint
        matrices = {name: DistMatrix.empty(grid, shape, dtype=dtype, layout=Layout("z"))
                    for name, (shape, dtype) in keeper.contents(path).items()}
        keeper.load(path, matrices)
        weights = {torch_name(name): matrix for name, matrix in matrices.items() if not name.startswith("optimizer/")}
        vectors = {name for name, matrix in weights.items() if not name.endswith("weight") or matrix.shape[0] == 1}
        export_safetensors(grid, target, weights, transpose=weights.keys() - vectors, vectors=vectors)
