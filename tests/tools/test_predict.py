"""`pmm3d predict`, `export` and `generate`: results of a run's network, on any ranks, in torch and as a text."""

import csv
import json
import os
import shutil
from types import SimpleNamespace
from typing import get_args

import h5py
import numpy as np
import pytest
import typer
from safetensors import safe_open

from pmm3d import Grid
from pmm3d.io import Tokenizer, convert_text
from pmm3d.nn.facts import ACCEPTED
from pmm3d.nn.training.continuation import TextStream
from pmm3d.nn.training.export import _export_tokenizer, tokenizer_of
from pmm3d.nn.training.samples import Recalled
from pmm3d.nn.training.sections import DataSection
from pmm3d.text import counted
from pmm3d.tools.ranks import Accept

NAMES = ["cat", "dog", "eel"]


@pytest.fixture
def pmm3d(on_ranks):
    """pmm3d(*arguments): the result of the command in the folder of the test."""
    return lambda *arguments, ranks=1: on_ranks(ranks, *arguments)


@pytest.fixture(scope="module")
def earlier():
    """Settings -> folder of a training. Each test with these settings gets a copy."""
    return {}


@pytest.fixture
def trained(pmm3d, tmp_path, tmp_path_factory, earlier):
    """trained(network, targets) trains with these [network] lines. The run is in `run`, the samples in x.h5."""

    def train(network="hidden = [8]", targets="y", features=5, grid="", ranks=1):
        asked = network, targets, features, grid, ranks
        if asked in earlier:
            shutil.copytree(earlier[asked], tmp_path, dirs_exist_ok=True)
        else:
            make(*asked)
            earlier[asked] = shutil.copytree(tmp_path, tmp_path_factory.mktemp("earlier"), dirs_exist_ok=True)

    def make(network, targets, features, grid, ranks):
        random = np.random.default_rng(0)
        x = random.standard_normal((40, features)).astype("float32")
        with h5py.File(tmp_path / "data.h5", "w") as file:
            file["x"], file["y"] = x, np.arange(40) % 3
            file["x"].attrs["columns"] = list("abcdefgh"[:features])
            file["y"].attrs["class_names"] = NAMES
            file["v"] = x[:, :1] * 2 + 1
        with h5py.File(tmp_path / "x.h5", "w") as file:
            file["x"] = random.standard_normal((13, features)).astype("float32")
        (tmp_path / "run.toml").write_text(
            f'[data]\nfile = "data.h5"\ntargets = "{targets}"\nbatch_size = 8\n[network]\n{network}\n'
            f'[training]\nfolder = "run"\nepochs = 2\n{grid}\n'
        )
        done = pmm3d("train", "run.toml", ranks=ranks)
        assert done.returncode == 0, done.stderr

    return train


