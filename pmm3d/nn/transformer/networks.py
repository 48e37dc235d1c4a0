"""Networks of transformer blocks: GPT-2, Llama, and an encoder without a causal mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...comm import Grid
from ...layout import Layout
from ...product.constructors import Library
from ..layers import Linear, check_sizes
from ..module import Module
from ..parameter import Parameter
from ..precision import Precision
from ..recompute import Recomputed
from ..recompute_budget import Budget, Group
from ..seeds import check_grid, derived, seed_of
from ..tensor import Tensor
from ..tiled import TiledHead, check_tiles
from .blocks import NORMS, TransformerBlock
from .embedding import DEVIATION, Embedding
from .files import Published
from .names import EPS, ROTARY_BASE, Architecture
from .scaling import RotaryScaling


class Head(Module):
    """Last norm, and layer from features to logits. table: the embedding's table, as the weight of a tied head."""

    replays = True

    def __init__(
        self,
        grid: Grid,
        hidden: int,
        vocabulary: int,
        *,
        norm: str = "layer",
        eps: float = 1e-5,
        table: Parameter | None = None,
        activations: str = "replicated",
        deviation: float | None = None,
        seed: int | None = None,
        **options: Any,
    ):
        self.grid = grid
        self.norm = NORMS[norm](grid, hidden, eps, **options)
        self.linear = Linear(
            grid,
            hidden,
            vocabulary,
            False,
            activations=activations,
            seed=seed,
            weight=table,
            deviation=deviation if table is None else None,
            **options,
        )

    def _assign_layout(self, columns: Layout | None, placed: set[Module]) -> Layout | None:
        self.norm._assign_layout(columns, placed)
        return self.linear._assign_layout(columns, placed)

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class Transformer(Published):
    """Embedding, blocks and head: the base class of `GPT`, `Llama` and `Encoder`.

    Parameters, input, result, errors and initial values are as in `GPT`.
    """

    learned, rotary_base, tied, norm = True, ROTARY_BASE, True, "layer"
    rotary_scaling: RotaryScaling | Mapping[str, Any] | None = None
    qkv_bias = True
    qk_norm: bool | str = False
    block: Mapping[str, Any] = {}
    """Further arguments of the blocks."""

    def __init__(
        self,
        grid: Grid,
        *,
        vocabulary: int,
        layers: int,
        hidden: int,
        heads: int,
        positions: int | None = None,
        mlp: int | None = None,
        seed: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        eps: float = EPS,
        dropout: float = 0.0,
        tied: bool | None = None,
        experts: int = 0,
        top_k: int | None = None,
        expert_mlp: int | None = None,
        every: int = 1,
        shared: int = 0,
        shared_gate: bool = False,
        scores: str = "softmax",
        normalize: bool | None = None,
        capacity: float | None = None,
        balance: float | None = None,
        z_loss: float = 0.0,
        bias_rate: float = 0.0,
        activations: str = "replicated",
        recompute: str | int = "none",
        loss_tiles: int = 0,
        mlp_tiles: int = 0,
        window: int | None = None,
        order: str = "plain",
        parallel: str = "auto",
        dtype: str = "float32",
        library: Library | None = None,
        precision: Precision | str | None = None,
    ):
        check_grid(type(self).__name__, grid)
        if self.learned:
            check_sizes(type(self).__name__, positions=positions)
        self.architecture = of = Architecture.checked(
            type(self).__name__,
            kind=self.kind,
            vocabulary=vocabulary,
            positions=positions,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            mlp=mlp,
            tied=self.tied if tied is None else tied,
            eps=eps,
            rotary_base=self.rotary_base,
            rotary_scaling=self.rotary_scaling,
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
            window=window,
            experts=experts,
            top_k=top_k,
            expert_mlp=expert_mlp,
            every=every,
            shared=shared,
            shared_gate=shared_gate,
            scores=scores,
            normalize=normalize,
            bias_rate=bias_rate,
        )
        mixture = of.mixture(type(self).__name__, capacity=capacity, balance=balance, z_loss=z_loss)
        self.rotary_scaling = of.rotary_scaling
        seed, again = seed_of(grid, seed), Recomputed.named(recompute)
        options: dict[str, Any] = {
            "activations": activations,
            "dtype": dtype,
            "library": library,
            "precision": precision,
        }
        first = Embedding(
            grid,
            of.vocabulary,
            of.hidden,
            positions=of.positions,
            order=order,
            dropout=dropout,
            learned=self.learned,
            seed=derived(seed, 0),
            **options,
        )
        options |= {"norm": self.norm, "eps": of.eps, "deviation": DEVIATION}
        rotary: dict[str, Any] = (
            {} if self.learned else {"rotary_base": of.rotary_base, "rotary_scaling": of.rotary_scaling}
        )
        dense = [index for index in range(of.layers) if not of.is_mixture(index)]
        made = [
            TransformerBlock(
                grid,
                of.hidden,
                of.heads,
                kv_heads=of.kv_heads,
                head_dim=of.head_dim,
                qkv_bias=of.qkv_bias,
                qk_norm=of.qk_norm,
                mlp=of.mlp,
                dropout=dropout,
                window=of.window,
                parallel=parallel,
                recompute=again.attention,
                mlp_tiles=0 if dense and index not in dense else mlp_tiles,
                experts=mixture if of.is_mixture(index) else None,
                residual=(2 * of.layers) ** -0.5,
                seed=derived(seed, 1 + index),
                **options,
                **rotary,
                **self.block,
            )
            for index in range(of.layers)
        ]
        last: Module = Head(
            grid,
            of.hidden,
            of.vocabulary,
            table=first.table if of.tied else None,
            seed=derived(seed, 1 + of.layers),
            **options,
        )
        if check_tiles(type(self).__name__, "loss_tiles", loss_tiles):
            last = TiledHead(last, loss_tiles)
        super().__init__(grid, first, *(again.block(index, each) for index, each in enumerate(made)), last)
        if again.budget is not None:
            groups = [Group(index, index + 1, 0 < index <= of.layers) for index in range(of.layers + 2)]
            self.budget = Budget(grid, again.budget, groups)


