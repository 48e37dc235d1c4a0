"""Simple machines, for tests of models that use a machine."""

from dataclasses import dataclass

from pmm3d.model.machines import Group, Machine


@dataclass(frozen=True)
class SimpleMachine(Machine):
    """A machine whose GEMMs have one rate, and whose passes have one bandwidth. A collective takes a latency for each
    member, and time for its bytes."""

    rate: float = float("inf")
    latency: float = 0.0
    latency_across: float = 0.0
    bandwidth: float = 1e9
    bandwidth_across: float = 1e9
    copying: float = float("inf")
    hiding: float = 0.0

    def gemm_seconds(self, m: int, n: int, k: int, dtype: str, form: str = "nn") -> float:
        return 2 * m * n * k / self.rate

    def pass_seconds(self, name: str, nbytes: int) -> float:
        return nbytes / self.copying

    def collective_seconds(self, operation: str, group: Group, nbytes: int) -> float:
        if group.size == 1:
            return 0.0
        away = (group.size - group.inside) / (group.size - 1)
        inside = self.latency * (group.inside - 1) + (1 - away) * nbytes / self.bandwidth
        into_node = away * nbytes * group.inside * group.sharers
        return inside + self.latency_across * (group.size - group.inside) + into_node / self.bandwidth_across

    def hidden_share(self, group: Group) -> float:
        return self.hiding


def machine(ranks_per_node: int = 2**20, memory: int = 0, **figures: float) -> SimpleMachine:
    return SimpleMachine("simple", ranks_per_node, memory, {"float64": 5e10}, {}, **figures)


BYTES_ONLY = machine()
"""A machine on which only the bytes of messages take time, equally inside a node and between nodes."""


def cluster(ranks_per_node: int = 8, **figures: float) -> SimpleMachine:
    """A machine of several nodes. The ranks of a node share its link."""
    known = {
        "rate": 5e10,
        "latency": 1e-6,
        "latency_across": 3e-6,
        "bandwidth": 5e9,
        "bandwidth_across": 12e9,
        "copying": 1e10,
        "hiding": 0.5,
    }
    return machine(ranks_per_node, **known | figures)
