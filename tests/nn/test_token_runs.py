"""`pmm3d train` of transformers on text: the log on every grid, and interrupted runs."""

import json
import re
import shutil
from math import exp, isclose, log

import h5py
import numpy as np
import pytest
from loops import given, looped
from mpi_runner.plugin import all_tests
from on_disk import on_rank_0
from training_runs import fails, signal_at

from pmm3d import Grid, nn
from pmm3d.nn.training.loop import Trainer

pytestmark = [pytest.mark.parallel([2], thorough=[4]), pytest.mark.deadline(240)]
TEXT = "It is easy to learn that one follows the other. " * 12


def write_text(path):
    with h5py.File(path, "w") as file:
        file["tokens"] = np.frombuffer(TEXT.encode(), np.uint8) % 32
        file["tokens"].attrs.update(vocabulary=32, bytes=2 * len(TEXT))
        file["documents"] = np.arange(0, len(TEXT), 7)


@pytest.fixture
def here(here, comm):
    """Runs on the ranks of the test, with a text."""
    on_rank_0(comm, lambda: write_text(here.folder / "text.h5"))
    return here


def config(here, name="run", grid="", network="", training="", kind="gpt", data="", lr=0.01) -> str:
    """A configuration of a small transformer."""
    text = (
        f'[grid]\n{grid}\n[data]\nfile = "{here.folder}/text.h5"\nsequence = 16\nbatch_size = 4\n{data}\n'
        f'[network]\nhidden = 8\nlayers = 2\nheads = 2\nkind = "{kind}"\n{network}\n[optimizer]\nlr = {lr}\n'
        f'[training]\nfolder = "{here.folder}/{name}"\nlog_every = 1\n{training}\n'
    )
    on_rank_0(here.comm, lambda: (here.folder / f"{name}.toml").write_text(text))
    return str(here.folder / f"{name}.toml")


def trained(here, *arguments, ranks=None, **options):
    """The losses of a run, which must not fail."""
    path = config(here, *arguments, **options)
    here.finish(path, ranks=ranks)
    return losses(here, path.rpartition("/")[2].removesuffix(".toml"))


def losses(here, name):
    return [line["loss"] for line in here.metrics(name) if "loss" in line]


def test_a_network_begins_with_published_weights_and_can_have_more_tokens_than_the_data(here, comm):
    """As published networks with a padded vocabulary, whose weights begin the run."""
    with Grid(comm, "ddp") as grid:
        net = nn.GPT(grid, vocabulary=40, positions=16, layers=2, hidden=8, heads=2, seed=3)
        net.export(here.folder / "padded", names="gpt2")
        expected = {name: matrix.gather() for name, matrix in net.matrices().items()}
    weights = f"steps = 1\nweights = '{here.folder}/padded'"
    trained(here, "padded_run", network="vocabulary = 40", training=weights, lr=1e-300)
    found = here.weights("padded_run")
    assert all(np.array_equal(found[name], value) for name, value in expected.items())
    done = here.train(config(here, "padded_run", network="vocabulary = 48", training="steps = 2"), "--resume", "auto")
    fails(done, "network.vocabulary was 40, is 48")
    fails(here.train(config(here, "narrow", training=weights)), "network.vocabulary was 40, is 32")
    fails(here.train(config(here, "small", network="vocabulary = 31")), "network.vocabulary = 31, but the data have")


@looped("kind, name", [("gpt", "GPT"), ("llama", "Llama")])
def test_a_text_is_learned_and_the_log_has_bits_per_byte(here, kind, name):
    done = here.finish(config(here, kind, network="mlp = 24", training="epochs = 2", kind=kind))
    assert "a vocabulary of 32, sequences of 16" in done.stderr and "validation bits_per_byte: " in done.stdout
    lines = here.metrics(kind)
    for line in (*lines, *(line["validation"] for line in lines if "validation" in line)):
        if "loss" in line:
            assert isclose(line["perplexity"], exp(line["loss"]), rel_tol=1e-6)
            assert isclose(line["bits_per_byte"], line["loss"] / log(2) / 2, rel_tol=1e-6)
    assert losses(here, kind)[-1] < 0.9 * log(32)
    assert f"pmm3d generate {here.folder}/{kind} --prompt TEXT" in done.stdout
    assert here.record(kind)["network"]["kind"] == name


