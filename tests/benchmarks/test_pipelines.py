"""benchmarks/pipelines.py: a step follows its table, and has its memory and its bytes."""

import numpy as np
import pytest
from loops import given
from pipelines import ROWS, WIDTH, Live, measured, network

from pmm3d import Grid
from pmm3d.nn.pipeline import schedule_of, simulate
from pmm3d.nn.pipeline.schedules import BY_NAME

MICRO_BATCHES = 8


@pytest.mark.parallel([4])
def test_a_step_follows_its_table(comm):
    """The actions in order, the number of micro-batches in memory as in the simulation, and the bytes of all boundaries
    between ranks: one output and one gradient per micro-batch."""
    with Grid(comm, (1, 1, 1), axes={"pipe": 4}) as grid:
        for name in BY_NAME:
            with given(schedule=name):
                table, live = schedule_of(name, 4, MICRO_BATCHES), Live()
                net = network(grid, table, lambda kind: 1e-3, live)
                grid.ledger.reset()
                measured(net, MICRO_BATCHES)
                done = [each.action for each in grid.ledger.actions]
                assert done == [str(each) for action in table.actions[grid.rank] for each in action.each]
                assert live.now == 0 and live.most == simulate(table).peak_live[grid.rank]
                counted = grid.ledger.total(axis="pipe")
                sent, received = comm.allreduce(np.array([counted.sent, counted.received]))
                crossed = sum(
                    table.stages[stage] != table.stages[stage + 1] for chain in table.chains for stage in chain[:-1]
                ) // len(table.chains)
                assert sent == received == 2 * MICRO_BATCHES * 8 * ROWS * WIDTH * crossed
