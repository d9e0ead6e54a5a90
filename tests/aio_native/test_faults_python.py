"""The request code of the Python engines and its faults, without threads and without a kernel."""

import errno
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvme_offload.aio_native.engine import EngineOptions, Failure, Op, Segment
from nvme_offload.aio_native.faults import FaultSpec
from nvme_offload.aio_native.injection import FaultInjector
from nvme_offload.aio_native.operation import PythonOperation
from nvme_offload.aio_native.requests import MAX_ATTEMPTS, Request, RequestQueue

FD = 7
OPTIONS = EngineOptions(queue_depth=4, block_size=1024, rings=1, alignment=256, max_operations=100)
KINDS = {"short": 0.4, "eintr": 0.2, "eagain": 0.1, "eio": 0.1, "enospc": 0.1, "delay": 0.2, "reorder": 0.3}


def queue_of(*operations: tuple[Op, int], depth: int = 4) -> RequestQueue:
    """A queue with operations of one segment each, given by direction and size."""
    requests = RequestQueue(OPTIONS, depth)
    for op, size_bytes in operations:
        requests.add(PythonOperation(op, [Segment(FD, 0, 0, size_bytes)]))
    return requests


def only_failure(requests: RequestQueue) -> Failure | None:
    ((_, failure),) = requests.take_finished()
    return failure


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_every_byte_is_moved_once_whatever_comes_back(sizes, draw):
    starts = list(itertools.accumulate(sizes, initial=0))
    requests = RequestQueue(OPTIONS, 3)
    segments = [Segment(FD, start, 10**6 + start, size) for start, size in zip(starts[:-1], sizes, strict=True)]
    requests.add(PythonOperation(Op.READ, segments))
    moved = [0] * starts[-1]
    in_flight: list[Request] = []
    while not requests.idle:
        while (request := requests.next()) is not None:
            assert 0 < request.size_bytes <= OPTIONS.block_size
            assert request.address == 10**6 + request.offset
            in_flight.append(request)
        assert 0 < len(in_flight) <= 3
        request = in_flight.pop(draw.randrange(len(in_flight)))
        result = draw.choice((request.size_bytes, draw.randint(1, request.size_bytes), -errno.EINTR))
        done = request.size_bytes if result == request.size_bytes else max(result, 0) // 256 * 256
        for position in range(request.offset, request.offset + done):
            moved[position] += 1
        requests.complete(request, result)
    assert moved == [1] * len(moved)
    assert only_failure(requests) is None
    assert requests.stats(0).bytes_read == len(moved)


@pytest.mark.parametrize(("result", "code"), [(-errno.EAGAIN, errno.EAGAIN), (255, errno.ENODATA)])
def test_attempts_without_progress_are_counted(result, code):
    requests = queue_of((Op.READ, 1024))
    for attempt in range(MAX_ATTEMPTS):
        if attempt == MAX_ATTEMPTS // 2:
            requests.complete(requests.next(), 256)  # progress: the count starts again
        assert requests.take_finished() == []
        requests.complete(requests.next(), result)
    assert requests.take_finished() == []
    for _ in range(MAX_ATTEMPTS // 2):
        requests.complete(requests.next(), result)
    assert only_failure(requests) == Failure(code, FD, 256, 768)


@pytest.mark.parametrize(("op", "code"), [(Op.READ, errno.ENODATA), (Op.WRITE, errno.EIO)])
def test_nothing_moved_is_final(op, code):
    requests = queue_of((op, 100))
    requests.complete(requests.next(), 0)
    assert only_failure(requests) == Failure(code, FD, 0, 100)


def test_a_failed_operation_waits_for_what_is_in_flight_and_issues_nothing_more():
    requests = queue_of((Op.WRITE, 10 * 1024))
    first, second, third, fourth = (requests.next() for _ in range(4))
    requests.complete(second, -errno.EINTR)  # waits to be repeated
    requests.complete(first, -errno.ENOSPC)
    assert requests.next() is None
    requests.complete(third, -errno.EIO)
    assert requests.take_finished() == []
    requests.complete(fourth, 100)
    assert only_failure(requests) == Failure(errno.ENOSPC, FD, 0, 1024)
    assert requests.idle


@given(st.integers(0, 2**32), st.integers(1, 10**6))
def test_an_injected_short_transfer_is_legal_for_direct_io(seed, size_bytes):
    asked = FaultInjector(FaultSpec(seed=seed, short=1.0), 256).ask(size_bytes)
    assert 0 < asked <= size_bytes
    assert asked == size_bytes or asked % 256 == 0
    assert asked < size_bytes or size_bytes <= 256


def test_a_seed_names_a_run():
    runs = []
    for _ in range(2):
        requests = queue_of((Op.WRITE, 200 * 1024), depth=200)
        injector = FaultInjector(FaultSpec(seed=3, max_delay_us=10**9, **KINDS), 256)
        issued = [requests.next() for _ in range(200)]
        asked = [injector.ask(request.size_bytes) for request in issued]
        seen = injector.sift((request, size) for request, size in zip(issued, asked, strict=True))
        runs.append((asked, [(request.offset, result) for request, result in seen]))
    assert runs[0] == runs[1]
    assert {result for _, result in runs[0][1]} > {-errno.EINTR, -errno.EAGAIN, -errno.EIO, -errno.ENOSPC, 1024}


def test_a_reordered_completion_is_seen_behind_a_later_one():
    requests = queue_of((Op.READ, 100 * 1024), depth=100)
    injector = FaultInjector(FaultSpec(seed=1, reorder=0.5, max_delay_us=10**9), 256)
    order = []
    for request in [requests.next() for _ in range(100)]:
        order += [seen.offset for seen, _ in injector.sift([(request, 1024)])]
    assert len(order) >= 90
    assert order != sorted(order)


def test_a_delayed_completion_is_held_until_it_is_due():
    injector = FaultInjector(FaultSpec(seed=1, delay=1.0, max_delay_us=1000), 256)
    assert injector.patience() is None
    request = queue_of((Op.READ, 1024)).next()
    assert injector.sift([(request, 1024)]) == []
    patience = injector.patience()
    assert 0.0 <= patience <= 0.001
    while not (seen := injector.sift([])):
        pass
    assert seen == [(request, 1024)]
    assert injector.patience() is None
