"""Weights of one precision in checkpoints of another: which stored matrix is which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..layout import LOW_PRECISION
from ..product import DistMatrix
from .optimizer import MASTER

Contents = Mapping[str, tuple[tuple[int, int], str]]
"""Name -> (shape, type) of what a checkpoint holds."""
STATE, ENDING = "optimizer/", f"/{MASTER}"


class StoredAs(NamedTuple):
    """What fills the matrices of a training, or of a network.

    matrices   name in the checkpoint -> matrix that it fills
    rounded    weights of low precision that nothing fills: they are rounded from what the checkpoint has of them in
               another type
    unused     names in the checkpoint of what others are taken for
    """

    matrices: dict[str, DistMatrix]
    rounded: list[str]
    unused: set[str]

    @classmethod
    def of(cls, contents: Contents, matrices: Mapping[str, DistMatrix]) -> StoredAs:
        """Each by its name and type; else weights are filled by stored masters of their type, and masters by stored
        weights. What does not fit at all is left as it is, for the checkpoint to refuse.

            >>> from pmm3d import Grid
            >>> with Grid() as grid:
            ...     stored = {"w": ((2, 2), "bfloat16"), "optimizer/w/master": ((2, 2), "float32")}
            ...     list(StoredAs.of(stored, {"w": DistMatrix.empty(grid, (2, 2), dtype="float32")}).matrices)
            ['optimizer/w/master']
        """
        found = cls({}, [], set())
        for name, matrix in matrices.items():
            there, master = contents.get(name, ((), ""))[1], contents.get(master_of(name), ((), ""))[1]
            weight = name.removeprefix(STATE).removesuffix(ENDING)
            if there and there != matrix.dtype and master == matrix.dtype:
                found.matrices[master_of(name)] = matrix
                found.unused.add(name)
            elif there and there != matrix.dtype and matrix.dtype in LOW_PRECISION:
                found.rounded.append(name)
                found.unused.add(name)
            elif not there and name == master_of(weight) and contents.get(weight, ((), ""))[1] == matrix.dtype:
                found.matrices[weight] = matrix
            else:
                found.matrices[name] = matrix
        return found

    def is_all(self, contents: Contents) -> bool:
        """Whether all else that is there is unused."""
        return contents.keys() - self.matrices.keys() <= self.unused


def is_state(name: str) -> bool:
    """Of a matrix in a checkpoint: whether it is an optimizer's."""
    return name.startswith(STATE)


def master_of(name: str) -> str:
    """The name of a parameter's master weights."""
    return f"{STATE}{name}{ENDING}"