class GPT(Transformer):
    """GPT-2: learned positions, LayerNorm before each part, an MLP with the tanh form of GELU, a tied head.

    Parameters
    ----------
    grid : Grid
        The grid of the parameters.
    vocabulary : int
        Number of different tokens.
    layers : int
        Number of blocks.
    hidden : int
        Number of features.
    heads : int
        Number of heads of attention, a divisor of `hidden` unless `head_dim` is given.
    positions : int or None
        Length of the longest sequence. Default for a Llama: no limit. The other networks need this argument.
    mlp : int or None
        Columns between the layers of the MLP. Default: 4 hidden. For a Llama: 8/3 hidden, up to a multiple of 64.
    seed : int or None
        Seed of all initial values. Default: the next seed of the grid (`manual_seed`).
    kv_heads : int or None
        Heads of keys and values, a divisor of `heads`. Default: `heads`.
    head_dim : int or None
        Columns of a head. Default: hidden / heads.
    eps : float
        Term that the norms add to the variance. Default: 1e-5.
    dropout : float
        Dropout probability of embeddings, softmax weights, and the results of both parts of a block. Default: 0.
    tied : bool or None
        Whether the head's weight is the table of the embedding. Default: True; for a Llama False.
    experts : int
        Number of experts of a mixture (`MoE`), in place of the MLP. Default: 0, an MLP.
    top_k : int or None
        Number of experts of a token. Default: 2.
    expert_mlp : int or None
        Columns between the layers of an expert. Default: `mlp`.
    every : int
        Every block whose number, counted from 1, is a multiple of this one has a mixture. Default: 1.
    shared : int
        Columns between the layers of the shared expert. Default: 0, no shared expert.
    shared_gate : bool
        Whether the shared expert has a gate, as in `MoE`. Default: False.
    scores, normalize, capacity
        As in `Router`.
    balance : float or None
        Factor of the balance loss, as in `Router`. Default: 0.01; 0 with `bias_rate`.
    z_loss, bias_rate
        As in `Router`.
    activations : str
        "replicated" (default) or "sharded" (sequence parallelism), as in `linear`.
    recompute : str or int
        "none" (default), "selective" (attention), "full", or k for every k-th block. A number of bytes, such as
        "2 GiB" (units B, KiB, MiB, GiB, TiB): the choice for each block that costs the fewest operations, so that the
        arrays of this rank for the backward pass take at most these bytes. The logits are counted, other arrays of the
        loss are not.
    loss_tiles : int
        Largest number of rows of a tile of the head and of `nn.cross_entropy` on a rank, as in `TiledHead`. Default: 0,
        the logits of all rows exist.
    mlp_tiles : int
        Largest number of rows of a tile of the MLP of a block on a rank, as in `Tiled`. Blocks with experts have no
        tiles. Default: 0, no tiles.
    window : int or None
        Number of rows that a row attends to, including itself. Default: no limit.
    order : str
        Order of `token_layout` into which tokens in ascending order are brought, if the axis "seq" splits sequences.
        Tokens in a layout with an order keep that order. Default: "plain".
    parallel : str
        As in `transformer.attention`.
    dtype, library, precision
        As in `Linear`.

    Raises
    ------
    LayoutError
        On every rank, for sizes that do not fit together, and for a sequence longer than `positions`.
    Pmm3dError
        On every rank, in a forward pass that needs more than the bytes of `recompute`.

    Notes
    -----
    net(tokens) takes integers, (batch x sequence, 1), with rows in units of a sequence:
    Layout(("data", "z"), units=(sequence, 1)). Without units, all rows are one sequence. net(tokens) returns logits,
    (batch x sequence, vocabulary), with columns over x, for `cross_entropy`.

    net(tokens, documents) takes sequences with several packed documents. `documents`, (batch x sequence, 1), contains
    the document number of each row. Alternatively, tokens (batch x sequence, 2) have these numbers in column 1.

    Initial values are as in GPT-2. Weights and tables are normal with a standard deviation of 0.02. It is divided by
    sqrt(2 layers) for weights whose results are added to the residual stream. Biases are 0.

    Examples
    --------
    >>> import numpy as np
    >>> from pmm3d import DistMatrix, Grid, Layout, nn
    >>> with Grid(shape="ddp") as grid:
    ...     net = nn.GPT(grid, vocabulary=5, positions=4, layers=2, hidden=8, heads=2, seed=0)
    ...     layout = Layout(("data", "z"), units=(4, 1))
    ...     tokens = DistMatrix.from_global(grid, np.arange(4)[:, None], layout=layout)
    ...     net(tokens).shape, net.size
    ((4, 5), 1832)
    """

    replays = True
    kind = "gpt2"


