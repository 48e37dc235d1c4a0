"""Train a torch model on a grid: its linear layers run on all ranks, everything else is plain torch.

python -m pmm3d.launcher -n 8 apps/torch_bridge.py               (or any number of ranks, and --grid 2x2x1 --data 2)
"""

import argparse

import torch
from mpi4py import MPI
from sklearn.datasets import load_digits
from torch import nn

from pmm3d import Grid
from pmm3d.torch import clip_grad_norm_, full_state_dict, gather_output, input_rows, mean, parallelize

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--grid", default="hsdp", help="GxxGyxGz, ddp, fsdp, hsdp or megatron")
parser.add_argument("--data", type=int, default=1, help="Gdata")
options = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(0)  # the same on all ranks

with Grid(MPI.COMM_WORLD, options.grid, options.data) as grid:
    model = parallelize(
        nn.Sequential(
            nn.Linear(64, 256),
            nn.GELU(),
            nn.LayerNorm(256),
            nn.Dropout(0.1),
            nn.Linear(256, 256),
            nn.GELU(),
            nn.Linear(256, 10),
        ),
        grid,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    for _step in range(100):
        batch = torch.randint(1400, (256,))
        x, y = input_rows(grid, images[batch]), input_rows(grid, labels[batch])
        loss = mean(grid, nn.functional.cross_entropy(model(x), y, reduction="none"))
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        right = (gather_output(grid, model(input_rows(grid, images[1400:]))).argmax(1) == labels[1400:]).float().mean()
    weights = full_state_dict(model, root=0)  # those of the plain nn.Sequential
    if grid.rank == 0:
        print(f"loss {loss.item():.4f}, right {right:.3f}; {', '.join(weights)}")
