"""Networks to and from torch: state dicts in safetensors files.

The names "torch" are those that torch gives the same layers in an nn.Sequential ("0.weight", "2.bias"). Weights of
Linear are transposed to torch's (outputs, inputs), vectors are 1D, and a LayerNorm's gain is called weight. A
transformer also has the names of a published network: `nn.GPT` those of "gpt2", `nn.Llama` those of "llama".
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..comm import Grid
from ..errors import CheckpointError, Pmm3dError
from ..io import Checkpoints, export_safetensors, import_safetensors
from ..io.checkpoint import Checkpoint, Partial
from ..io.disk import file_errors
from ..io.safetensors import contents_of
from ..io.shards import CHECKPOINT_FILE
from ..layout import LOW_PRECISION, Layout
from ..layout.layout import layout_of, unit_of
from ..product import DistMatrix
from .module import Module
from .operations import columns
from .optimizer import STATE, Optimizer, is_state
from .parameter import Parameter

__all__ = ["export_torch", "import_torch", "load_weights"]

StrPath = str | os.PathLike[str]
ENDING = ".safetensors"


TORCH = "torch"
WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
"""Files in a folder of the transformers package: the weights in one file, the table of several, the configuration."""


class Columns(NamedTuple):
    """Columns `start` to `stop` of each `unit` of a parameter, such as the queries of each head; a unit of 0: all."""

    parameter: str
    start: int = 0
    stop: int = 0
    unit: int = 0


class Stored(NamedTuple):
    """A tensor in a file: columns of parameters, side by side, or the transpose of that."""

    parts: tuple[Columns, ...]
    transpose: bool = False


class Names(NamedTuple):
    """The tensors of a network's files.

    tensors   name -> what it is, of the whole network
    ignored   ends of names of tensors that a file may have besides, and which are not read
    prefix    with which names may begin or not
    config    what config.json says of the network
    """

    tensors: Mapping[str, Stored]
    ignored: tuple[str, ...] = ()
    prefix: str = ""
    config: Mapping[str, Any] = {}


def export_torch(network: Module, path: StrPath, metadata: Mapping[str, str] | None = None, *, names: str = TORCH
                 ) -> None:
    """Write the weights so that network.load_state_dict(safetensors.torch.load_file(path)) takes them in torch.

    Of weights of low precision the master weights are written, if an optimizer made them.

    path       of the file, its name ending in .safetensors; or of a folder that from_pretrained of the transformers
               package loads, of a network that has published names
    metadata   of the file
    names      of the tensors: "torch", or "gpt2" or "llama" of a network that has them

    A network with published names also has a configuration. A folder gets it as config.json. The file has it in its
    metadata, so that `nn.GPT.load` needs no other file.

    Collective; each rank receives and writes its share of the rows. Tensors that are columns of a parameter, such as
    the queries of all heads, are copies: a rank holds its shards of them until the file is written. Raises
    CheckpointError, on every rank.

        >>> import tempfile; from mpi4py import MPI; from pmm3d import nn
        >>> with Grid(MPI.COMM_SELF) as grid, tempfile.NamedTemporaryFile() as file:
        ...     export_torch(nn.Linear(grid, 3, 2), file.name)
    """
    path, own, table, config = Path(path), network.named_parameters(), _own_tensors(network, names), _config(network)
    single = path.suffix == ENDING or not config
    matrices = {name: _together([_part_of(own[part.parameter], part) for part in stored.parts])
                for name, stored in table.items()}
    metadata = {**(metadata or {}), **({CONFIG: json.dumps(config)} if config else {})}
    export_safetensors(network.whole, path if single else path / WEIGHTS, matrices, metadata=metadata,
                       **_forms(own, table))
    with network.whole.collective_call("export", str(path), always=True), file_errors(path, "written"):
        if not single and network.whole.rank == 0:
            (path / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _config(network: Module) -> dict[str, Any]:
    """What config.json says of a network; nothing if it has no published names."""
    dtype = network.parameters()[0].in_checkpoint.dtype
    return next(({**names.config, "dtype": dtype} for names in _published(network).values()), {})


def import_torch(network: Module, path: StrPath, optimizer: Optimizer | None = None, *, names: str = "auto") -> None:
    """Take the weights of a torch state dict saved with safetensors. Collective; each rank reads its shards only.

    path        of the file, or of a folder that save_pretrained of the transformers package wrote
    optimizer   of the network: its master weights of low precision become those of the file; without it, or before it
                made master weights, the weights are rounded
    names       as of `export_torch`; "auto": those that the file has

    Raises CheckpointError, on every rank, with the names and shapes that do not fit.

        >>> import tempfile; from mpi4py import MPI; from pmm3d import nn
        >>> with Grid(MPI.COMM_SELF) as grid, tempfile.NamedTemporaryFile() as file:
        ...     net = nn.Linear(grid, 3, 2)
        ...     export_torch(net, file.name)
        ...     import_torch(net, file.name)
    """
    _make_masters(network, optimizer)
    files, own = tensor_files(network.whole, path), network.named_parameters()
    there = [name for held in files.values() for name in held]
    if names == "auto":
        of_torch = {*_names(network, TORCH).tensors} & {*there}
        names = next((kind for kind in _published(network) if not of_torch), TORCH)
    known, table = _names(network, names), _own_tensors(network, names)
    if known.prefix and not any(name.startswith(known.prefix) for name in there):
        table = {name.removeprefix(known.prefix): stored for name, stored in table.items()}
    matrices = {name: _to_fill([own[part.parameter] for part in stored.parts], stored)
                for name, stored in table.items()}
    for number, (file, held) in enumerate(files.items(), start=1):
        missing = [name for name in matrices if name not in there] if number == len(files) else []
        inside = {name: matrices[name] for name in matrices if name in held or name in missing}
        import_safetensors(network.whole, file, inside, ignored=[name for name in held if name.endswith(known.ignored)],
                           **_forms(own, {name: table[name] for name in inside}))
    _spread(own, table, matrices)
    network.loaded()


def tensor_files(grid: Grid, path: StrPath) -> dict[Path, list[str]]:
    """Return the safetensors files of a network -> names of their tensors. Collective.

    path   of one file, or of a folder of the transformers package

    Raises CheckpointError, on every rank, if there is none.
    """
    path, found = Path(path), dict[Path, list[str]]()
    with grid.collective_call("import_torch", str(path), always=True), file_errors(path, "read"):
        if grid.rank == 0:
            index = path / INDEX
            if index.exists():
                for name, file in json.loads(index.read_text())["weight_map"].items():
                    found.setdefault(path / file, []).append(name)
            else:
                file = path / WEIGHTS if path.is_dir() else path
                found[file] = [*contents_of(file)[0]]
    return grid.comm.bcast(found)


def _make_masters(network: Module, optimizer: Optimizer | None) -> None:
    if optimizer is not None:
        optimizer.matrices(network.named_parameters())


def whole_of(network: Module) -> Any:
    """Return the network, or of one in stages the whole one without data."""
    return getattr(network, "dry", network)


def _published(network: Module) -> Mapping[str, Names]:
    """The names of a published network, if the network is one: see `nn.transformer.files`."""
    return getattr(whole_of(network), "names", {})


def _names(network: Module, names: str) -> Names:
    """Raises CheckpointError for names that the network has not."""
    known = _published(network)
    if names == TORCH:
        return Names({torch_name(name): Stored((Columns(name),), not parameter.is_vector)
                      for name, parameter in whole_of(network).named_parameters().items()})
    if names not in known:
        raise CheckpointError(f"{type(whole_of(network)).__name__} has no names {names!r}; it has "
                              f"{', '.join([TORCH, *known])}")
    return known[names]


def _own_tensors(network: Module, names: str) -> dict[str, Stored]:
    """Of the tensors of a file, those of this rank's stage. Collective."""
    own = network.named_parameters()
    with network.whole.collective_call("names", names, always=True):
        return {name: stored for name, stored in _names(network, names).tensors.items()
                if stored.parts[0].parameter in own}


