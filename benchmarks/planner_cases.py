"""What is planned and measured: products, networks with data for them, and grids by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from pmm3d.layout import GridShape
from pmm3d.model.gpt_ranking import grids_4d


class Product(NamedTuple):
    """m, n, k and the type of the elements.

        >>> Product.named("256x512x64:float32")
        Product(m=256, n=512, k=64, dtype='float32')
    """

    m: int
    n: int
    k: int
    dtype: str = "float64"

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}:{self.dtype}"

    @classmethod
    def named(cls, text: str) -> Product:
        sizes, _, dtype = text.partition(":")
        m, n, k = map(int, sizes.split("x"))
        return cls(m, n, k, dtype or "float64")


PRODUCTS = tuple(map(Product.named, (
    "2048x2048x2048:float64", "1024x1024x1024:float32", "512x512x512:float64", "256x256x256:float32",
    "4096x4096x256:float64", "256x4096x4096:float32", "512x512x16384:float64", "1024x1024x8192:float32",
    "32768x256x256:float64", "256x32768x256:float32", "1501x1003x517:float64", "10001x499x513:float32")))
"""Square, flat, of large k, tall, small; two that no grid divides."""


class Network(NamedTuple):
    """layers of `width` inputs and outputs; settings: keys of a configuration besides, section by section."""

    layers: int
    width: int
    batch: int
    settings: dict[str, dict[str, Any]]


NETWORKS = {
    "relu-512": Network(8, 512, 256, {"network": {"activation": "relu"}, "optimizer": {"kind": "adam"}}),
    "norm-1024": Network(8, 1024, 512, {"network": {"activation": "gelu", "norm": True}}),
    "wide-batch-256": Network(8, 256, 2048, {"network": {"activation": "relu"}, "optimizer": {"kind": "sgd"}}),
}
OVERLAPS = {"overlap": {}, "none": {"oar": False, "ors": False, "oag": False, "buckets": False}}
"""Sections of a configuration."""
MEMORY = Network(6, 512, 1024, {"network": {"norm": True}})
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "adamw": {}, "adam": {"optimizer": {"kind": "adam"}}, "sgd": {"optimizer": {"kind": "sgd"}},
    "ZeRO-1": {"optimizer": {"shard_over_data": True}}, "recompute": {"network": {"recompute": True}},
    "dropout": {"network": {"dropout": 0.1}}, "sharded": {"network": {"activations": "sharded"}},
    "sharded, recompute, ZeRO-1": {"network": {"activations": "sharded", "recompute": True},
                                   "optimizer": {"shard_over_data": True}},
}
"""Of which the memory is predicted."""


def settings(network: Network, folder: Path, *others: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """A configuration without a grid, of data that `write_data` writes into the folder; others go over the network's
    own."""
    found: dict[str, dict[str, Any]] = {
        "data": {"file": str(data_file(network, folder)), "validation": 0.0, "batch_size": network.batch},
        "network": {"hidden": [network.width] * (network.layers - 1)},
        "training": {"folder": str(folder / "run"), "steps": 1}}
    for more in (network.settings, *others):
        for section, values in more.items():
            found[section] = found.get(section, {}) | values
    return found


def data_file(network: Network, folder: Path) -> Path:
    return folder / f"{network.batch}x{network.width}.h5"


def write_data(network: Network, folder: Path) -> None:
    """Random samples and targets for three batches."""
    import h5py
    import numpy as np

    source, shape = np.random.default_rng(0), (3 * network.batch, network.width)
    with h5py.File(data_file(network, folder), "w") as file:
        for name in ("x", "y"):
            file[name] = source.standard_normal(shape, dtype="float32")


def name_of(grid: GridShape) -> str:
    """GxxGyxGz, and xGdata where there is such an axis.

        >>> name_of(GridShape(2, 1, 4)), name_of(GridShape(1, 1, 2, 4))
        ('2x1x4', '1x1x2x4')
    """
    return "x".join(map(str, grid if grid.data > 1 else grid[:3]))


def grid_named(name: str) -> GridShape:
    return GridShape(*map(int, name.split("x")))


def grids_3d(ranks: int) -> list[GridShape]:
    """All of exactly that many ranks that have no data axis; of `grids_4d`."""
    return [grid for grid in grids_4d(ranks) if grid.data == 1]
