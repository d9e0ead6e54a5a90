"""The child process of one contender: it gets its order, then numbers of iterations, a line each."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nvme_offload.perf.compare.records import Ended, Order, Turn
from nvme_offload.perf.measure.child import Send, serve


def work(told: Iterator[Any], send: Send) -> None:
    """Train as told; at the end of what is told, write the master weights down."""
    order = Order(**next(told))
    import torch  # seconds, in which SIGTERM already works

    from nvme_offload.perf.compare.model import model_of, windows
    from nvme_offload.perf.compare.trainers import trainer_of
    from nvme_offload.perf.measure.machine import peak_resident_bytes, reset_peak_resident_bytes, storage_bytes

    torch.set_num_threads(order.threads)
    model = model_of(order.size)
    data = windows(order.tokens)
    trainer = trainer_of(order.contender, model, Path(order.swap))
    del model
    trainer.iterate(*next(data))  # what is made once is made now
    trainer.settle()
    reset_peak_resident_bytes()
    before, iterations = storage_bytes(), 0
    send("ready", _version(order.package))
    for count in told:
        seconds, losses = [], []
        for _ in range(count):
            batch = next(data)
            start = time.perf_counter()
            losses.append(trainer.iterate(*batch))
            seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        trainer.settle()
        seconds[-1] += time.perf_counter() - start
        iterations += count
        send("turn", dataclasses.asdict(Turn(seconds, losses)))
    peak, after = peak_resident_bytes(), storage_bytes()
    moved = None if before is None or after is None else (after[0] - before[0], after[1] - before[1])
    torch.save({name: weight.clone() for name, weight in trainer.weights()}, order.weights)
    trainer.close()
    send("ended", dataclasses.asdict(Ended(iterations, peak, moved)))


def _version(package: str | None) -> str | None:
    try:
        return version(package) if package else None
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(serve(work))
