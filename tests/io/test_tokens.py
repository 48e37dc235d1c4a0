"""Sequences of a text on every grid: each token once per epoch, with the next token, and on each rank its part."""

from itertools import product

import h5py
import numpy as np
import pytest
from loops import given, looped
from networks import ALL_GRIDS
from samples import to_numpy

from pmm3d import DataError, Grid
from pmm3d.io import TokenDataSet
from pmm3d.layout import EMPTY, ORDERS, Layout
from pmm3d.nn.transformer import positions, row_positions, token_layout

pytestmark = [pytest.mark.parallel([4], thorough=[1, 2]), pytest.mark.deadline(240)]

SEQUENCE, SAMPLES = 8, 11
TEXT = (np.arange(SEQUENCE * SAMPLES + 4) * 7 % 97 + np.arange(SEQUENCE * SAMPLES + 4)).astype("uint8")
"""SAMPLES sequences, and three further tokens that are not used."""
STARTS = np.array([0, 3, SEQUENCE, 20, 21, 60])
"""First tokens of documents."""


@pytest.fixture
def text(write):
    return write(
        tokens=TEXT,
        wide=TEXT.astype("int32") + 300,
        chunked=TEXT,
        table=TEXT[:, None],
        starts=STARTS,
        late=np.array([0, len(TEXT)]),
    )


def local(matrix):
    """This rank's shard. Asserts its layout and that it contains integers."""
    assert matrix.dtype == "int64" and matrix.labels_below == 256
    own = to_numpy(matrix.local, matrix.library)
    whole = to_numpy(matrix.gather(), matrix.library)
    assert np.array_equal(own, whole[matrix.box.within(EMPTY)])
    return whole


def sequences(loader):
    """Numbers of the sequences in the rest of an epoch, by batch."""
    batches = []
    for x, y in loader:
        tokens, following = local(x).reshape(-1, SEQUENCE), local(y).reshape(-1, SEQUENCE)
        starts = [
            next(start for start in range(SAMPLES) if np.array_equal(TEXT[start * SEQUENCE :][:SEQUENCE], row))
            for row in tokens
        ]
        for start, row in zip(starts, following):
            assert np.array_equal(row, TEXT[start * SEQUENCE + 1 :][:SEQUENCE])
        batches.append(starts)
    return batches


def test_each_token_once_per_epoch_on_every_grid(comm, nranks, text):
    seen = []
    for shape, size in ALL_GRIDS[nranks]:
        with given(shape=shape, data=size), Grid(comm, shape, data=size) as grid:
            with TokenDataSet(grid, text, SEQUENCE) as data:
                assert (data.samples, data.vocabulary, data.classes) == (SAMPLES, 256, 256)
                for batch_size, micro_batches in ((3, 1), (4, 2), (100, 1)):
                    loader = data.loader(batch_size, seed=3, micro_batches=micro_batches)
                    batches = sequences(loader)
                    assert sorted(sum(batches, [])) == list(range(SAMPLES))
                    x, _ = next(iter(loader))
                    assert x.layout == Layout(("data", "z"), (), units=(SEQUENCE, 1))
                seen.append(batches)
    assert all(batches == seen[0] for batches in seen)


