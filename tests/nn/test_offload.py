"""Offload of saved arrays and of optimizer states: the bits of training without it, exact bytes and peaks, and clear
errors of a store."""

import gc
import os
import re
import resource
import tempfile
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import active_count

import numpy as np
import pytest
from loops import given, looped
from mpi4py import MPI
from networks import VECTORS, batch_of, bits, network_of, ordinary, spread, weights_of
from samples import TESTED, to_numpy
from training_runs import RunsHere

from pmm3d import DistMatrix, Grid, Pmm3dError, nn
from pmm3d.io import Checkpoints
from pmm3d.layout import batch_layout
from pmm3d.nn import offloaded_states, optim
from pmm3d.nn.dry import memory
from pmm3d.nn.recorded_steps import Replays
from pmm3d.nn.tape import Tape
from pmm3d.nn.training import TrainState
from pmm3d.nn.training.step import train_step

pytestmark = pytest.mark.deadline(240)
WIDTH, ROWS, STEPS = 32, 64, 8
SIZES = [WIDTH] * 6


@pytest.fixture
def folder():
    """A folder of this rank on a disk."""
    with tempfile.TemporaryDirectory() as name:
        yield name


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Weights of the tests are cut into pieces. The slices in which arrays are updated are smaller, too."""
    from pmm3d.arrays import NumpyLibrary

    monkeypatch.setattr(NumpyLibrary, "slice_elements", 128)
    monkeypatch.setattr(offloaded_states, "PIECE_BYTES", 4096)


def batch(grid, step=0, rows=ROWS, library=TESTED):
    values = np.random.default_rng(step).standard_normal((rows, WIDTH)).astype("float32")
    return spread(grid, values, batch_layout("y"), library)


def train(grid, store=None, steps=STEPS, parts=1, offloads=("activations", "states"), network=None, **options):
    """Losses, norms, bits of weights and states of a short training."""
    make = network or (lambda grid: nn.MLP(grid, SIZES, seed=3, library=TESTED))
    net = make(grid)
    opt = optim.AdamW(net.parameters(), lr=1e-2, **options)
    stage = net.grid
    if store is not None:
        if "activations" in offloads:
            nn.offload(stage, store, least=1024, leaving=1, ahead=4096)
        if "states" in offloads:
            opt.offload(store)
    told = []
    for step in range(steps):
        micro = [batch(stage, step * parts + part) for part in range(parts)]
        told.append(train_step(net, opt, nn.mse, [(x, x) for x in micro], 1.0))
    states = {name: each.gather() for name, each in opt.matrices(net.named_parameters()).items()}
    if store is not None:
        nn.offload(stage, None)
    return (told, bits(weights_of(net)), bits(states)), Replays.of(net).replayed


@pytest.mark.parallel([1, 4])
def test_bits_are_those_without_offload(comm, folder):
    """Also of replayed steps, with ZeRO, and with micro-batches."""
    grids = {1: [("1x1x1", 1)], 4: [("2x1x1", 2), ("1x1x2", 2)]}[comm.size]
    cases = [
        {},
        {"shard_over_data": True},
        {"shard_over_data": "gradients", "parts": 2},
        {"network": lambda grid: nn.MLP(grid, SIZES, seed=3, library=TESTED, recompute=2)},
    ]
    for shape, data in grids:
        for options in cases if data == 1 or shape == "2x1x1" else cases[1:2]:
            with given(grid=shape, options=options), Grid(comm, shape, data) as grid:
                plain, replayed = train(grid, **options)
                store = nn.Store(grid, folder)
                offloaded, times = train(grid, store, **options)
                assert offloaded == plain
                assert times == replayed > 0
                assert store.written > 0 and store.read > 0


@pytest.mark.parallel([2])
def test_a_dry_run_moves_the_bytes_of_a_run_and_has_its_peak(comm, folder):
    found = []
    for dry in (False, True):
        with Grid.dry((1, 1, 1), 2, rank=comm.rank) if dry else Grid(comm, (1, 1, 1), 2) as grid, ordinary():
            library = grid.library(TESTED)
            net = nn.MLP(grid, SIZES, seed=3, library=library)
            opt, store = optim.AdamW(net.parameters(), lr=1e-2, shard_over_data=True), nn.Store(grid, folder)
            nn.offload(grid, store, least=1024, leaving=1, ahead=4096)
            opt.offload(store)
            per_step = []
            for _ in range(3):
                before = store.written, store.read
                x = DistMatrix.random(grid, (ROWS, WIDTH), dtype="float32", layout=batch_layout("y"), library=library)
                train_step(net, opt, nn.mse, [(x, x)])
                per_step.append((store.written - before[0], store.read - before[1], store.capacity))
            held = memory(grid)["state"] if dry else grid.ledger.memory["state"]
            found.append((per_step, grid.workspace.most_lent, held))
            if dry:
                passes = sum(each.nbytes for each in grid.dry_run.actions if each.operation == "offload")
                assert passes == store.written + store.read
    assert found[0] == found[1]
    (steps, _, held), (first, again) = found[0], found[0][0][:2]
    assert steps[1] == steps[2] and first[0] == again[0]
    assert again[1] - first[1] == 2 * 4 * sum(each.box.size for each in net.parameters()) // 2  # new states are zero
    assert held == offloaded_states.BUFFERS * 4096


@pytest.mark.parallel([1])
def test_the_peak_does_not_grow_with_the_number_of_layers(comm, folder):
    """vDNN: without offload, it grows by two arrays for each layer."""
    peaks = {}
    for offloads in (False, True):
        for layers in (4, 8):
            with Grid(comm, "1x1x1") as grid:
                net = nn.MLP(grid, [WIDTH] * (layers + 1), nn.gelu, seed=3, library=TESTED)
                if offloads:
                    nn.offload(grid, nn.Store(grid, folder), least=1024, leaving=1, ahead=0)
                x = batch(grid)
                nn.mse(net(x), x).backward()
                peaks[offloads, layers] = grid.workspace.most_lent
    array = 4 * ROWS * WIDTH
    assert peaks[False, 8] - peaks[False, 4] == 2 * 4 * array
    assert peaks[True, 8] == peaks[True, 4] < peaks[False, 4]


@pytest.mark.parallel([1])
def test_memory_of_a_store_is_no_more_than_without(comm, folder):
    """If all states are updated at a time, and in passes that overlap."""
    with Grid(comm, "1x1x1") as grid:
        layer, x, store = nn.Linear(grid, 8, 8, library=TESTED), batch(grid), nn.Store(grid, folder)
        opt = optim.AdamW(layer.parameters(), lr=1e-2)
        opt.offload(store)
        values = DistMatrix.random(grid, (8, 8), dtype="float32", layout=batch_layout("y"), library=TESTED)
        nn.mse(layer(values), values).backward()
        opt.step()
        assert grid.ledger.memory["state"] == 2 * (4 * 8 * 8 + 64)  # aligned
        setting = nn.offload(grid, store, least=1024)
        net = nn.MLP(grid, SIZES, seed=3, library=TESTED)
        loss = nn.mse(net(x), x)
        kept = len(setting._stored)
        for _ in range(4):
            loss = nn.mse(net(x), x)
            assert len(setting._stored) == kept and loss.node is not None
        nn.offload(grid, None)


@pytest.mark.parallel([2])
def test_stages_of_a_pipeline(comm, folder):
    with Grid(comm, (1, 1, 1), pipe=2) as grid:
        make = lambda grid: nn.Pipeline(
            grid, lambda stage: nn.MLP(stage, SIZES, seed=3, library=TESTED), schedule="1f1b"
        )
        plain, replayed = train(grid, network=make, parts=4)
        store = nn.Store(grid.stage, folder)
        assert train(grid.stage, store, network=lambda _: make(grid), parts=4) == (plain, replayed)
        assert store.read > 0


@pytest.mark.parallel([2])
def test_optimizers_whose_states_are_not_cut(comm, folder):
    """Those with sums over a shard, with factors of rows and columns, and without states."""
    with Grid(comm, (1, 1, 2)) as grid:
        for kind, options in ((optim.Adafactor, {}), (optim.Muon, {}), (optim.SGD, {}), (optim.SGD, {"momentum": 0.9})):
            found = []
            for store in (None, nn.Store(grid, folder)):
                net = nn.MLP(grid, SIZES, seed=3, library=TESTED)
                opt = kind(kind.groups_of(net), lr=1e-3, **options)
                if store is not None:
                    opt.offload(store)
                for step in range(3):
                    x = batch(grid, step)
                    train_step(net, opt, nn.mse, [(x, x)], 1.0)
                states = {name: each.gather() for name, each in opt.matrices(net.named_parameters()).items()}
                found.append((bits(weights_of(net)), bits(states)))
            assert found[0] == found[1], kind


@pytest.mark.parallel([4])
def test_checkpoints_of_offloaded_states_are_loaded_on_other_grids(comm, folder, tmp_path):
    """Training goes on from them with the bits of a training that never stopped, with offload and without it."""
    shared = comm.bcast(str(tmp_path))

    def trained(grid, offloads, first, last, checkpoints=None):
        net = network_of(grid, VECTORS)
        opt = optim.AdamW(net.parameters(), lr=1e-2)
        if offloads:
            opt.offload(nn.Store(grid, folder))
        state = TrainState(net, opt)
        if first:
            state.resume(checkpoints)
        for step in range(first, last):
            x, y = (spread(grid, each, batch_layout(cols)) for each, cols in zip(batch_of(VECTORS, step), "yy"))
            train_step(net, opt, nn.mse, [(x, y)])
        if checkpoints is not None and not first:
            state.save(checkpoints)
        return bits({name: each.gather() for name, each in state.matrices().items()})

    with Grid(comm, (1, 2, 1), 2) as grid:
        trained(grid, True, 0, 3, Checkpoints(grid, f"{shared}/a"))
    found = []
    for shape in ((1, 2, 1), (1, 1, 2)):
        with Grid(comm, shape, 2) as grid:
            found += [[trained(grid, each, 3, 5, Checkpoints(grid, f"{shared}/a")) for each in (False, True)]]
    with Grid(comm, (1, 2, 1), 2) as grid:
        found[0].append(trained(grid, False, 0, 5))
    assert all(each == own[0] for own in found for each in own)


@pytest.mark.parallel([2])
def test_a_missing_folder_ends_on_every_rank(comm, fails, folder):
    with Grid(comm, "ddp") as grid:
        own = folder if grid.rank else os.path.join(folder, "missing")
        fails(Pmm3dError, "Make the folder on each node", lambda: nn.Store(grid, own))
        fails(Pmm3dError, "name a folder on a fast disk", lambda: nn.Store(grid))
        store = nn.Store(grid, folder)
        fails(Pmm3dError, "least is at least 1", lambda: nn.offload(grid, store, least=0))
        assert os.listdir(folder) == []  # the file has no name, so nothing is left behind after a signal


@contextmanager
def largest_file(nbytes):
    """Context in which no file of this process grows beyond this size, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parallel([2])
