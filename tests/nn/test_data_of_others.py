"""`pmm3d train` on pairs of a user's file, on mapped tokens and on mixtures: the runs of HDF5 files, and errors."""

import re
import struct
from pathlib import Path

import h5py
import numpy as np
import pytest
from loops import given, looped
from on_disk import on_rank_0
from training_runs import fails

from pmm3d import Pmm3dError
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.described import as_toml
from pmm3d.nn.training.dry_step import DrySteps
from pmm3d.nn.training.samples import sizes_in_file

pytestmark = [pytest.mark.parallel([2], thorough=[1, 4]), pytest.mark.deadline(240)]

PAIRS = """
import sys
import h5py

class Rows:
    def __init__(self, targets):
        with h5py.File("{folder}/data.h5") as file:
            self.x, self.y = file["x"][...], file[targets][...]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]

class Raising(Rows):
    def __getitem__(self, index):
        if index == 77:
            raise ValueError("no " + "luck")
        return super().__getitem__(index)

class Ending(Rows):
    def __getitem__(self, index):
        if index == 77:
            sys.exit("no " + "file")
        return super().__getitem__(index)

def ending():
    return Ending("field")

def labels():
    return Rows("y")

def values():
    return Rows("field")

def raising():
    return Raising("field")

def nothing():
    pass

def broken():
    return 1 / 0

def tokens():
    with h5py.File("{folder}/text.h5") as file:
        text = file["tokens"][...].astype("int64")
    return [(text[at : at + 16], text[at + 1 : at + 17]) for at in range(0, len(text) - 16, 16)]
"""
TEXT = np.arange(600) * 7 % 32


@pytest.fixture
def here(here, comm):
    """Runs on the ranks of the test, with a file of Python, and a text in each format."""
    folder = here.folder

    def write():
        (folder / "pairs.py").write_text(PAIRS.format(folder=folder))
        with h5py.File(folder / "data.h5") as file:
            x, y = file["x"][...], file["y"][...]
        for name, rows in (("one", slice(0, 80)), ("two", slice(80, 330))):
            with h5py.File(folder / f"{name}.h5", "w") as file:
                file["x"], file["y"] = x[rows], y[rows]
        with h5py.File(folder / "text.h5", "w") as file:
            file["tokens"] = TEXT.astype("uint8")
            file["tokens"].attrs["vocabulary"] = 32
        TEXT.astype("uint16").tofile(folder / "text.bin")

    on_rank_0(comm, write)
    return here


def config(here, name, data, training="steps = 6", network="hidden = [8]", grid="") -> str:
    text = (
        f"[grid]\n{grid}\n[data]\n{data}\n[network]\n{network}\n[schedule]\nkind = 'constant'\n"
        f'[training]\nfolder = "{here.folder}/{name}"\nlog_every = 1\n{training}\n'
    ).replace("HERE", str(here.folder))
    on_rank_0(here.comm, lambda: (here.folder / f"{name}.toml").write_text(text))
    return str(here.folder / f"{name}.toml")


FILE, GPT = 'file = "HERE/data.h5"\nbatch_size = 50', 'kind = "gpt"\nhidden = 8\nlayers = 1\nheads = 2'
MIXTURE = 'mixture = {"HERE/one.h5" = 2, "HERE/two.h5" = 1}\nbatch_size = 50\nclasses = 3'


@looped("name, targets", [("labels", "y"), ("values", "field")])
def test_pairs_give_the_weights_and_the_log_of_a_file(here, name, targets):
    """Also with the targets' classes counted, standardised, and with a function for validation."""
    more = {"labels": "", "values": "standardize = true"}[name]
    other = {"labels": "", "values": 'validation_{} = "HERE/{}"'}[name]
    pairs = f'build = "HERE/pairs.py:{name}"\nbatch_size = 50\n{more}\n' + other.format("build", "pairs.py:values")
    file = f'{FILE}\ntargets = "{targets}"\n{more}\n' + other.format("file", "data.h5")
    here.finish(config(here, f"pairs_{name}", pairs))
    here.finish(config(here, f"file_{name}", file))
    here.assert_same_weights(f"pairs_{name}", f"file_{name}")
    for one, two in zip(here.metrics(f"pairs_{name}"), here.metrics(f"file_{name}")):
        assert one.get("loss") == two.get("loss") and one.get("validation") == two.get("validation")