def test_a_state_of_other_sequences_is_refused(grid, text):
    with TokenDataSet(grid, text, SEQUENCE) as data, TokenDataSet(grid, text, SEQUENCE // 2) as other:
        with pytest.raises(DataError, match="the state belongs to other batches"):
            other.loader(3, seed=1).load_state(data.loader(3, seed=1).state())


@looped("order", ORDERS)
def test_along_seq_each_rank_reads_its_rows(comm, nranks, text, order):
    """One sequence on two ranks, and two on two ranks, with each order of rows, from memory and from the file. The
    order may be that of halves of sequences, or of two sequences."""
    for name, sequences_here in product(("tokens", "chunked"), (1, 2)):
        seq = min(2, nranks)
        with (
            given(order=order, name=name, sequences_here=sequences_here),
            Grid(comm, (1, 1, nranks // seq), seq=seq) as grid,
            TokenDataSet(grid, text, SEQUENCE, tokens=name, cache_bytes=len(name) % 6 * 2**20) as data,
        ):
            layout, samples = token_layout(grid, SEQUENCE, order=order), sequences_here * grid.shape.z
            x, y = next(iter(data.loader(samples, shuffle=False, layout=layout)))
            rows = np.arange(x.box.r0, x.box.r1)
            own = positions(order, SEQUENCE, seq)[rows % SEQUENCE]
            for shift, matrix in enumerate((x, y)):
                expected = TEXT[rows // SEQUENCE * SEQUENCE + own + shift]
                whole = to_numpy(matrix.gather(), matrix.library).ravel()
                assert np.array_equal(whole, TEXT[shift : shift + len(whole)])
                assert np.array_equal(to_numpy(matrix.local, matrix.library).ravel(), expected)
                assert matrix.layout == layout and len(rows) == samples * SEQUENCE // nranks
            other = token_layout(grid, SEQUENCE * sequences_here // 2 * sequences_here, order=order)
            x, _ = next(iter(data.loader(samples, shuffle=False, layout=other)))
            assert np.array_equal(to_numpy(x.gather(), x.library).ravel(), TEXT[: samples * SEQUENCE])


def test_a_second_column_has_the_document_of_each_token(comm, nranks, text):
    """Also with other orders of rows on ranks that share a sequence, and in a dry run."""
    numbers = np.repeat(np.arange(len(STARTS)), np.diff([*STARTS, len(TEXT)]))
    for order in ("plain", "zigzag"):
        seq = min(2, nranks)
        with (
            given(order=order),
            Grid(comm, (1, 1, nranks // seq), seq=seq) as grid,
            TokenDataSet(grid, text, SEQUENCE, documents="starts") as data,
        ):
            layout = token_layout(grid, SEQUENCE, order=order)
            loader = data.loader(4, shuffle=False, layout=layout)
            for batch, (x, y) in enumerate(loader):
                rows = np.arange(x.box.r0, x.box.r1)
                own = row_positions(layout, x.shape[0], x.box)
                places = (4 * batch + rows // SEQUENCE) * SEQUENCE + own
                assert (x.shape[1], y.shape[1], data.features) == (2, 1, 2)
                assert np.array_equal(to_numpy(x.local, x.library), np.stack([TEXT[places], numbers[places]], 1))
                assert np.array_equal(to_numpy(y.local, y.library)[:, 0], TEXT[places + 1])
            assert data.fingerprint != TokenDataSet(grid, text, SEQUENCE).fingerprint
    with Grid.dry((1, 1, 2)) as grid, TokenDataSet(grid, text, SEQUENCE, documents="starts") as data:
        x, y = next(iter(data.loader(3)))
        assert (x.shape, x.local.shape, x.dtype) == ((3 * SEQUENCE, 2), (2 * SEQUENCE, 2), "int64")
        assert (y.shape, y.local.shape, y.dtype) == ((3 * SEQUENCE, 1), (2 * SEQUENCE, 1), "int64")


def test_parts_and_reading_from_the_file(grid, text):
    """Without the cache, as for a longer text."""
    with TokenDataSet(grid, text, SEQUENCE, cache_bytes=0) as data:
        kept, held = data.split(0.3, last=True)
        assert sum(sequences(data.loader(2, rows=kept, shuffle=False)), []) == list(range(8))
        assert sum(sequences(data.loader(2, rows=held, shuffle=False)), []) == [8, 9, 10]
        assert sorted(sum(sequences(data.loader(4)), [])) == list(range(SAMPLES))


@looped(
    "said, sequence, options",
    [
        ("choose shorter sequences", 92, {}),
        ("sequence is a whole number of at least 2; got 1", 1, {}),
        ("has no attribute vocabulary", SEQUENCE, {"tokens": "wide"}),
        ("tokens are integers in one dim", SEQUENCE, {"tokens": "table"}),
        ("has no data set 'none'", SEQUENCE, {"tokens": "none"}),
        ("has no data set 'documents'", SEQUENCE, {"documents": "documents"}),
        ("'tokens' does not say where documents begin", SEQUENCE, {"documents": "tokens"}),
        ("'late' does not say where documents begin", SEQUENCE, {"documents": "late"}),
        ("the tokens of the vocabulary are 0 to 89", SEQUENCE, {"vocabulary": 90}),
    ],
)
def test_what_is_refused(grid, text, fails, said, sequence, options):
    fails(DataError, said, lambda: [*TokenDataSet(grid, text, sequence, **options).loader(3)])


def test_bytes_of_a_token(comm, write):
    path = write("counted.h5", tokens=TEXT)
    if comm.rank == 0:
        with h5py.File(path, "r+") as file:
            file["tokens"].attrs.update(bytes=3 * len(TEXT), vocabulary=300)
    comm.barrier()
    with Grid(comm, "ddp") as grid, TokenDataSet(grid, path, SEQUENCE) as data:
        assert (data.bytes_per_token, data.vocabulary) == (3.0, 300)
