"""The element types of a parameter: what is computed with, sent, added up and changed."""

from __future__ import annotations

from dataclasses import dataclass

from ..arrays import NumpyLibrary
from ..errors import DTypeError
from ..layout import LOW_PRECISION, MATRIX_DTYPES, itemsize

NAMES = ("float32", "tf32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Precision:
    """Of a parameter, and of the layer that it belongs to.

    compute        of the parameter's shard and of activations: what GEMMs multiply
    communication  in which parts of its gradient are formed, and sent over z and over data; left out: as compute. They
                   are added in float32
    gradient       of the gradient, in which the parts of all ranks and batches are added up, and in which those of
                   vectors go over z; left out: float32 for low precision, else compute
    master         of the master weight that an optimizer changes, of which the shard is the rounded one, and of its
                   other state; if master is compute, the shard itself is changed. Left out: float32 for low precision,
                   else compute
    tf32           whether a device may round the operands of float32 GEMMs to 10 bits of mantissa

    Communication and gradient are compute or, beside a low precision, float32: what a GEMM writes. On the host torch
    rounds a product of bfloat16 even where it is added to float32, or sent in it.

    Bytes a parameter, with Adam: compute + gradient + 3 master, as 2 + 4 + 12 of bfloat16; the last part is shared
    among the ranks along data by `shard_over_data`. Raises DTypeError for types that do not go together.

        >>> Precision("bfloat16")
        Precision(compute='bfloat16', communication='bfloat16', gradient='float32', master='float32', tf32=False)
        >>> Precision.named("bfloat16").has_master, Precision("float64").gradient
        (True, 'float64')
    """

    compute: str = "float32"
    communication: str = ""
    gradient: str = ""
    master: str = ""
    tf32: bool = False

    def __post_init__(self) -> None:
        sums = "float32" if self.compute in LOW_PRECISION else self.compute
        for name, left_out in (("communication", self.compute), ("gradient", sums), ("master", sums)):
            object.__setattr__(self, name, getattr(self, name) or left_out)
        types = self.compute, self.communication, self.gradient, self.master
        if wrong := [each for each in types if each not in MATRIX_DTYPES]:
            raise DTypeError(f"a precision is of the types {', '.join(MATRIX_DTYPES)}; got {wrong[0]!r}")
        if any(each.startswith("complex") for each in types) and len(set(types)) > 1:
            raise DTypeError(f"a precision of complex numbers is of one type; got {', '.join(types)}")
        if self.master in LOW_PRECISION or itemsize(self.master) < itemsize(self.compute):
            raise DTypeError(f"master weights of {self.master}, for {self.compute}, would not take small changes: "
                             'master = "float32", or "float64" for float64')
        if not {self.communication, self.gradient} <= {self.compute, sums}:
            raise DTypeError(f"GEMMs of {self.compute} write {' or '.join(sorted({self.compute, sums}))}, in which a "
                             "gradient is formed, sent and added up; got "
                             f"communication = {self.communication}, gradient = {self.gradient}")
        if self.tf32 and self.compute != "float32":
            raise DTypeError(f"tf32 rounds operands of float32; this precision computes in {self.compute}")

    @classmethod
    def named(cls, name: str) -> Precision:
        """ "float32", "tf32", "bfloat16", "float16", "float64"; a complex type is of itself alone."""
        if name not in NAMES and name not in MATRIX_DTYPES:
            raise DTypeError(f"precision is {', '.join(NAMES)}, or an nn.Precision; got {name!r}")
        return cls(tf32=True) if name == "tf32" else cls(name)

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
    def has_master(self) -> bool:
        """Whether an optimizer changes a master weight beside the shard."""
        return self.master != self.compute

    def check(self, library: NumpyLibrary) -> None:
        """Raises DTypeError where arrays of that library cannot have it."""
        if "bfloat16" in (self.compute, self.communication, self.gradient) and library.name != "torch":
            raise DTypeError(f'bfloat16 is a type of torch arrays: library = "torch" (or "torch:cuda") of the '
                             f"Grid, or of each layer; this network is of {library.kind} arrays")
        if self.tf32 and library.kind in ("numpy", "torch"):
            raise DTypeError(f"tf32 is of GPUs, and {library.kind} arrays are in host memory: precision = \"float32\", "
                             'or library = "cupy" or "torch:cuda"')
