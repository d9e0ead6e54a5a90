import threading

import pytest

from nvme_offload.aio_native.aiofiles_engine import AiofilesEngine
from nvme_offload.aio_native.engine import EngineOptions, EngineUnavailable
from tests.support.engine_conformance import EngineConformance


class TestAiofilesEngine(EngineConformance):
    engine_class = AiofilesEngine
    moves_data = True


@pytest.mark.parametrize(("queue_depth", "rings", "depth"), [(4, 1, 4), (4, 3, 12), (4096, 16, 32)])
def test_the_number_of_threads_is_bounded(queue_depth, rings, depth):
    sizes = {"block_size": 4096, "alignment": 4096, "max_operations": 1}
    engine = AiofilesEngine(EngineOptions(queue_depth=queue_depth, rings=rings, **sizes))
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
    options = EngineOptions(queue_depth=8, rings=1, block_size=4096, alignment=4096, max_operations=1)
    with pytest.raises(EngineUnavailable, match=r"needs 8 threads.*can't start new thread.*queue_depth.*pids\.max"):
        AiofilesEngine(options)
    assert threading.active_count() <= before + 1  # the owner, which has nothing left to do