@looped("source", ['file = "HERE/text.bin"', 'build = "HERE/pairs.py:tokens"', 'mixture = {"HERE/text.bin" = 3}'])
def test_mapped_tokens_and_pairs_of_tokens_are_trained_like_a_file(here, source):
    """A mixture of one file has another order of the rows, and each once in an epoch."""
    common = "sequence = 16\nbatch_size = 4\nvocabulary = 32\nvalidation = 0.1\n"
    other = source.partition(" ")[0]
    here.finish(config(here, f"as_{other}", 'file = "HERE/text.h5"\n' + common, network=GPT))
    here.finish(config(here, other, f"{source}\n{common}", network=GPT))
    one, two = here.metrics(other), here.metrics(f"as_{other}")
    assert [line.get("step") for line in one] == [line.get("step") for line in two]
    if "mixture" not in source:
        here.assert_same_weights(other, f"as_{other}")
        done = here.run("generate", str(here.folder / other), "--prompt", "a")
        fails(done, f"No tokenizer is in the data of the run ({here.folder}/")


def test_a_type_of_tokens_is_for_the_raw_files_among_those_for_training_and_validation(here, comm):
    raw, index = here.folder / "raw32.bin", here.folder / "indexed.bin"

    def write():
        TEXT.astype("uint32").tofile(raw)
        TEXT.astype("uint16").tofile(index)
        tables = np.array([len(TEXT)], "i4").tobytes() + np.array([0, 0, 1], "i8").tobytes()
        index.with_suffix(".idx").write_bytes(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 2) + tables)

    on_rank_0(comm, write)
    common, kind = "sequence = 16\nbatch_size = 4\nvocabulary = 32\n", 'token_dtype = "uint32"\n'
    pairs = ("text.h5", "raw32.bin"), ("indexed.bin", "raw32.bin"), ("raw32.bin", "text.h5"), ("raw32.bin", "raw32.bin")
    validations = []
    for number, (file, held) in enumerate(pairs):
        with given(file=file, held=held):
            files = f'file = "HERE/{file}"\nvalidation_file = "HERE/{held}"\n'
            here.finish(config(here, f"typed{number}", files + common + kind, "steps = 3", network=GPT))
            validations.append([line["validation"] for line in here.metrics(f"typed{number}") if "validation" in line])
    assert validations[0] and all(each == validations[0] for each in validations)
    neither = 'file = "HERE/text.h5"\nvalidation_file = "HERE/indexed.bin"\n'
    fails(here.train(config(here, "untyped", neither + common + kind, network=GPT)), "leave it out")


def test_a_mixture_is_drawn_by_weight_and_resumes_with_the_same_bits(here, comm):
    """In the middle of an epoch. Other weights are other data."""
    done = here.finish(config(here, "unbroken", MIXTURE, "steps = 9"))
    assert f"an epoch draws 198 rows of {here.folder}/one.h5, 99 rows of {here.folder}/two.h5" in done.stderr
    here.finish(config(here, "broken", MIXTURE, "steps = 4"))
    here.finish(config(here, "broken", MIXTURE, "steps = 9"), "--resume", "auto")
    here.assert_same_weights("unbroken", "broken")
    changed = config(here, "broken", MIXTURE.replace("= 2", "= 3"), "steps = 12")
    fails(here.train(changed, "--resume", "auto"), "--accept data")
    here.finish(changed, "--resume", "auto", "--accept", "data")
    fails(here.train(config(here, "wrong", MIXTURE + "\nshuffle = false")), "mixture draws rows in a random order")


def test_a_mixture_has_the_same_samples_on_each_grid(here):
    expected = None
    for number, grid in enumerate(("shape = 'ddp'", "shape = 'megatron'", "shape = 'fsdp'\nmicro_batches = 2")):
        with given(grid=grid):
            here.finish(config(here, f"grid{number}", MIXTURE, grid=grid))
            losses = [line["loss"] for line in here.metrics(f"grid{number}") if "loss" in line]
            expected = expected or losses
            assert np.allclose(losses, expected, rtol=1e-5)


