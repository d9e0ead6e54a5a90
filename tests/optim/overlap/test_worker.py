"""The thread that works behind a step: who waits for it takes no processor time, its own neither."""

import threading
import time

from nvme_offload.optim.overlap.worker import Worker


class Stuck:
    """A job that waits for a drive."""

    must_end = False
    is_done = False
    turns = 0

    def turn(self):
        self.turns += 1
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
    assert 1 <= job.turns < 100 * seconds  # not one after the other: that were some 10,000 in a second