def said(done, text):
    """Assert that the job ended with 2, and printed the text once."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("pmm3d: ") == 1 and text in " ".join(done.stderr.split()), done.stderr
    assert "Traceback" not in done.stderr


def predicted(path):
    with h5py.File(path) as file:
        return {name: file[name][...] for name in file}


def in_torch(path, settings, outputs, x):
    """Outputs of the same layers in torch, with the exported weights."""
    import torch
    from safetensors.torch import load_file

    kinds = {"gelu": "GELU", "relu": "ReLU", "tanh": "Tanh", "silu": "SiLU", "sigmoid": "Sigmoid"}
    hidden, layers, inputs = settings.get("hidden", []), [], x.shape[1]
    for width in hidden:
        layers += [
            torch.nn.Linear(inputs, width, bias=settings.get("bias", True)),
            *[torch.nn.LayerNorm(width)] * settings.get("norm", False),
            getattr(torch.nn, kinds[settings["activation"]])(),
        ]
        inputs = width
    layers.append(torch.nn.Linear(inputs, outputs, bias=settings.get("bias", True)))
    network = torch.nn.Sequential(*layers).to(torch.from_numpy(x).dtype)
    network.load_state_dict(load_file(path))
    with torch.no_grad():
        return network(torch.from_numpy(x)).numpy()


NETWORKS = {
    "gelu": "hidden = [8]",
    "relu": 'hidden = [8, 6]\nactivation = "relu"\nnorm = true\ndropout = 0.3',
    "tanh": 'hidden = [4, 3]\nactivation = "tanh"\nbias = false\nrecompute = true\nnorm = true\ndropout = 0.2',
    "silu": 'hidden = [4]\nactivation = "silu"\ndtype = "float64"',
    "linear": "hidden = []",
}


@pytest.mark.parametrize(
    "kind, targets, features",
    [("gelu", "y", 5), ("relu", "v", 5), ("tanh", "y", 1), ("silu", "v", 1), ("linear", "v", 1)],
)
def test_the_same_layers_in_torch_load_what_export_writes(pmm3d, trained, tmp_path, kind, targets, features):
    trained(NETWORKS[kind], targets, features)
    done = pmm3d("export", "run", "run.safetensors")
    assert done.returncode == 0, done.stderr
    assert pmm3d("predict", "run", "x.h5", "--out", "out.h5", "--batch-size", "5").returncode == 0
    x = predicted(tmp_path / "x.h5")["x"].astype("float64" if kind == "silu" else "float32")
    outputs = predicted(tmp_path / "out.h5")["outputs"]
    assert outputs.shape == (13, 1 if targets == "v" else 3)
    with safe_open(tmp_path / "run.safetensors", "numpy") as file:
        settings = json.loads(file.metadata()["pmm3d"])
        assert file.get_slice("0.weight").get_shape()[1] == features == settings["samples"]["features"]
    assert settings["network"]["activation"] == ("gelu" if kind == "linear" else kind)
    found = in_torch(tmp_path / "run.safetensors", settings["network"], outputs.shape[1], x)
    assert np.allclose(found, outputs, rtol=1e-5, atol=1e-6)


def test_a_network_of_a_loop_is_exported(job, pmm3d, tmp_path):
    """Its checkpoint contains which parameters are vectors, but not the code of the network."""
    done = job(
        2,
        """
        from pmm3d import Grid, nn
        from pmm3d.io import Checkpoints
        with Grid(shape="fsdp") as grid:
            Checkpoints(grid, sys.argv[1]).save(3, nn.MLP(grid, [1, 4, 1], norm=True).matrices())
    """,
        tmp_path / "own",
    )
    assert done.returncode == 0, done.stderr
    done = pmm3d("export", "own", "own.safetensors", ranks=2)
    assert done.returncode == 0, done.stderr
    from safetensors.numpy import load_file

    found = {name: tensor.shape for name, tensor in load_file(tmp_path / "own.safetensors").items()}
    assert found == {
        "0.weight": (4, 1),
        "0.bias": (4,),
        "1.weight": (4,),
        "1.bias": (4,),
        "3.weight": (1, 4),
        "3.bias": (1,),
    }
    said(pmm3d("predict", "own", "x.h5", "--out", "o.h5"), "does not contain a configuration of its network")


def test_export_replaces_what_it_is_told_to_and_follows_no_link(pmm3d, trained, tmp_path):
    trained()
    (tmp_path / "precious").write_text("mine")
    for name in ("run.safetensors", "run.safetensors.writing"):
        (tmp_path / name).symlink_to("precious")
    assert pmm3d("export", "run", "run.safetensors", "--overwrite").returncode == 0
    assert (tmp_path / "precious").read_text() == "mine" and not (tmp_path / "run.safetensors").is_symlink()
    said(pmm3d("export", "run", "folder"), "cannot export to folder: the name of the file must end in .safetensors")
    assert not (tmp_path / "folder").exists()


@pytest.mark.nightly
def test_predictions_do_not_depend_on_ranks_grids_and_batches(pmm3d, trained, tmp_path):
    trained("hidden = [8, 7]\nnorm = true\ndropout = 0.5", grid='[grid]\nshape = "2x1x1"', ranks=2)
    whole = None
    for ranks, size in ((1, 13), (2, 4), (3, 8), (4, 1), (4, 100)):
        done = pmm3d("predict", "run", "x.h5", "--out", f"{ranks}-{size}.h5", "--batch-size", size, ranks=ranks)
        assert done.returncode == 0, done.stderr
        grid = "2x1x1" if ranks == 2 else "1x1x1"
        assert "outputs 13 x 3, probabilities 13 x 3, classes 13; by run/checkpoints/step-0000001" in done.stdout
        assert f"on grid {grid}" in done.stdout
        found = predicted(tmp_path / f"{ranks}-{size}.h5")
        whole = whole or found
        assert np.allclose(found["outputs"], whole["outputs"], rtol=1e-5, atol=1e-6)
        assert np.allclose(found["probabilities"].sum(1), 1, atol=1e-6)
        assert np.array_equal(found["classes"], found["outputs"].argmax(1))
    with h5py.File(tmp_path / "1-13.h5") as file:
        assert list(file["classes"].attrs["class_names"]) == NAMES and file["classes"].dtype == "int64"
        assert "run/checkpoints/step-" in file.attrs["checkpoint"]
    with h5py.File(tmp_path / "x.h5", "a") as file:
        two = file["x"][:2]
        del file["x"]
        file["x"] = two
    assert pmm3d("predict", "run", "x.h5", "--out", "few.h5", ranks=4).returncode == 0
    assert np.allclose(predicted(tmp_path / "few.h5")["outputs"], whole["outputs"][:2], rtol=1e-5, atol=1e-6)


MODEL = """
from pmm3d import nn
def build(grid, features, outputs):
    return nn.Sequential(grid, nn.Linear(grid, features, 6), nn.Residual(nn.Linear(grid, 6, 6)), nn.tanh,
                         nn.Linear(grid, 6, outputs))