def test_a_full_disk_changes_no_weight_and_loses_nothing(comm, fails, folder, tmp_path):
    """One rank has no room: for a few arrays of a pass, or for states. Afterwards a checkpoint can be written, and with
    more room, training goes on with the bits of a training without the error."""
    shared = comm.bcast(str(tmp_path))
    for offloads in (["activations"], ["states"], ["states", "activations"]):
        with given(offloads=offloads), Grid(comm, (1, 1, 1), 2) as grid:
            plain, _ = train(grid, steps=2)
            store = nn.Store(grid, folder)
            net = nn.MLP(grid, SIZES, seed=3, library=TESTED)
            opt = optim.AdamW(net.parameters(), lr=1e-2)
            if "states" in offloads:
                opt.offload(store)
            told = []
            step = lambda number: train_step(net, opt, nn.mse, [(batch(grid, number),) * 2], 1.0)
            if offloads[1:]:
                told.append(step(0))
            if "activations" in offloads:
                nn.offload(grid, store, least=1024, leaving=1, ahead=4096)
            before, steps = bits(weights_of(net)), opt.steps
            with largest_file(store.capacity + 8192 if grid.rank else 2**40):
                fails(Pmm3dError, "no weight was changed", lambda: step(len(told)))
                assert bits(weights_of(net)) == before and opt.steps == steps
                if "states" not in offloads or told:
                    state = TrainState(net, opt)
            if "states" not in offloads or told:
                state.save(Checkpoints(grid, f"{shared}/{'-'.join(offloads)}"))
            while len(told) < 2:
                told.append(step(len(told)))
            states = {name: each.gather() for name, each in opt.matrices(net.named_parameters()).items()}
            assert (told, bits(weights_of(net)), bits(states)) == plain


