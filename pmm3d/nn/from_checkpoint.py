"""Weights and states from checkpoints of any precision. Frozen weights may lack a state."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ..comm import Grid
from ..errors import CheckpointError, Pmm3dError
from ..io import Checkpoints
from ..io.checkpoint import Checkpoint, Partial
from ..io.disk import file_errors
from ..io.shards import CHECKPOINT_FILE
from ..layout import LOW_PRECISION
from ..product import DistMatrix
from .facts import STATES, Facts, compare, facts_in, facts_of
from .module import Module
from .optimizer import Optimizer
from .optimizer_state import STATE, is_average, is_state, names_of_weights


def fill_weights(
    network: Module,
    checkpoint: Checkpoint,
    keeper: Checkpoints,
    optimizer: Optimizer | None = None,
    *,
    accept: Collection[str] = (),
    facts: Mapping[str, Any] | None = None,
    ema: bool = True,
) -> bool:
    """Set the weights from a checkpoint, and return whether they are averages. Collective. accept, facts, ema: as in
    `load_weights`."""
    _refuse_several(network.parent_grid, checkpoint)
    prepare(network, checkpoint.path, facts_in(checkpoint.meta), optimizer, accept, facts)
    stored = checkpoint.contents
    names = names_of_weights(stored, ema)
    make_master_weights(network, {name: stored[weights][1] for name, weights in names.items()})
    matrices = {names.get(name, name): matrix for name, matrix in network.matrices().items()}
    fill(keeper, checkpoint, matrices, partial=lambda name: name not in names.values())
    network.loaded()
    return any(map(is_average, names.values()))


def _refuse_several(grid: Grid, checkpoint: Checkpoint) -> None:
    with grid.collective_call("load"):
        if isinstance(checkpoint.meta, dict) and (names := [*checkpoint.meta.get(STATES, {})]):
            raise CheckpointError(
                f"{checkpoint.path} contains several networks: {', '.join(names)}. Load one of them with "
                f'Checkpoints.load: checkpoints.load(path, {{"{names[0]}." + name: each for name, each in '
                "network.matrices().items()}, partial=True), then network.loaded()"
            )


def prepare(
    network: Module,
    path: str | os.PathLike[str],
    stored: Facts,
    optimizer: Optimizer | None,
    accept: Collection[str],
    facts: Mapping[str, Any] | None,
) -> None:
    """Compare the facts in a file with those of a network. Make the master weights of an optimizer, so that they are
    filled too. Collective. accept, facts: as in `load_weights`."""
    parent, named = network.parent_grid, network.named_parameters()
    with parent.collective_call("load", str(path), sorted(accept), always=True):
        if optimizer is not None and not {*named.values()} & {*optimizer.parameters}:
            raise Pmm3dError(
                "the optimizer changes no parameter of the network, so its master weights would not "
                "be set: pass an optimizer that was made with network.parameters()"
            )
        compare(stored, {**facts_of(network), **(facts or {})}, accept, str(path), rank=parent.rank)
    if optimizer is not None:
        optimizer.matrices(named)


def make_master_weights(network: Module, stored: Mapping[str, str]) -> None:
    """Make the master weights that keep the digits of stored values. stored: type of each parameter's values."""
    for name, parameter in network.named_parameters().items():
        if name in stored:
            parameter._to_fill(stored[name])


