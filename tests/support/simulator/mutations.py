"""Mistakes to make in the package, each by exchanging one function or two: what the simulator has to find."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from nvme_offload.aio_native import operation
from nvme_offload.aio_native.engine import Op
from nvme_offload.aio_native.requests import RequestQueue
from nvme_offload.offload.staging.mover import Mover
from nvme_offload.offload.staging.slot import Residency
from nvme_offload.offload.swapper.records import Prefetch
from nvme_offload.offload.swapper.scheduler import TaskScheduler
from tests.support.views_out import end_all_but_the_latest


def buffer_released_early() -> None:
    """The buffer of a slot may be given up as soon as its write was submitted."""
    start_write = Mover.start_write

    def start(staging: Any, slot: Any) -> None:
        start_write(staging, slot)
        slot.become(Residency.STAGED)

    Mover.start_write = start  # type: ignore[method-assign]


def record_updated_late() -> None:
    """Which tensors are busy is noted by the thread that serves them, and not yet by the caller."""

    def enqueue(scheduler: Any, task: Any) -> Any:
        task.record.append(task)
        scheduler._workers[task.op].call(partial(serve, scheduler, task))
        return task.transfer

    def serve(scheduler: Any, task: Any) -> None:
        with scheduler.lock:
            scheduler._busy.add(task.record)
            if isinstance(task, Prefetch):
                scheduler._prefetching.add(task.record)
            scheduler._advance(task.record)

    TaskScheduler.enqueue = enqueue  # type: ignore[method-assign]


def swallowed_short_read() -> None:
    """A read that brought fewer bytes counts as whole."""
    judge = RequestQueue._judge

    def judged(queue: Any, request: Any, result: int) -> int:
        return judge(queue, request, request.size_bytes if request.op is Op.READ and result > 0 else result)

    RequestQueue._judge = judged  # type: ignore[method-assign]


def lost_wake_up() -> None:
    """Who waits looks whether the operation is done, and only then says that he waits."""

    def wait(its: Any, timeout: float | None = None) -> bool:
        if its.done():
            return True
        finished = operation.threading.Lock()
        finished.acquire()
        its._waiting.append(finished)
        finished.acquire(timeout=-1 if timeout is None else timeout)
        return bool(its.done())

    operation.PythonOperation.wait = wait  # type: ignore[method-assign]


def stale_checksum() -> None:
    """The checksums of a slot that is written again stay those of the first time."""
    start_write = Mover.start_write

    def start(staging: Any, slot: Any) -> None:
        before = slot.checksums
        start_write(staging, slot)
        slot.checksums = slot.checksums if before is None else before

    Mover.start_write = start  # type: ignore[method-assign]


MUTATIONS: Mapping[str, Callable[[], None]] = {
    "buffer released early": buffer_released_early,
    "record updated late": record_updated_late,
    "swallowed short read": swallowed_short_read,
    "lost wake-up": lost_wake_up,
    "stale checksum": stale_checksum,
    "gather ended by its other half": end_all_but_the_latest,
}