QWEN = """kv_heads = 1
head_dim = 6
qk_norm = true
rotary_scaling = {rope_type = "yarn", factor = 2.0, original_max_position_embeddings = 8}"""


def test_a_run_with_the_options_of_qwen_resumes_and_is_exported(here, comm):
    """Its folder has the settings. A resume with another scaling is refused by name."""
    trained(here, "cut", network=QWEN, training="steps = 2", kind="llama")
    for change, text in (
        (("2.0", "4.0"), "network.rotary_scaling was 'yarn, factor=2.0.*is 'yarn, factor=4.0"),
        (("= true", "= false"), "network.qk_norm was True, is False"),
    ):
        other = config(here, "cut", network=QWEN.replace(*change), training="steps = 4", kind="llama")
        done = here.train(other, "--resume", "auto")
        assert done.returncode and re.search(text, done.stderr), done.stderr
    path = config(here, "cut", network=QWEN, training="steps = 4", kind="llama")
    here.finish(path, "--resume", "auto")
    assert len(losses(here, "cut")) == 4
    for names, target in (("llama", "folder"), ("torch", "file.safetensors")):
        done = here.run("export", str(here.folder / "cut"), str(here.folder / target), "--names", names)
        assert done.returncode == 0, done.stderr
    with Grid(comm, "ddp") as grid:
        net = nn.Llama.load(grid, here.folder / "folder")
        assert net.architecture.model_type == "qwen3" and net.architecture.head_dim == 6
        assert str(net.architecture.rotary_scaling).startswith("yarn, factor=2.0, original_max_position_embeddings=8")
        nn.exchange.load_weights(net, here.folder / "file.safetensors")
        expected = here.weights("cut")
        assert all(np.array_equal(expected[name], matrix.gather()) for name, matrix in net.matrices().items())
        assert nn.generate(net, [[3, 1]], 3, temperature=0).shape == (1, 5)
    done = here.run("plan", "train", path, "--ranks", "2")
    assert done.returncode == 0, done.stderr


OTHERS = [
    ("z", "shape = 'fsdp'", ""),
    ("x", "shape = '{0}x1x1'", ""),
    ("y", "shape = '1x{0}x1'", ""),
    ("sharded", "shape = '{0}x1x1'", "activations = 'sharded'"),
    ("seq", "seq = {0}", ""),
    *((order, "seq = {0}\nmicro_batches = 4", f"order = '{order}'") for order in ("plain", "zigzag", "striped")),
    ("pipe", "pipe = 2\nmicro_batches = 2", ""),
    *((way, "ulysses = 2\nseq = {1}", f"parallel = '{way}'") for way in ("auto", "ring")),
]
FEW = ("sharded", "zigzag", "pipe", "auto", "ring")


