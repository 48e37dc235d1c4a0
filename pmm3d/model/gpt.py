"""A GPT by published formulas: its layers, what it computes in a step, and what a rank of a grid holds of it.

Each block has four fully connected layers: the queries, keys and values (K = 3), the attention's projection (K = 1,
transposed), and the two of the MLP (K = 4, and 4 transposed). Columns of what is between blocks are split over y,
inside them over x, rows over z and data. `nn.GPT` in a dry run gives the same figures: tests compare the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import Pmm3dError
from ..layout import GridShape
from .axonn import ORDER, Bandwidths, Layer, layer_seconds

BYTES = {"weights": 2, "gradients": 4, "state": 12}
"""Of a parameter: the bfloat16 weight, its float32 gradient, and for AdamW the float32 weight and two moments."""
FACTORS = ((3, False), (1, True), (4, False), (4, True))
"""K of a block's layers, and whether they are transposed."""
LSE = 4
"""Bytes of a log-sum-exp, float32."""


def block_bytes(rows: int, hidden: int, heads: int, *, outer: int = 1, inner: int = 1, element: int = 2,
                kv_heads: int | None = None, mlp: int | None = None, recompute: str = "none", dropout: bool = False,
                scores: int = 0) -> float:
    """Return the bytes that a rank keeps of a transformer block for its backward pass (Korthikanti et al. 2022,
    arXiv 2205.05198, equations 1 to 4).

    rows       tokens on the rank: s b, of sequences of s
    outer      ranks that split what is between the parts of the block: the input of each part and of its norm, and the
               masks of dropout. 1 with Megatron's tensor parallelism, t with its sequence parallelism
    inner      ranks that split heads and the columns of the MLP: t
    element    bytes of an activation;   kv_heads, mlp: None: as many as heads, 4 hidden
    recompute  "none", "selective" or "full"
    dropout    whether both parts have one: a byte of mask for each element
    scores     keys of a query of which the weights are kept, 5 bytes each with their dropout: s in that paper; 0 for a
               kernel that keeps the result and its log-sum-exp, as ours does

    With 2 bytes, dropout and inner = t: rows h (10 / outer + 24 / t + 5 a s / (h t)). Selective recomputation drops the
    last term; of our kernel this term is 4 bytes for each row and head, and selective drops these.

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
    """batch: sequences of a step, of so many tokens each.

    heads        None: not looked at
    vocabulary   0: without embedding and logits
    recompute    blocks keep their input alone and are computed again in the backward pass
    """

    layers: int
    hidden: int
    sequence: int
    batch: int
    heads: int | None = None
    vocabulary: int = 51200
    recompute: bool = True

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "sequence", "batch"):
            if getattr(self, name) < 1:
                raise Pmm3dError(f"{name} of a GPT is at least 1; got {getattr(self, name)}")
        if self.heads is not None and (self.heads < 1 or self.hidden % self.heads):
            raise Pmm3dError(f"hidden = {self.hidden} must be a multiple of heads; got heads = {self.heads}")

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.sequence

    @property
    def block(self) -> list[Layer]:
        """The fully connected layers of one block."""
        return [Layer(self.hidden, factor, transposed) for factor, transposed in FACTORS]

    @property
    def parameters(self) -> int:
        """12 l H^2 + 13 l H of the blocks, (V + s) H of the embeddings (Narayanan et al., SC'21).

            >>> GPT(96, 12288, 2048, 1536, vocabulary=51200).parameters
            174615822336
        """
        return self.layers * self.hidden * (12 * self.hidden + 13) + (self.vocabulary + self.sequence) * self.hidden

    @property
    def flop(self) -> float:
        """Of a step: 96 B s l H^2 (1 + s/(6H) + V/(16 l H)), or 72 without recomputation (Narayanan et al., SC'21).

        The vocabulary is not computed twice: with recomputation its part is that of 72 too, V/(16 l H) of 96.

            >>> f"{GPT(96, 12288, 2048, 1536, vocabulary=51200).flop:.4g}"
            '4.511e+18'
        """
        blocks = (96 if self.recompute else 72) * (1 + self.sequence / (6 * self.hidden))
        return self.tokens * self.hidden * (blocks * self.layers * self.hidden + 6 * self.vocabulary)

    def __str__(self) -> str:
        heads = "" if self.heads is None else f", {self.heads} heads"
        return (f"a step of a GPT of {self.parameters / 1e9:.3g} billion parameters ({self.layers} layers, hidden "
                f"{self.hidden}{heads}, vocabulary {self.vocabulary}, {self.batch} sequences of "
                f"{self.sequence})")

    def why_not(self, grid: GridShape) -> str:
        """Return the reason why this GPT cannot be trained on a grid, in words; "" if it can."""
        if self.batch % (grid.data * grid.z):
            return f"{self.batch} sequences do not divide by data x z = {grid.data * grid.z}"
        if self.heads is not None and self.heads % grid.x:
            return f"{self.heads} heads do not divide by x = {grid.x}"
        return ""

    def memory(self, grid: GridShape) -> dict[str, int]:
        """Bytes by kind on a rank.

        "weights", "gradients", "state": 2 + 4 + 12 bytes of a parameter, split over x, y, z
        "activations": 2 bytes; with recomputation the input of every block (H over y) and what one block keeps, else
        what all keep; the logits, once in 2 and once in 4 bytes
        "workspace": two gathered weights, and the gradient of one before it is summed over z, of the largest weight,
        4 H^2 or V H, over x, y
        """
        held = {kind: -(-self.parameters * nbytes // (grid.x * grid.y * grid.z)) for kind, nbytes in BYTES.items()}
        rows = self.tokens // (grid.data * grid.z)
        inside, inputs = (block_bytes(rows, self.hidden, self.heads or 1, outer=grid.y, inner=grid.x, recompute=name)
                          for name in ("none", "full"))
        kept = self.layers * inputs + inside if self.recompute else self.layers * inside
        held["activations"] = round(kept + 6 * rows * self.vocabulary / grid.x)
        largest = self.hidden * max(4 * self.hidden, self.vocabulary)
        gathered = largest / (grid.x * grid.y) if grid.z > 1 else 0
        held["workspace"] = round(gathered * (2 * 2 + 4))
        return held

    def axonn_seconds(self, grid: GridShape, bandwidths: Bandwidths,
                      order: tuple[str, ...] = ORDER) -> dict[str, float]:
        """What the five-term model takes for the collectives of a step, by axis. Raises Pmm3dError as `bandwidth`."""
        terms = [layer_seconds(layer, self.tokens, grid, bandwidths, order) for layer in self.block]
        return {axis: self.layers * sum(term[axis] for term in terms) for axis in terms[0]}

