"""Small transformers, their results by torch in one process (float64), and lists of grids."""

from __future__ import annotations

from itertools import product
from math import ceil, floor, gcd, log, pi, prod
from typing import NamedTuple
from zlib import crc32

import numpy as np
from networks import alone, spread, weights_of
from samples import TESTED

from pmm3d import Layout, nn
from pmm3d.nn.transformer import token_layout

EXPERT_GRIDS = {
    1: [((1, 1, 1), 1, 1)],
    2: [((1, 1, 1), 2, 2), ((1, 1, 2), 1, 2), ((2, 1, 1), 1, 1), ((1, 2, 1), 1, 1)],
    4: [
        ((1, 1, 1), 4, 4),
        ((1, 1, 2), 2, 4),
        ((1, 1, 4), 1, 2),
        ((2, 1, 2), 1, 2),
        ((1, 2, 2), 1, 2),
        ((2, 1, 1), 2, 2),
        ((1, 4, 1), 1, 1),
        ((4, 1, 1), 1, 1),
        ((2, 2, 1), 1, 1),
    ],
}
"""Number of ranks -> grids (shape, data, expert) for mixtures of experts: the canonical ones, and with a data axis."""
AXES = "x", "y", "z", "data", "seq", "pipe"
IGNORED = -100


def all_grids(ranks, axes=AXES) -> list[dict[str, int]]:
    """All grids of a number of ranks, each as axis -> number of ranks along it."""
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    return [dict(zip(axes, found)) for found in product(sizes, repeat=len(axes)) if prod(found) == ranks]


