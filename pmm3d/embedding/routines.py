"""ScaLAPACK's routines, as a C or Fortran program calls them: a table of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from importlib import import_module
from typing import Any, NamedTuple

from ..arrays import NumpyLibrary
from ..comm import Grid
from ..product import PgemmPlan, Redistribution
from ..product.redistribution import part_of
from .arguments import CHARACTERS, dtype_named, letter, scalar_at
from .held import HeldContext, HeldPlan, LocalPart

OPS = {"pgemr2d": "N", "ptran": "T", "ptranu": "T", "ptranc": "C"}
"""Operation on A of a routine that moves elements. That of pgeadd is an argument."""


class Routine:
    """A routine and its arguments.

    name    name of the function in pmm3d
    form    the arguments in the order of embed/pmm3d.h. A capital X is a matrix: x, ix, jx, descx. alpha.real is a real
            number also if matrices are complex

    names   names of the arguments that the `Host` gets: `width`, the bytes of an integer of a descriptor; `plan`; then
            those of embed/pmm3d.h. of_NAME, the type of a number or an array, follows it
    reals   factors that are real numbers
    """

    def __init__(self, name: str, form: str):
        self.name, self.words = name, form.split()
        self.reals = {word.partition(".")[0] for word in self.words if word.endswith(".real")}
        self.names = ["width", "plan"]
        for word in self.words:
            own = word.partition(".")[0].lower()
            self.names.append(own)
            self.names += [f"i{own}", f"j{own}", f"desc{own}"] if word.isupper() else []
            self.names += [f"of_{own}"] if word.isupper() or own in ("alpha", "beta") else []

    @cached_property
    def function(self) -> Callable[..., int | None]:
        found: Callable[..., int | None] = getattr(import_module(__name__.partition(".")[0]), self.name)
        return found

    def read(
        self, given: Mapping[str, int], context_of: Callable[[int], HeldContext], library: NumpyLibrary
    ) -> Arguments:
        """Read the arguments. Raises Pmm3dError on this rank only.

        given        arguments by name
        context_of   context with a number
        """
        dtype = dtype_named(given["kind"])
        read = Arguments(dtype, library, [], [], {}, {})
        for word in self.words:
            name = word.partition(".")[0].lower()
            if word.isupper():
                context = context_of(given.get(f"context{name}", given.get("context", 0)))
                addresses = given[name], given[f"desc{name}"]
                part = context.part(name, *addresses, dtype, given[f"of_{name}"], given["width"], library)
                read.parts[word] = part
                placed = given[f"i{name}"], given[f"j{name}"], part.descriptor
                read.passed.extend((part.local, *placed))
                read.planned.extend(placed)
            elif f"of_{name}" in given:
                number = scalar_at(name, given[name], given[f"of_{name}"], dtype, name in self.reals)
                read.factors[name] = number
                read.passed.append(number)
            elif name not in ("kind", "info") and not name.startswith("context"):
                value = letter(given[name]) if name in CHARACTERS else given[name]
                read.passed.append(value)
                read.planned.append(value)
        return read

    def planner(
        self, given: Mapping[str, int], read: Arguments, grid: Grid, limit: int | None
    ) -> Callable[[], HeldPlan]:
        """Function that plans the routine, which is collective. Raises Pmm3dError on this rank only."""
        arrays = tuple(part.local for part in read.parts.values())
        options: dict[str, Any] = {"dtype": read.dtype, "library": read.library.kind}
        if self.name == "pgemm":
            parts = tuple(read.parts.values())

            def plan_product() -> HeldPlan:
                product = PgemmPlan(*read.planned, **options, max_workspace=limit)
                return HeldPlan(self.name, product, product.close, arrays, read.factors, parts)

            return plan_product
        op, shape = OPS.get(self.name) or letter(given["trans"]), (given["m"], given["n"])
        sides = [
            part_of(self.name, word, given[f"i{word.lower()}"], given[f"j{word.lower()}"], part.descriptor, *of)
            for (word, part), of in zip(read.parts.items(), (shape if op == "N" else shape[::-1], shape))
        ]

        def plan_move() -> HeldPlan:
            return HeldPlan(self.name, Redistribution(grid, *sides, op=op, **options), None, arrays, read.factors)

        return plan_move


class Arguments(NamedTuple):
    """Arguments of a call.

    passed    those of the function in Python, in order
    planned   those of its plan: without arrays and factors
    parts     name -> this rank's part of each matrix
    """

    dtype: str
    library: NumpyLibrary
    passed: list[Any]
    planned: list[Any]
    factors: dict[str, Any]
    parts: dict[str, LocalPart]


MOVED, SYMMETRIC = "context kind m n alpha A beta C", "context kind side uplo m n alpha A B beta C"
RANK_K, RANK_2K = "context kind uplo trans n k {} A {} C", "context kind uplo trans n k {} A B {} C"
TRIANGULAR = "context kind side uplo transa diag m n alpha A B"
SOLVED = "context kind uplo n nrhs A B info"
ROUTINES = {
    name: Routine(name, form)
    for name, form in {
        "pgemm": "context kind transa transb m n k alpha A B beta C",
        "pgemr2d": "kind m n A contexta B contextb",
        "ptran": MOVED,
        "ptranu": MOVED,
        "ptranc": MOVED,
        "pgeadd": "context kind trans m n alpha A beta C",
        "psyrk": RANK_K.format("alpha", "beta"),
        "pherk": RANK_K.format("alpha.real", "beta.real"),
        "psyr2k": RANK_2K.format("alpha", "beta"),
        "pher2k": RANK_2K.format("alpha", "beta.real"),
        "psymm": SYMMETRIC,
        "phemm": SYMMETRIC,
        "ptrmm": TRIANGULAR,
        "ptrsm": TRIANGULAR,
        "ppotrf": "context kind uplo n A info",
        "ppotrs": SOLVED,
        "pposv": SOLVED,
        "ptrtri": "context kind uplo diag n A info",
    }.items()
}
