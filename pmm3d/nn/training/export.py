"""Export of a run's checkpoint as a torch state dict."""

from __future__ import annotations

import json
from pathlib import Path

from mpi4py import MPI

from ...comm import Grid
from ...errors import CheckpointError
from ...io import Checkpoints, export_safetensors
from ...io.checkpoint import Checkpoint
from ...io.disk import check_replaceable
from ...layout import Layout
from ...product import DistMatrix
from ..exchange import ENDING, OWN, TORCH, export_torch, torch_name
from ..facts import FACTS, facts_in
from ..from_checkpoint import fill, fill_weights, find_checkpoint
from ..optimizer_state import is_state
from .network import network_of
from .samples import SAMPLES, Recalled, recalled


def check_target(target: Path, overwrite: bool) -> None:
    """Raises CheckpointError unless the target is a .safetensors file that may be written."""
    if target.suffix != ENDING:
        raise CheckpointError(f"cannot export to {target}: the name of the file must end in {ENDING}")
    check_replaceable(target, overwrite)


def export_checkpoint(comm: MPI.Intracomm, checkpoint: Path, target: Path, names: str | None = None) -> Path:
    """Write the weights of a checkpoint, or of a run's newest undamaged one, as `export_torch` does, and return the
    checkpoint. Collective over comm. Raises CheckpointError, on every rank."""
    with Grid(comm, "fsdp") as grid:
        found, keeper = find_checkpoint(grid, checkpoint)
        try:
            known: Recalled | None = recalled(found)
        except CheckpointError:
            known = None
        of_torch = known is None or known.config.network.build  # a file of network.build may be missing now
        with grid.collective_call("export", names, always=True):
            if of_torch and names not in (None, TORCH):
                raise CheckpointError(
                    f"{found.path} does not determine its network, so the export cannot use the "
                    f"names {names!r}. Make the network in a program, load it with "
                    "nn.exchange.load_weights, and call its export"
                )
        if known is None or of_torch:
            _export_matrices(grid, keeper, found, target)
        else:
            _export_network(grid, keeper, found, known, target, names)
        return found.path


def _export_network(
    grid: Grid, keeper: Checkpoints, found: Checkpoint, known: Recalled, target: Path, names: str | None
) -> None:
    """Export the parameters of the network, which distinguishes vectors from matrices."""
    section = known.config.network.model_copy(update={"library": "numpy"})
    config = known.config.model_copy(update={"network": section})
    made = network_of(config, grid, known.samples)
    fill_weights(made, found, keeper)
    said = {"network": config.settings()["network"], SAMPLES: known.samples.model_dump(), FACTS: known.facts}
    export_torch(made, target, {OWN: json.dumps(said)}, names=names)


def _export_matrices(grid: Grid, keeper: Checkpoints, found: Checkpoint, target: Path) -> None:
    """Export the matrices of the checkpoint, whose manifest distinguishes vectors from matrices."""
    entries = {name: entry for name, entry in found.manifest["matrices"].items() if not is_state(name)}
    library = "torch" if "bfloat16" in {entry["dtype"] for entry in entries.values()} else "numpy"
    matrices = {
        name: DistMatrix.empty(grid, tuple(entry["shape"]), dtype=entry["dtype"], layout=Layout("z"), library=library)
        for name, entry in entries.items()
    }
    vectors = {torch_name(name) for name, entry in entries.items() if entry.get("vector")}
    fill(keeper, found, matrices, partial=True)
    weights = {torch_name(name): matrix for name, matrix in matrices.items()}
    export_safetensors(
        grid,
        target,
        weights,
        transpose=weights.keys() - vectors,
        vectors=vectors,
        metadata={OWN: json.dumps({FACTS: facts_in(found.meta)})},
    )
