"""The element types of a parameter: of its values, messages, gradient and master weight."""

from __future__ import annotations

from dataclasses import dataclass

from ..arrays import NumpyLibrary
from ..errors import DTypeError
from ..layout import LOW_PRECISION, MATRIX_DTYPES, itemsize

NAMES = ("float32", "tf32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Precision:
    """Element types of a parameter and of the layer that holds it.

    Parameters
    ----------
    compute : str
        Type of the parameter's shard and of activations, which GEMMs multiply. Default: "float32".
    communication : str
        Type in which contributions to the gradient are computed and sent. 16-bit contributions are added in float32.
        Default: `compute`.
    gradient : str
        Type in which contributions are added up. Default: float32 if `compute` is 16-bit, else `compute`.
    master : str
        Type of the optimizer's state, and of the master weight, which the optimizer changes. The shard is the rounded
        master weight. If `master` equals `compute`, there is no master weight. Default: the default of `gradient`.
    tf32 : bool
        Whether a device may round operands of float32 GEMMs to 10 bits of mantissa. Default: False.

    Raises
    ------
    DTypeError
        For types that do not match. `communication` and `gradient` are `compute`, or float32 if `compute` is 16-bit.

    Notes
    -----
    With Adam, a parameter with a master weight takes compute + gradient + 3 master bytes: 2 + 4 + 12 for bfloat16.
    `shard_over_data` divides the last part by the number of ranks along data.

    Examples
    --------
    >>> from pmm3d import nn
    >>> nn.Precision("bfloat16")
    Precision(compute='bfloat16', communication='bfloat16', gradient='float32', master='float32', tf32=False)
    >>> nn.Precision.named("bfloat16").has_master, nn.Precision("float64").gradient
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
            raise DTypeError(f"types of a precision are {', '.join(MATRIX_DTYPES)}; got {wrong[0]!r}")
        if any(each.startswith("complex") for each in types) and len(set(types)) > 1:
            raise DTypeError(f"a precision of complex numbers has one type; got {', '.join(types)}")
        if self.master in LOW_PRECISION or itemsize(self.master) < itemsize(self.compute):
            raise DTypeError(
                f"master weights of {self.master}, for {self.compute}, would lose small changes: "
                'master = "float32", or "float64" for float64'
            )
        if not {self.communication, self.gradient} <= {self.compute, sums}:
            raise DTypeError(
                f"GEMMs of {self.compute} write {' or '.join(sorted({self.compute, sums}))}, in which a "
                "gradient is formed, sent and added up; got "
                f"communication = {self.communication}, gradient = {self.gradient}"
            )
        if self.tf32 and self.compute != "float32":
            raise DTypeError(f"tf32 rounds operands of float32; this precision computes in {self.compute}")

    @classmethod
    def named(cls, name: str) -> Precision:
        """Precision by name.

        Parameters
        ----------
        name : str
            "float32", "tf32", "bfloat16", "float16", "float64", or a complex type.

        Raises
        ------
        DTypeError
            For an unknown name.
        """
        if name not in NAMES and name not in MATRIX_DTYPES:
            raise DTypeError(f"precision is {', '.join(NAMES)}, or an nn.Precision; got {name!r}")
        return cls(tf32=True) if name == "tf32" else cls(name)

    @classmethod
    def _of(cls, precision: Precision | str | None, dtype: str = "float32") -> Precision:
        """Return the given precision, or if it is None, that of `dtype`. Raises DTypeError if both differ.

        A `dtype` of "float32" is the default, so it does not differ from any precision.
        """
        if precision is None:
            return cls.named(dtype)
        chosen = precision if isinstance(precision, Precision) else cls.named(precision)
        if dtype not in ("float32", chosen.compute):
            raise DTypeError(f"dtype is {dtype} and precision computes in {chosen.compute}: give one of them")
        return chosen

    @property
    def has_master(self) -> bool:
        """Whether optimizers change a master weight."""
        return self.master != self.compute

    def _check(self, library: NumpyLibrary) -> None:
        """Raise DTypeError if arrays of the library cannot have these types."""
        if "bfloat16" in (self.compute, self.communication, self.gradient) and library.name != "torch":
            raise DTypeError(
                f'bfloat16 is a type of torch arrays: library = "torch" (or "torch:cuda") of the '
                f"Grid, or of each layer; this network is of {library.kind} arrays"
            )
        if self.tf32 and library.kind in ("numpy", "torch"):
            raise DTypeError(
                f"tf32 needs a GPU, and {library.kind} arrays are in host memory: use precision = "
                '"float32", or library = "cupy" or "torch:cuda"'
            )