@pytest.mark.parallel([2])
def test_a_truncated_file_fails_the_step_on_every_rank(comm, fails, folder):
    for offloads in ("activations", "states"):
        with given(offloads=offloads), Grid(comm, (1, 1, 1), 2) as grid:
            net, store = nn.MLP(grid, SIZES, seed=3, library=TESTED), nn.Store(grid, folder)
            opt, x = optim.AdamW(net.parameters(), lr=1e-2), batch(grid)
            if offloads == "states":
                opt.offload(store)
                train_step(net, opt, nn.mse, [(x, x)])
            else:
                nn.offload(grid, store, least=1024, leaving=1)
            before, loss = bits(weights_of(net)), nn.mse(net(x), x)
            if grid.rank:
                store._slots.write(store._slots.slot(8), np.zeros(1)).wait()  # after all other writes
                os.truncate(store._slots._file, 100)
            loss.backward()
            fails(Pmm3dError, "it was truncated.*no weight was changed", opt.step)
            assert bits(weights_of(net)) == before
            if offloads == "states":
                fails(Pmm3dError, "it was truncated", lambda: opt.matrices(net.named_parameters()))


@pytest.mark.parallel([1])
def test_writes_that_fail_keep_the_arrays_in_memory(comm, folder, monkeypatch):
    """Of saved arrays, of states, and for the checkpoint after them."""
    with Grid(comm, "1x1x1") as grid:
        plain, _ = train(grid, steps=3)
        store, fail = nn.Store(grid, folder), [True]
        write = store._slots._write

        def failing(start, data):
            if fail[0]:
                raise OSError(5, "the disk is broken")
            write(start, data)

        monkeypatch.setattr(store._slots, "_write", failing)
        net = nn.MLP(grid, SIZES, seed=3, library=TESTED)
        opt = optim.AdamW(net.parameters(), lr=1e-2)
        nn.offload(grid, store, least=1024, leaving=1)
        x = batch(grid)
        gradients = lambda: nn.mse(net(x), x).backward()
        gradients()
        own = bits({each.name: each.grad.gather() for each in net.parameters()})
        with pytest.raises(Pmm3dError, match=r"the disk is broken.*still in memory.*no weight was changed"):
            opt.step()
        nn.offload(grid, None)
        opt.zero_grad()
        gradients()
        assert bits({each.name: each.grad.gather() for each in net.parameters()}) == own
        opt.zero_grad()
        opt.offload(store)
        told = []
        for step in range(3):
            x = batch(grid, step)
            try:
                told.append(train_step(net, opt, nn.mse, [(x, x)], 1.0))
            except Pmm3dError as error:
                assert step == 0 and "weights were changed" in str(error)
                told.append(plain[0][0])
                opt.zero_grad()
            fail[0] = False
        states = {name: each.gather() for name, each in opt.matrices(net.named_parameters()).items()}
        assert (told, bits(weights_of(net)), bits(states)) == plain


