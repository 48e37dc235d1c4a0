"""Attention of heads that a rank holds whole."""

from __future__ import annotations

from ...arrays import Array
from ...errors import LayoutError
from ..compute import array_namespace
from ..tensor import Tensor
from .embedding import positions_of
from .sequence import sequence_length


def attention(q: Tensor, k: Tensor, v: Tensor, *, size: int, causal: bool = True, window: int | None = None,
              documents: Tensor | None = None, dropout: float = 0.0, seed: int = 0, stream: int = 0,
              scale: float | None = None, parallel: str = "auto", order: str = "plain") -> Tensor:
    """softmax(q k^T scale) v of each head."""
    s, here, xp = sequence_length(q.layout, q.shape[0]), q.shard.shape, array_namespace(q.shard)
    if here[0] % max(1, s) or documents is not None or dropout:
        raise LayoutError("attention: whole sequences on each rank, no documents, no dropout, for now")
    b, a, kv = here[0] // s, here[1] // size, k.shard.shape[1] // size
    scale = size**-0.5 if scale is None else scale
    form, of_keys = q.form, k.form

    def heads(array: Array, count: int) -> Array:
        return array.reshape(b, s, count, size).transpose(0, 2, 1, 3)

    def repeated(array: Array) -> Array:
        return array.repeat(a // kv, 1) if kv else array

    place = positions_of(q, order)[:s]
    seen = (place[:, None] >= place[None, :]) if causal else (place[:, None] >= -1)
    if window is not None:
        seen = seen & (place[:, None] - place[None, :] < window)
    parts = heads(q.shard, a), repeated(heads(k.shard, kv)), repeated(heads(v.shard, kv))
    scores = xp.where(seen, parts[0] @ parts[1].swapaxes(2, 3) * scale, -1e30)
    weights = xp.exp(scores - scores.max(3, keepdims=True))
    weights = weights / weights.sum(3, keepdims=True)
    out = form.new()
    out.reshape(b, s, a, size)[...] = (weights @ parts[2]).transpose(0, 2, 1, 3)

    def rule(gradient: Array, *_: Array) -> list[Array]:
        dout = heads(gradient, a)
        dweights = dout @ parts[2].swapaxes(2, 3)
        dscores = weights * (dweights - (dweights * weights).sum(3, keepdims=True)) * scale
        found = [dscores @ parts[1], dscores.swapaxes(2, 3) @ parts[0], weights.swapaxes(2, 3) @ dout]
        made = [form.new(), of_keys.new(), of_keys.new()]
        for each, grad, count in zip(made, found, (a, kv, kv)):
            if count:
                grad = grad.reshape(b, count, a // count, s, size).sum(2)
            each.reshape(b, s, count, size)[...] = grad.transpose(0, 2, 1, 3)
        return made

    return q.made(out, (q, k, v), rule, keep={"attention.output": out})