def _forms(own: Mapping[str, Parameter], table: Mapping[str, Stored]) -> dict[str, set[str]]:
    """Names of the tensors that are transposed, and of those that are vectors."""
    return {"transpose": {name for name, stored in table.items() if stored.transpose},
            "vectors": {name for name, stored in table.items() if own[stored.parts[0].parameter].is_vector}}


def _part_of(parameter: Parameter, part: Columns) -> DistMatrix:
    held = parameter.in_checkpoint
    return columns(held, part.start, part.stop, part.unit).value if part.unit else held


def _new(like: DistMatrix, width: int, layout: Layout) -> DistMatrix:
    """A matrix of the type of another one, and with its rows."""
    grid, shape = like.grid, (like.shape[0], width)
    local = like.library.empty(layout.box(shape, grid.shape, grid.coords).shape, like.dtype)
    return DistMatrix(grid, local, shape, layout)


def _together(parts: list[DistMatrix]) -> DistMatrix:
    """The matrices side by side. Collective."""
    if len(parts) == 1:
        return parts[0]
    made, start = _new(parts[0], sum(part.shape[1] for part in parts), _without_units(parts[0].layout)), 0
    for part in parts:
        made.set_submatrix(slice(None), slice(start, start + part.shape[1]), part)
        start += part.shape[1]
    return made


