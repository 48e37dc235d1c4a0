"""The diagnosis of the watchdog, from invented states of ranks."""

import errno
import pickle
import sys
import threading
from pathlib import Path

import numpy as np
from loops import given

from pmm3d.comm import hang
from pmm3d.comm.hang import (
    SILENT,
    UNBORN,
    Collective,
    RankStatus,
    Waiting,
    Waits,
    absent,
    endless,
    long_wait,
    longest_wait,
    source_line,
    stack_of,
)
from pmm3d.comm.nodes import COMPUTES, DEAD, Process, Processes, process_state, row
from pmm3d.comm.watch import Inquiry, Watch
from pmm3d.text import ranks_in_words

HOSTS = [Process("n1", 10), Process("n1", 11), Process("n2", 12), Process("n2", 13)]
LIMIT = "The limit is 9 s."


def waits(rank, name, number=1, axis="x", members=(0, 1, 2, 3), line="solver.py:88 in solve", **more):
    return RankStatus(
        rank,
        {axis: (number, name)} | more.pop("begun", {}),
        Waiting(Collective(axis, name, number, members), 3.0, line),
        **more,
    )


def elsewhere(rank, number=0, axis="x", name="earlier", **more):
    return RankStatus(rank, {axis: (number, name)}, stack="    File user.py, line 3\n", **more)


def by_rank(*answers):
    return {answer.rank: answer for answer in answers}


def diagnosis(answers, gone, processes, limit, silent=()):
    return hang.diagnosis(answers, gone, silent, processes, limit)


def test_absent_are_those_that_have_not_begun_it_or_do_not_answer():
    answers = by_rank(waits(0, "all_gather", 5), elsewhere(1, 4), elsewhere(2, 6))
    assert absent(answers[0].waiting.collective, answers) == [1, 3]


def test_who_has_begun_another_operation_in_its_place_is_absent():
    answers = by_rank(*(waits(rank, "all_gather", 5) for rank in range(3)), waits(3, "shift", 5))
    assert absent(answers[0].waiting.collective, answers) == [3]
    assert absent(answers[3].waiting.collective, answers) == [0, 1, 2]


def test_ranks_that_wait_for_each_other_are_endless():
    on_x, on_y = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    answers = by_rank(
        waits(0, "shift", axis="x", members=on_x[0]),
        waits(1, "shift", axis="y", members=on_y[1]),
        waits(2, "shift", axis="y", members=on_y[0]),
        waits(3, "shift", axis="x", members=on_x[1]),
    )
    assert set(endless(answers, {})) == {0, 1, 2, 3}
    assert "This is a deadlock" in diagnosis(answers, {}, HOSTS, LIMIT)


def test_waiting_for_one_that_computes_is_no_deadlock():
    answers = by_rank(waits(0, "shift", members=(0, 1)), elsewhere(1), waits(2, "shift", axis="y", members=(0, 2)))
    assert endless(answers, {}) == {}


def test_messages_on_their_way_are_no_deadlock():
    answers = by_rank(*(waits(rank, "all_gather", 5) for rank in range(4)))
    assert endless(answers, {}) == {}
    text = long_wait(answers, {}, HOSTS, 2)
    assert "All members have begun all_gather #5 on axis x: messages do not arrive (the network)" in text


def test_a_chain_that_ends_at_one_who_has_left_is_certain():
    answers = by_rank(
        waits(0, "shift", members=(0, 1)),
        waits(1, "shift", axis="y", members=(1, 3)),
        waits(2, "shift", axis="z", members=(2, 0)),
    )
    answers[0].begun["z"] = (1, "shift")
    assert set(endless(answers, {3: "its program has ended"})) == {0, 1}


def test_waiting_for_the_dead_is_certain_and_for_the_silent_is_not():
    answers = by_rank(waits(0, "shift", members=(0, 1)), elsewhere(2, states={1: DEAD}), elsewhere(3))
    assert set(endless(answers, {})) == {0}
    assert "This is a deadlock" not in diagnosis(answers, {}, HOSTS, LIMIT)
    assert endless(by_rank(answers[0], elsewhere(2, states={1: SILENT}), elsewhere(3)), {}) == {}
    assert endless(answers | by_rank(elsewhere(1)), {}) == {}