def failing_once(store, method, number, monkeypatch, error=None):
    """Let the call with this number of a method of the store's slots fail."""
    before, calls = getattr(store._slots, method), count()

    def failing(*arguments):
        if next(calls) == number:
            raise error or OSError(5, "Input/output error")
        return before(*arguments)

    monkeypatch.setattr(store._slots, method, failing)


@pytest.mark.parallel([1])
def test_after_a_loss_no_optimizer_uses_the_gradients(comm, folder, monkeypatch):
    """Neither the one that was told, nor others. After `zero_grad`, training goes on."""
    with Grid(comm, "1x1x1") as grid:
        store, x = nn.Store(grid, folder), batch(grid)
        nets = [nn.MLP(grid, SIZES, seed=3, library=TESTED) for _ in range(2)]
        opts = [optim.AdamW(net.parameters(), lr=1e-2) for net in nets]
        nn.offload(grid, store, least=1024, leaving=0, ahead=0)
        failing_once(store, "_read", 2, monkeypatch)
        before = bits(weights_of(nets[1]))
        for net in nets:
            nn.mse(net(x), x).backward()
        with pytest.raises(Pmm3dError, match="arrays are lost.*no weight was changed"):
            opts[1].step()
        for opt in opts:
            with pytest.raises(Pmm3dError, match=r"call zero_grad\(\)"):
                opt.step()
        assert bits(weights_of(nets[1])) == before
        opts[1].zero_grad()
        nn.mse(nets[1](x), x).backward()
        opts[1].step()
        assert bits(weights_of(nets[1])) != before
        loss = nn.mse(nets[1](x), x)
        nn.offload(grid, None)
        opts[0].zero_grad()
        nn.mse(nets[0](x), x).backward()
        opts[0].step()  # no step agrees on the store from now on
        failing_once(store, "_read", 0, monkeypatch)
        with pytest.raises(Pmm3dError, match="arrays are lost"):
            loss.backward()
        with pytest.raises(Pmm3dError, match="arrays are lost"):
            store._agree()
        for problems, failed in (((False,), False), ((False, True, False), True)):  # a loss counts beside others
            with given(problems=problems):
                opts[1].zero_grad()
                nn.mse(nets[1](x), x).backward()
                for number, is_loss in enumerate(problems):
                    store._note(f"problem {number}", is_loss)
                with pytest.raises(Pmm3dError, match="problem 1; arrays are lost" if failed else "problem 0"):
                    store._agree()
                assert {each.grad_buffer.failed for each in nets[1].parameters()} == {failed}