"""


def test_a_network_of_ones_own_predicts_and_is_exported_without_its_file(pmm3d, trained, tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    trained('build = "model.py:build"')
    done = pmm3d("predict", "run", "x.h5", "--out", "o.h5", ranks=2)
    assert done.returncode == 0, done.stderr
    (tmp_path / "model.py").unlink()
    done = pmm3d("export", "run", "run.safetensors")
    assert done.returncode == 0, done.stderr
    from safetensors.numpy import load_file

    weights, x = load_file(tmp_path / "run.safetensors"), predicted(tmp_path / "x.h5")["x"]
    linear = lambda name, x: x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
    hidden = linear("0", x)
    outputs = linear("3", np.tanh(hidden + linear("1.module", hidden)))
    assert np.allclose(predicted(tmp_path / "o.h5")["outputs"], outputs, rtol=1e-4, atol=1e-5)
    said(pmm3d("predict", "run", "x.h5", "--out", "p.h5"), "network.build: cannot read")


def test_the_newest_good_checkpoint_counts_or_the_one_that_is_named(pmm3d, trained, tmp_path):
    trained()
    folder = tmp_path / "run" / "checkpoints"
    older, newer = sorted(folder.iterdir())
    for run, name in (("run", newer), (older, older), (folder, newer)):
        done = pmm3d("predict", run, "x.h5", "--out", f"{len(str(run))}.h5")
        assert done.returncode == 0 and name.name in done.stdout, done.stderr
    os.truncate(newer / "rank-00000.h5", 100)
    done = pmm3d("predict", "run", "x.h5", "--out", "old.h5")
    assert done.returncode == 0 and older.name in done.stdout and "is passed over" in done.stderr
    said(pmm3d("predict", newer, "x.h5", "--out", "new.h5"), "is damaged: it has 100 bytes")
    shutil.rmtree(folder)
    said(pmm3d("predict", "run", "x.h5", "--out", "new.h5"), "there is no checkpoint in run")
    assert not (tmp_path / "new.h5").exists()


def test_predict_refuses_what_does_not_fit(pmm3d, trained, tmp_path):
    trained()
    with h5py.File(tmp_path / "bad.h5", "w") as file:
        file["x"], file["nan"], file["text"] = np.ones((4, 6)), np.ones((4, 5)), ["a", "b"]
        file["nan"][3, 2] = np.nan
    (tmp_path / "there.h5").write_text("mine")
    data = (tmp_path / "x.h5").read_bytes()
    for arguments, text in (
        (("x.h5", "--out", "there.h5"), "there.h5 exists; --overwrite replaces it"),
        (("x.h5", "--out", "x.h5", "--overwrite"), "x.h5 is the file of the samples, and would be overwritten"),
        (("bad.h5", "--out", "o.h5"), "'x' has 6 features a row, the network of run takes 5. Give the columns"),
        (("bad.h5", "--out", "o.h5", "--inputs", "nan"), "row 3 of data set 'nan' holds nan in column 2"),
        (("bad.h5", "--out", "o.h5", "--inputs", "text"), "'text' holds strings; needed are real numbers"),
        (("bad.h5", "--out", "o.h5", "--inputs", "z"), "has no data set 'z'; it has 'nan', 'text', 'x'"),
        (("none.h5", "--out", "o.h5"), "cannot open none.h5"),
        (("x.h5", "--out", "none/o.h5"), "there is no folder"),
    ):
        said(pmm3d("predict", "run", *arguments, ranks=2), text)
    done = pmm3d("predict", "run", "x.h5", "--out", "o.h5", "--batch-size", "0")
    assert done.returncode == 2 and "Invalid value for '--batch-size'" in done.stderr
    assert not {"o.h5", "o.h5.writing"} & set(os.listdir(tmp_path))
    assert (tmp_path / "there.h5").read_text() == "mine" and (tmp_path / "x.h5").read_bytes() == data


FULL = """
import resource
from pmm3d.tools.cli import main
from pmm3d.product import new_hdf5
begin = new_hdf5.NewHdf5.__init__
def limited(self, path):
    begin(self, path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
new_hdf5.NewHdf5.__init__ = limited
sys.argv[0] = "pmm3d"
main()
"""


def test_a_full_disk_leaves_no_half_predictions(job, trained, tmp_path, monkeypatch):
    trained()
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)  # it would write, too
    (tmp_path / "o.h5").write_text("mine")
    done = job(2, FULL, "predict", "run", "x.h5", "--out", "o.h5", "--overwrite")
    said(done, "o.h5 cannot be written: File too large")
    assert (tmp_path / "o.h5").read_text() == "mine" and not (tmp_path / "o.h5.writing").exists()


def test_the_option_accept_has_the_names_of_all_facts():
    option = get_args(Accept)[1]
    assert option.callback([*ACCEPTED]) == [*ACCEPTED] and all(name in option.help for name in ACCEPTED)
    with pytest.raises(typer.BadParameter, match=f"'weights' is none of {', '.join(ACCEPTED)}"):
        option.callback(["weights"])


def write_csv(path, columns, header=""):
    np.savetxt(path, columns, delimiter=",", header=header, comments="", fmt="%.9g")


def test_samples_and_predictions_may_be_tables(pmm3d, trained, tmp_path):
    trained()
    x = predicted(tmp_path / "x.h5")["x"]
    write_csv(tmp_path / "x.csv", x, "a,b,c,d,e")
    write_csv(tmp_path / "turned.csv", x, "b,a,c,d,e")
    with open(tmp_path / "x.NPZ", "wb") as file:  # savez would add .npz
        np.savez(file, x=x)
    for arguments in (
        ("x.h5", "--out", "right.h5"),
        ("x.csv", "--out", "OUT.CSV"),
        ("x.NPZ", "--out", "out.h5"),
        ("turned.csv", "--out", "turned.h5", "--accept", "columns"),
    ):
        done = pmm3d("predict", "run", *arguments, ranks=2)
        assert done.returncode == 0 and f"wrote {arguments[2]}: " in done.stdout, done.stderr
    right = predicted(tmp_path / "right.h5")
    with open(tmp_path / "OUT.CSV") as file:
        first, *lines = csv.reader(file)
    assert first == ["class", *NAMES] and [line[0] for line in lines] == [NAMES[at] for at in right["classes"]]
    assert np.allclose(np.array([line[1:] for line in lines], float), right["probabilities"], atol=1e-6)
    with h5py.File(tmp_path / "out.h5") as file:
        assert np.allclose(file["outputs"][...], right["outputs"], atol=1e-6) and file.attrs["source"] == "x.NPZ"
    assert not list(tmp_path.glob(".*"))


def test_tables_that_do_not_fit_are_refused(pmm3d, trained, tmp_path):
    trained()
    x = predicted(tmp_path / "x.h5")["x"]
    np.savez(tmp_path / "x.npz", x=x)
    write_csv(tmp_path / "x.csv", x)
    write_csv(tmp_path / "xy.csv", np.c_[x, x[:, 0] > 0])
    write_csv(tmp_path / "turned.csv", x, "b,a,c,d,e")
    write_csv(tmp_path / "narrow.csv", x[:, :4])
    (tmp_path / "others.csv").write_text("0,1,2,3,4\n1,2,3,4,5\n")
    (tmp_path / "words.csv").write_text("0,1,2,3,4\n1,2,3,4,a\n")
    before = sorted(os.listdir(tmp_path))
    for arguments, text in (
        (("x.npz", "--out", "out.csv", "--inputs", "z"), "it has 'x'. --inputs names the array"),
        (("x.csv", "--out", "out.csv", "--inputs", "z"), "--inputs is z, but x.csv is a table"),
        (("no.csv", "--out", "out.csv"), "there is no file no.csv"),
        (
            ("turned.csv", "--out", "out.csv"),
            "columns was ['a', 'b', 'c', 'd' and 1 more], is ['b', 'a', 'c', 'd' and 1 more]",
        ),
        (("xy.csv", "--out", "out.csv"), "one column more than the 5 inputs. If it is"),
        (("x.csv", "--out", "out.npy"), "ends in .npy, which is another format"),
        (("x.csv", "--out", "xy.csv"), "xy.csv exists; --overwrite replaces it"),
        (("others.csv", "--out", "out.csv"), "the columns of others.csv differ"),
        (("words.csv", "--out", "out.csv"), "pmm3d convert words.csv FILE.h5 has options for that: --"),
        (("narrow.csv", "--out", "out.csv"), "narrow.csv: data set 'x' has 4 features a row"),
    ):
        said(pmm3d("predict", "run", *arguments), text)
    assert sorted(os.listdir(tmp_path)) == before


# Text

TEXT = "the cat sat on the mat. the dog sat on the cat. "
RUN = """
[data]
file = "text.h5"
sequence = 12
batch_size = 8
[network]
kind = "gpt"
layers = 2
hidden = 16
heads = 2
positions = 40
[optimizer]
lr = 0.02
[training]
folder = "run"
steps = 6
"""


FOLDER = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def words_of(*words, unknown="?"):
    """A tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate([unknown, *words])}, unk_token=unknown)
    )
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def metaspace():
    """A tokenizer whose tokens begin with a blank, as of Llama 2 and Mistral."""
    from tokenizers import decoders, pre_tokenizers

    made = words_of("▁the", "▁cat", "▁sat")
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return made


