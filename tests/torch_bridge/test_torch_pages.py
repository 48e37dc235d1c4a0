"""The program on the page about torch runs."""

import re
from pathlib import Path

import pytest
import torch
from seeded import Block
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


class Wide(Block):
    """A block with the heads of 64 columns of the page."""

    HEAD = 64


@pytest.mark.parallel([4])
@pytest.mark.deadline(200)
def test_the_plan_of_the_page_fits_a_transformer(comm):
    [text] = [text for text in PROGRAM.findall(PAGE.read_text()) if "import" not in text]
    names = {"Split": Split}
    exec(text, names)
    make = lambda: (torch.manual_seed(0), nn.Sequential(Wide(128, 2)).double())[1]
    tokens = torch.arange(12).reshape(4, 3) % 5
    with Grid(comm, (2, 2, 1)) as grid:
        net, plain = parallelize(make(), grid, names["plan"]), make()
        assert torch.allclose(net(tokens), plain(tokens))
