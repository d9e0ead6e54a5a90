"""Commits in a thread of their own: one at a time, waited for or not, and a failure ends nothing."""

import threading

import pytest

from nvme_offload import ClosedError, StateError
from nvme_offload.offload.durable.committer import Committer


@pytest.fixture
def committer():
    committer = Committer()
    yield committer
    committer.close()


def test_it_goes_on_while_nobody_waits(committer):
    go, done = threading.Event(), []
    committer.begin(lambda: (go.wait(60), done.append(threading.current_thread().name)))
    assert committer.is_busy
    with pytest.raises(StateError, match="no commit under way"):
        committer.begin(lambda: None)
    go.set()
    committer.wait()
    assert (done, committer.is_busy, committer.num_committed) == (["committer"], False, 1)
    assert committer.take_failure() is None
    assert committer.waited_seconds > 0
    assert committer.commit_seconds > 0


def test_a_failure_is_told_once_and_the_next_commit_is_made(committer):
    def fail():
        raise OSError("no")

    committer.begin(fail)
    committer.wait()
    assert str(committer.take_failure()) == "no"
    assert committer.take_failure() is None
    committer.begin(lambda: None)
    committer.wait()
    assert (committer.num_committed, committer.num_failed) == (1, 1)


def test_waiting_that_is_interrupted_can_be_repeated(committer, monkeypatch):
    go = threading.Event()
    committer.begin(lambda: go.wait(60))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Condition, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            committer.wait()
    go.set()
    committer.wait()
    assert committer.num_committed == 1


_wait = threading.Condition.wait


def interrupt(condition, timeout=None):
    if threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt
    return _wait(condition, timeout)


def test_closing_waits_and_ends_the_thread(committer):
    before, done = threading.active_count(), []
    committer.begin(lambda: done.append(1))
    committer.close()
    committer.close()
    assert (done, threading.active_count()) == ([1], before)
    with pytest.raises(ClosedError):
        committer.begin(lambda: None)


def test_nothing_is_started_without_a_commit():
    before = threading.active_count()
    Committer().close()
    assert threading.active_count() == before
