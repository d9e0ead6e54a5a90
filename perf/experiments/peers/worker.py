"""The child process of one contender: it gets its order, then numbers of iterations."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvme_offload.perf.experiments.peers.trainers import trainer_of
from nvme_offload.perf.measure.child import Send
from nvme_offload.perf.measure.corpus import load_corpus
from nvme_offload.perf.measure.gpt import ByteGPT, parse_size
from nvme_offload.perf.measure.machine import peak_resident_bytes, reset_peak_resident_bytes, storage_bytes

CONTEXT = 128
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Order:
    """What one child process is to do."""

    contender: str
    package: str | None
    size: str
    """Layers and width of the model, as `16x1024`."""
    tokens: int
    """Tokens of one iteration."""
    threads: int
    swap: str
    """Folder on the drive."""
    weights: str
    """File for the master weights at the end."""


@dataclass(frozen=True)
class Turn:
    """Iterations in a row, with nothing of them left running at the end."""

    seconds: list[float]
    losses: list[float]


@dataclass(frozen=True)
class Ended:
    """What the child saw of itself, the first iteration left out."""

    iterations: int
    peak_bytes: int | None
    """Most resident memory while it trained."""
    moved: tuple[int, int] | None
    """Bytes read and written, as the kernel counts them."""


def work(told: Iterator[Any], send: Send) -> None:
    """Train as told; at the end of what is told, write the master weights down."""
    order: Order = next(told)
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
        send("turn", Turn(seconds, losses))
    peak, after = peak_resident_bytes(), storage_bytes()
    moved = None if before is None or after is None else (after[0] - before[0], after[1] - before[1])
    torch.save({name: weight.clone() for name, weight in trainer.weights()}, order.weights)
    trainer.close()
    send("ended", Ended(iterations, peak, moved))


def model_of(size: str) -> ByteGPT:
    """Make the model of the demo, in fp32, with the same values each time; it computes in bf16."""
    torch.manual_seed(SEED)
    return ByteGPT(parse_size(size), CONTEXT, torch.bfloat16)


def windows(tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless inputs and targets, int64 [tokens / CONTEXT, CONTEXT], the same each time."""
    text = torch.frombuffer(bytearray(load_corpus().text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(SEED)
    while True:
        starts = torch.randint(len(text) - CONTEXT - 1, (tokens // CONTEXT,), generator=generator)
        rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
        yield rows[:, :-1], rows[:, 1:]


def _version(package: str | None) -> str | None:
    try:
        return version(package) if package else None
    except PackageNotFoundError:
        return None
