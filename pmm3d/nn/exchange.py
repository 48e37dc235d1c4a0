"""Networks to and from torch: state dicts in safetensors files.

Names are those that torch gives the same layers in an nn.Sequential ("0.weight", "2.bias"); weights of Linear are
transposed to torch's (outputs, inputs), vectors are 1D, and a LayerNorm's gain is called weight.
"""

from __future__ import annotations

from pathlib import Path

from ..comm import Grid
from ..io import Checkpoints, export_safetensors, import_safetensors
from ..layout import Layout
from ..product import DistMatrix
from .layers import Module


def export_torch(network: Module, path) -> None:
    """Write the weights so that network.load_state_dict(safetensors.torch.load_file(path)) takes them in torch.

    Collective; each rank receives and writes its share of the rows. Raises CheckpointError, on every rank.
    """
    matrices, transpose, vectors = _named(network)
    export_safetensors(network.grid, path, matrices, transpose=transpose, vectors=vectors)


def import_torch(network: Module, path) -> None:
    """Take the weights of a torch state dict saved with safetensors. Collective; each rank reads its blocks only.

    Raises CheckpointError, on every rank, with the names and shapes that do not fit.
    """
    matrices, transpose, vectors = _named(network)
    import_safetensors(network.grid, path, matrices, transpose=transpose, vectors=vectors)
    network.loaded()


def _named(network: Module) -> tuple[dict, set[str], set[str]]:
    """(matrices by torch's names, names of those to transpose, names of vectors)."""
    found = {torch_name(name): parameter for name, parameter in network.named_parameters().items()}
    vectors = {name for name, parameter in found.items() if parameter.is_vector}
    return {name: parameter.value for name, parameter in found.items()}, set(found) - vectors, vectors


def torch_name(name: str) -> str:
    stem, _, last = name.rpartition(".")
    return f"{stem}.weight".lstrip(".") if last == "gain" else name


def export_checkpoint(comm, checkpoint: Path, target: Path) -> None:
    """Write the weights of a checkpoint, or of a run's newest one, as `export_torch` does. Collective over comm.

    Each rank holds its share of the rows. Raises CheckpointError, on every rank.
    """
    with Grid(comm, "fsdp") as grid:
        _export(grid, checkpoint, target)


def _export(grid, checkpoint: Path, target: Path) -> None:
    run = next((folder for folder in (checkpoint / "checkpoints", checkpoint) if folder.is_dir()), checkpoint)
    keeper = Checkpoints(grid, run)
    path = keeper.latest() or checkpoint
    matrices = {
        name: DistMatrix.empty(grid, shape, dtype=dtype, layout=Layout("z"))
        for name, (shape, dtype) in keeper.contents(path).items()
    }
    keeper.load(path, matrices)
    weights = {torch_name(name): matrix for name, matrix in matrices.items() if not name.startswith("optimizer/")}
    vectors = {name for name, matrix in weights.items() if not name.endswith("weight") or matrix.shape[0] == 1}
    export_safetensors(grid, target, weights, transpose=set(weights) - vectors, vectors=vectors)
