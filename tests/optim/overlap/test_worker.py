"""The thread that works behind a step, and what it guesses: nobody who waits takes processor time."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch

from nvme_offload.optim.state.worker import Worker
from nvme_offload.optim.step.guess import Guesses
from tests.optim.test_interrupts import struck
from tests.support.interrupts import every, raise_struck
from tests.support.threads import at_once
from tests.support.training import BLOCK, assert_same_training, params_of, set_grads


class Stuck:
    """A job that waits for a drive."""

    must_end = False
    is_done = False
    shifts = 0

    def shift(self):
        self.shifts += 1
        return False

    def give_up(self, error):
        raise error


def test_a_job_that_waits_takes_no_turns_because_somebody_waits_for_it():
    worker, job, is_over = Worker(), Stuck(), threading.Event()

    def end():
        is_over.set()
        worker.bell.ring()

    start = time.monotonic()
    worker.job = job
    timer = threading.Timer(0.3, end)
    timer.start()
    worker.wait_until(is_over.is_set)
    seconds = time.monotonic() - start
    timer.join()
    worker.stop()
    assert 1 <= job.shifts < 100 * seconds  # not one after the other: that were some 10,000 in a second


def test_who_waits_sleeps_until_what_it_waits_for_holds():
    """The thread of the worker looks after each shift: another one that woke to look would stop it for as long."""
    worker, job, looked = Worker(), Stuck(), []

    def is_over():
        looked.append(threading.current_thread())
        return job.shifts >= 1000  # where the other thread wakes late there is another shift

    def shift():
        job.shifts += 1
        return job.shifts < 1000

    job.shift = shift
    worker.take_on(job)
    worker.wait_until(is_over)
    worker.stop()
    assert 1000 <= len(looked) - looked.count(threading.main_thread()) < 1010
    assert looked.count(threading.main_thread()) < 500


def test_the_next_shift_gives_way_to_who_keeps_it_away(monkeypatch):
    """Or this thread has the lock again before the other one is awake: a step waited for all updates in backward."""
    worker, slept = Worker(), []
    worker.take_on(Stuck())
    monkeypatch.setattr("nvme_offload.optim.state.worker.time", SimpleNamespace(sleep=slept.append))
    worker.shift()
    assert not slept
    with worker.kept_away():
        pass
    for _ in range(2):
        worker.shift()
    assert len(slept) == 1
    worker.stop()


def test_three_who_wake_it_at_once_find_one_thread(monkeypatch):
    start, started = threading.Thread.start, []

    def slow_start(thread):
        if thread.name == "nvme_offload: updates":
            started.append(thread)
            time.sleep(0.05)  # the others look meanwhile
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", slow_start)
    worker = Worker()
    at_once([worker.wake] * 3)
    worker.stop()
    assert len(started) == 1
    assert not started[0].is_alive()


def test_a_close_that_was_cut_short_is_made_again_and_leaves_no_thread():
    for interrupt in every(1, raise_struck):
        worker = Worker()
        worker.wake()
        struck(interrupt, worker.stop)
        worker.stop()
        assert not worker._started.at_work.locked(), interrupt.place


def test_state_and_figures_are_read_beside_steps(make_adamw):
    params, twins = (params_of([(2 * BLOCK,), (BLOCK,)], torch.bfloat16) for _ in range(2))
    optimizer, twin = make_adamw(params, buffers=2, sub_group_size=BLOCK), make_adamw(twins, "cpu")
    is_over = threading.Event()

    def read(what):
        while not is_over.is_set():
            what()

    with ThreadPoolExecutor(2) as threads:
        readers = threads.map(read, (optimizer.state_dict, optimizer.stats))
        for step in range(10):
            for ps, one in ((params, optimizer), (twins, twin)):
                set_grads(ps, step % 4)
                one.step()
        is_over.set()
        list(readers)
    assert_same_training(optimizer, twin)


def test_a_factor_is_guessed_while_it_stays_and_the_less_the_more_went_wrong():
    guesses = Guesses()
    for _ in range(3):
        guesses.note(1.0, is_right=None)
        assert guesses.factor is None
    guesses.note(1.0, is_right=None)
    assert guesses.factor == 1.0
    guesses.note(0.5, is_right=False)
    waits = []
    for _ in range(4):
        count = 0
        while guesses.factor is None:
            guesses.note(1.0, is_right=None)
            count += 1
        waits.append(count)
        guesses.note(None, is_right=False)
    assert waits == [8, 16, 32, 64]
    for _ in range(200):
        guesses.note(2.0, is_right=None if guesses.factor is None else True)
    guesses.note(3.0, is_right=False)
    for _ in range(9):
        assert guesses.factor is None
        guesses.note(2.0, is_right=None)


def test_where_most_steps_clip_nothing_is_guessed():
    guesses, random, wrong = Guesses(), torch.Generator().manual_seed(3), 0
    for _ in range(2000):
        clips = torch.rand((), generator=random) < 0.95
        factor = float(torch.rand((), generator=random)) if clips else 1.0
        guessed = guesses.factor
        wrong += guessed is not None and guessed != factor
        guesses.note(factor, is_right=None if guessed is None else guessed == factor)
    assert wrong <= 2
