"""Parts of a network that are computed by tiles of rows, so that their intermediate arrays never have all rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import add as plus
from typing import Any, NoReturn

from ..arrays import Array
from ..comm import assign, call
from ..errors import LayoutError, Pmm3dError
from ..layout import Box, Layout, RaggedRows, natural
from ..layout.layout import layout_of
from ..product import DistMatrix
from . import loss as losses
from .compute import TensorSpec, override
from .contract import Contribution, Gradient, LazyMatrix, accumulation
from .contract import natural as contribution_of
from .dense import spec_of_result
from .elementwise import map_elementwise
from .gradient_buffer import Leaf
from .gradients import fill
from .labels import check_all_labels, check_weights, layout_of_rows
from .layers import Linear
from .module import Module
from .operations import argmax
from .parallel import BackwardSync
from .recompute import Recompute
from .tape import Edge, Node, outside
from .tensor import Matrix, Tensor, as_tensor, relayout, summed
from .tiles_of_rows import RowTile, pieces_of, row_tiles

Part = Callable[..., Tensor]


class CurrentTile:
    """The tile that is computed (`Tape.tile`).

    whole     layout of the rows of the whole matrix;   rows   their number
    checked   whether the arguments of a loss were checked for all rows
    """

    def __init__(self, whole: Layout, rows: int, tile: RowTile, grid: Any, checked: bool):
        self.checked, self._whole, self._rows, self._tile, self._grid = checked, whole, rows, tile, grid.shape

    def runs(self, box: Box) -> list[tuple[slice, Box]]:
        """Slices of the rows of a shard, and the rows and columns of the whole matrix that they are.

        box   this rank's part of a matrix of the tile's rows
        """
        return [
            (slice(start, stop), Box(row, row + stop - start, box.c0, box.c1))
            for start, stop, row in pieces_of(self._whole, self._rows, self._tile, box, self._grid)
        ]

    def put(self, made: Tensor, whole: Array) -> None:
        """Copy the tile's rows of a result, of this layout of rows, to their places in a shard of all rows."""
        tile = self._tile
        rows = relayout(made, _with_rows(made.layout, tile.layout)).shard
        assign(made.grid.engine, whole[tile.start : tile.stop], rows)

    def refuse(self, what: str) -> NoReturn:
        raise LayoutError(
            f"Tiled: {what} depends on other rows than its own, and a tile has a few rows only. Use Tiled for parts "
            "that work row by row, such as linear layers, norms and activations"
        )


