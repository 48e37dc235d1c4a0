"""Which communication of a training step runs under computation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..comm import Axis
from ..errors import Pmm3dError


@dataclass(frozen=True)
class Overlap:
    """Which collectives run under computation. None of the four switches changes a result by a bit.

    oar       the sum of the gradient of a layer's input: under the GEMM of the weight gradient
    ors       the reduce-scatters of weight gradients (z) under the rest of the backward pass
    oag       the gather (z) of the weight that is needed next under the GEMM of the one before
    buckets   the sums of gradients over the data axis under the rest of the backward pass

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
                            sent as soon as they are computed. Bytes and the order of sums do not change; the BLAS may
                            round a product that is cut differently. None: across nodes, along axes whose collectives
                            do not go by nodes
    regather_inputs         of layers whose input's rows are sharded over one axis more ("sharded" activations): keep
                            the shard, and gather it again for the backward pass; False: keep what was gathered

        >>> Overlap.none(bucket_bytes=1).oar, Overlap(bucket_bytes=1).oar
        (False, True)
    """

    oar: bool = True
    ors: bool = True
    oag: bool = True
    buckets: bool = True
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
