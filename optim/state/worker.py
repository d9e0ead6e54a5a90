"""Run a job in shifts in a thread that others wait for, hurry, or keep away.

Who owns what the job works on (the pipeline of the state, its staging buffers, the records) at which moment:

- In a shift the worker, which holds the lock for as long. It never waits for a drive in a shift.
- Between two shifts nobody, or who is in `kept_away`: that one waits for drives as long as it likes.

Signals arrive in the main thread alone, and may raise out of anything it does. So nothing here has to be undone there:
a job begins with one assignment, who waits only waits, and the lock is taken and given back by C alone. CPython runs
handlers after every call, but not where ``with`` or ``for`` calls C: between the lock and the block that gives it back
there is no such place, as there are many in contextlib and one at the entry of any ``__exit__`` in Python.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from queue import Empty, SimpleQueue
from typing import Protocol

import torch

from nvme_offload.aio_native.bell import Bell
from nvme_offload.aio_native.finalizing import finalize
from nvme_offload.aio_native.starting import Flag, start
from nvme_offload.offload.devices.device import HOST, begin_thread

_LOOK_AGAIN_SECONDS = 0.1  # an exception may come between a change and the word of it
_GIVE_WAY_SECONDS = 0.002  # enough for who waits for the lock to wake


class WorkerJob(Protocol):
    """A job to be done behind the scenes, shift by shift."""

    @property
    def must_end(self) -> bool:
        """Whether the worker finishes it even if everybody has let go of the worker."""

    def shift(self) -> bool:
        """Do what can be done now, and wait for nothing; return whether more can be done at once."""

    def take_turn(self, block: int | None) -> bool:
        """Do some of what the calling thread has to do itself, and wait for it; whether there was any."""

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""

    def give_up(self, error: BaseException) -> None:
        """Note that a shift ended with this error, and that no other follows."""


class Worker:
    """One job at a time, done in a thread that is started when it is first needed.

    The thread keeps nothing alive, unless its job must end, and ends when its owner is gone, at the latest with the
    interpreter.

    Args:
        counted: entered for the time that somebody waits.
        device: says which one the thread works for when it begins.
    """

    def __init__(
        self,
        counted: Callable[[], AbstractContextManager[None]] = nullcontext,
        device: Callable[[], torch.device] = lambda: HOST,
    ) -> None:
        self.bell = Bell()
        """Ring it when there may be something to do, as `wake` does."""
        self.job: WorkerJob | None = None
        """None where there is none, or it is done or given up."""
        self.failure: BaseException | None = None
        """The error that ended the latest job, until somebody takes it with `raise_failure`."""
        self.wait_seconds = 0.0
        """Seconds that others waited for it."""
        self._counted = counted
        self._device = device
        self.lock = threading.RLock()
        """Held in each shift; take it with `kept_away`."""
        self._gives_way = False
        self._waiting: list[tuple[Callable[[], bool], SimpleQueue[None]]] = []
        self._started = _Started(self.bell)
        self._finalizer: weakref.finalize[..., Worker] | None = None

    def wake(self) -> None:
        """Have the worker look whether there is something to do. From any thread."""
        started = self._started
        with started.lock:  # or several who wake it at once start a thread each
            if not (started.threads and started.threads[-1].is_alive()) and not started.end.is_set:
                self._start()
        self.bell.ring()

    def _start(self) -> None:
        if self._finalizer is None:
            # Made after the tiers, and so before them when the interpreter ends: no shift finds its buffers gone.
            self._finalizer = finalize(self, _end, self._started)
        arguments, name = (weakref.ref(self), self._started, self._device()), "nvme_offload: updates"
        self._started.threads.append(threading.Thread(target=_work, args=arguments, name=name, daemon=True))
        # In the list before it begins: whoever ends the worker meanwhile waits for it.
        start(self._started.threads[-1])

    def wait_until(self, condition: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until `condition` holds. Signals are handled.

        Args:
            condition: the worker looks after every shift, and wakes who waits when it holds: a thread that wakes only
                to look has the worker wait for the interpreter.
            meanwhile: called now and then, by who waits; what it raises ends that.
        """
        if condition():
            return
        start = time.monotonic()
        told: SimpleQueue[None] = SimpleQueue()
        waiting = (condition, told)
        try:
            self._waiting.append(waiting)  # before the shift that looks for who waits
            self.wake()
            with self._counted():
                while not condition():
                    meanwhile()
                    try:
                        told.get(timeout=_LOOK_AGAIN_SECONDS)
                    except Empty:
                        self.wake()  # not after every shift: it would have nothing to do, and tell of that shift, too
        finally:
            if waiting in self._waiting:  # a signal may have come before it was there
                self._waiting.remove(waiting)
            self.wait_seconds += time.monotonic() - start

    def kept_away(self) -> AbstractContextManager[object]:
        """Let no shift begin during a ``with`` block, which begins after the shift that is under way. Re-entrant."""
        self._gives_way = True  # before it waits for the lock: the next shift looks
        return self.lock

    def take_on(self, job: WorkerJob) -> None:
        """Replace the job. `wake` the worker then."""
        self.job = job

    def drop_job(self) -> None:
        """Drop the job: it is done otherwise, or not at all."""
        self.job = None

    def note_failure(self, failure: BaseException | None) -> None:
        """Have `raise_failure` raise this; None: whatever failed was made good."""
        self.failure = failure

    def raise_failure(self) -> None:
        """Raise what ended the latest job, once."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def stop(self) -> None:
        """End the thread for good; a job that is under way is left where it is. Idempotent."""
        _end(self._started)  # not through the finalizer, which forgets before it calls
        if self._finalizer is not None:
            self._finalizer.detach()
        self.bell.close()  # last: the thread waits for it

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return self.job is None

    def take_turn(self, block: int | None = None) -> bool:
        """Do some of what the job leaves to the calling thread; whether there was any. An error ends it as in a shift.

        Args:
            block: whose updates; None: of the first one that has any.
        """
        with self.lock:
            job = self.job
            try:
                return job is not None and job.take_turn(block)
            except Exception as error:
                self.failure = error
                if job is not None:
                    job.give_up(error)
                self.job = None
                return False

    def shift(self) -> bool:
        """Do one shift of the job; return whether another can follow at once."""
        # Locks of Python's are not fair: without a pause this thread has it again before who waits for it is awake.
        if self._gives_way:
            self._gives_way = False
            time.sleep(_GIVE_WAY_SECONDS)
        with self.lock:
            job = self.job
            if job is None:
                return False
            try:
                more = job.shift()
                is_over = job.is_done
            except BaseException as error:  # whatever it is: raised here it would end the thread, and nobody hears it
                self.failure = error  # first: who waits for the job looks for it then
                job.give_up(error)
                more, is_over = False, True
            if is_over and self.job is job:  # a step that begins in backward gives it another without the lock
                self.job = None
        for condition, told in tuple(self._waiting):  # without the lock: whoever is woken may take it
            if told.empty() and condition():
                told.put(None)
        return more


class _Started:
    """The thread of a worker and what it ends with, for those who outlive the worker."""

    def __init__(self, bell: Bell) -> None:
        self.bell = bell
        self.pid = os.getpid()
        self.end = Flag()
        self.lock = threading.RLock()
        """Held while one is started."""
        self.at_work = threading.Lock()
        """Held by the thread as long as it works."""
        self.threads: list[threading.Thread] = []
        """The thread. After a start that was cut short there may be another: it does nothing before this one ends."""


def _work(of: weakref.ref[Worker], started: _Started, device: torch.device) -> None:
    begin_thread(device)
    with started.at_work, torch.no_grad():
        while not started.end.is_set:
            worker = of()
            if worker is None:
                return
            more, idle = worker.shift(), worker.is_idle
            if (job := worker.job) is None or not job.must_end:  # read once: a step that is given up takes it away
                del worker
            del job
            if not more and not started.end.is_set:
                started.bell.wait(None if idle else _LOOK_AGAIN_SECONDS)


def _end(started: _Started) -> None:
    started.end.set()  # before the bell: whoever it wakes looks
    started.bell.ring()
    # A forked child has no thread to wait for. The thread itself comes here if it had the last reference to the worker.
    if os.getpid() != started.pid or threading.current_thread() in started.threads:
        return
    with started.at_work:  # Thread.join that was interrupted takes the thread for one that has ended
        pass
    for thread in started.threads:
        if thread.is_alive():
            thread.join()
