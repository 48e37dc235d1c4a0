"""C of one product on one rank: the target of the GEMMs, and the sum over the ranks along k."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from ..arrays import Array, NumpyLibrary, Slab, add_up, sum_in_order
from ..comm import Axis, Buffers, Collective, Departures, Link, Pending, Persistent, run_schedule, wait_for_all
from ..layout import LOW_PRECISION, itemsize, offsets
from ..model.plan import RankPlan
from ..model.rounds import Schedule
from ..model.schedule import reduce_schedule
from .operand import READ_IN_PLACE
from .stored import StoredMatrix


class Result:
    """C, bound to the shard and to work memory. Call `begin`, then `done` after each block of rows, then `wait`.

    sums     target of the GEMMs: C itself, partial sums of C, or float32 copies of low precision
    blocks   (start, stop) of the rows of C, in the order of computation with the last panel
    """

    def __init__(self, rank: RankPlan, c: StoredMatrix, beta: complex, work: Slab):
        self._rank, self._grid, self._library, self._beta, plan = rank, c.grid, c.library, beta, rank.plan
        self._axis, self._out = c.grid.axis(plan.axis_roles[1]), c.memory
        self._messages = rank.reduces and not plan.sums_in_place
        self._partial = work.array((rank.rows, rank.cols), c.dtype) if self._messages else self._out
        self._widened = plan.c_dtype in LOW_PRECISION and plan.panels > 1
        self.sums = work.array((rank.rows, rank.cols), "float32") if self._widened else self._partial
        self._work = work.slab(rank.reduction.work if self._messages else 0)
        self.all_rows = self.blocks = [(0, rank.rows)]
        self._everyones = list[Array]()
        self._persistent: Persistent | None = None
        self._awaited: Pending | Persistent | Departures | None = None

    @property
    def axis(self) -> Axis:
        """Axis along which C is summed."""
        return self._axis

    @property
    def library(self) -> NumpyLibrary:
        return self._library

    @property
    def out(self) -> Array:
        """C in the layout of the plan."""
        return self._out

    @property
    def beta_of_out(self) -> complex:
        """Factor of C."""
        return self._beta

    @property
    def reduces(self) -> bool:
        """Whether C is summed over several ranks."""
        return self._rank.reduces

    @property
    def scatters(self) -> bool:
        """Whether each of these ranks keeps a part of the sum."""
        return self._rank.plan.c == 0

    @property
    def elements(self) -> list[int]:
        """Elements of every rank's part of the sum."""
        return [rows * self._rank.cols for rows in self._rank.c_counts]

    def beta(self, first: bool) -> complex:
        """Factor of `sums` in a GEMM: 1 after the first panel. In the first panel it is beta, or 0 if beta C is added
        later, by the reduction or the rounding."""
        if not first:
            return 1
        return 0 if self._rank.reduces or self._widened else self._beta

    @property
    def is_bound(self) -> bool:
        """Whether `sums` is the same array in each call. It is not if the ranks sum in shared memory."""
        return self._messages or not self._rank.reduces

    def scale(self, beta: complex) -> None:
        """Set the factor of C in the next calls."""
        self._beta = beta
        if self._persistent is not None:
            self._persistent.scale(beta)

    def persist(self, number: int, requests: ExitStack) -> None:
        """Bind the messages to persistent requests, if C is reduce-scattered at once; see `OperandGather.persist`."""
        rank, axis = self._rank, self._axis
        if not self._messages or rank.plan.decomposed or rank.plan.c != 0:
            return
        schedule = self._schedule
        buffers = Buffers(schedule, self._library, (self._partial, self._out), (0, 0), self._work.again(), self._beta)
        row_bytes = rank.cols * itemsize(rank.plan.c_dtype)
        self._persistent = axis._persistent("reduce_scatter", "reduce C", schedule, buffers, row_bytes, number)
        requests.callback(self._persistent.free)

    @property
    def _schedule(self) -> Schedule:
        rank, axis = self._rank, self._axis
        return reduce_schedule(rank.c_counts, axis.index, rank.plan.c_dtype, axis.node_map)

    def begin(self, shared: Sequence[Array]) -> None:
        """Prepare for the first GEMM of a call. shared: each rank's memory for partial sums that are summed in
        place."""
        rank, plan, self._awaited = self._rank, self._rank.plan, None
        if rank.reduces and plan.sums_in_place:
            self._everyones = [Slab(each, self._library).array((rank.rows, rank.cols), plan.c_dtype) for each in shared]
            self._partial = self._everyones[self._axis.index]
            self.sums = self.sums if self._widened else self._partial
        elif self._messages and plan.decomposed:
            self._awaited = Departures(
                self._axis, self._partial, rank.c_counts, self._work.again(), self._out, self._beta
            )
            self.blocks = self._awaited.blocks

    def done(self) -> None:
        """Begin to send the next block, which has been computed. After the last block, begin the rest."""
        if self._widened:
            add_up(self._library, [self.sums], self._partial, 0 if self._rank.reduces else self._beta)
        if self._rank.reduces:
            with self._grid.ledger.phase("reduce C"):
                if isinstance(self._awaited, Departures):
                    self._awaited.done()
                else:
                    self._awaited = self._reduction()

    def wait(self) -> None:
        """Wait for the messages. On a device, C and the work memory are ready in stream order."""
        if self._awaited is not None:
            self._awaited.wait()

    def _reduction(self) -> Pending | Persistent:
        rank, axis = self._rank, self._axis
        if self._persistent is not None:
            return self._persistent.begin()
        if not self._messages:
            return axis.begin(READ_IN_PLACE, self._sum_in_place)
        if rank.plan.c == 0:
            arrays = self._partial, self._out
            steps = partial(
                run_schedule,
                library=self._library,
                schedule=self._schedule,
                given=self._partial,
                out=self._out,
                beta=self._beta,
                work=self._work.again(),
            )
            return axis.begin("reduce_scatter", steps, library=self._library, arrays=arrays)
        return axis._all_reduce_into(self._partial, self._out, self._beta, work=self._work.again())

    def _sum_in_place(self, link: Link) -> Collective[None]:
        """Sum this rank's rows of C from the memory of all ranks, in rank order, between two barriers."""
        start, stop = offsets(self._rank.c_counts)[self._axis.index :][:2]
        yield from wait_for_all(link)
        sum_in_order(self._library, [partial[start:stop] for partial in self._everyones], self._out, self._beta)
        yield from wait_for_all(link)
