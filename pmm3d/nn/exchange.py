"""Networks to and from torch, as state dicts in safetensors files; and weights from checkpoints.

With the names "torch", tensors are named as in a torch.nn.Sequential of the same layers ("0.weight", "2.bias"). Weights
of Linear are transposed to torch's (outputs, inputs), vectors are 1D, and the gain of a LayerNorm is called weight.
Transformers also have published names: "gpt2" for `nn.GPT`, and "llama" for `nn.Llama` (Llama, Mistral, Qwen).
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError
from ..io import export_safetensors
from ..io.disk import file_errors, json_object, replace_file
from ..io.safetensors import contents_of, import_files
from ..layout import Layout
from ..layout.layout import layout_of, unit_of
from ..product import DistMatrix
from .facts import FACTS, facts_in, facts_of
from .from_checkpoint import fill_weights, find_checkpoint, make_master_weights, prepare
from .module import Module
from .optimizer import Optimizer
from .parameter import Parameter
from .parts import columns

__all__ = ["export_torch", "import_torch", "load_weights"]

StrPath = str | os.PathLike[str]
ENDING = ".safetensors"


TORCH = "torch"
WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
"""Files in a folder of the transformers package: weights in one file, table of several weight files, configuration."""
SHARDS = "*-of-*" + ENDING
"""Pattern of the names of several weight files."""
OWN = "pmm3d"
"""Key of pmm3d's JSON in the metadata of an exported file."""


class Columns(NamedTuple):
    """Columns `start` to `stop` of each `unit` of a parameter, such as the queries of each head. unit=0: all."""

    parameter: str
    start: int = 0
    stop: int = 0
    unit: int = 0


class Stored(NamedTuple):
    """A tensor in a file: columns of parameters, side by side, or their transpose."""

    parts: tuple[Columns, ...]
    transpose: bool = False


class Names(NamedTuple):
    """The tensors of a network's files by name.

    Tensors whose names end with one of `ignored` are not read. All names begin with `prefix`, which a file may leave
    out. `config` contains config.json.
    """

    tensors: Mapping[str, Stored]
    ignored: tuple[str, ...] = ()
    prefix: str = ""
    config: Mapping[str, Any] = {}


def export_torch(
    network: Module, path: StrPath, metadata: Mapping[str, str] | None = None, *, names: str | None = None
) -> None:
    """Write the weights for torch's load_state_dict(safetensors.torch.load_file(path)). Collective.

    Parameters
    ----------
    network : Module
        The network. If there are master weights, they are written.
    path : path
        File whose name ends in .safetensors; or, for published names, a folder that from_pretrained of the transformers
        package loads. In a folder, an index of several weight files and these files are removed.
    metadata : mapping or None
        Metadata of the file. Default: none.
    names : str or None
        Names of the tensors: "torch", "gpt2" or "llama". Default: the published names of the network, or else "torch".

    Raises
    ------
    CheckpointError
        On every rank, if the file cannot be written, if the network has no such names, and for a folder with the names
        "torch".

    Notes
    -----
    The metadata of the file contain the facts that `load_weights` compares. The configuration of a network with
    published names is written to the metadata, and to config.json in a folder. Each rank receives and writes its share
    of the rows. Columns of a parameter that form a tensor, such as the queries of all heads, are copied first.

    Examples
    --------
    >>> import tempfile
    >>> from mpi4py import MPI
    >>> from pmm3d import Grid, nn
    >>> with Grid(MPI.COMM_SELF) as grid, tempfile.NamedTemporaryFile() as file:
    ...     nn.exchange.export_torch(nn.Linear(grid, 3, 2), file.name)
    """
    path, own, config = Path(path), network.named_parameters(), _config(network)
    names = next(iter(published_names(network)), TORCH) if names is None else names
    table, folder = _own_tensors(network, names), path.suffix != ENDING and hasattr(whole_of(network), "names")
    with network.parent_grid.collective_call("export", str(path), always=True):
        if folder and names == TORCH:
            raise CheckpointError(
                f"cannot export to the folder {path} with the names {TORCH!r}, which from_pretrained "
                f"does not know. {_has(network)}. Give a file that ends in {ENDING}"
            )
        replaced = _indexed_files(path) if folder and network.parent_grid.rank == 0 else set()
    matrices = {
        name: _together([_part_of(own[part.parameter], part) for part in stored.parts])
        for name, stored in table.items()
    }
    metadata = {
        OWN: json.dumps({FACTS: facts_of(network)}),
        **(metadata or {}),
        **({CONFIG: json.dumps(config)} if config else {}),
    }
    export_safetensors(
        network.parent_grid, path / WEIGHTS if folder else path, matrices, metadata=metadata, **_specs(own, table)
    )
    with network.parent_grid.collective_call("export", str(path), always=True), file_errors(path, "written"):
        if folder and network.parent_grid.rank == 0:
            replace_file(path / CONFIG, f"{json.dumps(config, indent=2)}\n".encode())
            for name in {INDEX, *replaced} - {WEIGHTS}:
                (path / name).unlink(missing_ok=True)


