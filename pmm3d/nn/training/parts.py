"""What a configuration says of a network, its optimizer and its loss, made on any grid, one without data too."""

from __future__ import annotations

from typing import Any

from ...comm import Grid
from ...errors import Pmm3dError
from ...layout import Layout
from .. import optim
from ..layers import MLP, Module
from ..precision import Precision
from .config import Config
from .own_network import OwnNetwork
from .recalled import Samples


def loss_of(config: Config, classes: bool) -> str:
    """The loss asked for, or the one that fits the targets: classes or vectors. Raises Pmm3dError if it does not fit
    them."""
    loss = config.training.loss
    if loss == "auto":
        return "cross_entropy" if classes else "mse"
    if (loss == "cross_entropy") != classes:
        raise Pmm3dError(f"training.loss is {loss}, but the targets {config.data.targets!r} of {config.data.file} are "
                         f"{'classes (integers)' if classes else 'vectors (floating point)'}")
    return loss


def layer_sizes(config: Config, features: int, outputs: int) -> list[int]:
    """The columns of the input, of the hidden layers of a network that is not one's own, of the output."""
    return [features, *([] if config.network.build else config.network.hidden), outputs]


def make_network(config: Config, grid: Grid, sizes: list[int], own: OwnNetwork | None,
                 precision: Precision | None = None) -> tuple[Module, Layout]:
    """(the network, the layout of its output), in the configuration's precision or in another one. Collective."""
    if own is not None:
        return own.made(grid, sizes[0], sizes[-1])
    section = config.network.model_dump(exclude={"build", "hidden", "activation"})
    network = MLP(grid, sizes, config.network.activation, seed=config.training.seed,
                  precision=precision or config.precision, **section)
    return network, network.output_layout


def network_of(config: Config, grid: Grid, samples: Samples) -> Module:
    """The network of a configuration, for such samples, in float32 if it was trained in low precision; one of one's own
    in its own precision. Collective."""
    if config.network.build:
        own = OwnNetwork(grid, config.network, config.precision, config.training.seed)
        return own.made(grid, samples.features, samples.outputs)[0]
    sizes = layer_sizes(config, samples.features, samples.outputs)
    return make_network(config, grid, sizes, None, Precision(config.precision.master))[0]


def make_optimizer(config: Config, network: Module) -> optim.Optimizer:
    section = config.optimizer
    options: dict[str, Any] = {"lr": section.lr, "weight_decay": section.weight_decay,
                               "shard_over_data": section.shard_over_data, "decay_vectors": section.decay_vectors}
    if section.kind == "sgd":
        return optim.SGD(network.parameters(), momentum=section.momentum, **options)
    first, second = section.betas
    options |= {"betas": (first, second), "eps": section.eps}
    if section.kind == "muon":
        return optim.Muon(network.parameters(), momentum=section.momentum, ns_steps=section.ns_steps,
                          adjust_lr_fn=section.adjust_lr_fn, **options)
    kind = optim.AdamW if section.kind == "adamw" else optim.Adam
    return kind(network.parameters(), **options)