class Tiled(Recompute):
    """Part of a network that is computed by tiles of rows, and once more in the backward pass.

    Parameters
    ----------
    module : Module
        The part. It must work row by row: linear layers, norms, activations, dropout. It takes and returns one tensor
        of equally many rows. Names of its parameters do not change.
    rows : int
        Largest number of rows of a tile on a rank, at least 1.

    Raises
    ------
    LayoutError
        On every rank: if the module returns another number of rows, or contains attention, positions, a `Router` or
        another `Tiled`; for ragged rows; and for unequal parts of rows that no layout describes.
    Pmm3dError
        For other `rows`, if the module returns several tensors, and if it has a number of bytes as `recompute`.

    Notes
    -----
    Rows of a single tile are computed as without tiles. Otherwise only the input is kept. Each tile is computed again
    in the backward pass, one after the other, so intermediate arrays have the rows of one tile. All ranks compute
    equally many tiles. With sharded activations, `rows` counts rows of the shard; a layer gathers those of Gx (or Gy)
    ranks.

    A weight is gathered once for all tiles of a pass, and once for the backward pass. Its gradient is sent once: if z
    has several ranks, the tiles are added up first, in an array of the gathered block. Activations take the same bytes
    as without tiles, in a message for each tile.

    Results are the same as without tiles. Sums over rows, which are the gradients of parameters, are added tile by
    tile, so the last bits differ if there are several tiles. Dropout uses the masks of the whole matrix.

    With `defer_weights`, and so in pipelines without bubbles, the products of the weights' gradients are computed at
    once, because the queue would hold the arrays of all tiles.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     net = nn.Tiled(nn.FeedForward(grid, 8, 32), rows=2)
    ...     x = DistMatrix.random(grid, (5, 8), dtype="float32")
    ...     net(x).shape, list(net.named_parameters())
    ((5, 8), ['up.weight', 'up.bias', 'down.weight', 'down.bias'])
    """

    replays = True

    def __init__(self, module: Module, rows: int):
        super().__init__(module)
        self.rows = natural(rows, f"{type(self).__name__}: rows is a whole number, at least 1", 1, Pmm3dError)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        if len(inputs) != 1:
            raise Pmm3dError(f"Tiled: the part of a network takes one tensor; got {len(inputs)}")
        return self._by_tiles(partial(self.module, **options), *inputs)

    def _by_tiles(self, part: Part, x: Tensor, *others: Tensor) -> Tensor:
        """Result of part(x, *others), which works row by row, by tiles. `others` have the rows of x. Collective."""
        tape, grid, x = x.tape, self.grid, summed(x)
        if isinstance(x.shape[0], RaggedRows):
            x.shape[0].refuse()
        if tape.tile is not None:
            raise LayoutError(
                "Tiled: the part contains another Tiled. Rows are cut into tiles once: use one of the two"
            )
        inputs = [x, *(relayout(each, _with_rows(each.layout, x.layout)) for each in others)]
        run = _Tiles(part, inputs, self.rows)
        if len(run.tiles) == 1:
            return run(run.tiles[0], *inputs)
        mode, first, edges = self._mode(), next(tape.numbers), list[Edge | None]()
        frozen = [parameter for parameter in self.module.parameters() if not parameter.requires_grad]
        shards, result, spec = [each.shard for each in inputs], None, x.spec
        with tape.parallel.weights.holding(), tape.set(keeping=False):
            for number, tile in enumerate(run.tiles):
                if number:
                    self._set_mode(mode)
                out = run(tile, *run.of(tile, shards))
                if result is None:
                    spec = out.spec.like((x.shape[0], out.shape[1]), _with_rows(out.layout, x.layout))
                    result = spec.new()
                assign(grid.engine, result[tile.start : tile.stop], out.shard)
                edges.append(out._edge)
                del out
        outer, noted = outside(edges, first)

        def rule(gradient: Array, *shards: Array) -> list[Contribution]:
            own = [each.new() if needs else None for each, needs in zip(run.specs, run.wanted)]
            others = dict[Edge, Array]()
            with tape.parallel.weights.holding(), _added_up(tape.parallel):
                for tile in run.tiles:
                    rows, tensors = slice(tile.start, tile.stop), run.of(tile, shards)
                    places = [each._edge for each in tensors]
                    again = self._again(partial(run, tile), tensors, {}, mode, {}, frozen, [gradient[rows]])
                    del tensors
                    for array, place in zip(own, places):
                        if array is not None and place is not None:
                            assign(grid.engine, array[rows], again.pop(place, 0))
                    for edge, value in again.items():
                        before = others.get(edge)
                        others[edge] = (
                            value if before is None else map_elementwise(edge.spec, "add", plus, before, value)
                        )
            return [*own, *(others.get(edge) for edge in outer)]

        keep = {f"recompute.input {number}": each for number, each in enumerate(inputs)}
        parents = [*(each._edge for each in inputs), *outer]
        made = x.from_op(result, parents, rule, keep=keep, shape=spec.shape, layout=spec.layout)
        if made.node is not None:
            made.node.leaves = [
                *((each, each._written) for each in inputs if each.node is not None and each.node.leaf),
                *noted,
            ]
        return made


class _Tiles:
    """The tiles of a call of `Tiled`, without its arrays.

    specs, wanted, below   of each input: its spec, whether its gradient is needed, and `labels_below`
    """

    def __init__(self, part: Part, inputs: Sequence[Tensor], largest: int):
        [rows, _], grid, self._part = inputs[0].shape, inputs[0].grid, part
        self.whole = _with_rows(Layout(), inputs[0].layout)
        self.tiles = row_tiles(self.whole, rows, grid.shape, largest)
        self.specs, self.wanted = [each.spec for each in inputs], [each.requires_grad for each in inputs]
        self.below = [each.value.labels_below for each in inputs]

    def of(self, tile: RowTile, shards: Sequence[Array]) -> list[Tensor]:
        """The inputs of a tile. Their nodes have no parents, so a backward pass ends there."""
        tensors = list[Tensor]()
        for spec, shard, wanted, below in zip(self.specs, shards, self.wanted, self.below):
            shape, layout = (tile.rows, spec.shape[1]), _with_rows(spec.layout, tile.layout)
            value = DistMatrix(spec.grid, shard[tile.start : tile.stop], shape, layout)
            value.labels_below = below
            tensors.append(Tensor(value, edge=Edge(Node(TensorSpec.of(value)), 0) if wanted else None))
        return tensors

    def __call__(self, tile: RowTile, *inputs: Tensor) -> Tensor:
        """Result of a tile, with its rows where the inputs have them."""
        spec, checked = self.specs[0], len(inputs) > 1
        current = CurrentTile(self.whole, spec.shape[0], tile, spec.grid, checked)
        with inputs[0].tape.set(tile=current):
            out = self._part(*inputs)
        if not isinstance(out, Tensor):
            raise Pmm3dError(f"Tiled: the part of a network returns one tensor; got a {type(out).__name__}")
        if out.shape[0] != tile.rows:
            raise LayoutError(
                f"Tiled: the part of a network made {out.shape[0]} rows of {tile.rows}. Use Tiled for parts that work "
                "row by row"
            )
        if {*out.layout.cols} & {*self.whole.rows}:
            raise LayoutError(
                f"Tiled: the axis {out.layout.cols[0]} splits the columns of the result and the rows of the input, "
                f'{self.whole}. Pass activations="replicated" to the layers, or put the layer before or after into the '
                "same Tiled"
            )
        return relayout(out, _with_rows(out.layout, tile.layout))


