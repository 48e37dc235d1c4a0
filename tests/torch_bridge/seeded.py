"""A transformer block, modules on a grid with the same weights on every rank, and their gradients."""

import torch
from torch import nn

from pmm3d.torch import full_state_dict, parallelize


def made(kind, *plan, **options):
    torch.manual_seed(0)
    return parallelize(kind(), *plan, **options)


class Block(nn.Module):
    """A transformer of one block, on (sequences, tokens, features). The embedding and the head are replicated."""

    HEAD = 4

    def __init__(self, width=16, heads=4, words=11):
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.first, self.second, self.last = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, heads * self.HEAD) for _ in range(3))
        self.out = nn.Linear(heads * self.HEAD, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, tokens):
        x = self.embed(tokens) * self.scale
        x = x + self.attend(self.first(x))
        x = x + self.down(nn.functional.gelu(self.up(self.second(x))))
        return self.head(self.last(x))

    def attend(self, x):
        q, k, v = (part(x).unflatten(-1, (-1, self.HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def differences(state, other):
    assert list(state) == list(other)
    return max((state[name] - other[name]).abs().max().item() for name in state)


def whole_gradients(grid, net, names):
    """name -> gradient, as in the plain module, from a step of SGD."""
    before = full_state_dict(net)
    torch.optim.SGD(net.parameters(), lr=1.0).step()
    after = full_state_dict(net)
    return {name: before[name] - after[name] for name in names}
