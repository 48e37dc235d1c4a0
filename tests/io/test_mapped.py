"""Mapped files of tokens, as nanoGPT and Megatron write them: the batches of an HDF5 file, and unusable files."""

import os
import struct

import numpy as np
import pytest
from loops import given, looped
from on_disk import on_rank_0
from samples import to_numpy

from pmm3d import DataError
from pmm3d.io import DataSet, Mixture, TokenDataSet
from pmm3d.io.mapped import Mapped

pytestmark = [pytest.mark.parallel([2], thorough=[1, 4]), pytest.mark.deadline(240)]

SEQUENCE, VOCABULARY = 8, 300
TOKENS = np.arange(SEQUENCE * 11 + 4) * 37 % VOCABULARY
LENGTHS = 5, 3, 0, 40, 44
"""Lengths of the sequences of an index."""
DOCUMENTS = 0, 2, 2, 3, 4, 5
"""First sequence of each document, and the number of sequences. One document has no sequence, one only an empty one."""
STARTS = 0, 8, 48
"""First tokens of the documents with tokens."""
CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def write_index(path, dtype="uint16", lengths=LENGTHS, documents=DOCUMENTS, **changes):
    """Write the files of an indexed data set, from the description of the format."""
    size = np.dtype(dtype).itemsize
    (TOKENS % 120 if size == 1 else TOKENS).astype(dtype).tofile(path.with_suffix(".bin"))
    pointers = changes.get("pointers", np.cumsum([0, *lengths[:-1]]) * size)
    with open(path.with_suffix(".idx"), "wb") as file:
        file.write(changes.get("magic", b"MMIDIDX\x00\x00"))
        file.write(struct.pack("<Q", changes.get("version", 1)))
        file.write(struct.pack("<B", changes.get("code", CODES[dtype])))
        file.write(struct.pack("<QQ", changes.get("sequences", len(lengths)), len(documents)))
        file.write(np.array(lengths, "<i4").tobytes())
        file.write(np.array(pointers, "<i8").tobytes())
        file.write(np.array(documents, "<i8").tobytes())
        file.write(changes.get("more", b""))


def assert_same_batches(grid, one, two, **options):
    for shuffle in (False, True):
        loaders = (data.loader(4, seed=3, shuffle=shuffle, **options) for data in (one, two))
        for batches in zip(*loaders, strict=True):
            for mine, other in zip(*batches):
                assert mine.shape == other.shape and mine.labels_below == other.labels_below
                assert np.array_equal(*(to_numpy(each.local, each.library) for each in (mine, other)))


@looped("dtype", ["uint16", "uint32"])
def test_a_raw_file_has_the_batches_of_an_hdf5_file(grid, comm, shared_path, write, dtype):
    raw, text = shared_path / f"{dtype}.bin", write(f"{dtype}.h5", tokens=TOKENS)
    on_rank_0(comm, lambda: TOKENS.astype(dtype).tofile(raw))
    options = {"vocabulary": VOCABULARY}
    with (
        TokenDataSet(grid, text, SEQUENCE, **options) as file,
        TokenDataSet(grid, raw, SEQUENCE, token_dtype=dtype, **options) as data,
    ):
        assert (data.samples, data.classes, data.facts, data.bytes_per_token) == (11, VOCABULARY, {}, None)
        assert_same_batches(grid, data, file)
        assert data.split(0.2, last=True) == file.split(0.2, last=True)


def test_a_large_vocabulary_has_tokens_of_32_bits(some_grid, comm, shared_path):
    on_rank_0(comm, lambda: (TOKENS + 70000).astype("uint32").tofile(shared_path / "large.bin"))
    with TokenDataSet(some_grid, shared_path / "large.bin", SEQUENCE, vocabulary=70300) as data:
        x, _ = next(iter(data.loader(11, shuffle=False)))
        assert np.array_equal(to_numpy(x.gather(), x.library).ravel(), TOKENS[:88] + 70000)