def _config(network: Module) -> dict[str, Any]:
    """Contents of config.json; empty for a network without published names."""
    dtype = network.parameters()[0]._in_checkpoint.dtype
    return next(({**names.config, "dtype": dtype} for names in published_names(network).values()), {})


def import_torch(
    network: Module,
    path: StrPath,
    optimizer: Optimizer | None = None,
    *,
    names: str = "auto",
    accept: Collection[str] = (),
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Set the weights from a torch state dict in a safetensors file. Collective. Each rank reads only its shards.

    Parameters
    ----------
    path : path
        The file, or a folder that save_pretrained of the transformers package wrote.
    optimizer : Optimizer or None
        Optimizer of the network. Its master weights are then made in the layout of its state. Default: parameters make
        them (`Parameter`).
    names : str
        As in `export_torch`; "auto" (default): the names in the file.
    accept, facts
        As in `load_weights`.

    Raises
    ------
    CheckpointError
        On every rank, if names, shapes or facts do not fit. The message lists them.
    Pmm3dError
        On every rank, if the optimizer changes no parameter of the network on a rank.

    Examples
    --------
    >>> import tempfile
    >>> from mpi4py import MPI
    >>> from pmm3d import Grid, nn
    >>> with Grid(MPI.COMM_SELF) as grid, tempfile.NamedTemporaryFile() as file:
    ...     net = nn.Linear(grid, 3, 2)
    ...     nn.exchange.export_torch(net, file.name)
    ...     nn.exchange.import_torch(net, file.name)
    """
    own, (files, known_facts) = network.named_parameters(), _headers(network, Path(path), "network" in accept)
    prepare(network, path, known_facts, optimizer, accept, facts)
    there = {name: dtype for held in files.values() for name, dtype in held.items()}
    if names == "auto":
        of_torch = {*_names(network, TORCH).tensors} & {*there}
        names = next((kind for kind in published_names(network) if not of_torch), TORCH)
    known, table = _names(network, names), _own_tensors(network, names)
    if known.prefix and not any(name.startswith(known.prefix) for name in there):
        table = {name.removeprefix(known.prefix): stored for name, stored in table.items()}
    make_master_weights(
        network,
        {part.parameter: there[name] for name, stored in table.items() if name in there for part in stored.parts},
    )
    matrices = {
        name: _to_fill([own[part.parameter] for part in stored.parts], stored) for name, stored in table.items()
    }
    import_files(
        network.parent_grid,
        path,
        files,
        matrices,
        ignored={name for name in there if name.endswith(known.ignored)},
        **_specs(own, table),
    )
    _scatter_columns(own, table, matrices)
    network.loaded()


def _headers(network: Module, path: Path, any_network: bool) -> tuple[dict[Path, dict[str, str]], dict[str, Any]]:
    """Safetensors files of a path -> names and types of their tensors; and the facts in the metadata, and in the
    configuration of a network with published names. Collective. Raises CheckpointError on every rank.

    any_network: ignore the configuration of an unsupported network.
    """
    grid, tensors_of_files, facts = network.parent_grid, dict[Path, dict[str, str]](), dict[str, Any]()
    with grid.collective_call("import_torch", str(path), always=True), file_errors(path, "read"):
        if grid.rank == 0:
            single, table = path / WEIGHTS if path.is_dir() else path, _weight_map(path)
            if table and single.exists() and WEIGHTS not in table.values():
                raise CheckpointError(
                    f"{path} contains {WEIGHTS} and {INDEX}, which names other files of weights. "
                    f"Remove those that are out of date, or name the file {single}"
                )
            if (part := next(path.glob(SHARDS), None)) and not table and not single.exists():
                raise CheckpointError(
                    f"{path} contains {part.name}, but neither {WEIGHTS} nor {INDEX}, the table of "
                    "several weight files. Copy the table too"
                )
            for file in dict.fromkeys(table.values()):
                types = contents_of(path / file)[0]
                tensors_of_files[path / file] = {name: types[name] for name in types if table.get(name) == file}
            metadata = dict[str, str]()
            if not table:
                tensors_of_files[single], metadata = contents_of(single)
                facts = facts_in(json_object(single, metadata.get(OWN, "{}")))
            if published_names(network) and (
                (single.parent / CONFIG).exists() or (single == path and CONFIG in metadata)
            ):
                with suppress(*(CheckpointError,) if any_network else ()):
                    facts |= whole_of(network).facts_in_config(path)
    return grid.comm.bcast((tensors_of_files, facts))


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor -> file by the index in a folder; empty without an index. Raises CheckpointError if it cannot be read."""
    if not (index := folder / INDEX).exists():
        return {}
    table = json_object(index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
        raise CheckpointError(f"{index} has no weight_map from names of tensors to names of files. Copy it again")
    return table


def _indexed_files(folder: Path) -> set[str]:
    """Names of the weight files in a folder that its index lists; empty without an index. Raises CheckpointError if the
    index cannot be read."""
    try:
        files = {*_weight_map(folder).values()}
    except CheckpointError as error:
        raise CheckpointError(f"{error}. Or remove it before the export") from None
    return {file for file in files if file.endswith(ENDING) and not {"/", "\0"} & {*file}}


def whole_of(network: Module) -> Any:
    """Return the network; for a `Pipeline`, the whole network without data."""
    return getattr(network, "dry", network)


def published_names(network: Module) -> Mapping[str, Names]:
    """Published names of a network, if there are any."""
    return getattr(whole_of(network), "names", {})


def _names(network: Module, names: str) -> Names:
    """Tensors with these names. Raises CheckpointError if the network lacks the names."""
    known = published_names(network)
    if names == TORCH:
        return Names(
            {
                torch_name(name): Stored((Columns(name),), not parameter.is_vector)
                for name, parameter in whole_of(network).named_parameters().items()
            }
        )
    if names not in known:
        raise CheckpointError(f"there are no names {names!r}. {_has(network)}")
    return known[names]


def _has(network: Module) -> str:
    whole = whole_of(network)
    reason = f": {whole.misfit}" if getattr(whole, "misfit", "") else ""
    return f"This {type(whole).__name__} has the names {', '.join([TORCH, *published_names(network)])}{reason}"


def _own_tensors(network: Module, names: str) -> dict[str, Stored]:
    """Tensors of this rank's stage. Collective."""
    own = network.named_parameters()
    with network.parent_grid.collective_call("names", names, always=True):
        return {
            name: stored for name, stored in _names(network, names).tensors.items() if stored.parts[0].parameter in own
        }


def _specs(own: Mapping[str, Parameter], table: Mapping[str, Stored]) -> dict[str, set[str]]:
    """Names of the tensors that are transposed, and of vectors."""
    return {
        "transpose": {name for name, stored in table.items() if stored.transpose},
        "vectors": {name for name, stored in table.items() if own[stored.parts[0].parameter].is_vector},
    }


def _part_of(parameter: Parameter, part: Columns) -> DistMatrix:
    held = parameter._in_checkpoint
    return columns(held, part.start, part.stop, part.unit).value if part.unit else held


def _new(like: DistMatrix, width: int, layout: Layout) -> DistMatrix:
    """Make a matrix with the type and the number of rows of `like`."""
    grid, shape = like.grid, (like.shape[0], width)
    local = like.library.empty(layout.box(shape, grid.shape, grid.coords).shape, like.dtype)
    return DistMatrix(grid, local, shape, layout)


def _together(parts: list[DistMatrix]) -> DistMatrix:
    """Concatenate the columns of matrices. Collective."""
    if len(parts) == 1:
        return parts[0]
    layout = parts[0].layout
    made, start = _new(parts[0], sum(part.shape[1] for part in parts), Layout(layout.rows, layout.cols)), 0
    for part in parts:
        made.set_submatrix(slice(None), slice(start, start + part.shape[1]), part)
        start += part.shape[1]
    return made


def _width(parameter: Parameter, part: Columns) -> int:
    return parameter.shape[1] // part.unit * (part.stop - part.start)


def _to_fill(parameters: list[Parameter], stored: Stored) -> DistMatrix:
    """Matrix for a tensor of a file: the parameter, or a new matrix for `_scatter_columns`."""
    held, layout = parameters[0]._in_checkpoint, parameters[0].layout
    if not stored.parts[0].unit:
        return held
    width = sum(_width(parameter, part) for parameter, part in zip(parameters, stored.parts))
    return _new(held, width, Layout(layout.rows, layout.cols))


def _scatter_columns(
    own: Mapping[str, Parameter], table: Mapping[str, Stored], matrices: Mapping[str, DistMatrix]
) -> None:
    """Write tensors that are columns of parameters to these, through a copy of each parameter. Collective."""
    made = dict[str, DistMatrix]()
    for name, stored in table.items():
        start = 0
        for part in stored.parts if stored.parts[0].unit else ():
            parameter, unit, size = own[part.parameter], part.unit, part.stop - part.start
            if part.parameter not in made:
                made[part.parameter] = _new(parameter._in_checkpoint, parameter.shape[1], parameter.layout)
            joined, width = made[part.parameter], _width(parameter, part)
            held, (row_unit, _) = parameter.layout, parameter.layout.units
            per_part = unit_of(held.units[1], held.cols[0]) // unit if held.cols else 1
            layout = layout_of(held.rows, held.cols, (), (row_unit, per_part * size))
            block = matrices[name].submatrix(slice(None), slice(start, start + width), layout)
            heads = joined.local.shape[0], joined.local.shape[1] // unit
            joined.local.reshape(*heads, unit)[:, :, part.start : part.stop] = block.local.reshape(*heads, size)
            start += width
    for name, joined in made.items():
        target = own[name]._in_checkpoint
        joined.redistribute(target.layout, out=target)


def torch_name(name: str) -> str:
    """Torch's name of a parameter."""
    stem, _, last = name.rpartition(".")
    return f"{stem}.weight".lstrip(".") if last == "gain" else name


def load_weights(
    network: Module,
    path: StrPath,
    optimizer: Optimizer | None = None,
    *,
    accept: Collection[str] = (),
    facts: Mapping[str, Any] | None = None,
    ema: bool = True,
) -> Path:
    """Set the weights from a file, on any grid and for any precision. Collective.

    Parameters
    ----------
    network : Module
        The network. Call `Module.settle` of your own network first.
    path : path
        Folder of a checkpoint, folder of a run (its newest undamaged checkpoint), .safetensors file, or folder of the
        transformers package. The state of an optimizer is not read.
    optimizer : Optimizer or None
        As in `import_torch`.
    accept : collection of str
        Facts that may differ: "network", "columns", "targets", "classes", "tokenizer". Rank 0 logs the differences.
    facts : mapping or None
        Facts of your data, such as `data.facts` of a `DataSet`. Default: only facts of the network are compared.
    ema : bool
        Whether to take the averages of the weights (`optim.EMA`) if a checkpoint contains them. Default: True.

    Returns
    -------
    Path
        The file or folder that was read.

    Raises
    ------
    CheckpointError
        On every rank and before anything is changed, if names, shapes, types or facts differ from those of the network.

    Notes
    -----
    Facts are settings that no shape shows. Those of a network are heads, window, rotary base and its scaling, causal
    mask, eps, activations, and the routing of experts. Checkpoints of a `TrainState`, exported files and config.json
    contain them. A fact that one side lacks is not compared.

    Examples
    --------
    >>> import tempfile
    >>> from mpi4py import MPI
    >>> from pmm3d import Grid, io, nn
    >>> with tempfile.TemporaryDirectory() as folder, Grid(MPI.COMM_SELF) as grid:
    ...     net = nn.Linear(grid, 3, 2)
    ...     _ = io.Checkpoints(grid, folder).save(5, net.matrices())
    ...     nn.exchange.load_weights(net, folder).name
    'step-00000005'
    """
    return read_weights(network, path, optimizer, accept=accept, facts=facts, ema=ema)[0]


def read_weights(
    network: Module,
    path: StrPath,
    optimizer: Optimizer | None = None,
    *,
    accept: Collection[str] = (),
    facts: Mapping[str, Any] | None = None,
    ema: bool = True,
) -> tuple[Path, bool]:
    """Set the weights as `load_weights`. Return the file or folder, and whether the weights are averages."""
    path, parent, published = Path(path), network.parent_grid, False
    with parent.collective_call("load_weights", str(path), always=True), file_errors(path, "read"):
        if parent.rank == 0:
            published = path.suffix == ENDING or any(next(path.glob(name), None) for name in (WEIGHTS, INDEX, SHARDS))
    if parent.comm.bcast(published):
        import_torch(network, path, optimizer, accept=accept, facts=facts)
        return path, False
    checkpoint, keeper = find_checkpoint(parent, path)
    averaged = fill_weights(network, checkpoint, keeper, optimizer, accept=accept, facts=facts, ema=ema)
    return checkpoint.path, averaged
