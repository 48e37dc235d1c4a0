"""Networks in files of the transformers package: the weights, and the configuration from which one is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...comm import Grid
from ...errors import CheckpointError
from ...io.disk import file_errors
from ...io.safetensors import contents_of
from ..exchange import ENDING, WEIGHTS, StrPath, export_torch
from ..module import Module
from .names import Architecture, architecture_of, config_of

CONFIG = "config.json"


def export(network: Module, of: Architecture, path: StrPath, names: str | None = None) -> None:
    """Write a GPT or a Llama to a safetensors file, or to a folder that from_pretrained of the transformers package
    loads. Collective; see `exchange.export_torch`.

    path    a file whose name ends in .safetensors; any other path is that of a folder
    names   "gpt2" of a GPT, "llama" of a Llama, or "torch"; None: the published network's

    The configuration is written beside the weights in a folder, and to the metadata of the file in both cases.
    """
    path, names = Path(path), names or of.kind
    config, grid = {**config_of(of), "dtype": network.parameters()[0].in_checkpoint.dtype}, network.whole
    single = path.suffix == ENDING
    export_torch(network, path if single else path / WEIGHTS, {CONFIG: json.dumps(config)}, names=names)
    with grid.collective_call("export", str(path), always=True), file_errors(path, "written"):
        if not single and grid.rank == 0:
            (path / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def read_architecture(grid: Grid, path: StrPath) -> Architecture:
    """Return what the configuration in a folder, or of a file, says: of a file, that in its metadata or the config.json
    beside it. Collective. Raises CheckpointError, on every rank."""
    path, config = Path(path), None
    with grid.collective_call("load", str(path), always=True), file_errors(path, "read"):
        if grid.rank == 0:
            config = _config(path)
    said = grid.comm.bcast(config)
    with grid.collective_call("load", str(path), always=True):
        return architecture_of(said, str(path))


def _config(path: Path) -> dict[str, Any]:
    beside = (path if path.is_dir() else path.parent) / CONFIG
    text = None if path.is_dir() else contents_of(path)[1].get(CONFIG)
    if text is None and not beside.exists():
        raise CheckpointError(f"{path} does not say the sizes of its network: put the {CONFIG} of the network beside "
                              "it, or make the network with its sizes and call nn.exchange.load_weights(net, path)")
    return json.loads(text or beside.read_text(encoding="utf-8"))