def fill(
    keeper: Checkpoints,
    checkpoint: Checkpoint,
    matrices: Mapping[str, DistMatrix],
    *,
    check: Callable[[Any], None] | None = None,
    partial: Partial = False,
) -> Any:
    """Fill matrices from a checkpoint and return its meta. Collective. check, partial: as in `Checkpoints.fill`.

    16-bit weights are converted. A weight without a state in the checkpoint, because it was frozen, gets a state of
    zeros. Raises CheckpointError, on every rank, for matrices that do not fit.
    """
    path, stored = str(checkpoint.path), {name: dtype for name, (_, dtype) in checkpoint.contents.items()}
    with keeper.grid.collective_call("load: types", path, always=True):
        _refuse_remainders(path, stored)
        zeros = _without_state(stored, matrices)
        sources = {
            name: _like(matrix, stored[name])
            for name, matrix in matrices.items()
            if name in stored and _converts(stored[name], matrix.dtype)
        }
    meta = keeper.fill(
        checkpoint,
        {name: sources.get(name, matrix) for name, matrix in matrices.items() if name not in zeros},
        check=check,
        partial=partial,
    )
    with keeper.grid.collective_call("load: converting", path, always=True):
        while sources:
            name, source = sources.popitem()
            library, array = matrices[name].library, source.local
            matrices[name].local[...] = (
                array
                if library == source.library
                else library.from_numpy(source.library.to_numpy(array), matrices[name].dtype)
            )
        for name in zeros:
            matrices[name].local[...] = 0
    return meta


def _refuse_remainders(path: str, stored: Collection[str]) -> None:
    """Raise CheckpointError for a checkpoint that was written before there were master weights."""
    if any(is_state(name) and name.endswith("/remainder") for name in stored):
        raise CheckpointError(
            f"{path} contains 16-bit weights with remainders, from a version of pmm3d without master "
            "weights. Run pmm3d export of that version, which writes a .safetensors file with all "
            "digits, and start a run from that file (training.weights)"
        )


def _without_state(stored: Collection[str], matrices: Mapping[str, DistMatrix]) -> set[str]:
    """Names of the state arrays of weights that have no state in the checkpoint."""
    has_state = {name.rpartition("/")[0] for name in stored if is_state(name)}
    weights = {name: name.rpartition("/")[0] for name in matrices if is_state(name)}
    return {
        name for name, weight in weights.items() if weight not in has_state and weight.removeprefix(STATE) in stored
    }


def _converts(stored: str, dtype: str) -> bool:
    """Whether a weight is converted from or to 16 bits."""
    return stored != dtype and (stored in LOW_PRECISION or dtype in LOW_PRECISION)


def _like(matrix: DistMatrix, dtype: str) -> DistMatrix:
    """Make a matrix of another type; for bfloat16, a torch array. Raises CheckpointError if torch is missing."""
    try:
        torch = dtype == "bfloat16" and matrix.library.name != "torch"
        library = matrix.grid.library("torch") if torch else matrix.library
    except Pmm3dError as error:
        raise CheckpointError(
            f"the checkpoint contains bfloat16 weights, and torch is needed to read them: {error}"
        ) from None
    return DistMatrix(matrix.grid, library.empty(matrix.box.shape, dtype), matrix.shape, matrix.layout)


def find_checkpoint(grid: Grid, path: Path) -> tuple[Checkpoint, Checkpoints]:
    """Find a checkpoint: the folder itself, or the newest undamaged one in the folder of a run or of checkpoints.

    Collective. Raises CheckpointError, on every rank, if there is none.
    """
    with grid.collective_call("checkpoint", str(path), always=True), file_errors(path, "looked at"):
        place = _place_of(path) if grid.rank == 0 else None
    folder, is_one = grid.comm.bcast(place)
    keeper = Checkpoints(grid, folder)
    checkpoint = keeper.undamaged(path) if is_one else keeper.newest_undamaged()
    with grid.collective_call("checkpoint", str(path), always=True):
        if checkpoint is None:
            raise CheckpointError(
                f"there is no checkpoint in {path}: pass the folder of a checkpoint, or of a run "
                "with a checkpoint in checkpoints/"
            )
    return checkpoint, keeper


def _place_of(path: Path) -> tuple[Path, bool]:
    """Return (folder of checkpoints, whether the path is itself a checkpoint)."""
    folder = path / "checkpoints"
    return folder if folder.is_dir() else path, os.path.lexists(path / CHECKPOINT_FILE)
