"""Mixtures of experts: routers, the exchange of tokens along the axis "expert", and layers."""

from .exchange import Exchange, combine, dispatch, send_back
from .expert_linear import expert_linear, expert_weight_layout
from .layer import MoE
from .routing import Load, Routed, Router, with_penalty

__all__ = [
    "Exchange", "Load", "MoE", "Routed", "Router", "combine", "dispatch", "expert_linear", "expert_weight_layout",
    "send_back", "with_penalty",
]  # fmt: skip