@pytest.mark.parallel([1])
def test_errors_of_a_store_keep_master_weights(comm, folder, monkeypatch):
    """Of a write in a step, and of the first view. So does an optimizer that is dropped before its store."""
    found = []
    for fault in ("", "_write", "view", "dropped"):
        with given(fault=fault), Grid(comm, "1x1x1") as grid:
            net, store = nn.MLP(grid, SIZES, seed=3, library="torch", precision="bfloat16"), nn.Store(grid, folder)
            opt = optim.SGD(net.parameters(), lr=1e-2)
            opt.offload(store)
            if fault in ("_write", "view"):
                failing_once(store, fault, 2, monkeypatch)
            for step in range(3):
                x = nn.Tensor(batch(grid, step, library="torch").astype("bfloat16"))
                nn.mse(nn.cast(net(x), "float32"), batch(grid, step, library="torch")).backward()
                try:
                    opt.step()
                except Pmm3dError as error:
                    assert step == 0 and fault
                    if "no weight was changed" in str(error):
                        opt.step()
                if fault == "dropped" and step == 0:
                    opt = optim.SGD(net.parameters(), lr=1e-2)
                    slots = [store._slots.slot(each.nbytes) for each in (p.master.local for p in net.parameters())]
                    for slot in slots:
                        store._slots.write(slot, np.zeros(slot.nbytes, "uint8")).wait()
            found.append(bits({each.name: each.master.gather() for each in net.parameters()}))
    assert found[0] == found[1] == found[2] == found[3]


