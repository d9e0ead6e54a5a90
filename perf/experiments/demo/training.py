"""One run of the demo, in a process of its own: the same for both places where optimizer state can live."""

import hashlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from nvme_offload import OffloadAdamW
from nvme_offload.optim.telemetry.stats import Span
from nvme_offload.perf.experiments.gpt import CONTEXT, ByteGPT, ModelSize, batches, load_corpus
from nvme_offload.perf.measure.child import Send
from nvme_offload.perf.measure.machine import moved_since, peak_resident_bytes, settled_resident_bytes, storage_bytes

MICRO_BATCH, ACCUMULATION = 8, 2
LEARNING_RATE = 2e-3
SEED = 0  # of weights and batches
LEARNING_RATE_WIDTH = 384  # wider models get less, in proportion
WARM_UP_PASSES = 2
DIGESTED = ("master", "exp_avg", "exp_avg_sq")

Batches = Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step; its loss is in nats per byte."""

    loss: float
    total_norm: float
    started_ns: int  # when its first forward began
    called_ns: int
    returned_ns: int  # when `optimizer.step()` was called and when it returned; writes may run behind it
    share_of_ideal: float | None
    """The iteration came so near to the longer of its computing and its bytes; None is not known."""
    limit: str

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return (self.returned_ns - self.started_ns) / 1e9


@dataclass(kw_only=True)
class DemoRun:
    """One child process has found this by now. A step before the first is in nothing: it makes what others only use."""

    settings: dict[str, Any]
    num_parameters: int
    steps: list[Step] = field(default_factory=list)
    spans: set[Span] = field(default_factory=set)
    peak_bytes: int = 0
    optimizer_bytes: int = 0
    """Resident memory after training, less what was resident before the optimizer existed; no gradients in either."""
    kernel_bytes: tuple[int, int] | None = None  # bytes read and written by the process, as the kernel counts them
    counted_bytes: tuple[int, int] = (0, 0)  # the same as the optimizer counts them
    busy_seconds: float = 0.0  # of the drive meanwhile
    stats: dict[str, Any] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def rate(self) -> float | None:
        """Bytes per second while a read or a write was under way; None where nothing moved."""
        return sum(self.counted_bytes) / self.busy_seconds if self.busy_seconds else None


def work(section: dict[str, Any], size: ModelSize, threads: int, told: Iterator[Any], send: Send) -> None:
    """Train in a child process: it is told numbers of steps, and sends its run; after each it is quiet until the next.

    What the optimizer holds on a drive is gone at the end, also after an error.
    """
    torch.set_num_threads(threads)  # the same in every process: arithmetic is repeatable
    torch.manual_seed(SEED)
    # Processors without bf16 instructions take many times as long to compute in bf16.
    model = ByteGPT(size, CONTEXT, torch.float32).bfloat16()
    stream = batches(load_corpus(), MICRO_BATCH, SEED)
    before = _warm_up(model, stream)
    with OffloadAdamW(
        model.parameters(),
        lr=LEARNING_RATE * min(1.0, LEARNING_RATE_WIDTH / size.width),
        betas=(0.9, 0.95),
        weight_decay=0.1,
        offload=section,
    ) as optimizer:
        optimizer.overlap_with(model)  # a step goes on under the next forward
        run = DemoRun(settings=section, num_parameters=sum(param.numel() for param in model.parameters()))
        _step(model, optimizer, stream)
        optimizer.synchronize()
        by_kernel, before_steps = storage_bytes(), optimizer.stats()
        send("run", run)
        for steps in told:
            optimizer.begin_iteration()
            for _ in range(steps):
                run.steps.append(_step(model, optimizer, stream))
                run.spans.update(optimizer.timeline())
            optimizer.synchronize()
            run.spans.update(optimizer.timeline())  # what ran on behind the last step
            now = optimizer.stats()
            run.peak_bytes, run.stats = peak_resident_bytes(), asdict(now)
            run.kernel_bytes = moved_since(by_kernel)
            run.counted_bytes = (
                now.bytes_read - before_steps.bytes_read,
                now.bytes_written - before_steps.bytes_written,
            )
            run.busy_seconds = now.drive_busy_seconds - before_steps.drive_busy_seconds
            send("run", run)
        run.optimizer_bytes = settled_resident_bytes() - before
        run.digests = _digest_all(model, optimizer)
    send("run", run)


def _warm_up(model: nn.Module, stream: Batches) -> int:
    """Forward and backward that change nothing; gives the memory that is resident afterwards.

    An optimizer of torch's is made, too: the first one of a process imports much of torch that is not our doing.
    """
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    for inputs, targets in islice(stream, WARM_UP_PASSES):
        model(inputs, targets).backward()
        model.zero_grad(set_to_none=True)
    return settled_resident_bytes()


def _step(model: nn.Module, optimizer: OffloadAdamW, stream: Batches) -> Step:
    started, loss = time.monotonic_ns(), 0.0
    for inputs, targets in islice(stream, ACCUMULATION):
        with optimizer.passing("forward"):
            part = model(inputs, targets) / ACCUMULATION
        with optimizer.passing("backward"):
            part.backward()
        loss += part.item()
    called = time.monotonic_ns()
    optimizer.step()
    returned = time.monotonic_ns()
    optimizer.zero_grad()
    stats = optimizer.stats()
    return Step(
        loss=loss,
        total_norm=stats.total_norm,
        started_ns=started,
        called_ns=called,
        returned_ns=returned,
        share_of_ideal=stats.iteration.share_of_ideal if stats.iteration else None,
        limit=stats.iteration.limit if stats.iteration else "",
    )


def _digest_all(model: nn.Module, optimizer: OffloadAdamW) -> dict[str, str]:
    """SHA-256 of every parameter and of all its state, one tensor in memory at a time."""

    def digest(tensor: Tensor) -> str:
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.sha256(raw.numpy().data).hexdigest()

    digests = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        digests[name] = digest(parameter)
        digests |= {f"{name} {key}": digest(state[key]) for key in DIGESTED}
        digests[f"{name} step"] = str(float(state["step"]))
    return digests
