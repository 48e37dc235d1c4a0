"""Results and training of a network of pmm3d, computed by torch on one rank."""

import time
from collections import Counter

import numpy as np
from networks import alone, batch_of

from pmm3d import DistMatrix, nn


def by_rank_0(comm, call):
    """Result of call() on rank 0, for all ranks. The others sleep, because to import torch takes a core 2 s."""
    found = call() if comm.rank == 0 else None
    arrival = comm.Ibarrier()
    while not arrival.Test():
        time.sleep(0.01)
    return comm.bcast(found)


def clipped(torch, weights, clip):
    """Clip gradients, and return their norm. clip_grad_norm_ divides by norm + 1e-6, which the factor corrects."""
    norm = torch.nn.utils.clip_grad_norm_(weights, float("inf")).item()
    return torch.nn.utils.clip_grad_norm_(weights, clip * (norm + 1e-6) / norm).item()


def torch_steps(build, case, steps, clip):
    """(losses and norms, name -> weight) after the steps of AdamW that `networks.train` takes with these arguments.

    build(grid) returns the network: of Sequential, Residual, Recompute, Linear, LayerNorm, Dropout and functions of
    torch.
    """
    import torch

    torch.set_num_threads(1)
    with alone() as grid:
        net = build(grid)
        named = net.named_parameters()
        weights = {each: torch.tensor(np.array(each.gather()), requires_grad=True) for each in named.values()}
        optimizer = torch.optim.AdamW(weights.values(), lr=1e-2, weight_decay=0.1)
        found, calls = [], Counter()
        for step in range(steps):
            x, y = map(torch.from_numpy, batch_of(case, step))
            loss = torch_loss(torch, case, _forward(torch, net, x, weights, calls), y)
            optimizer.zero_grad()
            loss.backward()
            found += [loss.item(), clipped(torch, list(weights.values()), clip)]
            optimizer.step()
        return np.array(found), {name: weights[each].detach().numpy() for name, each in named.items()}


def torch_loss(torch, case, out, y):
    function = getattr(torch.nn.functional, {"mse": "mse_loss", "cross_entropy": "cross_entropy"}[case.loss])
    return function(out, y[:, 0] if case.loss == "cross_entropy" else y)


def torch_attention(q, k, v, slope, length, size, causal=True, window=None, documents=None, scale=None):
    """[result, gradients of <result, slope> by q, k and v] for sequences of this length and heads of this size."""
    import torch

    leaves = [torch.tensor(each, requires_grad=True) for each in (q, k, v)]
    heads = [each.reshape(-1, length, each.shape[1] // size, size).transpose(1, 2) for each in leaves]
    away = torch.arange(length)[:, None] - torch.arange(length)
    seen = ((away >= 0) | (not causal)) & (away.abs() < (window or length))
    if documents is not None:
        documents = torch.from_numpy(documents).reshape(-1, 1, length)
        seen = seen & (documents[..., None] == documents[:, :, None])
    out = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=seen, scale=scale, enable_gqa=True)
    out = out.transpose(1, 2).reshape(q.shape)
    (out * torch.from_numpy(slope)).sum().backward()
    return [out.detach().numpy(), *(each.grad.numpy() for each in leaves)]


def _forward(torch, module, x, weights, calls):
    within = lambda inner: _forward(torch, inner, x, weights, calls)
    match module:
        case nn.Sequential():
            for layer in module.layers:
                x = _forward(torch, layer, x, weights, calls)
            return x
        case nn.Recompute():
            return within(module.module)
        case nn.Residual():
            return x + within(module.module)
        case nn.Linear():
            product = x @ weights[module.weight]
            return product if module.bias is None else product + weights[module.bias]
        case nn.LayerNorm():
            gain, bias = weights[module.gain][0], weights[module.bias][0]
            return torch.nn.functional.layer_norm(x, gain.shape, gain, bias, module.eps)
        case nn.Dropout():
            calls[module] += 1
            return x * torch.from_numpy(_mask(module, tuple(x.shape), calls[module]))
    return getattr(torch.nn.functional, module.__name__)(x)


def _mask(layer, shape, call):
    """Dropout's mask. It is the same on every grid (tests/nn/test_nn_overlap.py)."""
    ones = DistMatrix.from_function(layer.grid, shape, lambda i, j: 1.0 + 0 * (i + j), dtype="float64")
    return np.array(nn.dropout(nn.Tensor(ones), layer.p, layer.seed, call).gather())
