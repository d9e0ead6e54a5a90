import errno
import sys

import pytest

from nvme_offload.aio_native import pyuring, uring_refusal
from nvme_offload.aio_native.engine import EngineOptions, EngineUnavailable
from nvme_offload.aio_native.pyuring import PyuringEngine
from tests.support.engine_conformance import EngineConformance
from tests.support.engine_faults import FaultConformance


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
    options = EngineOptions(queue_depth=8, rings=1, block_size=4096, alignment=4096, max_operations=1)
    with pytest.raises(EngineUnavailable, match="pip install pyuring"):
        PyuringEngine(options)


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