class Encoder(Transformer):
    """Encoder for masked tokens, as in BERT: a `GPT` without a causal mask, and with the exact GELU.

    Each row attends to all rows of its sequence, or to rows less than `window` rows before and after it. Unlike BERT,
    norms are before each part.

    Parameters
    ----------
    grid, vocabulary, layers, hidden, heads, positions, mlp, seed, kv_heads, head_dim, eps, dropout, tied
        As in `GPT`.
    experts, top_k, expert_mlp, every, shared, shared_gate, scores, normalize, capacity, balance, z_loss, bias_rate
        As in `GPT`.
    activations, recompute, loss_tiles, mlp_tiles, window, order, parallel, dtype, library, precision
        As in `GPT`.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     net = nn.Encoder(grid, vocabulary=5, positions=4, layers=1, hidden=8, heads=2)
    ...     net.layers[1].attention.core.rule["causal"]
    False
    """

    replays = True
    block: Mapping[str, Any] = {"causal": False, "activation": "gelu"}


class Llama(Transformer):
    """Llama: rotary positions, RMSNorm, a gated MLP with SiLU, grouped heads, no biases, and a head that is not tied.

    With `qkv_bias` it is a Qwen 2, with `qk_norm` a Qwen 3, and with `window` a Mistral. With `experts` it is a
    Mixtral, Qwen2-MoE, Qwen3-MoE or OLMoE.

    Parameters
    ----------
    grid : Grid
        The grid of the parameters.
    rotary_base : float
        Base of the rotary positions. Default: 10000.
    rotary_scaling : mapping or None
        Scaling of the rotary positions, with the keys of `rope_parameters` in a config.json. Its key `rope_theta` is
        the argument `rotary_base`. Default: none.
    qkv_bias : bool
        Whether queries, keys and values have biases. Default: False.
    qk_norm : bool or str
        Whether each head of queries and keys is normalized by an `RMSNorm`; "all": all heads together, as in OLMoE.
        Default: False.
    **options
        Arguments of `GPT`, such as `recompute`, `loss_tiles` and `mlp_tiles`. `vocabulary`, `layers`, `hidden` and
        `heads` are needed.

    Raises
    ------
    LayoutError
        On every rank, as in `GPT`, and for a key of `rotary_scaling` that is unknown, missing or out of range.

    Notes
    -----
    `rotary_scaling["rope_type"]` is one of the following. The other keys are numbers. The default of
    `original_max_position_embeddings` is `positions`.

    linear
        `factor`. Frequencies are divided by the factor.
    dynamic
        `factor`, `original_max_position_embeddings`. The base grows with the length of a sequence, if the sequence is
        longer than the second number. In `generate`, cached keys keep the frequencies of their pass.
    yarn
        `factor`, `original_max_position_embeddings`; and with defaults `attention_factor`, `beta_fast` (32),
        `beta_slow` (1), `mscale`, `mscale_all_dim`, `truncate` (True). See Peng et al. 2023, arXiv 2309.00071.
    llama3
        `factor`, `original_max_position_embeddings`, `low_freq_factor`, `high_freq_factor`, as in Llama 3.1 and later.

    Examples
    --------
    >>> import numpy as np
    >>> from pmm3d import DistMatrix, Grid, Layout, nn
    >>> with Grid(shape="ddp") as grid:
    ...     net = nn.Llama(grid, vocabulary=5, layers=1, hidden=8, heads=2, kv_heads=1, mlp=16)
    ...     tokens = DistMatrix.from_global(grid, np.arange(4)[:, None], layout=Layout(("data", "z"), units=(4, 1)))
    ...     net(tokens).shape, net.size
    ((4, 5), 680)
    """

    replays = True
    kind, learned, tied, norm = "llama", False, False, "rms"
    block: Mapping[str, Any] = {"bias": False, "gated": True, "activation": "silu"}

    def __init__(
        self,
        grid: Grid,
        *,
        rotary_base: float = ROTARY_BASE,
        rotary_scaling: RotaryScaling | Mapping[str, Any] | None = None,
        qkv_bias: bool = False,
        qk_norm: bool | str = False,
        **options: Any,
    ):
        self.rotary_base, self.rotary_scaling = rotary_base, rotary_scaling
        self.qkv_bias, self.qk_norm = qkv_bias, qk_norm
        super().__init__(grid, **options)
