"""The command `pmm3d simulate`: a training step on a machine, on as many ranks as it is to have."""