@looped("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_an_indexed_data_set_has_the_batches_of_an_hdf5_file(grid, comm, shared_path, write, dtype):
    """By the name of either file, with and without documents."""
    path = shared_path / f"{dtype}_text_document.bin"
    on_rank_0(comm, lambda: write_index(path, dtype))
    text = write(f"{dtype}.h5", tokens=TOKENS % 120 if dtype.endswith("t8") else TOKENS, documents=np.array(STARTS))
    for documents, name in ((None, path), ("documents", path.with_suffix(".idx"))):
        options = {"vocabulary": VOCABULARY, "documents": documents}
        with (
            given(documents=documents),
            TokenDataSet(grid, text, SEQUENCE, **options) as file,
            TokenDataSet(grid, name, SEQUENCE, **options) as data,
        ):
            assert_same_batches(grid, data, file)


def test_a_rank_maps_only_the_tokens_of_its_rows(grid, comm, shared_path, monkeypatch):
    path, mapped, read = shared_path / "some.bin", [], Mapped.__getitem__
    on_rank_0(comm, lambda: TOKENS.astype("uint16").tofile(path))
    with TokenDataSet(grid, path, SEQUENCE, vocabulary=VOCABULARY) as data:
        monkeypatch.setattr(Mapped, "__getitem__", lambda self, own: mapped.append(own) or read(self, own))
        x, _ = next(iter(data.loader(11, shuffle=False, drop_last=True, prefetch=1)))
        own = slice(x.box.r0, x.box.r1)
        assert mapped[:2] == [own, slice(own.start + 1, own.stop + 1)] and own.stop - own.start == x.local.shape[0]


@looped(
    "said, changes, options",
    [
        ("is no index of Megatron: it does not begin with MMIDIDX", {"magic": b"MMIDIDY\x00\x00"}, {}),
        ("is an index of version 2; this version of pmm3d reads version 1", {"version": 2}, {}),
        ("the numbers have the type float32; tokens are integers", {"dtype": "float32"}, {}),
        ("the numbers have the type code 77", {"code": 77}, {}),
        ("has 142 bytes; an index of 6 sequences and 6 entries for documents has 154", {"sequences": 6}, {}),
        ("is a multimodal index", {"more": bytes(5)}, {}),
        ("has 184 bytes, and its index .* describes 182", {"lengths": (5, 3, 0, 40, 43)}, {}),
        ("sequence 1 begins at byte 12 of the .bin file; the sequences before it end at byte 10", {
            "pointers": (0, 12, 16, 16, 96)}, {}),
        ("the table of documents does not ascend from 0", {"documents": (0, 3, 2, 5)}, {}),
        ("the table of documents does not ascend from 0", {"documents": (0, 3, 4)}, {"documents": "documents"}),
        ("has no attribute vocabulary: .* or give vocabulary= .data.vocabulary.", {}, {"vocabulary": None}),
        ("token_dtype .data.token_dtype. is for a .bin file without an index", {}, {"token_dtype": "uint16"}),
        ("has no data set 'text'; it contains 'tokens' and 'documents'", {}, {"tokens": "text"}),
        ("the token 297 at position 81; the tokens of the vocabulary are 0 to 296", {}, {"vocabulary": 297}),
    ],
)  # fmt: skip
def test_indexed_data_sets_that_cannot_be_used(some_grid, comm, shared_path, fails, said, changes, options):
    path = shared_path / "odd.bin"
    on_rank_0(comm, lambda: write_index(path, **changes))
    options = {"vocabulary": VOCABULARY} | options
    fails(DataError, said, lambda: [*TokenDataSet(some_grid, path, SEQUENCE, **options).loader(3, shuffle=False)])


@looped(
    "said, contents, options",
    [
        ("has 5 bytes, which are no tokens of uint16", b"12345", {}),
        ("has 0 bytes", b"", {}),
        ("every second of the first 184 tokens is 0, as if the tokens were uint32", TOKENS.astype("<u4"), {}),
        ("begins with the header of llm.c", struct.pack("<ii", 20240520, 1) + bytes(1016), {}),
        ("has 7 tokens; a sequence of 8", TOKENS[:7].astype("<u2"), {}),
        ("has no data set 'documents'; it contains 'tokens' without a table of documents", TOKENS.astype("<u2"), {
            "documents": "documents"}),
        ("token_dtype is 'uint16' or 'uint32'; got 'int32'", TOKENS.astype("<u2"), {"token_dtype": "int32"}),
        ("the token 3670053 at position 0; the tokens of the vocabulary are 0 to 299 .read as uint32; token_dtype= "
         ".data.token_dtype. names the type", TOKENS[1:].astype("<u2")[:90], {"token_dtype": "uint32"}),
        (r"has no data set 'text'; it contains 'tokens'\. Other names are for HDF5 files", TOKENS.astype("<u2"), {
            "tokens": "text"}),
    ],
)  # fmt: skip
def test_raw_files_that_cannot_be_used(some_grid, comm, shared_path, fails, said, contents, options):
    path = shared_path / "odd_raw.bin"
    on_rank_0(comm, lambda: path.write_bytes(bytes(contents)))
    options = {"vocabulary": VOCABULARY} | options
    said = said.replace("3670053", str(37 + 74 * 2**16))
    fails(DataError, said, lambda: [*TokenDataSet(some_grid, path, SEQUENCE, **options).loader(3, shuffle=False)])


def test_files_that_are_missing_or_no_samples(some_grid, comm, shared_path, fails):
    fails(
        DataError, "cannot open .*none.bin: No such file", lambda: TokenDataSet(some_grid, shared_path / "none.idx", 8)
    )
    on_rank_0(comm, lambda: TOKENS.astype("uint16").tofile(shared_path / "text.bin"))
    said = "text.bin is a file of tokens, not of samples and targets: read it with TokenDataSet .data.sequence."
    for names in ((), ("tokens", "tokens")):
        fails(DataError, said, lambda names=names: DataSet(some_grid, shared_path / "text.bin", *names))
    mixture = Mixture([([(1.0, 2.0)], 1), (shared_path / "text.bin", 1)])
    fails(DataError, said, lambda: DataSet(some_grid, mixture))


def test_an_hdf5_file_with_the_ending_of_tokens(some_grid, write):
    """It is recognised by its first bytes."""
    path = write("named.bin", tokens=TOKENS.astype("uint16"), x=np.ones((5, 2)), y=np.arange(5) % 2)
    with DataSet(some_grid, path) as data:
        assert (data.samples, data.classes) == (5, 2)
    with TokenDataSet(some_grid, path, SEQUENCE, vocabulary=VOCABULARY) as data:
        assert data.samples == 11


def test_a_file_that_changes_or_becomes_shorter_is_an_error_on_every_rank(some_grid, comm, shared_path, fails):
    path = shared_path / "changing.bin"
    for number, contents in enumerate((TOKENS[::-1], TOKENS[:10])):
        on_rank_0(comm, lambda: TOKENS.astype("uint16").tofile(path))
        with TokenDataSet(some_grid, path, SEQUENCE, vocabulary=VOCABULARY) as data:
            on_rank_0(comm, lambda contents=contents: contents.astype("uint16").tofile(path))
            on_rank_0(comm, lambda number=number: os.utime(path, (0, number)))
            comm.barrier()
            fails(DataError, "changed since it was opened", lambda: [*data.loader(11, shuffle=False)])
