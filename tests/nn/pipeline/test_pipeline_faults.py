"""Pipelines with failures: the job ends, and names the stage and the action. Each job has two ranks, and is separate,
because it ends."""

import re

import pytest

from pmm3d.comm.watch import HUNG
from pmm3d.tools.launcher import installed_wheel

SCRIPT = """
    import os, resource, signal, sys
    import numpy as np
    from pmm3d import DistMatrix, Grid, nn
    from pmm3d.comm import watch
    from pmm3d.layout import batch_layout
    from pmm3d.nn import optim
    from pmm3d.nn.training.step import train_step

    watch.PATIENCE_SECONDS = 1.0
    schedule, calls = sys.argv[2], 0

    def raises(x): raise ValueError("bad luck")
    def stops(x): os.kill(os.getpid(), signal.SIGSTOP)
    def is_killed(x): os.kill(os.getpid(), signal.SIGKILL)
    def has_no_memory(x):
        resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
        np.empty(2**40)
    def gives_another_shape(x):
        return nn.Tensor(DistMatrix.random(x.grid, (5, 7), layout=x.layout), requires_grad=True)

    def third(what):
        "what(x) once: in the third micro-batch of the second step."
        def disturbed(*arguments):
            global calls
            calls += 1
            return what(*arguments) if calls == 4 + 3 else None
        return disturbed

    def forward(what):
        disturbed = third(what)
        def layer(x):
            other = None if x.grid.dry_run is not None else disturbed(x)
            return x if other is None else other
        return layer

    def backward(what):
        disturbed = third(what)
        return lambda x: x.from_op(x.value.local, (x,), lambda gradient: (disturbed(None) or gradient,))

    def network(grid):
        faulty = {fault}
        return nn.Sequential(grid, nn.Linear(grid, 5, 7, seed=1), *[faulty][{stage}:],
                             nn.Linear(grid, 7, 3, seed=2, cols="x"), *[faulty][:{stage}])

    with Grid(): pass
    with Grid(shape=(1, 1, 1), axes={{"pipe": 2}}, timeout=float(sys.argv[1])) as grid:
        net = nn.Pipeline(grid, network, schedule=schedule)
        optimizer = optim.SGD(net.parameters(), lr=0.1)
        def batch(micro, rows=6):
            return [DistMatrix.random(grid.stage, (rows, columns), seed=micro, layout=batch_layout("y"),
                                      dtype="float32") for columns in (5, 3)]
        batches = [*map(batch, range(4))]
        for step in range({first} + 2):
            batches[2] = batch(2, 6 if step < {first} or grid.rank == 0 else {rows})
            train_step(net, optimizer, nn.mse, batches)
            print("step", step, flush=True)
"""
HANGS = "pmm3d: the job hangs, and is ended."


@pytest.fixture
def goes_wrong(job):
    """goes_wrong(fault, stage): stderr of a job whose step number `first` has the fault on this stage."""

    def run(fault, stage, schedule="1f1b", timeout=600.0, rows=6, first=1):
        done = job(2, SCRIPT.format(fault=fault, stage=stage, rows=rows, first=first), timeout, schedule)
        assert done.returncode != 0 and f"step {first}" not in done.stdout, done.stderr
        assert f"step {first - 1}" in done.stdout, done.stderr
        return done

    return run


def test_a_stopped_stage_is_named_and_the_action_that_waits_for_it(goes_wrong):
    done = goes_wrong("forward(stops)", 1, timeout=0.5)
    assert done.returncode in ((HUNG, 9) if installed_wheel() == "mpich" else (HUNG,)), done.stderr
    said = done.stderr.partition(HANGS)[2]
    assert re.search(
        r"rank 0 waits in RECV_B of micro-batch 2 on stage 0 from stage 1 #\d+ on axis pipe from rank 1 "
        r"to rank 0 ",
        said,
    ), said
    assert re.search(r"rank 1 \(host \S+, pid \d+\) never came: stopped by a signal", said), said


BAD_LUCK = r".*ValueError: bad luck"


@pytest.mark.parametrize(
    "fault, stage, schedule, action, error",
    [
        ("forward(raises)", 1, "1f1b", r"1F2 \(forward of micro-batch 2 on stage 1\)", BAD_LUCK),
        ("backward(raises)", 1, "zb-h1", r"1I2 \(backward for the input of micro-batch 2 on stage 1\)", BAD_LUCK),
        (
            "forward(has_no_memory)", 0, "1f1b", r"0F2 \(forward of micro-batch 2 on stage 0\)",
            r".*OutOfMemoryError: rank 0 \(host \S+\) is out of memory: Unable to allocate",
        ),
        (
            "forward(gives_another_shape)", 0, "1f1b", r"0F2 \(forward of micro-batch 2 on stage 0\)",
            "PipelineError: stage 0 returned 5 x 7 float64.*stage 1 expects 6 x 7 float32",
        ),
    ],
    ids=["forward", "backward", "memory", "shape"],
)  # fmt: skip
def test_a_stage_that_raises_is_named_with_its_action(goes_wrong, fault, stage, schedule, action, error):
    done = goes_wrong(fault, stage, schedule)
    assert re.search(rf"pmm3d: rank {stage} raised in {action}; ending the job\.\n.*{error}", done.stderr, re.S), done
    assert HANGS not in done.stderr


@pytest.mark.parametrize(
    "rows, rank, action",
    [(4, 1, r"1RECV_F2 \(receive of an input"), (9, 0, r"0RECV_B2 \(receive of an output's gradient")],
)
def test_a_micro_batch_of_other_rows_on_another_stage_is_named(goes_wrong, rows, rank, action):
    """Also if the step is replayed on the rank that raises."""
    done = goes_wrong("nn.relu", 1, rows=rows, first=1 if rank else 6)
    said = rf"same shapes. The micro-batches of this rank have \[6, 6, {rows if rank else 6}, 6\] rows"
    assert re.search(
        rf"rank {rank} raised.*PipelineError: {action} of micro-batch 2 on stage {rank}\): .*{said}", done.stderr, re.S
    ), done.stderr
    assert HANGS not in done.stderr


def test_a_killed_stage_is_named(goes_wrong):
    done = goes_wrong("forward(is_killed)", 1)
    of_mpich = "[^\n]*" * (installed_wheel() == "mpich")  # its mpiexec kills rank 0 at once: then both may be named
    killed = rf"rank 1 \(pid \d+, stage 1 of 2\){of_mpich} was killed by SIGKILL"
    assert re.search(killed, done.stderr), done.stderr
