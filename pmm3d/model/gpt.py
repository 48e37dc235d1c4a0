"""A GPT by published formulas: the activations of a block, and the grids ranked by the five-term model."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import GridError, Pmm3dError
from ..layout import GridShape
from ..text import counted
from .axonn import ORDER, Bandwidths, Layer, layer_seconds
from .candidates import Candidate, Ranking, preset_of
from .grid_search import grids_4d

FACTORS = ((3, False), (1, True), (4, False), (4, True))
"""(K, whether it is transposed) of each fully connected layer of a block: queries, keys and values; projection of the
attention; the two layers of the MLP."""
LSE = 4
"""Bytes of a log-sum-exp in float32."""
DTYPE = "bfloat16"
"""Type of the GEMMs."""


def block_bytes(
    rows: int,
    hidden: int,
    heads: int,
    *,
    outer: int = 1,
    inner: int = 1,
    element: int = 2,
    kv_heads: int | None = None,
    mlp: int | None = None,
    recompute: str = "none",
    dropout: bool = False,
    scores: int = 0,
) -> float:
    """Return the bytes that a rank stores for the backward pass of a transformer block (Korthikanti et al. 2022,
    arXiv 2205.05198, equations 1 to 4).

    rows       tokens on the rank: s b, for b sequences of s tokens
    outer      ranks that split the inputs of attention, MLP and norms, and the dropout masks: 1 with Megatron's tensor
               parallelism, t with its sequence parallelism
    inner      ranks that split the heads and the columns of the MLP: t
    element    bytes of an activation
    kv_heads   default: heads
    mlp        default: 4 hidden
    recompute  "none", "selective" or "full"
    dropout    whether attention and MLP have dropout, whose mask has a byte for each element
    scores     keys of a query whose weights are stored, 5 bytes each with dropout: s in the paper. 0 for a kernel that
               stores the result and its log-sum-exp, as the kernel of `pmm3d.nn`

    With 2 bytes, dropout and inner = t: rows h (10 / outer + 24 / t + 5 a s / (h t)). Selective recomputation drops the
    last term. With scores = 0 this term is 4 bytes for each row and head.

        >>> sizes = {"rows": 2048 * 4, "hidden": 6144, "heads": 64, "inner": 8, "dropout": True, "scores": 2048}
        >>> [f"{block_bytes(outer=outer, recompute=recompute, **sizes) / 2**30:.3f}"
        ...  for outer in (1, 8) for recompute in ("none", "selective")]
        ['1.234', '0.609', '0.824', '0.199']
    """
    groups, columns = (heads if kv_heads is None else kv_heads) / heads, 4 * hidden if mlp is None else mlp
    if recompute == "full":
        return element * rows * hidden / outer
    kept = rows * (4 * element + 2 * dropout) * hidden / outer
    kept += rows * element * ((2 + 2 * groups) * hidden + 2 * columns) / inner
    if recompute == "none":
        kept += rows * heads * (scores * (2 * element + 1) if scores else LSE) / inner
    return kept


@dataclass(frozen=True)
class GPT:
    """Sizes of a GPT and of its batch: `sequence` tokens in a sequence, `batch` sequences in a step."""

    layers: int
    hidden: int
    sequence: int
    batch: int
    heads: int | None = None
    vocabulary: int = 51200

    def __post_init__(self) -> None:
        if self.heads is not None and (self.heads < 1 or self.hidden % self.heads):
            raise Pmm3dError(f"hidden = {self.hidden} must be a multiple of heads; got heads = {self.heads}")

    @property
    def block(self) -> list[Layer]:
        """The fully connected layers of one block."""
        return [Layer(self.hidden, factor, transposed) for factor, transposed in FACTORS]

    @property
    def parameters(self) -> int:
        """12 l H^2 + 13 l H parameters of the blocks and (V + s) H of the embeddings (Narayanan et al., SC'21).

        >>> GPT(96, 12288, 2048, 1536, vocabulary=51200).parameters
        174615822336
        """
        return self.layers * self.hidden * (12 * self.hidden + 13) + (self.vocabulary + self.sequence) * self.hidden

    def __str__(self) -> str:
        heads = "" if self.heads is None else f", {self.heads} heads"
        return (
            f"a step of a GPT of {self.parameters / 1e9:.3g} billion parameters ({self.layers} layers, hidden "
            f"{self.hidden}{heads}, vocabulary {self.vocabulary}, {self.batch} sequences of "
            f"{self.sequence})"
        )

    def axonn_seconds(
        self, grid: GridShape, bandwidths: Bandwidths, order: tuple[str, ...] = ORDER
    ) -> dict[str, float]:
        """Return the seconds of the collectives of a step by axis. Raises Pmm3dError as in `axonn.bandwidth`."""
        terms = [layer_seconds(layer, self.batch * self.sequence, grid, bandwidths, order) for layer in self.block]
        return {axis: self.layers * sum(term[axis] for term in terms) for axis in terms[0]}

    def why_not(self, grid: GridShape, min_tensor: int = 1) -> str:
        """Return the reason why this GPT cannot be trained on a grid, in words; "" if it can."""
        if (tensor := grid.x * grid.y * grid.z) < min_tensor:
            return f"x y z = {tensor} is less than min-tensor = {min_tensor}"
        if self.batch % (grid.data * grid.z):
            return f"{self.batch} sequences are not divisible by data x z = {grid.data * grid.z}"
        if self.heads is not None and self.heads % grid.x:
            return f"{self.heads} heads are not divisible by x = {grid.x}"
        return ""


def rank_by_axonn(
    gpt: GPT,
    ranks: int,
    bandwidths: Bandwidths,
    *,
    powers_of_two: bool = False,
    min_tensor: int = 1,
    order: tuple[str, ...] = ORDER,
) -> Ranking:
    """Rank all grids by the seconds of collectives in the five-term model. Ties are ordered by the sizes of the grids.

    powers_of_two   whether the four sizes must be powers of two
    min_tensor      least number of ranks along x, y and z together
    order           axes along which ranks are numbered, innermost first

    Raises GridError if no grid is left.
    """
    candidates, dropped = list[Candidate](), list[Candidate]()
    for grid in grids_4d(ranks):
        if powers_of_two and any(size & (size - 1) for size in grid):
            continue
        reason, terms = gpt.why_not(grid, min_tensor), dict[str, float]()
        if not reason:
            try:
                terms = gpt.axonn_seconds(grid, bandwidths, order)
            except Pmm3dError as error:
                reason = str(error)
        found = Candidate(grid, sum(terms.values()), terms, preset=preset_of(grid), why_not=reason)
        (dropped if reason else candidates).append(found)
    if not candidates and not dropped:
        raise GridError(
            f"no grid of {ranks} ranks has sizes that are all powers of two: give a power of two, or leave "
            "out --powers-of-two"
        )
    if not candidates:
        raise GridError(
            f"no grid of {counted(ranks, 'rank')} is left for {gpt}; for example, {dropped[0].grid}: "
            f"{dropped[0].why_not}. Change the number of ranks, or the limit"
        )
    candidates.sort(key=lambda each: (each.seconds, tuple(each.grid)))
    return Ranking(str(gpt), ranks, candidates, dropped, 0.0, DTYPE, len(candidates) + len(dropped))
