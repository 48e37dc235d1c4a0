"""Networks of transformer blocks: GPT-2, Llama, and an encoder without a mask."""

from __future__ import annotations

from typing import Any

from ...comm import Grid
from ...layout import Layout
from ...product.matrix import Library
from ..layers import Linear, check_sizes
from ..module import Module
from ..parameter import Parameter
from ..precision import Precision
from ..recompute import Recomputed
from ..seeds import Seeds, check_grid, derived
from ..tensor import Tensor
from .blocks import NORMS, TransformerBlock
from .embedding import Embedding
from .files import Published
from .names import EPS, Architecture


class Head(Module):
    """The last norm, and the layer from features to the logits of the vocabulary.

    table   a table of embeddings that is the layer's weight (a tied head); None: a weight of its own

        >>> with Grid(shape="ddp") as grid:
        ...     list(Head(grid, 8, 5).named_parameters())
        ['norm.gain', 'norm.bias', 'linear.weight']
    """

    def __init__(self, grid: Grid, hidden: int, vocabulary: int, *, norm: str = "layer", eps: float = 1e-5,
                 table: Parameter | None = None, activations: str = "replicated", seed: int | None = None,
                 **options: Any):
        self.grid = grid
        self.norm = NORMS[norm](grid, hidden, eps, **options)
        self.linear = Linear(grid, hidden, vocabulary, False, activations=activations, seed=seed, weight=table,
                             **options)

    def place(self, columns: Layout | None, placed: set[Module]) -> Layout | None:
        self.norm.place(columns, placed)
        return self.linear.place(columns, placed)

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class Transformer(Published):
    """An embedding, blocks, a head: what `GPT`, `Llama` and `Encoder` are."""

    def __init__(self, grid: Grid, *, vocabulary: int, positions: int | None, layers: int, hidden: int, heads: int,
                 seed: int | None, tied: bool, dropout: float, recompute: str | int, learned: bool, norm: str,
                 eps: float, activations: str, order: str, dtype: str, library: Library | None,
                 precision: Precision | str | None, **block: Any):
        check_grid(type(self).__name__, grid)
        check_sizes(type(self).__name__, layers=layers)
        seed, again = Seeds.of(grid).next() if seed is None else seed, Recomputed.named(recompute)
        options: dict[str, Any] = {"activations": activations, "dtype": dtype, "library": library,
                                   "precision": precision}
        first = Embedding(grid, vocabulary, hidden, positions=positions, order=order, dropout=dropout, learned=learned,
                          seed=derived(seed, 0), **options)
        made = [TransformerBlock(grid, hidden, heads, norm=norm, eps=eps, dropout=dropout, order=order,
                                 recompute=again.attention, seed=derived(seed, 1 + index), **options, **block)
                for index in range(layers)]
        last = Head(grid, hidden, vocabulary, norm=norm, eps=eps, table=first.table if tied else None,
                    seed=derived(seed, 1 + layers), **options)
        super().__init__(grid, first, *(again.block(index, each) for index, each in enumerate(made)), last)


class GPT(Transformer):
    """GPT-2: learned positions, LayerNorm before each part, an MLP with the tanh form of GELU, a tied head.

    vocabulary   number of tokens;   positions: the longest sequence
    layers       number of blocks;   hidden: features;   heads: of attention, a divisor of hidden
    seed         of all initial values; None: the next of the grid's (`nn.manual_seed`)
    kv_heads     heads of keys and values; None: as many as heads
    mlp          columns between the layers of the MLP; None: 4 hidden
    dropout      probability: of embeddings, attention weights and the results of both parts of a block
    tied         whether the head's weight is the table of embeddings, the same Parameter
    activations  "replicated" or "sharded" (sequence parallelism); see `nn.linear`
    recompute    "none", "selective", "full", or k for every k-th block; see `nn.recompute.Recomputed`
    window       number of rows that a row attends to, itself the last; None: all before it
    order, parallel   of sequences that an axis "seq" splits; see `nn.transformer.sequence`
    precision    "float32", "bfloat16", ..., or an `nn.Precision`; None: that of `dtype`

    net(tokens) takes integers, (batch x sequence, 1), with rows in units of a sequence:
    Layout(("data", "z"), units=(sequence, 1)). Without units all rows are one sequence. Returns logits,
    (batch x sequence, vocabulary), columns over x; `nn.cross_entropy` takes them. net(tokens, documents), of sequences
    in which several documents are packed: the number of its document for each row.

    Initial values are not GPT-2's, which are normal with the deviation 0.02, of `out` and `down` divided by
    sqrt(2 layers). Tables are uniform with the deviation 0.02; weights and biases are uniform within 1/sqrt(inputs), as
    of `Linear`, in all layers alike.

    Raises, on every rank, LayoutError for sizes that do not go together and for a sequence longer than `positions`.

        >>> import numpy as np; from pmm3d import DistMatrix, Grid
        >>> with Grid(shape="ddp") as grid:
        ...     net = GPT(grid, vocabulary=5, positions=4, layers=2, hidden=8, heads=2, seed=0)
        ...     layout = Layout(("data", "z"), units=(4, 1))
        ...     tokens = DistMatrix.from_global(grid, np.arange(4)[:, None], layout=layout)
        ...     net(tokens).shape, net.size
        ((4, 5), 1832)
    """

    kind = "gpt2"

    def __init__(self, grid: Grid, *, vocabulary: int, positions: int, layers: int, hidden: int, heads: int,
                 seed: int | None = None, kv_heads: int | None = None, mlp: int | None = None, dropout: float = 0.0,
                 tied: bool = True, activations: str = "replicated", recompute: str | int = "none",
                 window: int | None = None, order: str = "plain", parallel: str = "auto", dtype: str = "float32",
                 library: Library | None = None, precision: Precision | str | None = None):
        super().__init__(
            grid, vocabulary=vocabulary, positions=positions, layers=layers, hidden=hidden, heads=heads, seed=seed,
            kv_heads=kv_heads, mlp=mlp, dropout=dropout, tied=tied, activations=activations, recompute=recompute,
            window=window, order=order, parallel=parallel, dtype=dtype, library=library, precision=precision,
            learned=True, norm="layer", eps=EPS)
        self.architecture = Architecture(self.kind, vocabulary, positions, layers, hidden, heads, kv_heads or heads,
                                         mlp or 4 * hidden, tied, EPS, window=window)