def _without_units(layout: Layout) -> Layout:
    return Layout(layout.rows, layout.cols)


def _width(parameter: Parameter, part: Columns) -> int:
    """Columns of a part of a parameter."""
    return parameter.shape[1] // part.unit * (part.stop - part.start) if part.unit else parameter.shape[1]


def _to_fill(parameters: list[Parameter], stored: Stored) -> DistMatrix:
    """The matrix that takes a tensor of a file: the parameter, or one that `_spread` takes the columns of."""
    held = parameters[0].in_checkpoint
    if not stored.parts[0].unit:
        return held
    width = sum(_width(parameter, part) for parameter, part in zip(parameters, stored.parts))
    return _new(held, width, _without_units(parameters[0].layout))


def _spread(own: Mapping[str, Parameter], table: Mapping[str, Stored], matrices: Mapping[str, DistMatrix]) -> None:
    """Write what was read of columns of parameters to the parameters, each in memory of its own first. Collective."""
    made = dict[str, DistMatrix]()
    for name, stored in table.items():
        start = 0
        for part in stored.parts if stored.parts[0].unit else ():
            parameter, unit, size = own[part.parameter], part.unit, part.stop - part.start
            if part.parameter not in made:
                made[part.parameter] = _new(parameter.in_checkpoint, parameter.shape[1], parameter.layout)
            whole, width = made[part.parameter], _width(parameter, part)
            held, (row_unit, _) = parameter.layout, parameter.layout.units
            per_part = unit_of(held.units[1], held.cols[0]) // unit if held.cols else 1
            layout = layout_of(held.rows, held.cols, (), (row_unit, per_part * size))
            found = matrices[name].submatrix(slice(None), slice(start, start + width), layout)
            heads = whole.local.shape[0], whole.local.shape[1] // unit
            whole.local.reshape(*heads, unit)[:, :, part.start : part.stop] = found.local.reshape(*heads, size)
            start += width
    for name, whole in made.items():
        target = own[name].in_checkpoint
        whole.redistribute(target.layout, out=target)


def torch_name(name: str) -> str:
    """Torch's name of a parameter."""
    stem, _, last = name.rpartition(".")
    return f"{stem}.weight".lstrip(".") if last == "gain" else name


def load_weights(network: Module, path: StrPath, optimizer: Optimizer | None = None, *,
                 check: Callable[[Checkpoint], None] | None = None) -> Path:
    """A warm start: fill the weights from a checkpoint's folder, from a run's (its newest good checkpoint), from a
    .safetensors file, or from a folder of the transformers package. An optimizer's state that is there too is left
    out. Returns what was read.

    optimizer   as in `import_torch`
    check       check(checkpoint) may raise on some ranks, before anything is changed; not called for other files

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
    published = any((path / name).is_file() for name in (WEIGHTS, INDEX)) if network.whole.rank == 0 else None
    if path.suffix == ENDING or network.whole.comm.bcast(published):
        import_torch(network, path, optimizer)
        return path
    found, keeper = find_checkpoint(network.whole, path)
    if check is not None:
        with network.whole.collective_call("load_weights", str(path), always=True):
            check(found)
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
