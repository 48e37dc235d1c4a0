"""The diagnosis of the watchdog, from invented states of ranks."""

import errno
import os
import pickle
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from loops import given
from mpi4py import MPI

from pmm3d.comm.hang import (
    SILENT,
    UNBORN,
    CallersCall,
    Collective,
    RankStatus,
    Waiting,
    Waits,
    absent,
    diagnosis,
    endless,
    long_wait,
    source_line,
    stack_of,
)
from pmm3d.comm.nodes import COMPUTES, DEAD, Process, Processes, process_state, row
from pmm3d.comm.watch import Inquiry, Watch

HOSTS = [Process("n1", 10), Process("n1", 11), Process("n2", 12), Process("n2", 13), Process("n3", 14)]
LIMIT = "The limit is 9 s."


def waits(rank, name, number=1, axis="x", members=(0, 1, 2, 3), line="solver.py:88 in solve", call="", **more):
    return RankStatus(
        rank,
        {axis: (number, name)} | more.pop("begun", {}),
        Waiting(Collective(axis, name, number, members), 3.0, line, call),
        **more,
    )


def elsewhere(rank, number=0, axis="x", name="earlier", **more):
    return RankStatus(rank, {axis: (number, name)}, stack="    File user.py, line 3\n", **more)


def by_rank(*answers):
    return {answer.rank: answer for answer in answers}


CHAIN = [
    waits(0, "shift", members=(0, 1), begun={"z": (1, "shift")}),
    waits(1, "shift", axis="y", members=(1, 3)),
    waits(2, "shift", axis="z", members=(2, 0)),
]
"""Rank 3 does not answer. Rank 2 waits for messages that are on their way."""
BEHIND = [*CHAIN[:2], waits(2, "shift", axis="z", members=(2, 4)), elsewhere(4)]
NETWORK = "All members have begun all_gather #5 on axis x: messages do not arrive (the network)"
STATES = {
    "ranks wait for each other": (
        [
            waits(rank, "shift", axis=axis, members=members)
            for rank, axis, members in ((0, "x", (0, 1)), (1, "y", (1, 3)), (2, "y", (0, 2)), (3, "x", (2, 3)))
        ],
        {0, 1, 2, 3},
        ["This is a deadlock"],
    ),
    "one computes, for whom two wait": (
        [waits(0, "shift", members=(0, 1)), elsewhere(1), waits(2, "shift", axis="y", members=(0, 2))],
        set(),
        [],
    ),
    "messages are on their way": ([waits(rank, "all_gather", 5) for rank in range(4)], set(), [NETWORK]),
    "all wait for one that waits for messages": (
        [*(waits(rank, "all_reduce", 7) for rank in range(3)), waits(3, "all_gather", 5)],
        set(),
        [NETWORK],
    ),
    "a chain ends at one who has left": (
        CHAIN,
        {0, 1},
        ["never came: it has left the program (its program has ended)"],
        {3: "its program has ended"},
    ),
    "one is dead": (
        [waits(0, "shift", members=(0, 1)), elsewhere(2, states={1: DEAD}), elsewhere(3)],
        {0},
        [f"never came: {DEAD}"],
    ),
    "one is said to be silent": (
        [waits(0, "shift", members=(0, 1)), elsewhere(2, states={1: SILENT}), elsewhere(3)],
        set(),
        [f"never came: {SILENT}"],
    ),
    "one was said to be dead, and answers": (
        [waits(0, "shift", members=(0, 1)), elsewhere(2, states={1: DEAD}), elsewhere(1)],
        set(),
        [],
    ),
    "a chain ends at one that computes": (
        [*CHAIN[:2], elsewhere(3)],
        set(),
        [
            "ranks 0-1 have waited for more than 2 s. The job goes on.\n",
            "rank 3 (host n2, pid 13) never came: its last collective",
            "File user.py, line 3",
        ],
    ),
    "one has begun it and left": (
        [waits(0, "shift", members=(0, 1)), elsewhere(1, 1, name="shift")],
        set(),
        ["has begun it, and does not finish"],
    ),
    "calls of a C program": (
        [
            waits(0, "agreement on matmul", 2, line="pmm3d_matmul", call="pmm3d_matmul"),
            elsewhere(1, 1, name="agreement on Grid"),
        ],
        set(),
        [
            "rank 0 waits in agreement on pmm3d_matmul #2 on axis x for 3.0 s, at pmm3d_matmul\n",
            "rank 1 (host n1, pid 11) never came: its last collective on axis x is agreement #1;",
        ],
    ),
    "actions of a pipeline": (
        [waits(0, "all_gather", doing="0B0"), elsewhere(1, doing="1F3")],
        set(),
        [
            "rank 0 waits in all_gather #1 on axis x for 3.0 s, in 0B0, at solver.py:88 in solve\n",
            "rank 1 (host n1, pid 11) never came",
            "it is in 1F3, at\n    File user.py, line 3",
        ],
    ),
    "a silent rank counts as lost": (BEHIND, {0, 1}, [f"rank 3 (host n2, pid 13) never came: {SILENT}"], {}, [3]),
    **{
        f"a silent rank is seen: {state}": (
            [*BEHIND[:3], elsewhere(4, states={3: state})],
            ranks,
            [f"rank 3 (host n2, pid 13) never came: {state}"],
            {},
            [3],
        )
        for state, ranks in ((COMPUTES, set()), (DEAD, {0, 1}), (SILENT, {0, 1}))
    },
    "a collective waits for another one, and that for one that computes": (
        [
            *(waits(rank, "sum", members=(0, 1), begun={"all": (1, "sum")}) for rank in range(2)),
            elsewhere(2, axis="all"),
        ],
        set(),
        ["rank 2 (host n2, pid 12) waits in no collective: it is at\n    File"],
    ),
    "all but one wait in one line": (
        [*(waits(rank, "all_gather (gather A)", 5) for rank in (0, 1, 3)), elsewhere(2, 4)],
        set(),
        [
            "ranks 0-1, 3 wait in all_gather (gather A) #5 on axis x for 3.0 s, at solver.py:88 in solve",
            "rank 2 (host n2, pid 12) never came: its last collective on axis x is earlier #4; it is at\n    File",
        ],
    ),
}
"""States of the ranks, those whose waits never end, words of the report; then ranks that have left, and silent ones."""