def check_tiles(what: str, argument: str, rows: Any) -> int:
    """Return a number of rows of a tile; 0: no tiles. Raises Pmm3dError."""
    return natural(rows, f"{what}: {argument} is a number of rows of a tile, or 0 for no tiles", 0, Pmm3dError)


def _with_rows(layout: Layout, rows: Layout) -> Layout:
    """A layout without partial sums, with the rows of another one."""
    return layout_of(rows.rows, layout.cols, (), (rows.units[0], layout.units[1]))


@contextmanager
def _added_up(parallel: BackwardSync) -> Iterator[None]:
    """Context of the backward passes of tiles. Contributions to a gradient that would be sent, or put into a queue, are
    added up, and one contribution follows at the end. Others are added to the gradient at once."""
    outer, engine = parallel.deferred, parallel.grid.engine
    totals = dict[tuple[Leaf, Layout], Array]()

    def put(leaf: Leaf, part: Contribution) -> None:
        buffer = leaf.grad_buffer
        given = contribution_of(buffer.of, part)
        if outer is None and accumulation(given.layout, buffer.spec.layout, parallel.grid.shape).kind == "stay":
            parallel.gradients.add(buffer, given)
            return
        key = leaf, given.layout
        if key in totals:
            fill(engine, given, totals[key], 1)
            if outer is None:
                parallel.gradients.absorbed(buffer)
            return
        shape = given.shape if isinstance(given, LazyMatrix) else tuple(given.array.shape)
        totals[key] = total = buffer.spec.new(shape)
        fill(engine, given, total, 0)

    with override(parallel, deferred=put):
        yield
    while totals:
        (leaf, layout), total = totals.popitem()
        whole = Gradient(total, layout)
        if outer is None:
            parallel.gradients.add(leaf.grad_buffer, whole)
        else:
            outer(leaf, whole)


class TiledHead(Tiled):
    """Last part of a network, of whose result `nn.cross_entropy` computes a tile of rows at a time.

    The result of all rows, such as the logits of a large vocabulary, is never stored.

    Parameters
    ----------
    module : Module
        The part. Its last layer is a `Linear`; the others work row by row and keep the layout, such as a norm.
    rows : int
        As in `Tiled`, also for errors.

    Raises
    ------
    Pmm3dError
        If the last layer is no Linear.

    Notes
    -----
    net(x) returns a `TiledLogits`, a tensor whose values are computed when they are needed:

    - `nn.cross_entropy` computes them by tiles, with all its arguments, and once more in the backward pass: a third
      more operations of this part. `nn.accuracy` computes them by tiles too.
    - Anything else computes the result of all rows, as without tiles. While operations are recorded for a backward
      pass, this is refused.

    Losses and gradients are the same as without tiles. With one tile, their bits are equal.

    Examples
    --------
    >>> import numpy as np
    >>> from pmm3d import DistMatrix, Grid, Layout, nn
    >>> with Grid(shape="ddp") as grid:
    ...     net = nn.TiledHead(nn.Linear(grid, 8, 1000), rows=2)
    ...     x = DistMatrix.random(grid, (5, 8), dtype="float32")
    ...     labels = DistMatrix(grid, np.arange(5)[:, None], (5, 1), Layout())
    ...     loss = nn.cross_entropy(net(x), labels)
    ...     loss.backward()
    ...     loss.shape, net.module.weight.grad.shape
    ((1, 1), (8, 1000))
    """

    replays = True

    def __init__(self, module: Module, rows: int):
        super().__init__(module, rows)
        self.last = _last_linear(module)

    def forward(self, x: Tensor) -> Any:
        if x.tape.placed is not None:  # in `settle`, the layers look at their inputs
            return self.module(x)
        return TiledLogits(self, summed(x))


