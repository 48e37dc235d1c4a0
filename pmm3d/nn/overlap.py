"""Which communication of a training step runs under computation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..comm import Axis
from ..errors import Pmm3dError
from ..layout import itemsize, part_range

STRIPS_ACROSS_HOSTS = 8
"""Within one there is little to hide."""
LEAST_STRIP_BYTES = 2**19
"""Below it the latency of a message outweighs what is hidden."""


@dataclass(frozen=True)
class Overlap:
    """Which collectives run under computation. None of the four switches changes a result by a bit.

    oar       the all-reduces of a layer's output and of its input's gradient: under the GEMMs of the same product's
              further rows, and the latter under the GEMM of the weight gradient
    ors       the reduce-scatters of weight gradients (z) under the rest of the backward pass
    oag       the gather (z) of the weight that is needed next under the GEMM of the one before
    buckets   the sums of gradients over the data axis under the rest of the backward pass

    strips                  rows of those products are cut into so many strips, each reduced as it is there; None: 1 on
                            one node, 8 across nodes. Strips have half a MiB at least. The BLAS may round a product
                            that is cut differently
    bucket_bytes            gradients are summed over data once this much has come together
    reshard_after_forward   True: gathered weights are dropped after the forward pass and gathered again for the
                            backward pass; False: kept for it, and from pass to pass in `nn.unchanged`; None: kept while
                            they take no more than `keep_bytes`
    keep_bytes              None: a quarter of the memory that is free, shared by the ranks of the node
    shared_weights          True: ranks along z that are on one node have one copy of each gathered weight, in
                            memory that they share: each writes its shard there, and what its like on other nodes have;
                            none are sent in a node. It stays for the backward pass. For networks on the host, z in
                            a node, or evenly on several; other grids refuse it
    decomposed              with "sharded" activations: rows that arrive from other ranks are multiplied as they
                            arrive, this rank's rows first. Rows of results for other ranks are multiplied first, and
                            sent as soon as they are computed, in place of strips. Bytes and the order of sums do not
                            change. None: across nodes, along axes whose collectives do not go by nodes
    regather_inputs         of layers whose input's rows are sharded over one axis more ("sharded" activations): keep
                            the shard, and gather it again for the backward pass; False: keep what was gathered

        >>> Overlap.none(strips=2).oar, Overlap(strips=2).oar
        (False, True)
    """

    oar: bool = True
    ors: bool = True
    oag: bool = True
    buckets: bool = True
    strips: int | None = None
    bucket_bytes: int = 2**24
    reshard_after_forward: bool | None = None
    keep_bytes: int | None = None
    decomposed: bool | None = None
    regather_inputs: bool = False
    shared_weights: bool = False

    def __post_init__(self) -> None:
        if self.shared_weights and self.reshard_after_forward:
            raise Pmm3dError("Overlap: shared_weights=True keeps the one copy of a node for the backward pass, which "
                             "reshard_after_forward=True forbids: leave one of them out")

    @classmethod
    def none(cls, **others: Any) -> Overlap:
        """All four switches off, and nothing decomposed."""
        return cls(**{"oar": False, "ors": False, "oag": False, "buckets": False, "decomposed": False, **others})

    def decomposes(self, axis: Axis, hosts: int) -> bool:
        """Whether rows that come along an axis are multiplied as they come."""
        wanted = hosts > 1 and axis.node_map.per_node == 1 if self.decomposed is None else self.decomposed
        return wanted and axis.size > 1

    def row_strips(self, rows: int, cols: int, dtype: str, hosts: int) -> list[slice]:
        """The strips that a product of this local shape is reduced in."""
        strips = self.strips or (1 if hosts == 1 else STRIPS_ACROSS_HOSTS)
        strips = max(1, min(strips, rows * cols * itemsize(dtype) // LEAST_STRIP_BYTES))
        return [slice(*part_range(rows, strips, index)) for index in range(strips)]