def assert_the_grid_changes_no_loss(here, names, expected, data=""):
    for name, grid, network in OTHERS:
        if name in names:
            with given(grid=grid, network=network):
                axes = grid.format(here.comm.size, here.comm.size // 2)
                found = trained(here, name, axes, network, "steps = 2", data=data)
                assert np.allclose(found, expected, rtol=1e-4)


def test_the_grid_changes_no_loss(here):
    """Also if ranks share sequences, in each order of rows, along ulysses, and with stages."""
    expected = trained(here, "alone", training="steps = 2", ranks=1)
    assert_the_grid_changes_no_loss(here, [name for name, *_ in OTHERS] if all_tests else FEW, expected)


def test_documents_in_the_file_are_attended_to_apart_on_every_grid(here):
    """Also with stages. A file without their data set, and a checkpoint with another table, are refused."""
    packed = 'documents = "documents"'
    together = trained(here, "together", training="steps = 2", ranks=1)
    apart = trained(here, "apart", training="steps = 2", data=packed, ranks=1)
    assert apart[1] != together[1]
    assert_the_grid_changes_no_loss(here, ("zigzag", "pipe"), apart, packed)
    fails(here.train(config(here, "none", data='documents = "none"')), "has no data set 'none'")
    fails(here.train(config(here, "wrong", data='documents = "tokens"')), "does not say where documents begin")
    resumed = config(here, "apart", training="steps = 3")
    fails(here.train(resumed, "--resume", "auto", ranks=1), "data.documents was 'documents', is None")


def test_a_run_that_is_cut_short_goes_on_to_the_same_bits(here, comm):
    """In the middle of an epoch, with dropout."""
    options = {"network": "dropout = 0.1", "training": "steps = 7"}
    whole, cut = trained(here, "whole", **options), config(here, "cut", **options)
    with signal_at(comm, Trainer, "_step", 4):
        done = here.train(cut)
    assert done.returncode == 75 and here.checkpoints("cut")[-1] == "step-00000004", done.stderr
    done = here.finish(cut, "--resume", "auto")
    assert losses(here, "cut") == whole, done.stderr
    here.assert_same_weights("whole", "cut")


def test_gradients_are_clipped_and_the_rate_warms_up_unless_a_key_is_zero(here, comm):
    """The defaults give the bits of explicit keys. A resume of a run without them prints the changes."""
    keys = "clip = {}\n[schedule]\nwarm_up = {}".format
    found = {
        name: trained(here, name, training="steps = 20", lr=lr)
        for name, lr in (("left_out", 0.01), ("given", f"0.01\n{keys('1.0', 2)}"), ("off", f"0.01\n{keys(0, 0)}"))
    }
    assert found["left_out"] == found["given"] != found["off"]
    rates = {name: [line["lr"] for line in here.metrics(name) if "lr" in line] for name in found}
    assert rates["left_out"][:2] == [0.005, 0.01] and rates["off"][0] == 0.01
    done = here.finish(config(here, "off", training="steps = 22"), "--resume", "auto")
    for text in ("optimizer.clip was 0.0, is 1.0", "schedule.warm_up was 0, is 'auto'"):
        assert f"resumed with a change: {text}. The new configuration applies" in done.stderr


def test_another_length_or_number_of_heads_is_refused(here, comm):
    trained(here, training="steps = 1")
    path, text = here.folder / "run.toml", open(config(here, training="steps = 2")).read()
    for key, before, now in (("data.sequence", 16, 8), ("network.heads", 2, 4)):
        name = key.partition(".")[2]
        on_rank_0(comm, lambda: path.write_text(text.replace(f"{name} = {before}", f"{name} = {now}")))
        fails(here.train(path, "--resume", "auto"), f"{key} was {before}, is {now}")


def write_tokenizers(folder):
    """Write text.h5, same.h5 and other.h5 with tokenizers, of which two split texts alike."""
    words, same = {f"w{number}": number for number in range(32)}, {"truncation": {"max_length": 4}, "decoder": None}
    coders = {
        "text": {"model": {"vocab": words}},
        "same": {**same, "model": {"vocab": words}},
        "other": {"model": {"vocab": dict(zip(reversed(words), range(32)))}},
    }
    for name in ("same", "other"):
        shutil.copy(folder / "text.h5", folder / f"{name}.h5")
    for name, coder in coders.items():
        with h5py.File(folder / f"{name}.h5", "a") as file:
            file["tokenizer"] = json.dumps(coder)


def test_the_tokenizers_of_all_files_are_compared(here, comm):
    """Of the validation file, of initial weights and of a resume: by what changes tokens, not by their number."""
    on_rank_0(comm, lambda: write_tokenizers(here.folder))
    validation = "validation_file = '{}/{}.h5'".format
    here.finish(config(here, training="steps = 1", data=validation(here.folder, "same")))
    against = config(here, "two", training="steps = 1", data=validation(here.folder, "other"))
    fails(here.train(against), "the tokenizer of")
    here.finish(against, "--accept", "tokenizer")
    on_rank_0(comm, lambda: (here.folder / "other.h5").rename(here.folder / "text.h5"))
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
    text = (
        f'network = "{here.folder}/model.py:build"\n[grid]\nshape = "{comm.size}x1x1"\n[data]\n'
        f'file = "{here.folder}/text.h5"\nsequence = 16\nbatch_size = 4\n'
        f'[training]\nfolder = "{here.folder}/own"\nsteps = 3\nlog_every = 1\n'
    )
    for name, content in (("model.py", MODEL), ("own.toml", text)):
        on_rank_0(comm, lambda: (here.folder / name).write_text(content))
    done = here.finish(here.folder / "own.toml")
    assert len(losses(here, "own")) == 3, done.stderr
    assert "memory is not predicted" not in done.stderr
    on_rank_0(comm, lambda: (here.folder / "model.py").write_text(MODEL.replace("window=4", "window=2")))
    fails(here.train(here.folder / "own.toml", "--resume", "auto"), "network.window was 4, is 2")