def test_the_text_after_a_prompt_has_its_blank():
    for made in (words_of("the", "cat", "sat"), metaspace()):
        coder = Tokenizer(made.to_str())
        *tokens, last = coder.encode("the cat sat").tolist()
        stream = TextStream(coder, tokens, lambda text: None)
        stream.add(last)
        assert len(tokens) == 2 and stream.finish() == " sat"


def test_the_tokenizer_of_an_export_is_that_of_the_facts_of_the_run(tmp_path):
    """Not another one that the data file contains now."""
    config = lambda name: SimpleNamespace(data=DataSection(file=tmp_path / name))
    words_of("the", "cat").save(str(tmp_path / "words.json"))
    (tmp_path / "cat.txt").write_text(TEXT)
    convert_text([tmp_path / "cat.txt"], tmp_path / "words.h5", tokenizer=tmp_path / "words.json")
    coder = Tokenizer.of(tmp_path / "words.h5")
    for name, facts, expected in (
        ("words.h5", {"tokenizer": coder.digest}, coder.json),
        ("words.h5", {"tokenizer": "other"}, None),
        ("words.h5", {}, None),
        ("none.h5", {"tokenizer": coder.digest}, None),
        ("none.h5", {"tokenizer": "bytes"}, Tokenizer().for_package),
    ):
        found = tokenizer_of(Recalled(config(name), None, facts))
        assert (found and found.for_package) == expected


