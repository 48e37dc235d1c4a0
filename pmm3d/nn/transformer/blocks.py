"""Parts of a transformer: attention with its projections, the MLP, and the block of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd, ulp
from typing import Any

from ...comm import Grid, call
from ...errors import LayoutError, Pmm3dError, hint
from ...layout import Layout, natural, real
from ...layout.layout import layout_of
from ...product.constructors import Library
from .. import functional
from ..arithmetic import add
from ..dense import OTHER
from ..experts.layer import MoE
from ..feed_forward import FeedForward, scaled_deviation
from ..layers import Dropout, Layer, LayerNorm, Linear, RMSNorm, check_sizes, check_switches
from ..module import Module
from ..parts import split
from ..precision import Precision
from ..recompute import Recompute
from ..seeds import check_grid, derived, seed_of
from ..tensor import Tensor, relayout
from ..tiled import Tiled, check_tiles
from .attention import attention
from .cache import rows_of_sequence
from .rotary import rotary
from .scaling import RotaryScaling
from .sequence import chosen

POSITIVE = ulp(0.0)
"""Smallest positive number."""
ALL_HEADS = "all"
"""Value of qk_norm for a norm of all heads together."""
OF_MIXTURE = "experts", "top_k", "inner", "shared", "shared_gate", "router"
"""Arguments of `MoE` that a block with experts has."""
NORMS = {"layer": LayerNorm, "rms": RMSNorm}


class CoreAttention(Module):
    """Part of `Attention` between the projections. turns: as from `qkv_turns`. norms: of queries and of keys, or none.
    rule: arguments of `attention`."""

    replays, arguments = True, ("calls",)

    def __init__(
        self,
        grid: Grid,
        size: int,
        turns: Sequence[int],
        *,
        rotary_base: float | None,
        scaling: RotaryScaling | None,
        norms: Sequence[RMSNorm],
        dropout: float,
        seed: int,
        **rule: Any,
    ):
        self.grid, self.columns, self.turns, self.rotary_base, self.rule = grid, size, turns, rotary_base, rule
        self.dropout, self.seed, self.calls, self.scaling, self.norms = dropout, seed, 0, scaling, norms

    def forward(self, fused: Tensor, documents: Tensor | None = None) -> Tensor:
        size, operands = self.columns, [fused]
        if self.rotary_base is not None or self.norms or self.turns != 3 * (size,):
            q, k, v = split(fused, self.turns)
            k, v = (_with_uncut_heads(each, size) for each in (k, v))
            if self.norms:
                q, k = (norm(each) for norm, each in zip(self.norms, (q, k)))
            if self.rotary_base is not None:
                q, k = (rotary(each, size, base=self.rotary_base, scaling=self.scaling) for each in (q, k))
            operands = [q, k, v]
        dropout = self.dropout if self.training else 0.0
        if dropout:
            call(self.grid.engine, self._count)
        return attention(
            *operands,
            size=size,
            documents=documents,
            dropout=dropout,
            seed=self.seed,
            stream=lambda: self.calls,
            **self.rule,
        )

    def _count(self) -> None:
        self.calls += 1


class Attention(Module):
    """Multi-head attention: projection to queries, keys and values, `transformer.attention`, and output projection.

    Parameters
    ----------
    grid : Grid
        The grid of the parameters.
    hidden : int
        Columns of the input and of the result.
    heads : int
        Number of query heads.
    kv_heads : int or None
        Number of heads of keys and values, a divisor of `heads`. Default: `heads`.
    head_dim : int or None
        Columns of a head. Default: hidden / heads.
    causal, window
        As in `transformer.attention`.
    rotary_base : float or None
        Base of the rotary positions of queries and keys. Default: no rotation.
    rotary_scaling : mapping or None
        Scaling of rotary positions, as in `Llama`. Default: none.
    bias : bool
        Whether projections have a bias. Default: True.
    qkv_bias : bool or None
        Whether the projection to queries, keys and values has a bias. Default: `bias`.
    qk_norm : bool or str
        Whether each head of queries and of keys is normalized by an `RMSNorm`, before the rotation; "all": all heads
        together. Default: False.
    eps : float
        Term that these norms add to the mean square. Default: 1e-6.
    dropout : float
        Dropout probability of the softmax weights. Default: 0.
    recompute : bool
        Whether the backward pass computes the part between the projections again. Default: False.
    activations : str
        "replicated" (default) or "sharded", as in `linear`.
    parallel
        As in `transformer.attention`.
    deviation
        As in `Linear`.
    residual : float
        Factor of the deviation of `out`, whose result is added to the residual stream. Default: 1.
    seed
        As in `Linear`.
    **options
        `dtype`, `library` and `precision`, as in `Linear`.

    Raises
    ------
    LayoutError
        For sizes that do not fit together.
    Pmm3dError
        For values out of range.

    Notes
    -----
    net(x, documents=None): x is (m, hidden), with rows in units of a sequence, as returned by `Embedding`. documents is
    (m, 1), integers: a row attends only to rows of the same document.

    `qkv.weight` is (hidden, (heads + 2 kv_heads) head_dim), and `out.weight` is (heads head_dim, hidden). Each query
    head is followed by its share of the columns of its key and value. The axis x cuts between these units, so any
    number of query heads is allowed. If `kv_heads` is not a multiple of the ranks along x, keys and values are
    gathered: each rank receives (Gx-1)/Gx of 2 kv_heads head_dim columns.

    With `qk_norm`, `q_norm.gain` and `k_norm.gain` are (1, head_dim). All ranks hold them, and all heads share them.
    The norms send nothing. Their gradients are also summed over x. With "all", they have a number for each column of
    the queries, or of the keys, and the norms sum over x.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, Layout, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = DistMatrix.random(grid, (4, 8), dtype="float32", layout=Layout(("data", "z"), units=(4, 1)))
    ...     net = nn.Attention(grid, 8, 2)
    ...     net(x).shape, list(net.named_parameters())
    ((4, 8), ['qkv.weight', 'qkv.bias', 'out.weight', 'out.bias'])
    """

    replays, selected = True, "core"

    def __init__(
        self,
        grid: Grid,
        hidden: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        window: int | None = None,
        rotary_base: float | None = None,
        rotary_scaling: RotaryScaling | Mapping[str, Any] | None = None,
        bias: bool = True,
        qkv_bias: bool | None = None,
        qk_norm: bool | str = False,
        eps: float = 1e-6,
        dropout: float = 0.0,
        recompute: bool = False,
        activations: str = "replicated",
        parallel: str = "auto",
        deviation: float | None = None,
        residual: float = 1.0,
        seed: int | None = None,
        **options: Any,
    ):
        check_grid("Attention", grid)
        kv_heads = heads if kv_heads is None else kv_heads
        check_sizes("Attention", hidden=hidden, heads=heads, kv_heads=kv_heads)
        size = head_size("Attention", hidden, heads, kv_heads, head_dim)
        check_switches("Attention", qkv_bias=bias if qkv_bias is None else qkv_bias)
        check_qk_norm("Attention", qk_norm)
        if rotary_base is not None and size % 2:
            raise LayoutError(f"Attention: rotary positions need heads of an even size; a head has {size} columns")
        if rotary_base is not None:
            rotary_base = real(
                rotary_base, "Attention: rotary_base must be a positive number, such as 10000", POSITIVE, LayoutError
            )
        scaling = RotaryScaling.of(rotary_scaling, "Attention: rotary_scaling")
        if scaling is not None and rotary_base is None:
            raise LayoutError("Attention: rotary_scaling needs rotary positions: pass rotary_base too")
        if scaling is not None and rotary_base is not None:
            scaling.check(size, rotary_base, "Attention: rotary_scaling")
        if window is not None:
            window = natural(window, "Attention: window is a number of rows, at least 1", 1, Pmm3dError)
        dropout = functional.check_probability("Attention: dropout", dropout)
        chosen(parallel, Layout(), 1, grid.shape, (0, 0), False)  # raises for an unknown method, or axes that it lacks
        self.grid, self.turns = grid, qkv_turns(heads, kv_heads, size)
        self.heads, self.causal, self.window, self.rotary_base = heads, causal, window, rotary_base
        self.rotary_scaling = scaling
        seed = seed_of(grid, seed)
        self.qkv = Linear(
            grid,
            hidden,
            (heads + 2 * kv_heads) * size,
            bias if qkv_bias is None else qkv_bias,
            unit=sum(self.turns),
            activations=activations,
            deviation=deviation,
            seed=derived(seed, 0),
            **options,
        )
        norms = list[RMSNorm]()
        if qk_norm:
            together = qk_norm == ALL_HEADS
            self.q_norm, self.k_norm = norms = [
                RMSNorm(grid, number * size, eps, unit=None if together else size, **options)
                for number in (heads, kv_heads)
            ]
            for norm, unit in zip(norms, self.turns if together else ()):
                norm._assign_layout(Layout((), "x", units=(1, unit)), set())
        core = CoreAttention(
            grid,
            size,
            self.turns,
            rotary_base=rotary_base,
            scaling=scaling,
            norms=norms,
            dropout=dropout,
            seed=derived(seed, 1),
            causal=causal,
            window=window,
            parallel=parallel,
        )
        self.core = Recompute(core) if recompute else core
        self.out = Linear(
            grid,
            heads * size,
            hidden,
            bias,
            activations=activations,
            cols="x",
            seed=derived(seed, 2),
            deviation=scaled_deviation("Attention", deviation, residual),
            **options,
        )

    def _assign_layout(self, columns: Layout | None, placed: set[Module]) -> Layout | None:
        between = self.qkv._assign_layout(columns, placed)
        if between is not None:
            between = Layout((), between.cols, units=(1, self.turns[0]))
        return self.out._assign_layout(between, placed)

    def forward(self, x: Tensor, *documents: Tensor) -> Tensor:
        return self.out(self.core(self.qkv(x, activations=self._sharded_or_replicated(x)), *documents))

    def _sharded_or_replicated(self, x: Tensor) -> str:
        """`activations` of the projection. "sharded" is used if each rank then has whole sequences, because no work is
        repeated. Both values move the same number of bytes."""
        k = self.qkv.weight.layout.rows[0]
        ranks = x.grid.shape.along((*(axis for axis in x.layout.rows if axis not in OTHER), k))
        sequences = x.shape[0] // max(1, rows_of_sequence(x))
        return "sharded" if isinstance(x.layout.units[0], int) and sequences >= ranks else "replicated"


def check_qk_norm(what: str, qk_norm: Any, error: type[Exception] = LayoutError) -> None:
    """Raise `error` for a value that is neither true, nor false, nor "all"."""
    if qk_norm not in (True, False, ALL_HEADS):
        raise error(f'{what}: qk_norm is true or false; got {qk_norm!r}. "{ALL_HEADS}" is for a norm of all heads')


def head_size(
    what: str, hidden: int, heads: int, kv_heads: int, head_dim: int | None, error: type[Exception] = LayoutError
) -> int:
    """Columns of a head: `head_dim`, or else hidden / heads. Raises `error` for sizes that do not fit together."""
    if (head_dim is None and hidden % heads) or heads % kv_heads:
        raise error(
            f"{what}: hidden must be a multiple of heads unless head_dim is given, and heads of kv_heads; got "
            f"hidden={hidden}, heads={heads}, kv_heads={kv_heads}"
        )
    return natural(
        hidden // heads if head_dim is None else head_dim, f"{what}: head_dim is a whole number, at least 1", 1, error
    )


def qkv_turns(heads: int, kv_heads: int, size: int) -> tuple[int, int, int]:
    """Numbers of adjacent columns of queries, keys and values in the projection, for one query head and its share of
    key and value. If the share is not a whole number of columns, for several query heads.

        >>> qkv_turns(8, 8, 64), qkv_turns(8, 2, 64), qkv_turns(6, 2, 4)
        ((64, 64, 64), (64, 16, 16), (12, 4, 4))
    """
    group = heads // kv_heads
    together = group // gcd(group, size)
    return together * size, together * size // group, together * size // group


def _with_uncut_heads(x: Tensor, size: int) -> Tensor:
    """Keys or values with whole heads on each rank, or with all heads if the ranks do not divide the heads."""
    unit, cols = x.layout.units
    ranks = x.grid.shape.along(x.layout.cols)
    if isinstance(cols, int) and cols % size == 0:
        return x
    axes = x.layout.cols if x.shape[1] // size % ranks == 0 else ()
    return relayout(x, layout_of(x.layout.rows, axes, (), (unit, size if axes else 1)))


class TransformerBlock(Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

    Parameters
    ----------
    grid : Grid
        The grid of the parameters.
    hidden, heads : int
        As in `Attention`.
    mlp : int or None
        Columns between the layers of the MLP. Default: 4 hidden.
    activation, gated
        As in `FeedForward`.
    norm, eps
        "layer" (default) or "rms", and eps of all norms. Default of `eps`: 1e-5.
    bias
        As in `Attention`. Experts have no biases.
    experts : mapping or None
        Arguments of a mixture of experts (`MoE`) in place of the MLP: `experts`, and with defaults `top_k`, `inner`
        (default: `mlp`), `shared`, `shared_gate` and `router`. Default: an MLP.
    dropout : float
        Dropout probability of the softmax weights, and of both results before their additions. Default: 0.
    mlp_tiles : int
        Largest number of rows of a tile of the MLP on a rank, as in `Tiled`. Default: 0, no tiles.
    activations, deviation, residual, seed, dtype, library, precision
        As in `Attention` and `Linear`.
    **attention
        Further arguments of `Attention`.

    Raises
    ------
    LayoutError, Pmm3dError
        As in `Attention`, for an unknown norm, and for other keys of `experts`.

    Notes
    -----
    net(x, documents=None) returns x, or (x, documents) for the next block.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     list(nn.TransformerBlock(grid, 8, 2, bias=False, norm="rms").named_parameters())
    ['norm1.gain', 'attention.qkv.weight', 'attention.out.weight', 'norm2.gain', 'mlp.up.weight', 'mlp.down.weight']
    """

    replays = True

    def __init__(
        self,
        grid: Grid,
        hidden: int,
        heads: int,
        *,
        mlp: int | None = None,
        activation: Layer | str = "gelu_tanh",
        gated: bool = False,
        norm: str = "layer",
        eps: float = 1e-5,
        bias: bool = True,
        experts: Mapping[str, Any] | None = None,
        dropout: float = 0.0,
        mlp_tiles: int = 0,
        activations: str = "replicated",
        deviation: float | None = None,
        residual: float = 1.0,
        seed: int | None = None,
        dtype: str = "float32",
        library: Library | None = None,
        precision: Precision | str | None = None,
        **attention: Any,
    ):
        check_grid("TransformerBlock", grid)
        if norm not in NORMS:
            raise Pmm3dError(f'TransformerBlock: norm must be "layer" or "rms", got {norm!r}')
        check_switches("TransformerBlock", gated=gated, bias=bias)
        mixture = None if experts is None else _checked_mixture(experts)
        self.grid = grid
        seed = seed_of(grid, seed)
        options: dict[str, Any] = {"dtype": dtype, "library": library, "precision": precision}
        layers: dict[str, Any] = {"activations": activations, "deviation": deviation, "residual": residual, **options}
        self.norm1 = NORMS[norm](grid, hidden, eps, **options)
        self.attention = Attention(
            grid, hidden, heads, bias=bias, dropout=dropout, seed=derived(seed, 0), eps=eps, **layers, **attention
        )
        self.norm2 = NORMS[norm](grid, hidden, eps, **options)
        mlp = 4 * hidden if mlp is None else mlp
        layers |= {"activation": activation, "gated": gated, "seed": derived(seed, 1)}
        self.mlp: FeedForward | MoE | Tiled
        if mixture is None:
            self.mlp = FeedForward(grid, hidden, mlp, bias=bias, **layers)
            if check_tiles("TransformerBlock", "mlp_tiles", mlp_tiles):
                self.mlp = Tiled(self.mlp, mlp_tiles)
        elif mlp_tiles:
            raise Pmm3dError(
                f"TransformerBlock: mlp_tiles={mlp_tiles} is for an MLP, and this block has experts: leave it out"
            )
        else:
            self.mlp = MoE(grid, hidden, **{"inner": mlp, **layers, **mixture})
        self.drop1, self.drop2 = (Dropout(grid, dropout, derived(seed, 2 + index)) for index in range(2))

    def _assign_layout(self, columns: Layout | None, placed: set[Module]) -> Layout | None:
        for norm, part in ((self.norm1, self.attention), (self.norm2, self.mlp)):
            norm._assign_layout(columns, placed)
            of_part = part._assign_layout(columns, placed)
        return of_part if columns is None else columns

    def forward(self, x: Tensor, *documents: Tensor) -> Any:
        x = add(x, self.drop1(self.attention(self.norm1(x), *documents)))
        x = add(x, self.drop2(self.mlp(self.norm2(x))))
        return (x, *documents) if documents else x


def _checked_mixture(given: Any) -> dict[str, Any]:
    """Arguments of `MoE`, from those of a block. Raises Pmm3dError."""
    if not isinstance(given, Mapping) or "experts" not in given:
        raise Pmm3dError(
            "TransformerBlock: experts is a mapping with the key experts, the number of experts, such as "
            f'{{"experts": 8, "top_k": 2}}; got {given!r}'
        )
    for key in given:
        if key not in OF_MIXTURE:
            raise Pmm3dError(
                f"TransformerBlock: experts has no key {key!r}{hint(str(key), OF_MIXTURE)}. Arguments of the Router, "
                'such as capacity, are in the mapping with the key router: {"router": {"capacity": 1.25}}'
            )
    check_switches("TransformerBlock: experts", shared_gate=given.get("shared_gate", False))
    return {**given}
