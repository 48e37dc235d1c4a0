"""`pmm3d train` of transformers on text: the log on every grid, and interrupted runs."""

import json
import shutil
from math import exp, isclose, log

import h5py
import numpy as np
import pytest
from loops import given
from mpi_runner.plugin import all_tests
from training_runs import RunsHere, fails, signal_at

from pmm3d import Grid, nn
from pmm3d.nn.training.loop import Trainer

pytestmark = [pytest.mark.parallel([2], thorough=[4]), pytest.mark.deadline(240)]
TEXT = "It is easy to learn that one follows the other. " * 12


@pytest.fixture
def here(shared_path, comm):
    """Runs on the ranks of the test, with a text."""
    runs = RunsHere(shared_path, comm)
    if comm.rank == 0:
        with h5py.File(shared_path / "text.h5", "w") as file:
            file["tokens"] = np.frombuffer(TEXT.encode(), np.uint8) % 32
            file["tokens"].attrs.update(vocabulary=32, bytes=2 * len(TEXT))
            file["documents"] = np.arange(0, len(TEXT), 7)
    comm.barrier()
    return runs


def config(here, name="run", grid="", network="", training="", kind="gpt", data="") -> str:
    """A configuration of a small transformer."""
    if here.comm.rank == 0:
        (here.folder / f"{name}.toml").write_text(
            f'[grid]\n{grid}\n[data]\nfile = "{here.folder}/text.h5"\nsequence = 16\nbatch_size = 4\n{data}\n'
            f'[network]\nhidden = 8\nlayers = 2\nheads = 2\nkind = "{kind}"\n{network}\n[optimizer]\nlr = 0.01\n'
            f'[training]\nfolder = "{here.folder}/{name}"\nlog_every = 1\n{training}\n'
        )
    here.comm.barrier()
    return str(here.folder / f"{name}.toml")


def test_a_network_can_have_more_tokens_than_the_data(here, comm):
    """As published networks with a padded vocabulary, whose weights begin the run."""
    with Grid(comm, "ddp") as grid:
        net = nn.GPT(grid, vocabulary=40, positions=16, layers=2, hidden=8, heads=2, seed=3)
        net.export(here.folder / "padded")
        table = net.gather("0.table")
    weights = f"steps = 1\nweights = '{here.folder}/padded'"
    done = here.train(config(here, "padded_run", network="vocabulary = 40", training=weights))
    assert done.returncode == 0, done.stderr
    assert here.weights("padded_run")["0.table"].shape == table.shape
    done = here.train(config(here, "padded_run", network="vocabulary = 48", training="steps = 2"), "--resume", "auto")
    fails(done, "network.vocabulary was 40, is 48")
    fails(here.train(config(here, "narrow", training=weights)), "network.vocabulary was 40, is 32")
    fails(here.train(config(here, "small", network="vocabulary = 31")), "network.vocabulary = 31, but the data have")


def losses(here, name):
    return [line["loss"] for line in here.metrics(name) if "loss" in line]


def test_a_text_is_learned_and_the_log_has_bits_per_byte(here):
    for kind in ("gpt", "llama"):
        with given(kind=kind):
            done = here.train(config(here, kind, network="mlp = 24", training="epochs = 2", kind=kind))
            assert done.returncode == 0, done.stderr
            assert "tokens 'tokens': a vocabulary of 32, sequences of 16" in done.stderr
            lines = here.metrics(kind)
            for line in (*lines, *(line["validation"] for line in lines if "validation" in line)):
                if "loss" in line:
                    assert isclose(line["perplexity"], exp(line["loss"]), rel_tol=1e-6)
                    assert isclose(line["bits_per_byte"], line["loss"] / log(2) / 2, rel_tol=1e-6)
            assert losses(here, kind)[-1] < 0.9 * log(32) and "validation bits_per_byte: " in done.stdout
            assert f"pmm3d generate {here.folder}/{kind} --prompt TEXT" in done.stdout
            record = json.loads((here.folder / kind / "run.json").read_text())
            assert record["network"]["kind"] == {"gpt": "GPT", "llama": "Llama"}[kind]


OTHERS = [
    ("z", "shape = 'fsdp'", ""),
    ("x", "shape = '{0}x1x1'", ""),
    ("y", "shape = '1x{0}x1'", ""),
    ("sharded", "shape = '{0}x1x1'", "activations = 'sharded'"),
    ("seq", "seq = {0}", ""),
    *((order, "seq = {0}\nmicro_batches = 4", f"order = '{order}'") for order in ("plain", "zigzag", "striped")),
    ("pipe", "pipe = 2\nmicro_batches = 2", ""),
]
FEW = ("sharded", "zigzag", "pipe")


def test_the_grid_changes_no_loss(here):
    """Also if ranks share sequences, in each order of rows, and with stages."""
    assert here.train(config(here, "alone", training="steps = 2"), ranks=1).returncode == 0
    for name, grid, network in OTHERS:
        if all_tests or name in FEW:
            with given(grid=grid, network=network):
                done = here.train(config(here, name, grid.format(here.comm.size), network, "steps = 2"))
                assert done.returncode == 0, done.stderr
                assert np.allclose(losses(here, name), losses(here, "alone"), rtol=1e-4)


