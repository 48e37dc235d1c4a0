"""Export of a run's checkpoint as a torch state dict, or as a folder of the transformers package."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from ...comm import Grid
from ...errors import CheckpointError, DataError
from ...io import Checkpoints, export_safetensors
from ...io.checkpoint import Checkpoint
from ...io.disk import check_replaceable, file_errors, replace_file
from ...io.scaling import Scaling
from ...io.text import Tokenizer
from ...layout import Layout
from ...product import DistMatrix
from ..exchange import CONFIG, ENDING, OWN, TORCH, export_torch, torch_name
from ..facts import FACTS, facts_in
from ..from_checkpoint import fill, fill_weights, find_checkpoint
from ..layers import Linear
from ..module import Module
from ..optimizer_state import is_average, names_of_weights
from .log import AVERAGED
from .network import network_of
from .samples import SAMPLES, Recalled, recalled, tokenizer_file


def check_target(target: Path, overwrite: bool) -> Path:
    """Return a file that the export writes. Raises CheckpointError unless the target is a .safetensors file, or a
    folder, that may be written."""
    if target.is_dir() and target.suffix != ENDING:
        if not overwrite and any(target.iterdir()):
            raise CheckpointError(f"the folder {target} contains files; --overwrite replaces those of the same names")
        return target / CONFIG
    if target.suffix != ENDING and (target.suffix or os.path.lexists(target)):
        remedy = "" if os.path.lexists(target) else ". To export to a folder of this name, make the folder first"
        raise CheckpointError(f"cannot export to {target}: the name of the file must end in {ENDING}{remedy}")
    check_replaceable(target, overwrite)
    return target


SCALED = "scaling"
"""Key of the scales in the metadata; None if samples have the units of the data."""


def export_checkpoint(
    comm: MPI.Intracomm, path: Path, target: Path, names: str | None = None, ema: bool = True
) -> tuple[Path, str]:
    """Write the weights of a checkpoint, or of a run's newest undamaged one, as `export_torch` does. To a folder, also
    write the tokenizer. Return the checkpoint, and a text about averaged weights, and about the units of samples that
    were standardised, or about the tokenizer. Collective over comm. Raises CheckpointError, on every rank.

    ema: as in `load_weights`
    """
    with Grid(comm, "fsdp") as grid:
        checkpoint, keeper = find_checkpoint(grid, path)
        try:
            run: Recalled | None = recalled(checkpoint)
        except CheckpointError:
            run = None
        of_torch = run is None or run.config.network.build  # a file of network.build may be missing now
        with grid.collective_call("export", names, always=True):
            if of_torch and names not in (None, TORCH):
                raise CheckpointError(
                    f"{checkpoint.path} does not determine its network, so the export cannot use the "
                    f"names {names!r}. Make the network in a program, load it with "
                    "nn.exchange.load_weights, and call its export"
                )
            if target.suffix != ENDING and (run is None or of_torch or not run.config.network.of_tokens):
                raise CheckpointError(
                    f"cannot export to {target}: the name of the file must end in {ENDING}. A folder for "
                    "from_pretrained of the transformers package needs a run with network.kind gpt or llama"
                )
        scaling = None if run is None else run.scaling
        if run is None or of_torch:
            metadata = {} if run is None else {SCALED: scaling and scaling.state()}
            _export_matrices(grid, keeper, checkpoint, target, metadata, ema)
            contained = False
        else:
            contained = _export_network(grid, keeper, checkpoint, run, target, names, ema)
        by = AVERAGED * (ema and any(map(is_average, checkpoint.contents)))
        if run is not None and target.suffix != ENDING:
            return checkpoint.path, by + _export_tokenizer(grid, run, target)
        units = "; samples and outputs have the units of the data"
        if not contained:
            units = "; the network takes standardised samples: the scales are in the metadata pmm3d"
        return checkpoint.path, by + (units if scaling is not None else "")


def _export_network(
    grid: Grid, keeper: Checkpoints, checkpoint: Checkpoint, run: Recalled, target: Path, names: str | None, ema: bool
) -> bool:
    """Export the parameters of the network, which distinguishes vectors from matrices. Return whether they contain the
    scales of the samples."""
    section = run.config.network.model_copy(update={"library": "numpy"})
    config = run.config.model_copy(update={"network": section})
    network = network_of(config, grid, run.samples)
    fill_weights(network, checkpoint, keeper, ema=ema)
    contained = run.scaling is not None and put_scales_into_weights(network, run.scaling)
    metadata: dict[str, Any] = {
        "network": config.settings()["network"],
        SAMPLES: run.samples.model_dump(),
        FACTS: run.facts,
    }
    metadata[SCALED] = None if run.scaling is None or contained else run.scaling.state()
    export_torch(network, target, {OWN: json.dumps(metadata)}, names=names)
    return contained


def _export_tokenizer(grid: Grid, run: Recalled, folder: Path) -> str:
    """Write the tokenizer of a run for AutoTokenizer.from_pretrained. If there is none, remove that of another network
    from the folder. Collective. Return a text about it."""
    file, text = run.config.data.source, None
    with grid.collective_call("export: tokenizer", str(folder), always=True), file_errors(folder, "written"):
        if grid.rank == 0:
            had = "tokenizer" in run.facts
            text = (
                f", without its tokenizer: {file} does not contain it now"
                if had
                else f", without a tokenizer: none was in the data of the run ({file})"
            )
            files = folder / "tokenizer.json", folder / "tokenizer_config.json"
            if (coder := tokenizer_of(run)) is None:
                for path in files:
                    path.unlink(missing_ok=True)
            else:
                for path, contents in zip(files, (coder.for_package, TOKENIZER_CONFIG)):
                    replace_file(path, contents.encode())
                text = ", with its tokenizer"
    return str(grid.comm.bcast(text))


TOKENIZER_CONFIG = """{
  "tokenizer_class": "PreTrainedTokenizerFast",
  "clean_up_tokenization_spaces": false
}
"""
"""Contents of tokenizer_config.json: tokenizer.json contains the whole tokenizer."""


def tokenizer_of(run: Recalled) -> Tokenizer | None:
    """Return the tokenizer of a run, or None if its data do not contain it."""
    file = tokenizer_file(run.config.data)
    if run.facts.get("tokenizer") == Tokenizer().digest:
        return Tokenizer()
    if file is None:
        return None
    try:
        tokenizer = Tokenizer.of(file)
        return tokenizer if tokenizer.digest == run.facts.get("tokenizer") else None
    except DataError:
        return None


def put_scales_into_weights(network: Module, scaling: Scaling) -> bool:
    """Change the first and the last layer of an MLP, so that the network takes and returns the units of the data.
    Collective. Return False, without a change, if a layer has no bias."""
    layers = [(name, layer) for name, layer in network.named_modules() if isinstance(layer, Linear)]
    if any(layer.bias is None for _, layer in (layers[0], layers[-1])):
        return False

    def change(name: str, rule: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]) -> None:
        names = [f"{name}.weight", f"{name}.bias"]
        values = [network.gather(each).astype(np.float64) for each in names]
        made = (each.astype(layers[0][1].weight.dtype) for each in rule(*values))
        network.load_state_dict(dict(zip(names, made)), strict=False)

    mean, scale = scaling.inputs
    change(layers[0][0], lambda w, b: (w / scale[:, None], b - (w * (mean / scale)[:, None]).sum(0)))
    if scaling.targets is not None:
        middle, spread = scaling.targets
        change(layers[-1][0], lambda w, b: (w * spread, b * spread + middle))
    return True


def _export_matrices(
    grid: Grid, keeper: Checkpoints, checkpoint: Checkpoint, target: Path, metadata: Mapping[str, Any], ema: bool
) -> None:
    """Export the matrices of the checkpoint, whose manifest distinguishes vectors from matrices.

    metadata: further metadata of the file.
    """
    names = names_of_weights(checkpoint.contents, ema)
    entries = {name: checkpoint.manifest["matrices"][weights] for name, weights in names.items()}
    library = "torch" if "bfloat16" in {entry["dtype"] for entry in entries.values()} else "numpy"
    matrices = {
        name: DistMatrix.empty(grid, tuple(entry["shape"]), dtype=entry["dtype"], layout=Layout("z"), library=library)
        for name, entry in entries.items()
    }
    vectors = {torch_name(name) for name, entry in entries.items() if entry.get("vector")}
    fill(keeper, checkpoint, {names[name]: matrix for name, matrix in matrices.items()}, partial=True)
    weights = {torch_name(name): matrix for name, matrix in matrices.items()}
    export_safetensors(
        grid,
        target,
        weights,
        transpose=weights.keys() - vectors,
        vectors=vectors,
        metadata={OWN: json.dumps({FACTS: facts_in(checkpoint.meta), **metadata})},
    )
