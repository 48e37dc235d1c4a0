"""Errors of ranks that do not agree: which texts they contain, and that there are few at any number of ranks."""

from queue import Queue
from threading import Event, Thread

import numpy as np
import pytest
from fake_link import run

from pmm3d import DisagreementError, Grid, GridError, OutOfMemoryError, Pmm3dError
from pmm3d.comm import CallersCall, agreement
from pmm3d.comm.agreement import MOST_ARGUMENTS, MOST_CHARACTERS, MOST_TEXTS, Terms, agree


def reports_of(texts):
    """(the texts as every rank learns them, the bytes of texts that each rank receives)."""
    reports, links = run(len(texts), lambda link: agreement._exchanged(link, texts[link.rank]))
    assert len(set(map(str, reports))) == 1
    return reports[0], {link.record.received - 16 * (link.size - 1) for link in links}


def test_many_ranks_that_all_differ_make_a_short_error():
    reports, received = reports_of([f"call({rank})" for rank in range(300)])
    assert str(reports) == "; ".join(f"rank {rank}: call({rank})" for rank in range(MOST_TEXTS)) + (
        f"; other texts of {300 - MOST_TEXTS:,} more ranks"
    )
    assert max(received) < 1000 and reports.ranks == 300


def test_a_text_crosses_once_however_many_ranks_say_it():
    reports, received = reports_of(["one" if rank % 2 else "other" for rank in range(300)])
    assert [one.text for one in reports.first] == ["other", "one"] and reports.others == []
    assert reports.first[1].ranks == list(range(1, 300, 2))
    assert max(received) < 100 and len(str(reports)) < 300


def test_ranks_without_a_text_send_nothing_and_long_texts_are_cut():
    reports, _ = reports_of(["", "bad", "", "bad"])
    assert str(reports) == "ranks 1, 3: bad" and reports.ranks == 2
    reports, _ = reports_of(["x" * 10**6, "y"])
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
def test_only_arguments_that_differ_are_told(grid, fails):
    """Also of more ranks and arguments than have a text of their own."""
    last = grid.rank == 3

    def call(*arguments):
        def collective():
            with grid.collective_call("call", *arguments):
                pass

        return collective

    fails(
        DisagreementError,
        r"ranks 0-2: call\(..., argument 3: 'b', ..., argument 5: 7\); rank 3: call\(..., .* 3: 'c', ..., .* 5: 8\)$",
        call(1, 2, "bc"[last], None, 7 + last),
    )
    fails(DisagreementError, r"ranks 0-2: call\(1\); rank 3: call\(1, 2\)$", call(1, *[2] * last))
    many = [1] * MOST_ARGUMENTS
    fails(
        DisagreementError, r"ranks 0-2: call\(1, 1,[1, ]+\.\.\.; rank 3: call\(2, 1,[1, ]+", call(1 + last, *many * 4)
    )


@pytest.mark.parallel([2])
def test_arguments_are_compared_for_a_message_by_their_canonical_form(grid, fails):
    """Equal arguments with different texts are left out. Of different ones with equal texts, the forms are shown."""
    large = np.zeros(2000)
    large[1000] = grid.rank

    def call():
        with grid.collective_call("call", [2, 2.0][grid.rank], large):
            pass

    form = r"call\(..., argument 2: array \(2000,\) float64 \w+\)"
    fails(DisagreementError, f"rank 0: {form}; rank 1: {form}$", call)


def test_an_agreement_that_another_thread_ends_is_told_by_the_call_that_began_it():
    ended = Event()

    def began(link):
        difference = agree(link, "inner", "they differ.", Terms(f"inner {link.rank}"), [])
        begun = Queue()

        def call():
            begun.put(next(difference))
            ended.wait()

        thread = Thread(target=lambda: CallersCall("pmm3d_call", lambda: [f"m={link.rank}"]).run(call))
        thread.start()
        yield begun.get()
        try:
            yield from difference
        except DisagreementError as error:
            return str(error)
        finally:
            ended.set()
            thread.join()

    told, _ = run(2, began)
    assert set(told) == {"pmm3d_call: they differ. rank 0: pmm3d_call(m=0); rank 1: pmm3d_call(m=1)"}


@pytest.mark.parallel([4])
def test_a_call_of_a_c_program_is_told_by_its_name_and_arguments(grid, fails):
    """Nothing is told of Python, unless only Python's arguments differ. The texts of the arguments are made for errors
    only."""
    last, made = grid.rank == 3, []

    def operation(*arguments, error=None):
        with grid.collective_call("inner", *arguments):
            if error:
                raise error

    def call(arguments, inner, name="pmm3d_call"):
        texts = lambda: made.append(1) or arguments
        return lambda: CallersCall(name, texts).run(inner)

    different, equal = [f"m={2 + last}", "n=4"], ["m=2", "n=4"]
    call(equal, lambda: operation(1))()
    assert not made
    passed = "^pmm3d_call: the ranks passed different arguments. ranks 0-2: "
    fails(
        DisagreementError,
        rf"{passed}pmm3d_call\(m=2, ...\); rank 3: pmm3d_call\(m=3, ...\)$",
        call(different, lambda: operation(2 + last, 4)),
    )
    fails(
        DisagreementError,
        rf"{passed}inner\(argument 1: 1, ...\); rank 3: inner\(argument 1: 2, ...\)$",
        call(equal, lambda: operation(1 + last, 0)),
    )
    fails(
        LocalError,
        "^pmm3d_call failed on 1 of 4 ranks. rank 3: LocalError: bad luck$",
        call(equal, lambda: operation(*[1] * (not last), error=LocalError("bad luck") if last else None)),
    )
    fails(
        DisagreementError,
        "^the ranks made different calls. ranks 0-2: pmm3d_call; rank 3: pmm3d_end$",
        call(equal, lambda: operation(1 + last), "pmm3d_end" if last else "pmm3d_call"),
    )


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
