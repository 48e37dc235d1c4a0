"""Choice of the messages of a training step that are sent in fewer bytes."""

from __future__ import annotations

from dataclasses import dataclass

from ..arrays.codecs import Codec, codec_named
from ..comm import sum_named
from ..errors import DTypeError


@dataclass(frozen=True)
class Compression:
    """Choice of the messages of a training step that are sent in fewer bytes. Default: none.

    Parameters
    ----------
    gradients : str
        Sums of gradients over data and the other axes that do not split weights: "bfloat16", "float16", "int8",
        "powersgd:RANK" (factors of a matrix) or "topk:SHARE" (the largest numbers, above 0 and up to 1). Each rank
        keeps what it did not send, and adds it to its next gradient.
    weights : str
        Gathers of weights over z: "bfloat16", "float16", "int8" or "int8:BLOCK".
    stages : str
        Activations and their gradients between stages of a pipeline: codecs as for `weights`.

    Raises
    ------
    Pmm3dError
        For an unknown name.

    Notes
    -----
    It is set for the networks of a grid, before their first step. A `Pipeline(grid, ...)` is a network of `grid.stage`:
    set `nn.Tape.of(grid.stage).parallel.compression`. Numbers that a codec would not make smaller are sent as they are,
    such as those of a bfloat16 network with "bfloat16".

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     nn.Tape.of(grid).parallel.compression = nn.Compression(gradients="int8")
    ...     nn.Tape.of(grid).parallel.compression.weights
    ''
    """

    gradients: str = ""
    weights: str = ""
    stages: str = ""

    def __post_init__(self) -> None:
        for name in filter(None, (self.weights, self.stages)):
            codec_named(name)
        if self.gradients:
            sum_named(self.gradients)

    def codec_of(self, messages: str, dtype: str) -> Codec | None:
        """Codec of "weights" or "stages" for numbers of a type. None: they are sent as they are.

        Parameters
        ----------
        messages : str
            "weights" or "stages".
        dtype : str
            Type of the numbers. Integers are sent as they are, and numbers that would take no fewer bytes.

        Returns
        -------
        Codec or None

        Raises
        ------
        DTypeError
            For complex numbers.
        """
        name = getattr(self, messages)
        if not name or "int" in dtype or dtype == "bool":
            return None
        if dtype.startswith("complex"):
            raise DTypeError(
                f"Compression({messages}={name!r}): codecs are for real numbers, and these are {dtype}. "
                f"Leave {messages} out"
            )
        codec = codec_named(name)
        return codec if codec.shortens(dtype) else None
