"""Networks of transformer blocks: GPT-2, Llama, and an encoder without a mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...comm import Grid
from ...layout import Layout
from ...product.construct import Library
from ..layers import Linear, check_sizes
from ..module import Module
from ..parameter import Parameter
from ..precision import Precision
from ..recompute import Recomputed
from ..seeds import Seeds, check_grid, derived
from ..tensor import Tensor
from .blocks import NORMS, TransformerBlock
from .embedding import DEVIATION, Embedding
from .files import Published
from .names import EPS, ROTARY_BASE, Architecture


class Head(Module):
    """The last norm, and the layer from features to the logits of the vocabulary.

    table   a table of embeddings that is the layer's weight (a tied head); None: a weight of its own

        >>> with Grid(shape="ddp") as grid:
        ...     list(Head(grid, 8, 5).named_parameters())
        ['norm.gain', 'norm.bias', 'linear.weight']
    """

    def __init__(self, grid: Grid, hidden: int, vocabulary: int, *, norm: str = "layer", eps: float = 1e-5,
                 table: Parameter | None = None, activations: str = "replicated", deviation: float | None = None,
                 seed: int | None = None, **options: Any):
        self.grid = grid
        self.norm = NORMS[norm](grid, hidden, eps, **options)
        self.linear = Linear(grid, hidden, vocabulary, False, activations=activations, deviation=deviation, seed=seed,
                             weight=table, **options)

    def place(self, columns: Layout | None, placed: set[Module]) -> Layout | None:
        self.norm.place(columns, placed)
        return self.linear.place(columns, placed)

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class Transformer(Published):
    """An embedding, blocks, a head: the base class of `GPT`, `Llama` and `Encoder`.

    vocabulary   number of tokens
    positions    the longest sequence. None: any length, of a Llama only
    layers       number of blocks
    hidden       number of features
    heads        number of heads of attention, a divisor of hidden
    seed         of all initial values. None: the next seed of the grid (`nn.manual_seed`)
    kv_heads     heads of keys and values. None: as many as heads
    mlp          columns between the layers of the MLP. None: 4 hidden; of a Llama 8/3 hidden, rounded up to a multiple
                 of 64
    dropout      probability: of embeddings, attention weights and the results of both parts of a block
    tied         whether the head's weight is the table of embeddings, the same Parameter. None: True; of a Llama False
    activations  "replicated" or "sharded" (sequence parallelism); see `nn.linear`
    recompute    "none", "selective", "full", or k for every k-th block; see `nn.recompute.Recomputed`
    window       number of rows that a row attends to, including itself. None: no limit
    order, parallel   of sequences that an axis "seq" splits; see `nn.transformer.sequence`
    precision    "float32", "bfloat16", ..., or an `nn.Precision`. None: that of `dtype`

    net(tokens) takes integers, (batch x sequence, 1), with rows in units of a sequence:
    Layout(("data", "z"), units=(sequence, 1)). Without units all rows are one sequence. net(tokens, documents) takes
    sequences in which several documents are packed: `documents` has the number of its document for each row. Tokens
    (batch x sequence, 2) have these numbers in the second column. Returns logits, (batch x sequence, vocabulary),
    columns over x; `nn.cross_entropy` takes them.

    Initial values are those of GPT-2. Weights and tables are normal with the standard deviation 0.02. The weights of
    `out` and `down`, whose results are added to the residual stream, have 0.02 / sqrt(2 layers). Biases are 0.

    Raises, on every rank, LayoutError for sizes that do not fit together and for a sequence longer than `positions`.
    """

    learned, rotary_base, tied, norm = True, ROTARY_BASE, True, "layer"
    block: Mapping[str, Any] = {}
    """Further arguments of the blocks."""

    def __init__(self, grid: Grid, *, vocabulary: int, layers: int, hidden: int, heads: int,
                 positions: int | None = None, mlp: int | None = None, seed: int | None = None,
                 kv_heads: int | None = None, eps: float = EPS, dropout: float = 0.0, tied: bool | None = None,
                 activations: str = "replicated", recompute: str | int = "none", window: int | None = None,
                 order: str = "plain", parallel: str = "auto", dtype: str = "float32", library: Library | None = None,
                 precision: Precision | str | None = None):
        check_grid(type(self).__name__, grid)
        check_sizes(type(self).__name__, layers=layers)
        if self.learned:
            check_sizes(type(self).__name__, positions=positions)
        tied = self.tied if tied is None else tied
        mlp = self.inner(hidden) if mlp is None else mlp
        seed, again = Seeds.of(grid).next() if seed is None else seed, Recomputed.named(recompute)
        options: dict[str, Any] = {"activations": activations, "dtype": dtype, "library": library,
                                   "precision": precision}
        first = Embedding(grid, vocabulary, hidden, positions=positions, order=order, dropout=dropout,
                          learned=self.learned, seed=derived(seed, 0), **options)
        options |= {"norm": self.norm, "eps": eps, "deviation": DEVIATION}
        made = [TransformerBlock(grid, hidden, heads, kv_heads=kv_heads, mlp=mlp, dropout=dropout, window=window,
                                 order=order, parallel=parallel, recompute=again.attention,
                                 residual=(2 * layers) ** -0.5, seed=derived(seed, 1 + index), **options,
                                 **{"rotary_base": None if self.learned else self.rotary_base, **self.block})
                for index in range(layers)]
        last = Head(grid, hidden, vocabulary, table=first.table if tied else None, seed=derived(seed, 1 + layers),
                    **options)
        super().__init__(grid, first, *(again.block(index, each) for index, each in enumerate(made)), last)
        self.architecture = Architecture(self.kind, vocabulary, positions, layers, hidden, heads, kv_heads or heads,
                                         mlp, tied, eps, self.rotary_base, window)

    @staticmethod
    def inner(hidden: int) -> int:
        """Return the default of `mlp`."""
        return 4 * hidden


class GPT(Transformer):
    """GPT-2: learned positions, LayerNorm before each part, an MLP with the tanh form of GELU, a tied head.

    Arguments, the call and errors as of `transformer.networks.Transformer`. `positions` is needed.

        >>> import numpy as np; from pmm3d import DistMatrix, Grid
        >>> with Grid(shape="ddp") as grid:
        ...     net = GPT(grid, vocabulary=5, positions=4, layers=2, hidden=8, heads=2, seed=0)
        ...     layout = Layout(("data", "z"), units=(4, 1))
        ...     tokens = DistMatrix.from_global(grid, np.arange(4)[:, None], layout=layout)
        ...     net(tokens).shape, net.size
        ((4, 5), 1832)
    """

    kind = "gpt2"


class Encoder(Transformer):
    """As `GPT`, but each row attends to all rows of its sequence, or to those less than `window` rows before and after
    it: for masked tokens, as in BERT, with the norms before each part, and the exact GELU.

        >>> from pmm3d import Grid
        >>> with Grid(shape="ddp") as grid:
        ...     net = Encoder(grid, vocabulary=5, positions=4, layers=1, hidden=8, heads=2)
        ...     net.layers[1].attention.core.rule["causal"]
        False
    """

    block: Mapping[str, Any] = {"causal": False, "activation": "gelu"}


class Llama(Transformer):
    """Llama: rotary positions, RMSNorm, a gated MLP with SiLU, no biases, grouped heads, a head of its own.

    rotary_base   base of the rotary positions

    Further arguments, the call and errors as of `transformer.networks.Transformer`.

        >>> from pmm3d import Grid
        >>> with Grid(shape="ddp") as grid:
        ...     Llama(grid, vocabulary=5, layers=1, hidden=8, heads=2, kv_heads=1, mlp=16).size
        680
    """

    kind, learned, tied, norm = "llama", False, False, "rms"
    block: Mapping[str, Any] = {"bias": False, "gated": True, "activation": "silu"}

    def __init__(self, grid: Grid, *, rotary_base: float = ROTARY_BASE, **options: Any):
        self.rotary_base = rotary_base
        super().__init__(grid, **options)

    @staticmethod
    def inner(hidden: int) -> int:
        return 64 * -(-hidden // 24)