class Case(NamedTuple):
    """A transformer and its batches. A label is the next token of the sequence; some labels are ignored."""

    kind: str = "GPT"
    layers: int = 2
    hidden: int = 12
    heads: int = 3
    kv_heads: int | None = None
    head_dim: int | None = None
    qkv_bias: bool | None = None
    qk_norm: bool | str | None = None
    scaling: dict | None = None
    vocabulary: int = 11
    positions: int = 9
    mlp: int = 10
    tied: bool = True
    window: int | None = None
    sequence: int = 6
    batch: int = 3
    mixture: dict | None = None
    """Arguments for a mixture of experts in each block."""

    @property
    def size(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def shared(self) -> int:
        return self.kv_heads or self.heads

    def make(self, grid, **options):
        """The network, with its initial weights."""
        sizes = {
            "vocabulary": self.vocabulary,
            "layers": self.layers,
            "hidden": self.hidden,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "mlp": self.mlp,
            "window": self.window,
            "tied": self.tied,
            "seed": 3,
            "positions": self.positions,
            "dtype": "float64",
            **(self.mixture or {}),
            **options,
        }
        if self.kind == "Llama":
            del sizes["positions"]
            own = {"qkv_bias": self.qkv_bias, "qk_norm": self.qk_norm, "rotary_scaling": self.scaling}
            sizes |= {name: value for name, value in own.items() if value is not None}
        return getattr(nn, self.kind)(grid, **sizes)

    def batch_of(self, step=0) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, labels), each of shape (batch x sequence, 1)."""
        random = np.random.default_rng([step, self.vocabulary])
        tokens = random.integers(0, self.vocabulary, (self.batch, self.sequence + 1))
        labels = tokens[:, 1:].reshape(-1, 1).copy()
        labels[1:][random.random(len(labels[1:])) < 0.2] = IGNORED
        return tokens[:, :-1].reshape(-1, 1), labels


def values(name: str, shape) -> np.ndarray:
    """Values for a parameter. They differ from the initial values, which are 0 or 1 in norms and biases."""
    return 0.3 * np.random.default_rng(crc32(name.encode())).standard_normal(shape) + ("gain" in name)


def fill(net, library=TESTED):
    """Set the weights of a network to `values`. Return the network."""
    for name, parameter in net.named_parameters().items():
        parameter.assign(spread(net.grid, values(name, parameter.shape), parameter.layout, library, parameter.dtype))
    return net


def batch_on(grid, case: Case, step=0, library=TESTED, part=slice(None)):
    """Yield tokens and labels on the grid. part: slice of the sequences."""
    for whole in case.batch_of(step):
        whole = whole.reshape(case.batch, case.sequence)[part].reshape(-1, 1)
        yield spread(grid, whole, token_layout(grid, case.sequence) if case.sequence > 1 else Layout(), library)


# Results of torch ----------------------------------------------------------------------------------------------------


def of_torch(case: Case, step=0, documents=None):
    """(loss, logits, name -> gradient)."""
    torch, weights = _weights(case, fill)
    loss, logits, penalty = _loss(torch, case, weights, step, documents)
    (loss + penalty).backward()
    return loss.item(), logits.detach().numpy(), {name: each.grad.numpy() for name, each in weights.items()}


def steps_of_torch(case: Case, steps: int, **options):
    """(losses, weights) of steps of AdamW from the initial weights of the network, each with a different batch."""
    torch, weights = _weights(case, lambda net: net)
    optimizer, losses = torch.optim.AdamW(weights.values(), **options), []
    for step in range(steps):
        loss, _, penalty = _loss(torch, case, weights, step)
        optimizer.zero_grad()
        (loss + penalty).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: each.detach().numpy() for name, each in weights.items()}


def _weights(case, filled):
    """(torch, name -> weight as a tensor)."""
    import torch

    torch.set_num_threads(1)
    with alone() as grid:
        named = weights_of(filled(case.make(grid)))
    return torch, {name: torch.tensor(value, requires_grad=True) for name, value in named.items()}


def _loss(torch, case, weights, step, documents=None):
    """(loss, logits, sum of the losses of routers)."""
    tokens, labels = (torch.from_numpy(each) for each in case.batch_of(step))
    logits, penalty = _logits(torch, case, weights, tokens.reshape(case.batch, case.sequence), documents)
    return torch.nn.functional.cross_entropy(logits, labels[:, 0], ignore_index=IGNORED), logits, penalty


def _logits(torch, case, weights, tokens, documents):
    """(logits, sum of the losses of routers)."""
    b, s = tokens.shape
    llama, penalty = case.kind == "Llama", 0.0
    of = lambda name: weights[name]

    def linear(x, name):
        bias = weights.get(f"{name}.bias")
        return x @ of(f"{name}.weight") + (0 if bias is None else bias)

    def norm(x, name):
        if llama:
            return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * of(f"{name}.gain")
        return torch.nn.functional.layer_norm(x, x.shape[-1:], of(f"{name}.gain")[0], of(f"{name}.bias")[0], 1e-5)

    def norms(block):
        """Norms of queries and keys, or functions that do nothing."""
        names = [f"{block}attention.{name}_norm" for name in "qk"]
        if case.qk_norm == "all":
            return [lambda x, name=name: _of_all_heads(x, lambda heads: norm(heads, name)) for name in names]
        return [(lambda x, name=name: norm(x, name)) if case.qk_norm else lambda x: x for name in names]

    x = of("0.table").T[tokens]
    if not llama:
        x = x + of("0.positions").T[:s]
    seen = _visible(torch, case, s, documents)
    for number in range(1, case.layers + 1):
        block = f"{number}."
        x = x + linear(
            _attention(torch, case, linear(norm(x, block + "norm1"), block + "attention.qkv"), seen, norms(block)),
            block + "attention.out",
        )
        h = norm(x, block + "norm2")
        if f"{block}mlp.router.weight" in weights:
            mixed, more = mixture_of_torch(torch, case.mixture, weights, block + "mlp.", h.reshape(b * s, -1), llama)
            x, penalty = x + mixed.reshape(b, s, -1), penalty + more
            continue
        if llama:
            h = gated(torch, linear(h, block + "mlp.up"))
        else:
            exact = "none" if case.kind == "Encoder" else "tanh"
            h = torch.nn.functional.gelu(linear(h, block + "mlp.up"), approximate=exact)
        x = x + linear(h, block + "mlp.down")
    head = of("0.table") if case.tied else of(f"{case.layers + 1}.linear.weight")
    return (norm(x, f"{case.layers + 1}.norm") @ head).reshape(b * s, -1), penalty


def gated(torch, up):
    """silu(gate) * factor, whose columns alternate in units of at most 64."""
    inner = up.shape[-1] // 2
    unit = max(size for size in range(1, 65) if inner % size == 0)
    up = up.reshape(*up.shape[:-1], -1, 2, unit)
    return (torch.nn.functional.silu(up[..., 0, :]) * up[..., 1, :]).flatten(-2)


def mixture_of_torch(torch, options, weights, path, x, is_gated):
    """(result, loss of the router) of a mixture of experts for tokens x (T, h): all experts compute all tokens, and
    the weights of those that a token did not choose are 0. options: of `nn.GPT`; path: beginning of the names."""
    of = lambda name: weights[path + name]

    def mlp(name):
        up = x @ of(f"{name}.up.weight")
        up = gated(torch, up) if is_gated else torch.nn.functional.gelu(up, approximate="tanh")
        return up @ of(f"{name}.down.weight")

    experts, top_k = options["experts"], options.get("top_k", 2)
    logits = x @ of("router.weight")
    p = torch.softmax(logits, -1)
    places = torch.topk(p, top_k, -1).indices
    chosen = torch.zeros_like(p).scatter(1, places, 1.0)
    gates = p * chosen
    if options.get("normalize", top_k > 1):
        gates = gates / gates.sum(-1, keepdim=True)
    carried = chosen
    if options.get("capacity"):
        most = max(1, int(options["capacity"] * top_k * len(x) / experts))
        carried = chosen * (chosen.cumsum(0) <= most)
    out = sum((gates * carried)[:, e : e + 1] * mlp(f"experts.{e}") for e in range(experts))
    if options.get("shared"):
        shared = mlp("shared")
        out = out + (torch.sigmoid(x @ of("shared_gate.weight")) * shared if options.get("shared_gate") else shared)
    balance = experts / (top_k * len(x)) * (chosen.sum(0) * p.mean(0)).sum()
    penalty = options.get("balance", 0.01) * balance
    penalty = penalty + options.get("z_loss", 0.0) * (torch.logsumexp(logits, -1) ** 2).mean()
    return out, penalty


def _visible(torch, case, s, documents):
    """Mask (1 or batch, 1, s, s): whether the query of a row attends to the key of a column."""
    query, key = torch.arange(s)[:, None], torch.arange(s)[None, :]
    seen = (key <= query if case.kind != "Encoder" else key < s + query)[None]
    if case.window is not None:
        seen = seen & (abs(query - key) < case.window)
    if documents is not None:
        documents = torch.as_tensor(documents).reshape(-1, s)
        seen = seen & (documents[:, :, None] == documents[:, None, :])
    return seen[:, None]


def _attention(torch, case, fused, seen, norms):
    """Attention. fused: columns of q, k and v, in repeated groups of the fewest query heads that share whole
    columns. norms: of q and of k."""
    b, s, _ = fused.shape
    group = case.heads // case.shared
    together = group // gcd(group, case.size) * case.size
    parts = fused.reshape(b, s, -1, together + 2 * (together // group)).split([together, *[together // group] * 2], -1)
    q, k, v = (each.reshape(b, s, case.shared, -1, case.size).permute(0, 2, 3, 1, 4) for each in parts)
    q, k = (norm(each) for norm, each in zip(norms, (q, k)))
    if case.kind == "Llama":
        q, k = (rotated(torch, each, scaling=case.scaling) for each in (q, k))
    scores = q @ k.transpose(-1, -2) * case.size**-0.5
    scores = scores.masked_fill(~seen[:, :, None], -torch.inf)
    return (torch.softmax(scores, -1) @ v).permute(0, 3, 1, 2, 4).reshape(b, s, -1)


def _of_all_heads(x, function):
    """function of the columns of all heads, side by side. x: (batch, shared, group, s, size)."""
    rows = x.permute(0, 3, 1, 2, 4)
    return function(rows.flatten(2)).reshape(rows.shape).permute(0, 2, 3, 1, 4)


def rotated(torch, x, base=10000.0, scaling=None):
    """Rotate the pairs (i, i + size/2) of x (..., s, size) by position * frequency of the pair, as Llama does."""
    s, size = x.shape[-2:]
    steps, magnitude = frequencies(size, base, scaling, s)
    angle = torch.arange(s, dtype=x.dtype)[:, None] * torch.tensor(steps, dtype=x.dtype)
    one, other = magnitude * x[..., : size // 2], magnitude * x[..., size // 2 :]
    return torch.cat([one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()], -1)


def frequencies(size, base=10000.0, scaling=None, length=0):
    """(frequency of each pair, factor of the result) of rotary positions (Su et al. 2021), pair by pair, for sequences
    of this length. scaling: as of `nn.Llama`."""
    given = {"rope_type": "default", "factor": 1.0, **(scaling or {})}
    kind, factor, original = (given.get(key) for key in ("rope_type", "factor", "original_max_position_embeddings"))
    if kind == "dynamic" and length > original:
        base *= (factor * length / original - (factor - 1)) ** (size / (size - 2))
    plain = [base ** (-2 * pair / size) for pair in range(size // 2)]
    if kind == "linear":
        return [step / factor for step in plain], 1.0
    if kind == "llama3":
        low, high = given["low_freq_factor"], given["high_freq_factor"]

        def mixed(step):
            wave = 2 * pi / step
            if wave < original / high:
                return step
            if wave > original / low:
                return step / factor
            share = (original / wave - low) / (high - low)
            return (1 - share) * step / factor + share * step

        return [mixed(step) for step in plain], 1.0
    if kind == "yarn":
        turns = given.get("beta_fast", 32), given.get("beta_slow", 1)
        low, high = (size * log(original / (2 * pi * each)) / (2 * log(base)) for each in turns)
        if given.get("truncate", True):
            low, high = floor(low), ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        shares = [min(1, max(0, (pair - low) / (high - low if high != low else 0.001))) for pair in range(size // 2)]
        magnitude = given.get("attention_factor")
        if magnitude is None:
            larger = lambda by: 0.1 * by * log(factor) + 1 if factor > 1 else 1.0
            one, other = given.get("mscale"), given.get("mscale_all_dim")
            magnitude = larger(one) / larger(other) if one and other else larger(1)
        return [step * (1 - share) + step / factor * share for step, share in zip(plain, shares)], magnitude
    return plain, 1.0
