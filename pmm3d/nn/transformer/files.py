"""Files of the transformers package: weights, and configurations from which networks are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ...comm import Grid
from ...errors import CheckpointError
from ...io.disk import file_errors, json_object
from ...io.safetensors import contents_of
from ..containers import Sequential
from ..exchange import CONFIG, Names, StrPath, export_torch, import_torch
from ..module import Module
from ..pipeline.network import Pipeline
from .names import KINDS, Architecture, architecture_of, names_of


class Published(Sequential):
    """Network whose files may have a published format. kind: "gpt2", "llama", or "" without such a format."""

    kind = ""
    architecture: Architecture

    @property
    def names(self) -> Mapping[str, Names]:
        """Published names of tensors for files of this network. See `exchange.export_torch`."""
        return names_of(self.architecture) if self.kind else {}

    @property
    def misfit(self) -> str:
        """Reason why the network has no published names, or ""."""
        return self.architecture.misfit if self.kind else ""

    @staticmethod
    def facts_in_config(path: Path) -> dict[str, Any]:
        """Settings of a stored network that no shape shows, for `nn.exchange.load_weights`. Sends nothing.

        The path is a file or a folder with a configuration. The facts have names such as "network.heads". Raises
        CheckpointError for an unsupported network.
        """
        return architecture_of(_config(path), str(path)).facts

    def export(self, path: StrPath, names: str | None = None) -> None:
        """Write the weights and the configuration. Collective. See `nn.exchange.export_torch`.

        Parameters
        ----------
        path : path
            A file whose name ends in .safetensors, or a folder for from_pretrained of the transformers package.
        names : str or None
            "gpt2" for a GPT, "llama" for a Llama, Mistral or Qwen, or "torch". Default: the published names, or else
            "torch".

        Examples
        --------
        >>> import tempfile
        >>> from mpi4py import MPI
        >>> from pmm3d import Grid, nn
        >>> with Grid(MPI.COMM_SELF) as grid, tempfile.TemporaryDirectory() as folder:
        ...     sizes = {"vocabulary": 5, "positions": 4, "layers": 1, "hidden": 8, "heads": 2}
        ...     nn.GPT(grid, seed=3, **sizes).export(folder, names="gpt2")
        ...     nn.GPT.load(grid, folder).size
        960
        """
        export_torch(self, path, names=names)

    @classmethod
    def load(cls, grid: Grid, path: StrPath, names: str = "auto", **options: Any) -> Any:
        """Network with the sizes and the weights of a file. Collective. Each rank reads only its own shards.

        Parameters
        ----------
        grid : Grid
            The grid of the network.
        path : path
            A folder from `export`, or from save_pretrained of the transformers package. Or a .safetensors file from
            `export`, or with a config.json in the same folder.
        names : str
            Names of the tensors: "gpt2", "llama", "torch", or "auto" (default) for the names in the file.
        options
            Further arguments of the network, such as `library`, `precision`, `activations`, `recompute`, `capacity`.

        Returns
        -------
        Module
            The network. On a grid with an axis "pipe", a `Pipeline` of the network.

        Raises
        ------
        CheckpointError
            On every rank, if the file contains another network or no configuration, or another value of an option.
        """
        of = read_architecture(grid, path)
        with grid.collective_call("load", str(path)):
            if of.kind != cls.kind:
                raise CheckpointError(
                    f"{path} contains a network of model_type {of.kind!r}, not an nn.{cls.__name__}. "
                    f"Use nn.{KINDS[of.kind]}.load"
                )
            for name in sorted(options.keys() & of.options.keys()):
                if options[name] != of.options[name]:
                    raise CheckpointError(
                        f"{path} contains a network with {name} = {of.options[name]!r}, not {options[name]!r}. Leave "
                        f"{name} out"
                    )
        make: Callable[..., Any] = partial(cls, **{**options, **of.options})
        network: Module = Pipeline(grid, make) if grid._has_stages else make(grid)
        import_torch(network, path, names=names)
        return network


def read_architecture(grid: Grid, path: StrPath) -> Architecture:
    """Architecture in the configuration of a folder or a file. Collective. Raises CheckpointError on every rank."""
    path, of = Path(path), None
    with grid.collective_call("load", str(path), always=True), file_errors(path, "read"):
        if grid.rank == 0:
            of = architecture_of(_config(path), str(path))
    architecture: Architecture = grid.comm.bcast(of)
    return architecture


def _config(path: Path) -> dict[str, Any]:
    beside = (path if path.is_dir() else path.parent) / CONFIG
    text = None if path.is_dir() else contents_of(path)[1].get(CONFIG)
    if text is None and not beside.exists():
        raise CheckpointError(
            f"{path} does not contain the sizes of the network. Put its {CONFIG} into the same "
            "folder, or make the network and call nn.exchange.load_weights(net, path)"
        )
    return json_object(beside if text is None else path, text)