@pytest.mark.parallel([2])
def test_what_a_store_costs(comm, fails, folder, monkeypatch):
    """Agreements of a step, of each kind of offload, and after it. Memory and threads of a store that was dropped."""
    counted, calls, before = {}, count(), Grid.collective_call

    def counting(self, *arguments, always=False):
        if always:
            next(calls)
        return before(self, *arguments, always=always)

    monkeypatch.setattr(Grid, "collective_call", counting)
    with Grid(comm, (1, 1, 1), 2) as grid:
        for offloads in ([], ["activations"], ["states"], ["activations", "states"]):
            net = nn.MLP(grid, SIZES, seed=3, library=TESTED)
            opt, store = optim.AdamW(net.parameters(), lr=1e-2), nn.Store(grid, folder)
            if "activations" in offloads:
                nn.offload(grid, store, least=1024)
            if "states" in offloads:
                opt.offload(store)
            for step in range(2):
                first, x = next(calls), batch(grid, step)
                train_step(net, opt, nn.mse, [(x, x)], 1.0)
                counted[tuple(offloads)] = next(calls) - first - 1
            nn.offload(grid, None)
            if offloads[1:]:
                if grid.rank:
                    failing_once(store, "view", 0, monkeypatch)
                fails(Pmm3dError, "Input/output error", lambda: opt.matrices(net.named_parameters()))
            train_step(net, opt, nn.mse, [(x, x)], 1.0)
            monkeypatch.undo()
            monkeypatch.setattr(Grid, "collective_call", counting)
            threads = active_count()
            net = opt = store = None
            gc.collect()  # errors refer to their frames
            assert active_count() == threads - 1, offloads
    assert [*counted.values()] == [0, 1, 2, 2]


@pytest.mark.parallel([1])
@looped("library", ["standin", "numpy"])
def test_memory_of_the_host_is_a_store_for_arrays_on_a_device(library):
    with Grid(MPI.COMM_SELF, "1x1x1", device_transport="direct") as grid:
        if library == "numpy":
            with pytest.raises(Pmm3dError, match="numpy arrays are on the host"):
                nn.Store(grid, library=library)
            return
        found = []
        for store in (None, nn.Store(grid, library=library)):
            net = nn.MLP(grid, SIZES, nn.gelu, seed=3, library=library)
            opt = optim.AdamW(net.parameters(), lr=1e-2)
            if store is not None:
                nn.offload(grid, store, least=1024)
                opt.offload(store)
            for step in range(6):
                x = batch(grid, step, library=library)
                train_step(net, opt, nn.mse, [(x, x)], 1.0)
            states = {name: to_numpy(each.gather()) for name, each in opt.matrices(net.named_parameters()).items()}
            found.append((bits(weights_of(net)), bits(states)))
        assert found[0] == found[1] and store.read > 0


@pytest.mark.parallel([1])
def test_what_stays_in_memory(comm, folder):
    """Small arrays, arrays with gaps, parameters."""
    with Grid(comm, "1x1x1") as grid:
        store, names = nn.Store(grid, folder), []
        nn.offload(grid, store, least=4 * ROWS * WIDTH)
        pack = Tape.of(grid).pack
        x = nn.Tensor(batch(grid), requires_grad=True)
        values = DistMatrix.random(grid, (ROWS, WIDTH), dtype="float32", layout=x.layout, library=TESTED)
        weight = nn.Parameter(values)
        with Tape.of(grid).set(pack=lambda name, array: (names.append(name), pack(name, array))[1]):
            loss = nn.sum(nn.sum(x * weight, 0), 1) + nn.sum(nn.sum(nn.matrix_transpose(x * 2) * 3, 0), 1)
        assert [name for name in names if "multiply" in name] == ["multiply.a"]
        assert store.written == 4 * ROWS * WIDTH
        loss.backward()
        assert nn.offload(grid, None) is None and Tape.of(grid).is_plain