@pytest.mark.parallel([2])
def test_an_export_without_a_tokenizer_leaves_none_of_another_network(comm, shared_path):
    if comm.rank == 0:
        for name in FOLDER:
            (shared_path / name).write_text("of another network")
    config = SimpleNamespace(data=DataSection(file=shared_path / "none.h5"))
    with Grid(comm) as grid:
        told = _export_tokenizer(grid, Recalled(config, None, {"tokenizer": "other"}), shared_path)
        never = _export_tokenizer(grid, Recalled(config, None, {}), shared_path)
    assert never == f", without a tokenizer: none was in the data of the run ({shared_path}/none.h5)"
    left = {each.name for each in shared_path.iterdir()}
    assert "without its tokenizer" in told and left & {*FOLDER} == {"config.json", "model.safetensors"}
    comm.barrier()


def test_a_run_of_tokens_continues_a_text(pmm3d, tmp_path):
    """The same text on one rank, and on two ranks with the grid of the run; greedy, and with a seed."""

    def right(*words, ranks=1):
        done = pmm3d(*words, ranks=ranks)
        assert done.returncode == 0, done.stderr
        assert words[0] != "generate" or "replayed" not in done.stderr  # no line inside the text
        return done.stdout

    def generate(*options, run="run", ranks=1):
        return right("generate", run, "--prompt", "the cat", "--out", "out.txt", "--overwrite", *options, ranks=ranks)

    (tmp_path / "cat.txt").write_text(TEXT * 20)
    (tmp_path / "run.toml").write_text(RUN)
    right("convert", "text", "cat.txt", "text.h5")
    right("train", "run.toml", ranks=2)
    found = []
    for options in (("--temperature", "0"), ("--top-k", "5", "--seed", "3"), ("--top-p", "0.9", "--seed", "4")):
        for ranks in (1, 2):
            told = generate("--length", "20", *options, ranks=ranks)
            found.append((tmp_path / "out.txt").read_bytes().decode())
            assert "the cat" + found[-1] in told and "20 tokens by run/checkpoints" in told
    assert found[::2] == found[1::2] and len(set(found)) == 3
    greedy = found[0]
    last = greedy[5]
    stop = greedy.index(last)
    told = generate("--length", "20", "--temperature", "0", "--end", "\n", "--end", last)
    assert "the cat" + greedy[:stop] + "\n" in told and f"{counted(stop, 'token')} by run/checkpoints" in told
    assert (tmp_path / "out.txt").read_text() == greedy[:stop]
    words = words_of(unknown="</s>")
    words.add_special_tokens(["</s>"])
    words.save(str(tmp_path / "words.json"))
    right("convert", "text", "cat.txt", "words.h5", "--tokenizer", "words.json")
    other = ("generate", "run", "--prompt", "the cat", "--length", "4", "--tokenizer", "words.h5")
    for words, text in (
        (("generate", "run", "--prompt", ""), "the prompt has no tokens"),
        (("generate", "run", "--prompt", "a", "--overwrite"), "--overwrite has no effect without --out"),
        (("generate", "run", "--prompt", "a", "--end", "ab"), "'ab' is 2 tokens, not one"),
        (
            ("generate", "run", "--prompt", "a", "--top-p", "0"),
            "top_p must be a number above 0, and at most 1; got 0.0",
        ),
        (("generate", "run", "--prompt", "a", "--tokenizer", "none.h5"), "none.h5"),
        (other, "the tokenizer of words.h5 differs, and nothing was changed: tokenizer was 'bytes', is "),
        (("predict", "run", "text.h5", "--out", "o.h5"), "pmm3d generate run --prompt TEXT"),
        (("export", "run", "no.safetensors", "--names", "llama"), "no names 'llama'. This GPT has the names torch"),
    ):
        said(pmm3d(*words), text)
    assert "</s> </s>\n0 tokens by" in right(*other, "--accept", "tokenizer")
    assert "</s>" * 6 + "\n4 tokens by" in right(*other, "--accept", "tokenizer", "--no-end").replace(" </s>", "</s>")
    done = pmm3d("generate", "run", "--prompt", "cut \udcc3", "--length", "3", "--out", "a" * 250)
    said(done, "File name too long")
    assert done.stdout.startswith("cut ") and done.stdout.endswith("\n")  # the error begins a line
    assert "longer than" not in right("generate", "run", "--prompt", "the cat " * 9, "--length", "0")
    assert "longer than the 40 positions" in generate("--length", "40")
    (tmp_path / "text.h5").rename(tmp_path / "moved.h5")
    generate("--length", "3")
    generate("--length", "3", "--tokenizer", "moved.h5")
    right("export", "run", "gpt.safetensors", ranks=2)
    with safe_open(tmp_path / "gpt.safetensors", "numpy") as file:
        assert file.get_tensor("transformer.h.1.attn.c_attn.weight").shape == (16, 48)
        assert json.loads(file.metadata()["config.json"])["n_positions"] == 40
        assert np.isfinite(file.get_tensor("transformer.wte.weight")).all()
    assert "without its tokenizer" not in right("export", "run", "folder")
    folder = tmp_path / "folder"
    assert Tokenizer.of(folder / "tokenizer.json").encode(TEXT).tolist() == [*TEXT.encode()]
    assert sorted(each.name for each in folder.iterdir()) == FOLDER
    said(pmm3d("export", "run", "folder"), "the folder folder contains files; --overwrite replaces")
    right("export", "run", "folder", "--overwrite")
    said(
        pmm3d("export", "run", "other", "--names", "torch"), "cannot export to the folder other with the names 'torch'"
    )
    with h5py.File(tmp_path / "moved.h5", "r+") as file:  # with tokens that the tokenizer does not have
        file["tokens"].attrs["vocabulary"] = 3000
    (tmp_path / "wide.toml").write_text(RUN.replace("text.h5", "moved.h5").replace('"run"', '"wide"'))
    right("train", "wide.toml", ranks=2)
    generate("--length", "30", run="wide", ranks=2)