def _last_linear(module: Module) -> Linear:
    last: Any = module
    while not isinstance(last, Linear):
        below = [child for _, child in last.children() if isinstance(child, Module)]
        if not below:
            raise Pmm3dError(
                f"TiledHead: the last layer is a {type(last).__name__}; it must be a Linear, such as the one that "
                "makes the logits. For other parts, use nn.Tiled"
            )
        last = below[-1]
    return last


class TiledLogits(Tensor):
    """Result of a `TiledHead`, whose values are computed when they are needed."""

    def __init__(self, head: TiledHead, x: Tensor):
        self._head, self._x, self._recorded, self.grad = head, x, x.tape.recording, None
        self._largest: Tensor | None = None
        self.spec = spec = spec_of_result(x.spec, head.last.weight, head.last.activations)
        self.grid, self.layout, self.shape, self.dtype = spec.grid, spec.layout, spec.shape, spec.dtype
        self.library, self.tape = spec.library, x.tape

    def __repr__(self) -> str:
        return f"<TiledLogits {self.shape[0]} x {self.shape[1]} {self.dtype}>"

    @property
    def tiled(self) -> TiledLogits:
        return self

    @property
    def requires_grad(self) -> bool:
        """Whether the operations of these values are recorded for a backward pass."""
        return self._recorded

    @property
    def box(self) -> Box:
        return self.layout.box(self.shape, self.grid.shape, self.grid.coords)

    def __getattr__(self, name: str) -> Any:
        """Compute all values, at the first use of one of the attributes of a computed tensor."""
        if name not in ("_value", "_pending", "node"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if self._recorded:
            raise Pmm3dError(
                "logits of a TiledHead (loss_tiles) are computed by nn.cross_entropy, by tiles of rows. For another "
                "function of logits in training, make the network without loss_tiles. Without a backward pass, use "
                "nn.no_grad(grid) or network.evaluating()"
            )
        with self.tape.set(recording=False):
            made = self._head.module(self._x)
        if made.spec != self.spec:
            raise LayoutError(f"TiledHead: its layers made {made!r}; from the last Linear, {self.spec} was expected")
        vars(self).update(_value=made._value, _pending=made._pending, node=None)
        return vars(self)[name]

    def cross_entropy(
        self, labels: Matrix, reduction: str, ignored: int | None, weight: losses.Weights | None, label_smoothing: float
    ) -> Tensor:
        """`nn.cross_entropy` by tiles. Its arguments were checked, except the weights and the labels."""
        class_weights = check_weights(self, weight, "cross_entropy", "weight", label_smoothing)
        call(self.grid.engine, partial(check_all_labels, self, labels, ignored))
        given = as_tensor(labels).value
        own = DistMatrix(self.grid, given.local, given.shape, given.layout)
        own.labels_below, module = self.shape[1], self._head.module
        recording = self._recorded and self.tape.recording
        rows = _with_rows(Layout(), self._x.layout)
        largest = None if recording else self._x.spec.typed("int64").like((self.shape[0], 1), rows)
        found = None if largest is None else largest.new()

        def of_tile(x: Tensor, labels: Tensor) -> Tensor:  # it must not hold the input of all rows
            logits = module(x)
            if found is not None and (tile := x.tape.tile) is not None:  # an evaluation also needs the accuracy
                tile.put(argmax(logits, 1), found)
            return losses.cross_entropy(logits, labels, "none", ignored, class_weights, label_smoothing)

        with self.tape.set(recording=recording):
            terms = relayout(self._head._by_tiles(of_tile, self._x, Tensor(own)), layout_of_rows(self))
        if largest is not None:
            self._largest = Tensor(largest.matrix(found))
        return terms if reduction == "none" else losses.reduced(terms, labels, reduction, ignored, class_weights)

    def first_largest(self) -> Tensor:
        """Column of the largest logit of each row, (m, 1) int64, in the layout of the logits' rows. If there was a loss
        of these logits without a backward pass, nothing is computed again."""
        with self.tape.set(recording=False):
            if self._largest is None:
                self._largest = self._head._by_tiles(lambda x: argmax(self._head.module(x), 1), self._x)
            return relayout(self._largest, layout_of_rows(self))