@pytest.mark.parallel([1])
def test_a_change_of_an_array_that_is_leaving_is_seen(comm, folder):
    """As without offload: torch counts changes, and PMM3D_DEBUG=1 compares digests."""
    with Grid(comm, "1x1x1", debug=True) as grid:
        nn.offload(grid, nn.Store(grid, folder), least=1024, leaving=3)
        layer, x = nn.Linear(grid, WIDTH, WIDTH, library=TESTED), batch(grid)
        loss = nn.mse(layer(x), batch(grid, 1))
        x.local[...] = 0
        with pytest.raises(Pmm3dError, match="was overwritten since the forward pass"):
            loss.backward()


@pytest.mark.parallel([1])
def test_master_weights_are_in_the_file(comm, folder, tmp_path):
    """16-bit networks keep 12 bytes a parameter in the file, and three buffers in memory."""
    found, counted = [], []
    for offloads in (False, True, True):
        with Grid(comm, "1x1x1") as grid:
            net = nn.MLP(grid, SIZES, seed=3, library="torch", precision="bfloat16")
            opt = optim.AdamW(net.parameters(), lr=1e-2)
            state, checkpoints = TrainState(net, opt), Checkpoints(grid, tmp_path / "run")
            if offloads:
                opt.offload(store := nn.Store(grid, folder))
            if found[1:]:
                state.resume(checkpoints)
            for step in range(state.step, 4):
                if offloads and step == 2 and not found[1:]:
                    state.save(checkpoints)
                x = nn.Tensor(batch(grid, step, library="torch").astype("bfloat16"))
                train_step(
                    net,
                    opt,
                    lambda out, x: nn.mse(nn.cast(out, "float32"), x),
                    [(x.value, batch(grid, step, library="torch"))],
                )
            found.append(bits({name: each.gather() for name, each in state.matrices().items()}))
            if offloads:
                own = sum(each.box.size for each in net.parameters())
                counted.append((grid.ledger.memory["state"], store.read >= 12 * own))
    assert found[0] == found[1] == found[2]
    assert counted == [(offloaded_states.BUFFERS * 12 * 256, True)] * 2


@pytest.mark.parallel([2])
def test_a_run_of_a_configuration(comm, shared_path):
    """It has the checkpoint of a run without offload. Without a folder, and with a folder that nothing uses, it is
    refused."""
    runs, shared = RunsHere(shared_path, comm), str(shared_path)
    memory = f'offload = ["states", "activations"]\nstore = "{shared}"'
    runs.finish(runs.config("plain", training="steps = 8"))
    runs.finish(runs.config("offloaded", training="steps = 8", memory=memory))
    if runs.comm.rank == 0:
        runs.assert_same_weights("plain", "offloaded")
    for lines, text in (
        ('offload = ["states"]', "name a folder on a fast disk"),
        (f'offload = ["states"]\nstore = "{shared}/missing"', "Make the folder on each node"),
        (f'store = "{shared}"', "store is the folder of offload, which is empty"),
    ):
        done = runs.train(runs.config("wrong", training="steps = 2", memory=lines))
        assert done.returncode != 0 and text in " ".join(done.stderr.split())


@pytest.mark.parallel([1])
def test_the_program_of_the_page_prints_what_it_should(comm, capsys):
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    text = next(each for each in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "nn.Store" in each)
    exec(text.replace("MPI.COMM_WORLD", "comm"), {"comm": comm})
    assert capsys.readouterr().out == "4.0\n"