class Encoder(Transformer):
    """As `GPT`, but each row attends to all rows of its sequence, or to those less than `window` rows before and after
    it: for masked tokens, as in BERT, with the norms before each part, and the exact GELU.

        >>> from pmm3d import Grid
        >>> with Grid(shape="ddp") as grid:
        ...     net = Encoder(grid, vocabulary=5, positions=4, layers=1, hidden=8, heads=2)
        ...     net.layers[1].attention.core.rule["causal"]
        False
    """

    def __init__(self, grid: Grid, *, vocabulary: int, positions: int, layers: int, hidden: int, heads: int,
                 seed: int | None = None, kv_heads: int | None = None, mlp: int | None = None, dropout: float = 0.0,
                 tied: bool = True, activations: str = "replicated", recompute: str | int = "none",
                 window: int | None = None, order: str = "plain", parallel: str = "auto", dtype: str = "float32",
                 library: Library | None = None, precision: Precision | str | None = None):
        super().__init__(
            grid, vocabulary=vocabulary, positions=positions, layers=layers, hidden=hidden, heads=heads, seed=seed,
            kv_heads=kv_heads, mlp=mlp, dropout=dropout, tied=tied, activations=activations, recompute=recompute,
            window=window, order=order, parallel=parallel, dtype=dtype, library=library, precision=precision,
            learned=True, norm="layer", eps=1e-5, causal=False, activation="gelu")


class Llama(Transformer):
    """Llama: rotary positions, RMSNorm, a gated MLP with SiLU, no biases, grouped heads.

    positions     the longest sequence; None: any
    mlp           columns of the gate
    rotary_base   base of the rotary positions

    Further arguments and the call as of `GPT`.

        >>> from pmm3d import Grid
        >>> with Grid(shape="ddp") as grid:
        ...     Llama(grid, vocabulary=5, layers=1, hidden=8, heads=2, kv_heads=1, mlp=16).size
        680
    """

    kind = "llama"

    def __init__(self, grid: Grid, *, vocabulary: int, positions: int | None = None, layers: int, hidden: int,
                 heads: int, mlp: int, seed: int | None = None, kv_heads: int | None = None,
                 rotary_base: float = 10000.0, eps: float = 1e-5, dropout: float = 0.0, tied: bool = False,
                 activations: str = "replicated", recompute: str | int = "none", window: int | None = None,
                 order: str = "plain", parallel: str = "auto", dtype: str = "float32", library: Library | None = None,
                 precision: Precision | str | None = None):
        super().__init__(
            grid, vocabulary=vocabulary, positions=positions, layers=layers, hidden=hidden, heads=heads, seed=seed,
            kv_heads=kv_heads, mlp=mlp, dropout=dropout, tied=tied, activations=activations, recompute=recompute,
            window=window, order=order, parallel=parallel, dtype=dtype, library=library, precision=precision,
            learned=False, norm="rms", eps=eps, bias=False, gated=True, activation="silu", rotary_base=rotary_base)
        self.architecture = Architecture(self.kind, vocabulary, positions, layers, hidden, heads, kv_heads or heads,
                                         mlp, tied, eps, rotary_base, window)