def test_a_wait_for_one_that_computes_goes_on_and_is_told_of():
    """The waits have lasted 3 s."""
    answers = by_rank(waits(0, "shift", members=(0, 1)), waits(1, "shift", axis="y", members=(1, 3)), elsewhere(3))
    assert endless(answers, {}) == {} and longest_wait(answers) == answers[0].waiting
    text = long_wait(answers, {}, HOSTS, 2)
    assert text.startswith("ranks 0-1 have waited for more than 2 s. The job goes on.\n")
    assert "rank 3 (host n2, pid 13) never came: its last collective" in text and "File user.py, line 3" in text
    begun = by_rank(waits(0, "shift", members=(0, 1)), elsewhere(1, 1, name="shift"))
    assert endless(begun, {}) == {} and "has begun it, and does not finish" in long_wait(begun, {}, HOSTS, 2)


def test_the_action_of_a_pipeline_that_a_rank_carries_out_is_told():
    answers = by_rank(waits(0, "all_gather", doing="0B0"), elsewhere(1, doing="1F3"))
    text = long_wait(answers, {}, HOSTS, 2)
    assert "rank 0 waits in all_gather #1 on axis x for 3.0 s, in 0B0, at solver.py:88 in solve\n" in text
    assert "rank 1 (host n1, pid 11) never came" in text and "it is in 1F3, at\n    File user.py, line 3" in text


def test_a_silent_rank_is_lost_unless_it_is_seen_to_compute():
    waiting = [
        waits(0, "shift", members=(0, 1)),
        waits(1, "shift", axis="y", members=(1, 3)),
        waits(2, "shift", axis="z", members=(2, 4)),
    ]
    assert set(endless(by_rank(*waiting, elsewhere(4)), {}, [3])) == {0, 1}
    for state, found in ((COMPUTES, set()), (DEAD, {0, 1}), (SILENT, {0, 1})):
        with given(state=state, found=found):
            answers = by_rank(*waiting, elsewhere(4, states={3: state}))
            assert set(endless(answers, {}, [3])) == found
            assert f"rank 3 (host n2, pid 13) never came: {state}" in long_wait(answers, {}, [*HOSTS, Process()], 2)


def test_a_collective_that_waits_for_another_one_may_wait_for_a_rank_that_computes():
    """A collective begun with `after` counts as begun, and its members wait in it. Rank 2 is not a member."""
    waiting = [
        waits(rank, "all_reduce_into", members=(0, 1), begun={"all": (1, "all_reduce_into")}) for rank in range(2)
    ]
    answers = by_rank(*waiting, elsewhere(2, axis="all"))
    assert endless(answers, {}) == {}
    assert "rank 2 (host n2, pid 12) waits in no collective: it is at\n    File" in long_wait(answers, {}, HOSTS, 2)


def test_the_diagnosis_groups_ranks_and_shows_where_the_missing_one_is():
    text = diagnosis(
        by_rank(
            waits(0, "all_gather (gather A)", 5),
            waits(1, "all_gather (gather A)", 5),
            elsewhere(2, 4),
            waits(3, "all_gather (gather A)", 5),
        ),
        {},
        HOSTS,
        LIMIT,
    )
    assert "ranks 0-1, 3 wait in all_gather (gather A) #5 on axis x for 3.0 s, at solver.py:88 in solve" in text
    assert (
        "rank 2 (host n2, pid 12) never came: its last collective on axis x is earlier #4; it is at\n"
        "    File user.py, line 3"
    ) in text
    assert text.endswith(LIMIT)


SILENCES = [
    ({}, {}, True, SILENT),
    ({}, {}, False, UNBORN),
    ({3: DEAD}, {}, True, DEAD),
    ({}, {3: "its program has ended"}, True, "it has left the program (its program has ended)"),
]


def test_why_a_rank_is_silent():
    for states, gone, pids, said in SILENCES:
        with given(states=states, gone=gone, pids=pids, said=said):
            hosts = HOSTS if pids else [Process()] * 4
            text = diagnosis(by_rank(*(waits(rank, "shift", states=states) for rank in range(3))), gone, hosts, LIMIT)
            assert f"never came: {said}" in text