def test_documents_in_the_file_are_attended_to_apart_on_every_grid(here, comm):
    """Also with stages. A file without their data set, and a checkpoint with another table, are refused."""
    packed = 'documents = "documents"'
    assert here.train(config(here, "together", training="steps = 2"), ranks=1).returncode == 0
    done = here.train(config(here, "apart", training="steps = 2", data=packed), ranks=1)
    assert done.returncode == 0, done.stderr
    assert losses(here, "apart")[1] != losses(here, "together")[1]
    for name, grid, network in OTHERS:
        if name in ("zigzag", "pipe"):
            with given(grid=grid):
                done = here.train(config(here, name, grid.format(here.comm.size), network, "steps = 2", data=packed))
                assert done.returncode == 0, done.stderr
                assert np.allclose(losses(here, name), losses(here, "apart"), rtol=1e-4)
    fails(here.train(config(here, "none", data='documents = "none"')), "has no data set 'none'")
    fails(here.train(config(here, "wrong", data='documents = "tokens"')), "does not say where documents begin")
    resumed = config(here, "apart", training="steps = 3")
    fails(here.train(resumed, "--resume", "auto", ranks=1), "data.documents was 'documents', is None")


def test_ranks_along_ulysses_are_an_axis_of_the_configuration(here):
    assert here.train(config(here, "alone", training="steps = 2"), ranks=1).returncode == 0
    for parallel in ("auto", "ring"):
        axes = f"ulysses = 2\nseq = {here.comm.size // 2}" if here.comm.size > 2 else "ulysses = 2"
        with given(parallel=parallel):
            done = here.train(config(here, parallel, axes, f'parallel = "{parallel}"', "steps = 2"))
            assert done.returncode == 0, done.stderr
            assert np.allclose(losses(here, parallel), losses(here, "alone"), rtol=1e-4)


def test_a_run_that_is_cut_short_goes_on_to_the_same_bits(here, comm):
    """In the middle of an epoch, with dropout."""
    options = {"network": "dropout = 0.1", "training": "steps = 7"}
    assert here.train(config(here, "whole", **options)).returncode == 0
    cut = config(here, "cut", **options)
    with signal_at(comm, Trainer, "_step", 4):
        done = here.train(cut)
    assert done.returncode == 75 and here.checkpoints("cut")[-1] == "step-00000004", done.stderr
    done = here.train(cut, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert losses(here, "cut") == losses(here, "whole")
    whole, again = here.weights("whole"), here.weights("cut")
    assert whole.keys() == again.keys() and all(np.array_equal(again[name], whole[name]) for name in whole)


def test_another_length_or_number_of_heads_is_refused(here, comm):
    assert here.train(config(here, training="steps = 1")).returncode == 0
    text = open(config(here, training="steps = 2")).read()
    for key, before, now in (("data.sequence", 16, 8), ("network.heads", 2, 4)):
        with given(key=key):
            name = key.partition(".")[2]
            if comm.rank == 0:
                (here.folder / "run.toml").write_text(text.replace(f"{name} = {before}", f"{name} = {now}"))
            comm.barrier()
            fails(here.train(here.folder / "run.toml", "--resume", "auto"), f"{key} was {before}, is {now}")


def test_the_tokenizers_of_all_files_are_compared(here, comm):
    """Of the validation file, of initial weights and of a resume: by what changes tokens, not by their number."""
    words, same = {f"w{number}": number for number in range(32)}, {"truncation": {"max_length": 4}, "decoder": None}
    coders = {
        "text": {"model": {"vocab": words}},
        "same": {**same, "model": {"vocab": words}},
        "other": {"model": {"vocab": dict(zip(reversed(words), range(32)))}},
    }
    if comm.rank == 0:
        for name in ("same", "other"):
            shutil.copy(here.folder / "text.h5", here.folder / f"{name}.h5")
        for name, coder in coders.items():
            with h5py.File(here.folder / f"{name}.h5", "a") as file:
                file["tokenizer"] = json.dumps(coder)
    comm.barrier()
    validation = "validation_file = '{}/{}.h5'".format
    assert here.train(config(here, training="steps = 1", data=validation(here.folder, "same"))).returncode == 0
    against = config(here, "two", training="steps = 1", data=validation(here.folder, "other"))
    fails(here.train(against), "the tokenizer of")
    assert here.train(against, "--accept", "tokenizer").returncode == 0
    if comm.rank == 0:
        (here.folder / "other.h5").rename(here.folder / "text.h5")
    comm.barrier()
    fails(here.train(config(here, "warm", training=f"steps = 1\nweights = '{here.folder}/run'")), "--accept tokenizer")
    fails(here.train(config(here, training="steps = 2"), "--resume", "auto", "--accept", "data"), "--accept tokenizer")


MODEL = """
from pmm3d import nn
def build(grid, features, outputs):
    assert features == 1
    return nn.Sequential(grid, nn.Embedding(grid, outputs, 8, positions=16), nn.TransformerBlock(grid, 8, 2, window=4),
                         nn.LayerNorm(grid, 8), nn.Linear(grid, 8, outputs))
"""


def test_a_network_of_ones_own_takes_tokens(here, comm):
    if comm.rank == 0:
        (here.folder / "model.py").write_text(MODEL)
        text = (
            f'network = "{here.folder}/model.py:build"\n[grid]\nshape = "{comm.size}x1x1"\n[data]\n'
            f'file = "{here.folder}/text.h5"\nsequence = 16\nbatch_size = 4\n'
            f'[training]\nfolder = "{here.folder}/own"\nsteps = 3\nlog_every = 1\n'
        )
        (here.folder / "own.toml").write_text(text)
    comm.barrier()
    done = here.train(here.folder / "own.toml")
    assert done.returncode == 0 and len(losses(here, "own")) == 3, done.stderr
    assert "memory is not predicted" not in done.stderr
    if comm.rank == 0:
        (here.folder / "model.py").write_text(MODEL.replace("window=4", "window=2"))
        warm = text.replace(f"{here.folder}/own", f"{here.folder}/warm")
        (here.folder / "warm.toml").write_text(f'{warm}weights = "{here.folder}/own"\n')
    comm.barrier()
    fails(here.train(here.folder / "warm.toml"), "network.window was 4, is 2")
