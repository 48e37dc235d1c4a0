"""A GPT by published formulas: its parameters, and the activations of a block."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import Pmm3dError

LSE = 4
"""Bytes of a log-sum-exp in float32."""
INVERSE = 4
"""Bytes of the inverse root mean square of a head, in float32."""


def block_bytes(
    rows: int,
    hidden: int,
    heads: int,
    *,
    outer: int = 1,
    inner: int = 1,
    attention: int | None = None,
    element: int = 2,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    qk_norm: bool = False,
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
    inner      ranks that split the heads, and the activations between the layers of the MLP: t
    attention  ranks that split queries, keys, values and the result of attention. Default: inner
    element    bytes of an activation
    kv_heads   default: heads
    head_dim   columns of a head. Default: hidden / heads
    qk_norm    whether each head of queries and keys is normalized by its root mean square
    mlp        default: 4 hidden
    recompute  "none", "selective" or "full"
    dropout    whether attention and MLP have dropout, whose mask has a bit for each element; with `scores` a byte, as
               in the paper
    scores     keys of a query whose weights are stored, 5 bytes each with dropout: s in the paper. 0 for a kernel that
               stores the result and its log-sum-exp, as the kernel of `pmm3d.nn`

    For a grid of `pmm3d.nn` with `Overlap(regather_inputs=True)`: outer is y and inner is x. With sharded activations,
    both are x y. attention is x y if there are enough sequences for each rank along y, else x.

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
    nbytes = rows * (4 * element + 2 * dropout / (1 if scores else 8)) * hidden / outer
    sharing = inner if attention is None else attention
    size = hidden / heads if head_dim is None else head_dim
    nbytes += rows * element * ((2 + 2 * groups) * heads * size / sharing + 2 * columns / inner)
    if recompute == "none" and qk_norm:
        nbytes += rows * (1 + groups) * heads * (element * size + INVERSE) / sharing
    if recompute == "none":
        nbytes += rows * heads * (scores * (2 * element + 1) if scores else LSE) / sharing
    return nbytes


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
