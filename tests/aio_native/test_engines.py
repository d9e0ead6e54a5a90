"""Each engine passes what all of them have to, and what is its own."""

import dataclasses
import errno
import os
import signal
import sys
import threading
import time

import pytest

from nvme_offload.aio_native import _native, pyuring, uring_refusal
from nvme_offload.aio_native.aiofiles_engine import AiofilesEngine
from nvme_offload.aio_native.engine import EngineOptions, EngineUnavailable, Op, Segment
from nvme_offload.aio_native.null import NullEngine, NullThread
from nvme_offload.aio_native.pyuring import PyuringEngine
from nvme_offload.aio_native.requests import Request
from nvme_offload.aio_native.uring import UringEngine
from tests.support.engine_conformance import EngineConformance
from tests.support.engine_faults import FaultConformance

OPTIONS = EngineOptions(queue_depth=8, block_size=2**20, rings=1, alignment=4096, max_operations=8)
SEGMENT = Segment(0, 0, 0, 2**30)
ZEROS = {"alignment": [0], "max_operations": [0]}
OUT_OF_RANGE = ZEROS | {"queue_depth": [0, 4097], "rings": [0, 65], "block_size": [0, 2**31, 4096 + 512]}


class TestNullEngine(EngineConformance):
    engine_class = NullEngine
    moves_data = False


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_options_out_of_range_are_named(name):
    for value in OUT_OF_RANGE[name]:
        with pytest.raises(ValueError, match=name):
            NullEngine(dataclasses.replace(OPTIONS, **{name: value}))


def test_a_signal_handler_may_submit_at_any_moment():
    engine = NullEngine(dataclasses.replace(OPTIONS, max_operations=10**6))
    from_handler = []
    previous = signal.signal(signal.SIGALRM, lambda *_: from_handler.append(engine.submit(Op.READ, [SEGMENT])))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        deadline = time.monotonic() + 0.2
        while time.monotonic() < deadline:
            assert engine.submit(Op.WRITE, [SEGMENT._replace(size_bytes=1)]) is not None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
    engine.close()
    assert from_handler
    assert all(operation.done() for operation in from_handler)


class _BreakingThread(NullThread):
    def _start(self, request: Request) -> None:
        raise ZeroDivisionError


class _BreakingEngine(NullEngine):
    owner_type = _BreakingThread


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_owner_thread_that_breaks_leaves_nobody_waiting(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    engine = _BreakingEngine(OPTIONS)
    operation = engine.submit(Op.READ, [SEGMENT])
    assert operation.wait(60)
    assert operation.failure is not None
    engine.close()
    with pytest.raises(RuntimeError):
        engine.submit(Op.READ, [SEGMENT])


@pytest.mark.skipif(not hasattr(_native, "UringEngine"), reason="built without liburing")
class TestUringEngine(EngineConformance):
    engine_class = UringEngine
    moves_data = True

    def test_a_forked_child_does_not_keep_a_ring_alive(self):
        """Nor what a ring that breaks is watched by: nobody would know when its last request has ended."""
        self.open(rings=2)
        descriptors = len(os.listdir("/proc/self/fd"))
        pid = os.fork()
        if pid == 0:
            links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
            os._exit(sum("io_uring" in os.readlink(link) for link in links if os.path.islink(link)))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert len(os.listdir("/proc/self/fd")) == descriptors


class TestAiofilesEngine(EngineConformance):
    engine_class = AiofilesEngine
    moves_data = True


@pytest.mark.parametrize(("queue_depth", "rings", "depth"), [(4, 1, 4), (4, 3, 12), (4096, 16, 32)])
def test_the_number_of_threads_is_bounded(queue_depth, rings, depth):
    engine = AiofilesEngine(dataclasses.replace(OPTIONS, queue_depth=queue_depth, rings=rings))
    assert engine.depth == depth
    engine.close()


def test_a_thread_that_is_refused_is_said_at_once(monkeypatch):
    """Not in the middle of a transfer, when a request that was called failed could still be run by another thread."""
    start, num_started = threading.Thread.start, 0

    def start_some(thread):
        nonlocal num_started
        num_started += 1
        if num_started > 4:  # the owner and three of the pool
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    before = threading.active_count()
    with pytest.raises(EngineUnavailable, match=r"needs 8 threads.*can't start new thread.*queue_depth.*pids\.max"):
        AiofilesEngine(OPTIONS)
    assert threading.active_count() <= before + 1  # the owner, which has nothing left to do


class TestPyuringEngine(EngineConformance):
    engine_class = PyuringEngine
    moves_data = True


@pytest.mark.parametrize(("code", "sysctl", "words"), [
    (errno.EPERM, "0", "seccomp=unconfined"), (errno.EPERM, "2", "sysctl -w kernel.io_uring_disabled=0"),
    (errno.ENOSYS, "0", "Linux 5.6 or newer"), (errno.ENOMEM, "0", "smaller aio.queue_depth"),
])  # fmt: skip
def test_a_refusal_says_what_to_do(monkeypatch, tmp_path, code, sysctl, words):
    (tmp_path / "sysctl").write_text(sysctl)
    monkeypatch.setattr(uring_refusal, "SYSCTL", tmp_path / "sysctl")
    monkeypatch.setattr(pyuring, "probe_errno", lambda entries: code)
    with pytest.raises(EngineUnavailable, match=words):
        pyuring._make_ring(_RefusingBinding, 9)


class _RefusingBinding:
    UringError = OSError
    IORING_SETUP_SINGLE_ISSUER = IORING_SETUP_DEFER_TASKRUN = 0
    IORING_SETUP_COOP_TASKRUN = IORING_SETUP_TASKRUN_FLAG = 0

    @staticmethod
    def UringCtx(**_):  # noqa: N802 - the binding's name
        raise OSError(errno.EOPNOTSUPP, "uring_create_ex")


def test_a_missing_binding_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyuring", None)
    with pytest.raises(EngineUnavailable, match="pip install pyuring"):
        PyuringEngine(OPTIONS)


class _ReluctantRing:
    """Queues every second request without submitting it, as when io_uring_enter(2) answers EAGAIN."""

    def __init__(self, binding, entries):
        self._ring = make_ring(binding, entries)
        self._error = binding.UringError
        self._queued = []
        self._num_begun = 0
        self.num_refusals = 0

    def _begin(self, begin, *arguments):
        self._num_begun += 1
        if self._num_begun % 2:
            self._queued.append((begin, arguments))
            raise self._error(errno.EAGAIN, "io_uring_submit")
        begin(*arguments)

    def read_async_ptr(self, *arguments):
        self._begin(self._ring.read_async_ptr, *arguments)

    def write_async_ptr(self, *arguments):
        self._begin(self._ring.write_async_ptr, *arguments)

    def submit(self):
        self.num_refusals += 1
        if self.num_refusals % 3:
            raise self._error(errno.EBUSY, "io_uring_submit")
        for begin, arguments in self._queued:
            begin(*arguments)
        self._queued.clear()

    def __getattr__(self, name):
        return getattr(self._ring, name)


make_ring = pyuring._make_ring


class TestReluctantKernel(FaultConformance):
    """Submissions that the kernel refuses for now are made again, and lose nothing."""

    engine_class = PyuringEngine
    moves_data = True

    @pytest.fixture(autouse=True)
    def _make_reluctant(self, monkeypatch):
        monkeypatch.setattr(pyuring, "_make_ring", _ReluctantRing)
