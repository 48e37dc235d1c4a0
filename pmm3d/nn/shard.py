"""What a rank stores of a parameter, and which part of it others hold."""

from __future__ import annotations

from ..arrays import Array, NumpyLibrary
from ..comm import Grid
from ..layout import FIRST, Layout, itemsize, offsets, part_sizes
from ..product import DistMatrix


class ParameterShard:
    """A rank's shard of a weight, whose rows are sharded over z within those of another axis, or of a vector; and its
    gradient. `Parameter` is the tensor that has this shard."""

    grid: Grid
    shape: tuple[int, int]
    layout: Layout
    dtype: str
    library: NumpyLibrary
    _value: DistMatrix
    name = ""
    version = 0
    gradient: Array = None
    filled = synced = split_over_data = has_state = False

    @property
    def local(self) -> Array:
        return self._value.local

    @property
    def is_vector(self) -> bool:
        """One row for all rows of a batch (a bias): whole on all ranks of z."""
        return not self.layout.rows

    @property
    def gathered_layout(self) -> Layout:
        """Of a weight once its shards along z are together."""
        return Layout(self.layout.rows[:-1], self.layout.cols)

    @property
    def split_layout(self) -> Layout:
        """If the data axis splits it too: the rows of a matrix, the columns of a vector."""
        rows, cols = self.layout.rows, self.layout.cols
        return Layout(rows, (*cols, "data")) if self.is_vector else Layout((*rows, "data"), cols)

    def z_counts(self) -> list[int]:
        """Rows of a weight's gathered block that each rank along z holds."""
        rows, _ = self.gathered_layout.box(self.shape, self.grid.shape, self.grid.coords).shape
        return part_sizes(rows, self.grid.z.size)

    def data_counts(self) -> list[int]:
        """Elements of the shard in each part that the data axis splits it into, one after the other."""
        rows, cols = self.local.shape
        size, width = (cols, 1) if self.is_vector else (rows, cols)
        return [part * width for part in part_sizes(size, self.grid.data.size)]

    def largest(self, layout: Layout) -> int:
        """Bytes of the largest rank's shard in a layout."""
        return layout.box(self.shape, self.grid.shape, FIRST).size * itemsize(self.dtype)

    def landing(self) -> tuple[Array, int]:
        """(array, beta): where the next part of the gradient goes, and what it is added to: beta times the array."""
        if self.gradient is None:
            self.gradient = self.library.empty(tuple(self.local.shape), self.dtype)
        if self.filled and self.synced:
            self._keep_once()
        beta = int(self.filled)
        self.synced, self.filled = False, True
        return self.gradient, beta

    def _keep_once(self) -> None:
        """A gradient that is summed already must count once in the next sum: one rank keeps it, the others start from
        zero."""
        flat, index = self.gradient.reshape(-1), self.grid.data.index
        start, stop = 0, flat.shape[0] * (index == 0)
        if self.split_over_data:
            start, stop = offsets(self.data_counts())[index : index + 2]
        if self.is_vector and self.grid.z.index:
            start = stop = 0
        flat[:start] = 0
        flat[stop:] = 0
