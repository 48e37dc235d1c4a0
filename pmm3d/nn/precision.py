"""The element types of a parameter: what is computed with, sent, added up and changed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..arrays import NumpyLibrary
from ..errors import DTypeError
from ..layout import LOW_PRECISION, MATRIX_DTYPES, itemsize

NAMES = ("float32", "tf32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Precision:
    """Of a parameter, and of the layer that it belongs to.

    compute        of the parameter's shard and of activations: what GEMMs multiply
    communication  in which parts of its gradient are formed, and sent over z and over data; None: as compute. They are
                   added in float32
    gradient       of the gradient, in which the parts of all ranks and batches are added up
    master         of the weights that an optimizer keeps and changes, and of what else it keeps. They are rounded to
                   the shard after each step; where master is compute, the shard is all that there is
    tf32           whether a device may round the operands of float32 GEMMs to 10 bits of mantissa

    Bytes a parameter, with Adam: compute + gradient + 3 master, as 2 + 4 + 12 of bfloat16; the last part is shared
    among the ranks along data by `shard_over_data`. Raises DTypeError for types that do not go together.

        >>> Precision.named("bfloat16").sent, Precision.named("bfloat16").has_master, Precision().has_master
        ('bfloat16', True, False)
    """

    compute: str = "float32"
    communication: str | None = None
    gradient: str = "float32"
    master: str = "float32"
    tf32: bool = False

    def __post_init__(self) -> None:
        types = self.compute, self.sent, self.gradient, self.master
        if wrong := [each for each in types if each not in MATRIX_DTYPES]:
            raise DTypeError(f"a precision is of the types {', '.join(MATRIX_DTYPES)}; got {wrong[0]!r}")
        if any(each.startswith("complex") for each in types) and len(set(types)) > 1:
            raise DTypeError(f"a precision of complex numbers is of one type; got {', '.join(types)}")
        if self.master in LOW_PRECISION or itemsize(self.master) < itemsize(self.compute):
            raise DTypeError(f"master weights of {self.master}, for {self.compute}, would not take small changes: "
                             'master = "float32", or "float64" for float64')
        if self.tf32 and self.compute != "float32":
            raise DTypeError(f"tf32 rounds operands of float32; this precision computes in {self.compute}")

    @classmethod
    def named(cls, name: str) -> Precision:
        """ "float32", "tf32", "bfloat16", "float16", "float64"; a complex type is of itself alone."""
        if name not in NAMES and name not in MATRIX_DTYPES:
            raise DTypeError(f"precision is {', '.join(NAMES)}, or an nn.Precision; got {name!r}")
        if name == "tf32":
            return cls(tf32=True)
        return cls(name) if name in (*LOW_PRECISION, "float32") else cls(name, gradient=name, master=name)

    @classmethod
    def of(cls, precision: Precision | str | None, dtype: str = "float32") -> Precision:
        """That which is asked for; None: that of the name `dtype`, which else must not say something else."""
        if precision is None:
            return cls.named(dtype)
        found = precision if isinstance(precision, Precision) else cls.named(precision)
        if dtype not in ("float32", found.compute):
            raise DTypeError(f"dtype is {dtype} and precision computes in {found.compute}: give one of them")
        return found

    @property
    def sent(self) -> str:
        """In which parts of a gradient are formed and sent."""
        return self.communication or self.compute

    @property
    def has_master(self) -> bool:
        """Whether an optimizer keeps weights of its own."""
        return self.master != self.compute

    @property
    def whole(self) -> Precision:
        """That of the master weights alone: to predict, and to export."""
        return replace(self, compute=self.master, communication=None, gradient=self.master, tf32=False)

    def check(self, library: NumpyLibrary) -> None:
        """Raises DTypeError where arrays of that library cannot have it."""
        if "bfloat16" in (self.compute, self.sent, self.gradient) and library.name != "torch":
            raise DTypeError(f'bfloat16 is a type of torch arrays: library = "torch" (or "torch:cuda"); this network '
                             f"is of {library.kind} arrays")
        if self.tf32 and library.kind in ("numpy", "torch"):
            raise DTypeError(f"tf32 is of GPUs, and {library.kind} arrays are in host memory: precision = \"float32\", "
                             'or library = "cupy" or "torch:cuda"')
