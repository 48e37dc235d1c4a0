"""The checks of pmm3d doctor on several ranks: each is independent of the others, and measurements are right."""

import time

import numpy as np
import pytest
from doctor_verdicts import judged
from loops import looped

from pmm3d.tools.doctor import checks, files, network
from pmm3d.tools.doctor.finding import Examination, Verdict
from pmm3d.tools.doctor.session import NoAnswer, Session

pytestmark = pytest.mark.parallel([1, 4])
several = pytest.mark.parallel([4])


def run(comm, *some, **options):
    """Findings of rank 0 by these checks, on every rank."""
    session = Session(comm, len(some), **options)
    examination = Examination(session.hosts)
    checks.examine(session, examination, some)
    assert not examination.findings or comm.rank == 0
    return comm.bcast(examination)


def quote(finding, facts, hosts):
    finding.found = repr(facts)


def all_ranks(session):
    return session.rank


def raises_on(rank):
    def gather(session):
        if session.rank == rank:
            raise OSError("broken here")
        session.barrier(0.5)

    return checks.Check("raises", gather, quote)


@pytest.mark.parallel([1, 4], thorough=[2])
def test_all_ranks_facts_reach_the_judge(comm):
    examination = run(comm, checks.Check("ranks", all_ranks, quote))
    assert [finding.found for finding in examination.findings] == [repr(list(range(comm.size)))]
    assert examination.verdict.exit_code == 0 and not examination.stuck


@pytest.mark.parallel([1, 4], thorough=[2])
def test_a_check_that_raises_on_one_rank_fails_alone(comm):
    """The other ranks wait for it in vain. Earlier and later checks are not affected."""
    last = comm.size - 1
    ranks = checks.Check("ranks", all_ranks, quote)
    before, failed, after = run(comm, ranks, raises_on(last), ranks).findings
    assert before.found == after.found == repr(list(range(comm.size)))
    assert failed.verdict == Verdict.FAILURE
    assert failed.problems[0].text == f"rank {last}: OSError: broken here"


@pytest.mark.parallel([1, 4], thorough=[2])
def test_measuring_goes_on_after_a_failure(comm, shared_path):
    """The next check does not receive messages and barriers of the failed one."""
    measured = [check for check in checks.CHECKS if check.name in ("axes", "folder", "BLAS")]
    failed, *others = run(comm, raises_on(0), *measured, folder=shared_path).findings
    assert failed.verdict == Verdict.FAILURE
    assert [finding.check for finding in others] == ["BLAS", "axes", "folder"]
    assert all(finding.found != "could not be examined" for finding in others), others


@pytest.mark.parallel([4], thorough=[2])
def test_waiting_ends(comm):
    session = Session(comm)
    begun = time.monotonic()
    with pytest.raises(NoAnswer, match=f"rank {comm.rank} on .* waited 0.3 s"):
        session.wait(session.comm.Irecv(np.empty(1), (comm.rank + 1) % comm.size, 7), 0.3)
    assert time.monotonic() - begun >= 0.3


@pytest.mark.parallel([4], thorough=[2])
def test_ping_pong_counts_its_trips_and_keeps_its_time(comm, monkeypatch):
    session = Session(comm)
    if comm.rank < 2:
        monkeypatch.setattr(network, "SECONDS", 60.0)
        few = network.ping_pong(session, (0, 1), 8, 20)
        monkeypatch.setattr(network, "SECONDS", 0.05)
        many = network.ping_pong(session, (0, 1), 2**20, 10**9)
        assert (len(few), len(many) >= 2) == ((20, True) if comm.rank == 0 else (0, False))
        assert all(seconds > 0 for seconds in few + many)
        assert sum(many[:-1]) < network.SECONDS


@several
@looped(
    "shape, expected",
    (
        ("4x1x1", {(0, 1), (1, 2), (2, 3)}),
        ("2x1x2", {(0, 1), (2, 3), (0, 2), (1, 3)}),
        ("1x4x1", {(0, 1), (1, 2), (2, 3)}),
    ),
)
def test_every_pair_of_an_axis_is_measured(comm, shape, expected):
    session = Session(comm, grid=shape)
    facts = network.gather_axes(session)
    assert {pair.ranks for rank in comm.allgather(facts) for pair in rank.pairs} == expected
    assert facts.shape == tuple(map(int, shape.split("x")))


def folder_facts(comm, folder):
    """The facts of all ranks about a folder, if each rank counts as a host. The folder must be left clean."""
    session = Session(comm, folder=folder)
    session.hosts = [f"host{rank}" for rank in range(comm.size)]
    facts = comm.allgather(files.gather_folder(session))
    assert not list(folder.glob(".pmm3d*"))
    return session.hosts, facts


@pytest.mark.parallel([4], thorough=[2])
def test_a_folder_of_each_rank_s_own_is_no_shared_one(comm, tmp_path):
    assert len(set(comm.allgather(str(tmp_path)))) == comm.size
    hosts, facts = folder_facts(comm, tmp_path)
    assert facts[0].seen is not None and all(fact.seen is None for fact in facts[1:])
    finding = judged("folder", facts, hosts)
    assert finding.verdict == Verdict.FAILURE and "host1" in finding.problems[0].text


@pytest.mark.parallel([1, 4], thorough=[2])
def test_a_shared_folder_is_seen_and_left_clean(comm, shared_path):
    for fact in folder_facts(comm, shared_path)[1]:
        assert fact.seen is not None and fact.exists and fact.unwritable == "" and fact.free > 0