def test_absent_are_those_that_have_not_begun_it_or_another_one_or_do_not_answer():
    answers = by_rank(waits(0, "all_gather", 5), elsewhere(1, 4), elsewhere(2, 6))
    assert absent(answers[0].waiting.collective, answers) == [1, 3]
    answers |= by_rank(waits(3, "shift", 5))
    assert absent(answers[3].waiting.collective, answers) == [0, 1]


def test_which_waits_never_end_and_what_is_told():
    """A wait that may end is noted, and the job goes on."""
    for what, (answers, ranks, words, *more) in STATES.items():
        gone, silent = (more + [{}, []][len(more) :])[:2]
        with given(what=what):
            answers = by_rank(*answers)
            assert set(endless(answers, gone, silent)) == ranks
            text = diagnosis(answers, gone, silent, HOSTS, LIMIT) if ranks else long_wait(answers, gone, HOSTS, 2)
            assert [word for word in words if word not in text] == [], text
            assert ("This is a deadlock" in text) == (words == ["This is a deadlock"])
            assert text.endswith(LIMIT) == bool(ranks)
    assert f"never came: {UNBORN}" in long_wait(by_rank(*CHAIN), {}, [Process()] * 4, 2)


RANKS = 32768
HOSTS_OF_MANY = [Process(f"n{rank // 128}", 1000 + rank % 128, 1) for rank in range(RANKS)]


def of_many(*missing):
    everybody = range(RANKS)
    return by_rank(
        *(waits(rank, "agreement on matmul", 7, "all", everybody) for rank in range(RANKS) if rank not in missing)
    )


def test_32768_ranks_in_one_collective_are_looked_at_together():
    answers = of_many(77, 20000) | by_rank(elsewhere(20000, 6, "all"))
    assert len(Waits(answers, {}).waiters) == 1
    text = diagnosis(answers, {}, [], HOSTS_OF_MANY, LIMIT)
    assert "ranks 0-76, 78-19999, 20001-32767 wait in agreement on matmul #7 on axis all" in text
    assert f"rank 77 (host n0, pid 1077) never came: {SILENT}" in text
    assert "rank 20000 (host n156, pid 1032) never came: its last collective on axis all is earlier #6" in text
    assert len(pickle.dumps(answers[5])) < 400


