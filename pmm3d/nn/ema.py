"""Exponential moving averages of the weights of a network."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from weakref import WeakSet

from ..action import UPDATE
from ..arrays import Array, by_rows, parallel_rows
from ..comm import Pending
from ..errors import Pmm3dError
from ..product import DistMatrix
from .compute import computing
from .module import Module
from .optimizer_state import Part, average_name, note_memory
from .parameter import Parameter


class EMA:
    """Exponential moving average of the weights of a network: a = decay a + (1 - decay) w after each step.

    Parameters
    ----------
    network : Module
        The network, also a `Pipeline`. Parameters that are added later have no average.
    decay : float
        At least 0 and below 1. Default: 0.999.

    Raises
    ------
    Pmm3dError
        For a decay out of range.

    Notes
    -----
    The first `update` copies the weights, as torch.optim.swa_utils.AveragedModel does with get_ema_multi_avg_fn. A
    frozen parameter has no average until it learns: its average is its weight.

    Averages have the type of the master weights, float32 for 16-bit weights, and take the memory of one state of an
    optimizer. They are sharded as the weights; with `shard_over_data` of the optimizer, over data too. `update` sends
    nothing. `average_parameters` all-gathers weights that are sharded over data, at its start. At its end it sends
    nothing, so it needs a copy of this rank's weights if they are 16-bit or sharded over data.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> from pmm3d.nn import optim
    >>> with Grid(shape="ddp") as grid:
    ...     net, x = nn.Linear(grid, 3, 2, bias=False), DistMatrix.random(grid, (8, 3), dtype="float32")
    ...     opt, ema, weights = optim.SGD(net.parameters(), lr=0.1), optim.EMA(net, decay=0.75), []
    ...     for _ in range(2):
    ...         nn.mse(net(x), DistMatrix.random(grid, (8, 2), dtype="float32")).backward()
    ...         opt.step()
    ...         ema.update()
    ...         weights.append(net.weight.gather())
    ...     with ema.average_parameters():
    ...         average = net.weight.gather()
    ...     bool(abs(0.75 * weights[0] + 0.25 * weights[1] - average).max() < 1e-6)
    True
    """

    def __init__(self, network: Module, decay: float = 0.999):
        if not 0 <= decay < 1:
            raise Pmm3dError(f"EMA: decay is a number of at least 0 and below 1; got {decay!r}")
        self.network, self.decay, self._parameters = network, decay, network.parameters()
        self._averages = dict[Parameter, tuple[Part, DistMatrix]]()
        self._exchanged = False
        network.grid.attached.setdefault(note_memory, WeakSet()).add(self)

    def update(self) -> None:
        """Add the weights to the averages. Call it after each step of the optimizer that was not skipped.

        Raises
        ------
        Pmm3dError
            In `average_parameters`.
        """
        self._check_weights("update")
        grid, before = self.network.grid, len(self._averages)
        with (
            grid.ledger.phase("optimizer"),
            computing(grid, "update", sum(part.work for part, _ in self._averages.values())),
        ):
            for parameter in self._parameters:
                mean = self._mean if parameter in self._averages else _first
                if parameter.requires_grad or parameter in self._averages:
                    part, average = self._averages[parameter] = self._average(parameter)
                    held, parameter.has_state = average.local.reshape(-1), True
                    by_rows(part.library, mean, held, held, part.weight(), name=UPDATE + "ema")
        if len(self._averages) > before:
            note_memory(grid)

    def _mean(self, average: Array, weight: Array) -> Array:
        change = weight - average
        change *= 1 - self.decay
        change += average
        return change

    def _average(self, parameter: Parameter) -> tuple[Part, DistMatrix]:
        """The part of a parameter that this rank averages, and the average; if there is none, a new one with arbitrary
        values."""
        if parameter in self._averages:
            return self._averages[parameter]
        part, grid = _part(parameter), parameter.grid
        with grid.ledger.holding("state"):
            local = part.library.empty(part.shape, part.types.master)
        return part, DistMatrix(grid, local, parameter.shape, part.layout)

    def _held(self) -> dict[Parameter, Sequence[Array]]:
        return {parameter: [average.local] for parameter, (_, average) in self._averages.items()}

    @contextmanager
    def average_parameters(self) -> Iterator[Module]:
        """Context in which the weights of the network are the averages, for evaluations and exports. Collective.

        At the end the weights have the same bits as before.

        Raises
        ------
        Pmm3dError
            In another such context.
        """
        self._check_weights("average_parameters")
        weights, gathers = dict[Parameter, Array](), list[Pending]()
        with self.network.grid.ledger.phase("optimizer"):
            for parameter, (part, average) in self._averages.items():
                if part.has_master or part.is_split:
                    weights[parameter] = part.library.copy(parameter.shard)
                _swap(part, part.weight(), average.local.reshape(-1))
                parameter._loaded()
                if part.is_split and not part.has_master:
                    gathers.append(part.all_gather())
            for gather in gathers:
                gather.wait()
        self._exchanged = True
        try:
            yield self.network
        finally:  # without messages: other ranks may be elsewhere after an error
            self._exchanged = False
            for parameter, (part, average) in self._averages.items():
                _swap(part, part.weight(), average.local.reshape(-1))
                if parameter in weights:
                    parameter.shard[...] = weights[parameter]
                parameter.version += 1
                if parameter.master is not None:
                    parameter._note_rounded()

    def _check_weights(self, what: str) -> None:
        if self._exchanged:
            raise Pmm3dError(
                f"EMA.{what}: the weights of the network are the averages; leave average_parameters() first"
            )

    def matrices(
        self, paths: Mapping[str, Parameter] | None = None, stored: Collection[str] | None = None
    ) -> dict[str, DistMatrix]:
        """Averages by name, such as "ema/0.weight", for a checkpoint.

        Parameters
        ----------
        paths : mapping or None
            `named_parameters()` of the network that the checkpoint contains. Default: those of the network.
        stored : collection of str or None
            Names in a checkpoint that is to be loaded. Default: the averages of all updates so far.

        Returns
        -------
        dict
            Name -> DistMatrix. In `average_parameters` it also contains the weights, by their paths, to replace those
            of `Module.matrices`.

        Raises
        ------
        Pmm3dError
            With `stored`, in `average_parameters`.
        """
        if stored is not None:
            self._check_weights("matrices(stored=)")
        matrices = dict[str, DistMatrix]()
        for path, parameter in self._by_path(paths).items():
            if parameter in self._averages if stored is None else average_name(path) in stored:
                average = matrices[average_name(path)] = self._average(parameter)[1]
                if self._exchanged:
                    matrices[average_name(path)], matrices[path] = parameter._in_checkpoint, average
        return matrices

    def load_state(self, matrices: Mapping[str, DistMatrix], paths: Mapping[str, Parameter] | None = None) -> None:
        """Take averages of a checkpoint. A parameter without one begins its average with the next update.

        Parameters
        ----------
        matrices : mapping
            Result of `matrices(paths, stored)`, filled from the checkpoint. Other names are ignored.
        paths
            As in `matrices`.

        Raises
        ------
        Pmm3dError
            In `average_parameters`.
        """
        self._check_weights("load_state")
        for path, parameter in self._by_path(paths).items():
            self._averages.pop(parameter, None)
            if (average := matrices.get(average_name(path))) is not None:
                self._averages[parameter], parameter.has_state = (_part(parameter), average), True
        note_memory(self.network.grid)

    def _by_path(self, paths: Mapping[str, Parameter] | None) -> dict[str, Parameter]:
        own = {*self._parameters}
        named = self.network.named_parameters() if paths is None else paths
        return {path: parameter for path, parameter in named.items() if parameter in own}


def _part(parameter: Parameter) -> Part:
    return Part(parameter, bool(parameter.grad_buffer.split_over))


def _first(average: Array, weight: Array) -> Array:
    return weight


def _swap(part: Part, one: Array, other: Array) -> None:
    """Exchange the contents of two flat arrays."""

    def swap(chunk: slice) -> None:
        held = part.library.copy(one[chunk])
        one[chunk] = other[chunk]
        other[chunk] = held

    parallel_rows(part.library, swap, (part.size,), part.slice_size)