@looped(
    "said, data",
    [
        ("pairs.py:raising: item 77 raised ValueError: no luck", 'build = "HERE/pairs.py:raising"\nvalidation = 0.0'),
        ("pairs.py:nothing has no __len__ or no __getitem__", 'build = "HERE/pairs.py:nothing"'),
        ("pairs.py:broken raised an error: ZeroDivisionError", 'build = "HERE/pairs.py:broken"'),
        ("item 77 raised SystemExit: no file", 'build = "HERE/pairs.py:ending"\nvalidation = 0.0'),
        ("text.bin is a file of tokens, not of samples and targets: read it with TokenDataSet (data.sequence)",
         'file = "HERE/text.bin"\ninputs = "tokens"\ntargets = "tokens"'),
        ("has no function absent; it has", 'build = "HERE/pairs.py:absent"'),
        ("validation_build = HERE/pairs.py:broken raised an error", 'file = "HERE/data.h5"\ntargets = "field"\n'
         'validation_build = "HERE/pairs.py:broken"'),
        ("pairs.py:labels has 12 features and 1 targets a row", 'file = "HERE/data.h5"\ntargets = "field"\n'
         'validation_build = "HERE/pairs.py:labels"'),
    ],
)  # fmt: skip
def test_errors_of_a_users_file_end_every_rank_with_one_line(here, said, data):
    fails(here.train(config(here, "wrong", data)), said.replace("HERE", str(here.folder)))


def test_keys_that_do_not_go_together():
    file = {"file": "x.h5"}
    for values, text in (
        ({}, "data: the data are missing: set file, mixture or build"),
        (file | {"build": "a.py:b"}, "file and build are given: leave all but one of file, mixture and build out"),
        ({"mixture": {}}, "data.mixture = {}: needed is a table of files with weights above 0"),
        ({"mixture": {"a.h5": 0}}, "data.mixture = {'a.h5': 0}: needed is a table of files with weights above 0"),
        ({"mixture": ["a.h5"]}, "data.mixture = ['a.h5']: needed is a table of files"),
        ({"mixture": {"a.h5": 1}, "shuffle": False}, "mixture draws rows in a random order"),
        (file | {"validation_file": "y.h5", "validation_build": "a.py:b"}, "leave one of them out"),
        ({"build": "a.py:b", "targets": "field"}, "inputs and targets name data sets of files, which build has not"),
        (file | {"vocabulary": 7}, "data.vocabulary is for tokens: set data.sequence, or leave it out"),
        (file | {"token_dtype": "uint16"}, "data.token_dtype is for tokens"),
        (file | {"sequence": 8, "token_dtype": "int16"}, 'data.token_dtype = \'int16\': needed is "uint16", "uint32"'),
    ):
        with given(values=values), pytest.raises(Pmm3dError) as caught:
            checked({"data": values})
        assert text in str(caught.value)


def test_a_configuration_is_printed_and_stored_with_its_source(here):
    for data in ({"mixture": {"b.h5": 2.0, "a.h5": 1.0}}, {"build": "a.py:b"}, {"file": "t.bin"}):
        found = checked({"data": data})
        assert checked(found.settings()).data == found.data
        text = as_toml(found)
        assert f"{next(iter(data))} = " in text
    assert [str(file) for file in checked({"data": {"mixture": {"b.h5": 2, "a.h5": 1}}}).data.files] == ["b.h5", "a.h5"]


def test_sizes_and_dry_steps_of_each_source(here):
    """As `pmm3d plan train` reads them."""
    for data, sizes in (
        ({"build": f"{here.folder}/pairs.py:labels"}, (12, 3, True, 297)),
        ({"mixture": {f"{here.folder}/one.h5": 2, f"{here.folder}/two.h5": 1}}, (12, 3, True, 297)),
        ({"file": f"{here.folder}/text.bin", "sequence": 16, "vocabulary": 32}, (1, 32, True, 33)),
    ):
        network = {"kind": "gpt", "hidden": 8, "heads": 2} if "sequence" in data else {}
        found = checked({"data": data, "network": network})
        with given(data=data):
            assert tuple(sizes_in_file(found)) == sizes
            assert DrySteps(found).samples == sizes
    with pytest.raises(Pmm3dError, match="cannot open none.h5: there is no such file"):
        DrySteps(checked({"data": {"mixture": {f"{here.folder}/one.h5": 1, "none.h5": 1}}}))


@pytest.mark.parallel([2])
def test_the_data_set_on_the_page_is_trained(here, comm):
    pytest.importorskip("torch")
    page = (Path(__file__).resolve().parents[2] / "docs" / "training.md").read_text()
    [program] = [text for text in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "def build():" in text]
    on_rank_0(comm, lambda: (here.folder / "waves.py").write_text(program))
    here.finish(config(here, "waves", 'build = "HERE/waves.py:build"\nbatch_size = 100', "epochs = 3"))
    validations = [line["validation"] for line in here.metrics("waves") if "validation" in line]
    assert validations[-1]["loss"] < validations[0]["loss"] and "accuracy" in validations[0]
