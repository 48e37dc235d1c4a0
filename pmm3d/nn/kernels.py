"""Changes of weights as kernels of a device: one pass over weight, gradient and state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from ..arrays import Array, NumpyLibrary

TYPES = ("float32", "float64")
"""In which they are calculated."""
PLAIN = "T x = w; T h = factor * T(g); T d = 0;", "w = x - d;"
SPLIT = ("T kept = T(w); r = chosen(T(W(kept + T(0.99975) * r)) == kept, r, T(0)); "
         "T x = kept + r; T h = factor * T(g); T d = 0;",
         "r = r - d; W rounded = W(kept + r); r = (kept - T(rounded)) + r; r = chosen(isfinite(r), r, T(0)); "
         "w = rounded;")
"""What comes before and after the formula, of weights that are all there is, and of such with remainders: as
`masters.joined` and `masters.part`."""
CHOSEN = "template<typename U> __device__ U chosen(bool first, U one, U other) { return first ? one : other; }"


class OnePass(NamedTuple):
    """What an optimizer does to each element.

    formula   lines of C++: from the weight x and the gradient h they form d, which is taken off the weight, and change
              the state. T is the type of all that they calculate with
    states    the names in it of the optimizer's state arrays;   numbers   of its numbers, and what they are
    """

    formula: str
    states: Sequence[str]
    numbers: dict[str, float]

    def change(self, library: NumpyLibrary, factor: float, weight: Array, gradient: Array, remainder: Array | None,
               states: Sequence[Array]) -> bool:
        """Change a weight and what belongs to it, if the library makes a kernel for such arrays: whether it did.
        factor: of the gradient."""
        if library.slice_elements is not None or library.name != "cupy":
            return False
        types = {library.dtype(array) for array in (weight if remainder is None else remainder, *states)}
        if types - set(TYPES) or len(types) > 1:
            return False
        kernel = _kernel(library, self.formula, tuple(self.states), tuple(self.numbers), remainder is not None)
        kernel(gradient, factor, *self.numbers.values(), weight, *([] if remainder is None else [remainder]), *states)
        return True


@cache
def _kernel(library: NumpyLibrary, formula: str, states: Sequence[str], numbers: Sequence[str],
            split: bool) -> Callable[..., Any]:
    """A kernel of (gradient, factor, *numbers, weight, [remainder,] *states)."""
    before, after = SPLIT if split else PLAIN
    inputs = ", ".join(["G g", *(f"T {name}" for name in ("factor", *numbers))])
    outputs = ", ".join(["W w", "T r"] if split else ["T w"]) + "".join(f", T {name}" for name in states)
    return library.xp.ElementwiseKernel(inputs, outputs, f"{before} {formula} {after}", "pmm3d_change",
                                        preamble=CHOSEN)
