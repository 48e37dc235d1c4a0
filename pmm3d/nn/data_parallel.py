"""Sums of gradients over ranks with different rows (data parallelism). A message contains a bucket of gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from ..arrays import Array
from ..comm import Axis, Grid, Method, Pending, sum_compressed
from ..layout import EXPERT_Z, is_folded
from .feedback import feedback_of, method_named
from .gradient_buffer import GradientBuffer, replica_axis
from .overlap import Overlap

IN_FLIGHT = 2
"""Largest number of concurrent sums of gradients along one axis. More sums would take memory without a gain in speed,
because two saturate the link."""
PRODUCT_AXES = ("x", "y", "z", EXPERT_Z)
"""Gradients are summed over these axes first, then over the others (data, seq, ...), which do not split weights."""


class GradientSums:
    """Starts the sums of gradients over axes along which ranks hold different rows of the batch."""

    def __init__(self, grid: Grid):
        self._grid, self.overlap, self.compression = grid, Overlap(), ""
        self._flights: dict[str, list[Pending]] = {}
        self._bucket: list[GradientBuffer] = []
        self._bytes = 0

    def put(self, buffer: GradientBuffer) -> None:
        """Put a finished gradient into the bucket. Its sums over x, y and z have already been started.

        A full bucket is sent.
        """
        if not buffer.open.sums:
            buffer.note_last_sum()
            return
        if self._bucket and _kind(self._bucket[0]) != _kind(buffer):
            self.flush()
        self._bucket.append(buffer)
        self._bytes += buffer.largest_share
        if self._bytes >= self.overlap.bucket_bytes:
            self.flush()

    def flush(self, buffer: GradientBuffer | None = None) -> None:
        """Send the bucket. If `buffer` is given, only if the bucket contains it."""
        if self._bucket and (buffer is None or buffer in self._bucket):
            self.start_data_all_reduce(self._bucket)
            self.empty()

    def empty(self) -> list[GradientBuffer]:
        """Return the gradients in the bucket, and empty it."""
        bucket, self._bucket, self._bytes = self._bucket, [], 0
        return bucket

    def start_data_all_reduce(self, bucket: Sequence[GradientBuffer]) -> None:
        """Start the all-reduce of gradients over data and the other axes of their partial sums.

        Over the axis `split_over` (ZeRO), it is a reduce-scatter. If there are several sums, the last is compressed,
        unless the codec would send no fewer bytes.
        """
        sums, splits, sent = bucket[0].open.sums, bucket[0].split_over, bucket[0].message.dtype
        scatter = splits if splits in sums else ""
        together, stages = [axis for axis in sums if axis != scatter], list[tuple[str, ...]]()
        if len(together) > 1 and any(map(is_folded, together)):
            # Folded axes are first: bits do not depend on the ranks along "expert".
            stages.append(tuple([axis for axis in together if is_folded(axis)]))
            together = [axis for axis in together if axis not in stages[0]]
        stages += [each for each in (tuple(together), (scatter,) * bool(scatter)) if each]
        for axes in stages[:-1]:
            self._start(self._grid.axis(axes), bucket, "reduce data", sent)
        method = method_named(self.compression, sent)
        self._start(self._grid.axis(stages[-1]), bucket, "reduce data", sent, bool(scatter), method)
        for buffer in bucket:
            buffer.note_last_sum(scatter)
            if method is None:
                buffer.feedback = None

    def start_sums(self, name: str, buffers: Iterable[GradientBuffer]) -> None:
        """Start the sums of gradients over x, y or z. These are sums of vectors, which are not reduce-scattered."""
        groups: dict[tuple[object, ...], list[GradientBuffer]] = {}
        for buffer in buffers:
            if name in buffer.open.sums:
                groups.setdefault(_kind(buffer), []).append(buffer)
        for group in groups.values():
            self._start(self._grid.axis(name), group, "reduce vectors", group[0].spec.dtype)
            for buffer in group:
                buffer.open.note_sum(name)

    def _start(
        self,
        axis: Axis,
        bucket: Sequence[GradientBuffer],
        phase: str,
        sent: str,
        scatter: bool = False,
        method: Method | None = None,
    ) -> None:
        """Start the sum of gradients along an axis. It begins after the pending collectives that write to them."""
        written = opened = [buffer.open for buffer in bucket]
        outs, beta = list[Array](), 0
        if scatter and bucket[0].scattered:
            written = list(bucket)
            given = [buffer.scattered_array() for buffer in bucket]
            outs, beta = [out for out, _ in given], given[0][1]
        own = [number for number, buffer in enumerate(opened) if 0 not in buffer.spec.local_shape]
        if not own:  # the other ranks of the axis store nothing either
            return
        before = [buffer.pending for buffer in dict.fromkeys((*opened, *written)) if buffer.pending is not None]
        flight = self._flights.get(axis.name, [])
        if len(flight) == IN_FLIGHT:
            flight.pop(0).wait()
        sum_over = axis._sum_coalesced
        if method is not None and axis.size > 1:
            sum_over = partial(self._sum_compressed, axis, [bucket[number] for number in own], method)
        with self._grid.ledger.phase(phase):
            pending = sum_over(
                [opened[number].array for number in own],
                [bucket[number].counts(axis.name) for number in own] if scatter else None,
                sent,
                [outs[number] for number in own] if outs else None,
                beta,
                after=list(dict.fromkeys(before)),
            )
        for number in own:
            written[number].pending = pending
        self._flights[axis.name] = [*flight, pending]
        if not self.overlap.buckets:
            pending.wait()

    def _sum_compressed(
        self,
        axis: Axis,
        bucket: Sequence[GradientBuffer],
        method: Method,
        arrays: Sequence[Array],
        counts: Sequence[list[int]] | None,
        sent: str,
        outs: Sequence[Array] | None,
        beta: int,
        after: Sequence[Pending],
    ) -> Pending:
        """Begin the sum of gradients of one kind, compressed. Other arguments: as `Axis._sum_coalesced`."""
        spec, scale = bucket[0].spec, max(bucket[0].scales, default=1.0)
        for buffer in bucket:
            buffer.feedback = feedback_of(buffer, method, axis)
        feedback = [buffer.feedback for buffer in bucket]
        replica = replica_axis(spec.layout)
        keeps = not any(getattr(spec.grid.coords, name) for name in axis.name.split("+") if name != replica)
        steps = partial(
            sum_compressed,
            library=spec.library,
            method=method,
            arrays=arrays,
            feedback=feedback,
            counts=counts,
            outs=outs,
            beta=beta,
            sent=sent,
            scale=scale,
            keeps=keeps,
        )
        recorder = self._grid.engine.recorder
        if recorder is not None and scale != 1:
            recorder.refuse("gradients of a scaled loss are summed in fewer bytes, whose errors follow the scale")
        name = "all_reduce" if counts is None else "reduce_scatter"
        return axis.begin(name, steps, library=spec.library, arrays=arrays, after=after)


def _kind(buffer: GradientBuffer) -> tuple[object, ...]:
    """Key that is equal for gradients that can share a message."""
    return (
        buffer.spec.dtype,
        buffer.message.dtype,
        buffer.spec.library,
        buffer.open.sums,
        buffer.split_over,
        buffer.scattered,
        buffer.layout is None,
    )
