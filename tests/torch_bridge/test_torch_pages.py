"""The program on the page about torch runs."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from pmm3d import Grid
from pmm3d.torch import Split, parallelize

torch.set_num_threads(1)
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "torch.md"
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


@pytest.mark.parallel([4])
@pytest.mark.deadline(200)
def test_the_program_of_the_page_trains(comm):
    [text] = [text for text in PROGRAM.findall(PAGE.read_text()) if "import" in text]
    assert text.count("MPI.COMM_WORLD") == 1
    names = {"comm": comm}
    exec(text.replace("MPI.COMM_WORLD", "comm"), names)
    assert names["loss"].item() < 3
    assert list(names["weights"]) == ["0.weight", "0.bias", "3.weight", "3.bias"] * (comm.rank == 0)


class Block(nn.Module):
    """A block with heads of 64 columns, for the plan on the page."""

    def __init__(self):
        super().__init__()
        self.norm, self.second, self.embed = nn.LayerNorm(128), nn.LayerNorm(128), nn.Embedding(5, 128)
        self.net = nn.ModuleDict({name: nn.Linear(128, 128) for name in ("q", "k", "v", "out", "up", "down")})

    def forward(self, tokens):
        x, net = self.embed(tokens), self.net
        q, k, v = (net[name](self.norm(x)).unflatten(-1, (-1, 64)).transpose(1, 2) for name in "qkv")
        x = x + net["out"](nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + net["down"](torch.relu(net["up"](self.second(x))))


@pytest.mark.parallel([4])
@pytest.mark.deadline(200)
def test_the_plan_of_the_page_fits_a_transformer(comm):
    [text] = [text for text in PROGRAM.findall(PAGE.read_text()) if "import" not in text]
    names = {"Split": Split}
    exec(text, names)
    make = lambda: (torch.manual_seed(0), Block().double())[1]
    tokens = torch.arange(12).reshape(4, 3) % 5
    with Grid(comm, (2, 2, 1)) as grid:
        net, plain = parallelize(make(), grid, names["plan"]), make()
        assert torch.allclose(net(tokens), plain(tokens))
