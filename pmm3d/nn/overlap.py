"""Choice of the communication that overlaps with the computation of a training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..comm import Axis
from ..errors import Pmm3dError


@dataclass(frozen=True)
class Overlap:
    """Choice of the collectives that overlap with computation.

    Parameters
    ----------
    oar : bool
        Overlap the all-reduce of the gradient of a layer's input with the GEMM of the weight gradient. Default: True.
    ors : bool
        Overlap the reduce-scatter of weight gradients over z with the rest of the backward pass. Default: True.
    oag : bool
        Overlap the all-gather of the next weight over z with the GEMM of the current weight. Default: True.
    buckets : bool
        Overlap the all-reduce of gradients over data with the rest of the backward pass. Default: True.
    bucket_bytes : int
        Bytes of gradients in one message over data. Default: 16 MiB.
    reshard_after_forward : bool or None
        True: gathered weights are dropped after the forward pass and gathered again for the backward pass. False: they
        are kept, in `nn.unchanged` from pass to pass. None (default): they are kept up to `keep_bytes`.
    keep_bytes : int or None
        Bytes of gathered weights that a rank keeps. None (default): its share of a quarter of the node's free memory.
    decomposed : bool or None
        With "sharded" activations, multiply rows of other ranks when they arrive, and send rows to other ranks when
        they are computed. None (default): across nodes, along axes whose collectives are not hierarchical.
    regather_inputs : bool
        With "sharded" activations, keep the shard of a layer's input and gather it again in the backward pass. False
        (default): keep the gathered input.
    shared_weights : bool
        Keep one copy of each gathered weight for the ranks of a node, in shared memory. It needs host arrays, and ranks
        along z on one node, or equally many on each of several nodes. Weights of experts are not shared. Default:
        False.

    Raises
    ------
    Pmm3dError
        For `shared_weights` together with `reshard_after_forward`.

    Notes
    -----
    `oar`, `ors`, `oag` and `buckets` do not change the bits of a result. `decomposed` changes neither bytes nor the
    order of sums, but the BLAS may round parts of a product differently.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     nn.Tape.of(grid).parallel.overlap = nn.Overlap.none(bucket_bytes=2**20)
    ...     nn.Tape.of(grid).parallel.overlap.oar
    False
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
            raise Pmm3dError(
                "Overlap: shared_weights=True keeps the copy of a node for the backward pass, and "
                "reshard_after_forward=True drops it: leave one of them out"
            )

    @classmethod
    def none(cls, **others: Any) -> Overlap:
        """Choice without overlap: the first four switches and `decomposed` are False.

        Parameters
        ----------
        **others
            Values of further attributes.
        """
        return cls(**{"oar": False, "ors": False, "oag": False, "buckets": False, "decomposed": False, **others})

    def _decomposes(self, axis: Axis, hosts: int) -> bool:
        """Whether rows are multiplied when they arrive along an axis."""
        wanted = hosts > 1 and axis.node_map.per_node == 1 if self.decomposed is None else self.decomposed
        return wanted and axis.size > 1