def test_where_all_that_is_missed_waits_itself_it_is_the_network():
    """Rank 3 waits for messages of an earlier collective, which all ranks have begun, and the others wait for rank
    3."""
    answers = by_rank(*(waits(rank, "all_reduce", 7) for rank in range(3)), waits(3, "all_gather", 5))
    text = long_wait(answers, {}, HOSTS, 2)
    assert endless(answers, {}) == {}
    assert "All members have begun all_gather #5 on axis x: messages do not arrive (the network)" in text


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
    text = diagnosis(answers, {}, HOSTS_OF_MANY, LIMIT)
    assert "ranks 0-76, 78-19999, 20001-32767 wait in agreement on matmul #7 on axis all" in text
    assert f"rank 77 (host n0, pid 1077) never came: {SILENT}" in text
    assert "rank 20000 (host n156, pid 1032) never came: its last collective on axis all is earlier #6" in text
    assert len(pickle.dumps(answers[5])) < 400


def test_a_node_of_many_that_is_gone_is_told_in_one_line():
    text = diagnosis(of_many(*range(128, 256)), {}, HOSTS_OF_MANY, LIMIT)
    assert text.count("never came: ") == 2 and "... of 128 that never came: ranks 128-255" in text


def test_ranks_on_axes_of_many_are_deadlocked_in_a_chain():
    """Each rank waits for the next one, on an axis where that rank has begun nothing. One pass finds a chain of any
    length."""
    answers = by_rank(*(waits(rank, "shift", 2, "xy"[rank % 2], range(rank, rank + 2)) for rank in range(RANKS - 1)))
    assert endless(answers, {}) == {}
    assert len(endless(answers, {RANKS - 1: "its program has ended"})) == RANKS - 1


def test_many_ranks_stay_readable():
    assert ranks_in_words({4}) == "rank 4" and ranks_in_words([0, 1, 2, 7]) == "ranks 0-2, 7"
    assert ranks_in_words(list(range(10000))) == "ranks 0-9999"
    assert len(ranks_in_words(list(range(0, 10000, 2)))) < 600


def test_the_users_line_is_the_innermost_that_is_not_ours():
    here = sys._getframe()
    assert source_line(here).endswith(f"test_hang.py:{here.f_lineno} in {here.f_code.co_name}")
    assert source_line(None) == "an unknown line"


def test_the_users_line_is_none_of_the_machinery_of_imports():
    names = {"__name__": "importlib._bootstrap_external", "sys": sys, "source_line": source_line}
    code = "def get_data(): return source_line(sys._getframe())"
    exec(compile(code, "<frozen importlib._bootstrap_external>", "exec"), names)
    assert source_line(sys._getframe()).split(":")[0] == names["get_data"]().split(":")[0]


def test_the_stack_of_a_thread_is_read_while_it_sleeps():
    stop = threading.Event()
    sleeper = threading.Thread(target=stop.wait)
    sleeper.start()
    try:
        assert "stop.wait" in stack_of(sleeper.ident) or "in wait" in stack_of(sleeper.ident)
    finally:
        stop.set()
        sleeper.join()
    assert "has ended" in stack_of(sleeper.ident)


def test_the_state_of_processes():
    import os

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


def test_silence_counts_once_somebody_waits_for_as_long_as_the_limit(monkeypatch):
    """Rank 2 does not answer for 100 s; the limit is 10 s. Rank 0 waits for it in several collectives, for 5 s each,
    then for 11 s."""
    ended = []
    monkeypatch.setattr(Watch, "_end", lambda self, answers, silent: ended.append(silent))
    watch = Watch(Asked(), 10.0, False, None)
    for number in range(1, 12):
        waited, now = 5.0 if number < 11 else 11.0, 10.0 * number
        collective = hang.Collective("all", "all_reduce", number, (0, 1, 2))
        answers = {
            rank: RankStatus(rank, {"all": (number, "all_reduce")}, hang.Waiting(collective, waited, "line"))
            for rank in (0, 1)
        }
        for _ in range(2):  # the second time, the waits are the same
            watch._conclude(Inquiry(now - 4.0, dict(answers)), now)
        assert bool(ended) == (number == 11)
    assert ended == [[2]]
