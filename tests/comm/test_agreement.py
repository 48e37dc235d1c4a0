"""Errors of ranks that do not agree: which texts they contain, and that there are few at any number of ranks."""

from types import SimpleNamespace

import numpy as np
import pytest

from pmm3d import DisagreementError, Grid, GridError, OutOfMemoryError, Pmm3dError
from pmm3d.comm import agreement
from pmm3d.comm.agreement import MOST_CHARACTERS, MOST_TEXTS, Terms, agree
from pmm3d.layout import offsets


class ManyRanks:
    """One rank of many, in one process. The data of the other ranks is given; messages are counted."""

    def __init__(self, texts, monkeypatch):
        self.size, self.rank = len(texts), 0
        self.record = SimpleNamespace(members=tuple(range(self.size)))
        self.packed = [agreement._packed(text, Pmm3dError) if text else b"" for text in texts]
        self.rows = np.array([(agreement.digest(text), len(packed)) for text, packed in zip(texts, self.packed)])
        self.received, self.mine = 0, texts[0]
        monkeypatch.setattr(agreement, "gather_small", self.gather_small)
        monkeypatch.setattr(agreement, "all_gather_into", self.all_gather_into)

    def gather_small(self, link, mine):
        assert np.array_equal(mine, self.rows[0])
        return self.rows
        yield

    def all_gather_into(self, link, library, mine, texts, counts):
        assert len(mine) == counts[0]
        starts = offsets(counts)
        for rank in np.flatnonzero(counts):
            texts[starts[rank] : starts[rank + 1]] = np.frombuffer(self.packed[rank], np.uint8)
        self.received += sum(counts)
        return
        yield

    def uncounted(self, collective):
        return collective

    def reports(self):
        generator = agreement._exchanged(self, self.mine)
        try:
            while True:
                next(generator)
        except StopIteration as end:
            return end.value


def test_ten_thousand_ranks_that_all_differ_make_a_short_error(monkeypatch):
    ranks = ManyRanks([f"call({rank})" for rank in range(10_000)], monkeypatch)
    reports = ranks.reports()
    assert str(reports) == "; ".join(f"rank {rank}: call({rank})" for rank in range(MOST_TEXTS)) + (
        f"; other texts of {10_000 - MOST_TEXTS:,} more ranks"
    )
    assert ranks.received < 1000 and reports.ranks == 10_000


def test_a_text_crosses_once_however_many_ranks_say_it(monkeypatch):
    ranks = ManyRanks(["one" if rank % 2 else "other" for rank in range(10_000)], monkeypatch)
    reports = ranks.reports()
    assert [one.text for one in reports.first] == ["other", "one"] and reports.others == []
    assert reports.first[1].ranks == list(range(1, 10_000, 2))
    assert ranks.received == len(ranks.packed[0]) + len(ranks.packed[1]) and len(str(reports)) < 300


def test_ranks_without_a_text_send_nothing_and_long_texts_are_cut(monkeypatch):
    reports = ManyRanks(["", "bad", "", "bad"], monkeypatch).reports()
    assert str(reports) == "ranks 1, 3: bad" and reports.ranks == 2
    reports = ManyRanks(["x" * 10**6, "y"], monkeypatch).reports()
    assert reports.first[0].text == "x" * MOST_CHARACTERS + "..."


class LocalError(Pmm3dError):
    pass


@pytest.fixture
def grid(comm):
    with Grid(comm, (1, 1, comm.size)) as grid:
        yield grid


@pytest.mark.parallel([2], thorough=[4])
def test_different_calls_are_told_with_their_lines(grid, fails):
    def another():
        with grid.collective_call(f"call {grid.rank}", 1):
            pass

    text = fails(DisagreementError, "^the ranks made different calls. rank 0: call 0 at .*rank 1: call 1 at ", another)
    assert text.count("test_agreement.py:") == grid.size and " in another" in text and "passed" not in text


@pytest.mark.parallel([4])
def test_an_error_of_some_ranks_is_told_once_in_its_class(grid, fails):
    """Also in a class that is not of pmm3d, and with a text that UTF-8 does not have. A class that other ranks cannot
    find is replaced by the common one."""

    class HereOnly(Pmm3dError):
        pass

    for error, seen, words in (
        (GridError("bad luck"), GridError, "GridError: bad luck$"),
        (LocalError("bad luck in \udcff.h5"), LocalError, "LocalError: bad luck in "),
        (HereOnly("bad luck"), Pmm3dError, "HereOnly: bad luck$"),
    ):

        def call(error=error):
            with grid.collective_call("sharing"):
                if grid.rank:
                    raise error

        assert fails(seen, f"^sharing failed on 3 of 4 ranks. ranks 1-3: {words}", call).count("bad luck") == 1


@pytest.mark.parallel([4])
def test_ranks_without_memory_share_a_line_and_the_fullest_explains(grid, fails, monkeypatch):
    monkeypatch.setattr(agreement, "resident_memory", lambda: 10**9 + 10**8 * (grid.rank == 2))
    text = fails(
        OutOfMemoryError,
        r"^filling failed on 3 of 4 ranks. ranks 1-3: OutOfMemoryError. The rank that holds "
        r"the most memory: rank 2 \(host \S+\) is out of memory: no room for 12 rows. ",
        lambda: _fill(grid),
    )
    assert text.count("Use more ranks") == text.count("Predicted for a rank") == text.count("no room") == 1


def _fill(grid):
    with grid.collective_call("filling"):
        if grid.rank:
            raise MemoryError(f"no room for {10 + grid.rank} rows")


@pytest.mark.parallel([1, 2])
def test_an_error_that_all_ranks_share_is_the_one_that_was_raised(grid):
    """It has its own traceback, class and attributes, and no text is added."""
    error = LocalError("all of us")
    with pytest.raises(LocalError) as caught:
        with grid.collective_call("sharing"):
            raise error
    assert caught.value is error and error.everywhere and error.__context__ is None


@pytest.mark.parallel([4], thorough=[2])
def test_numbers_cross_with_the_agreement(grid, fails):
    def compared(text):
        agreeing = lambda link: agree(link, "rows", "rows differ.", Terms(text), [grid.rank, 7], GridError)
        return grid.everyone.begin("rows", agreeing).wait()

    assert compared("same").tolist() == [[rank, 7] for rank in range(grid.size)]
    fails(GridError, "rows differ. rank 0: text 0; rank 1: text 1", lambda: compared(f"text {grid.rank}"))


def test_names_of_other_objects_are_no_errors():
    for name in ("os.system", "builtins.OSError", "pmm3d.errors", ""):
        assert agreement._kind_named(name) is Pmm3dError
