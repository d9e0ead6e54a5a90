import dataclasses
import signal
import threading
import time

import pytest

from nvme_offload.aio_native.engine import EngineOptions, Op, Segment
from nvme_offload.aio_native.null import NullEngine, NullThread
from nvme_offload.aio_native.requests import Request
from tests.support.engine_conformance import EngineConformance

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