def test_a_node_of_many_that_is_gone_is_told_in_one_line():
    text = diagnosis(of_many(*range(128, 256)), {}, [], HOSTS_OF_MANY, LIMIT)
    assert text.count("never came: ") == 2 and "... of 128 that never came: ranks 128-255" in text


def test_ranks_on_axes_of_many_are_deadlocked_in_a_chain():
    """Each rank waits for the next one, on an axis where that rank has begun nothing. One pass finds a chain of any
    length."""
    answers = by_rank(*(waits(rank, "shift", 2, "xy"[rank % 2], range(rank, rank + 2)) for rank in range(RANKS - 1)))
    assert endless(answers, {}) == {}
    assert len(endless(answers, {RANKS - 1: "its program has ended"})) == RANKS - 1


def test_the_users_line_is_none_of_the_machinery_of_imports():
    names = {"__name__": "importlib._bootstrap_external", "sys": sys, "source_line": source_line}
    code = "def get_data(): return source_line(sys._getframe())"
    exec(compile(code, "<frozen importlib._bootstrap_external>", "exec"), names)
    assert source_line(sys._getframe()).split(":")[0] == names["get_data"]().split(":")[0]


def test_a_call_of_a_c_program_has_no_line_of_python():
    """Neither while it waits, nor while it computes."""
    places = CallersCall("pmm3d_matmul", list).run(
        lambda: (source_line(sys._getframe()), stack_of(threading.get_ident()).strip())
    )
    assert places == ("pmm3d_matmul", "pmm3d_matmul")
    assert stack_of(None) == "    (the program, outside of pmm3d)"


def test_the_state_of_processes():
    assert process_state(os.getpid()) == COMPUTES
    child = os.fork()
    if child == 0:
        os._exit(0)
    try:
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert process_state(child) == DEAD
    finally:
        os.waitpid(child, 0)
    assert process_state(child) == DEAD


def test_a_process_whose_state_cannot_be_read_is_not_dead(monkeypatch):
    """For example, if no file descriptor is left. A process that ends during the check is dead."""
    for number, state in ((errno.EMFILE, None), (errno.EACCES, None), (errno.ESRCH, DEAD), (errno.ENOENT, DEAD)):

        def refuses(path, number=number):
            raise OSError(number, "")

        monkeypatch.setattr(Path, "read_text", refuses)
        assert process_state(1) == state


class Asked:
    """A communicator on which no other rank answers."""

    rank, size = 0, 3

    def isend(self, message, rank, tag):
        return type("Request", (), {"Test": lambda self: True})()

    def improbe(self, tag):
        return None


def test_the_deputy_is_on_another_host_if_there_is_one():
    for hosts, leaders in (("aab", [0, 2]), ("abb", [0, 1]), ("aaa", [0, 1])):
        with given(hosts=hosts):
            rows = np.concatenate([row(Process(host, 1 + rank), False) for rank, host in enumerate(hosts)])
            known = Processes(rows, list(dict.fromkeys(hosts)))
            assert Watch(Asked(), 0.0, False, known)._leaders == leaders


@pytest.mark.parametrize("level, lost", [(MPI.THREAD_MULTIPLE, [[2]]), (MPI.THREAD_SERIALIZED, [])])
def test_silence_counts_once_somebody_waits_for_as_long_as_the_limit(monkeypatch, level, lost):
    """Rank 2 does not answer for 100 s; the limit is 10 s. Rank 0 waits for it in several collectives, for 5 s each,
    then for 11 s. Below MPI_THREAD_MULTIPLE a rank that computes cannot answer."""
    monkeypatch.setattr(MPI, "Query_thread", lambda: level)
    ended = []
    monkeypatch.setattr(Watch, "_end", lambda self, answers, silent: ended.append(silent))
    known = Processes(np.concatenate([row(Process("h", 0), False) for _ in range(3)]), ["h"])
    watch = Watch(Asked(), 10.0, False, known)
    for number in range(1, 12):
        waited, now = 5.0 if number < 11 else 11.0, 10.0 * number
        collective = Collective("all", "all_reduce", number, (0, 1, 2))
        answers = {
            rank: RankStatus(rank, {"all": (number, "all_reduce")}, Waiting(collective, waited, "line"))
            for rank in (0, 1)
        }
        for _ in range(2):  # the second time, the waits are the same
            watch._conclude(Inquiry(now - 4.0, dict(answers)), now)
        assert not ended or number == 11
    assert ended == lost
