"""Ctrl-C while a finalizer runs, or in who waits for threads that make calls: nobody waits for ever."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest

from nvme_offload.aio_native.finalizing import finalize
from nvme_offload.aio_native.starting import ThreadPool, start
from tests.support.interrupts import STRIKES, every, send_sigint, struck


class Owner:
    """Dies when nobody has it any more."""


def end(asked, thread, ended):
    asked.set()
    with threading.Lock():  # what a finalizer of ours waits with
        thread.join()
    ended.append(thread)


def owner_of_a_thread(asked, ended):
    owner = Owner()
    thread = threading.Thread(target=asked.wait, daemon=True)
    start(thread)
    finalize(owner, end, asked, thread, ended)
    return owner


def num_threads():
    return len(os.listdir("/proc/self/task"))


def let_go(owners, asked, num_before):
    """Let the owner go, and give what is sent behind its finalizer the time to come."""
    owners.clear()
    while asked.is_set() and num_threads() > num_before:
        time.sleep(0.001)


def test_it_comes_when_the_finalizer_has_returned(monkeypatch):
    """Before it has begun, and after it has ended, Python loses what is raised; then, too, it does its work."""
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: None)
    held_back, lost, num_before = 0, 0, num_threads()
    for interrupt in every(1, send_sigint):
        asked, ended = threading.Event(), []
        owners = [owner_of_a_thread(asked, ended)]
        try:
            with interrupt:
                let_go(owners, asked, num_before)
        except KeyboardInterrupt:
            held_back += 1
            assert ended, interrupt.place
        else:
            assert ended or "(_undisturbed, after RESUME)" in interrupt.place, interrupt.place
            asked.set()
            lost += 1
    assert held_back > lost


def test_the_interpreter_ends_all_the_same():
    script = (
        "import signal, weakref\n"
        "from nvme_offload.aio_native.finalizing import finalize\n"
        "class Owner: pass\n"
        "first, second = Owner(), Owner()\n"
        "finalize(first, print, 'ended')\n"
        "finalize(second, signal.raise_signal, signal.SIGINT)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "ended\n", "")


def test_a_second_one_ends_the_finalizer():
    owner, said, num_before = Owner(), [], num_threads()

    def never_ends():
        send_sigint()
        said.append("first")
        send_sigint()
        said.append("second")

    call = finalize(owner, never_ends)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        call()
        while num_threads() > num_before:
            time.sleep(0.001)
    assert said == ["first"]


def test_a_thread_has_signals_blocked_from_its_beginning():
    masks = []
    thread = threading.Thread(target=lambda: masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
    start(thread)
    thread.join()
    assert signal.SIGINT in masks[0]


@STRIKES
@pytest.mark.timeout(60)
def test_whoever_is_interrupted_waits_for_nobody(strike):
    found = []

    def use():
        with closing(ThreadPool(2, "of this test")) as threads:
            pending = [threads.submit(found.append, number) for number in range(3)]
            for each in pending:
                each.result()

    for interrupt in every(1, strike):
        found.clear()
        if struck(interrupt, use) is None:
            assert sorted(found) == [0, 1, 2], interrupt.place


def test_an_error_is_raised_as_often_as_it_is_asked_for():
    with closing(ThreadPool(1, "of this test")) as threads:
        failing = threads.submit(int, "none")
        for _ in range(2):
            with pytest.raises(ValueError, match="none"):
                failing.result()
