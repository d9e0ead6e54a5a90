"""One run of the demo, in a process of its own: the same for both places where optimizer state can live."""

import dataclasses
import hashlib
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nvme_offload import OffloadAdamW
from nvme_offload.optim.telemetry.stats import Span
from nvme_offload.perf.measure.child import Send
from nvme_offload.perf.measure.gpt import CONTEXT, ByteGPT, ModelSize, batches, load_corpus
from nvme_offload.perf.measure.machine import peak_resident_bytes, settled_resident_bytes, storage_bytes
from nvme_offload.perf.measure.sections import section

MICRO_BATCH, ACCUMULATION = 8, 2
LEARNING_RATE = 2e-3
LEARNING_RATE_WIDTH = 384  # wider models get less, in proportion
WEIGHT_DECAY = 0.1
WARM_UP_PASSES = 2
MEASURED_FROM = 1  # the first step also creates what later steps only use
DIGESTED = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """One child process is to do this."""

    size: ModelSize
    seed: int
    engine: str
    swap: Path | None
    """Folder for the optimizer's state; None: it is in memory."""
    threads: int

    def section(self) -> dict[str, Any]:
        """The offload section of this run, as a user would write it."""
        return section(
            self.swap,
            state={"buffer_count": 4},
            sub_group_size=self.size.sub_group_size,
            aio={"engine": self.engine, "direct": "optional"},
            gradient_clipping=1.0,
        )


@dataclass(frozen=True, kw_only=True)
class StepSample:
    """One step: losses in nats per byte, times in seconds."""

    loss: float
    forward_backward_seconds: float
    optimizer_seconds: float
    """Seconds in `optimizer.step()`, and waiting for writes of the step before if they still ran."""
    total_norm: float
    started_ns: int
    """When its first forward began."""
    began_ns: int
    returned_ns: int
    """When `optimizer.step()` was called and when it returned; writes may run behind it."""
    share_of_ideal: float | None = None
    """The iteration came so near to the longer of its computing and its bytes; None is not known."""
    limit: str = ""
    """The limit of the iteration."""
    spans: list[Span] = field(default_factory=list)
    """All that began between the end of the step before and the end of this one, also what ran on behind them."""
    bytes_moved: int = 0
    """Bytes that this step read and wrote."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.forward_backward_seconds + self.optimizer_seconds

    @property
    def pace(self) -> str:
        """Seconds, and what share of the ideal they are, in words."""
        share = self.share_of_ideal
        of_ideal = "" if share is None else f", {share:.0%} of the ideal ({self.limit})"
        return f"{self.seconds:.2f} s per step{of_ideal}"


@dataclass(kw_only=True)
class RunResult:
    """One child process found this."""

    settings: dict[str, Any]
    num_parameters: int
    samples: list[StepSample] = field(default_factory=list)
    train_seconds: float = 0.0
    peak_resident_bytes: int | None = None
    optimizer_resident_bytes: int | None = None
    """Resident memory after training, less what was resident before the optimizer existed; no gradients in either."""
    process_bytes: tuple[int, int] | None = None
    """Bytes read and written by the process from the second step on, as the kernel counts them."""
    counted_bytes: tuple[int, int] = (0, 0)
    """Bytes read and written from the second step on, as the optimizer counts them."""
    stats: dict[str, Any] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def measured(self) -> list[StepSample]:
        """The steps that times and bytes are taken from."""
        return self.samples[MEASURED_FROM:] or self.samples


def work(told: Iterator[Any], send: Send) -> None:
    """Train in a child process: it is told settings, then numbers of steps; after each it is quiet until the next.

    What the optimizer holds on a drive is gone at the end, also after an error.
    """
    settings: RunSettings = next(told)
    torch.set_num_threads(settings.threads)  # the same in every process: arithmetic is repeatable
    text = load_corpus()
    torch.manual_seed(settings.seed)
    # Processors without bf16 instructions take many times as long to compute in bf16.
    model = ByteGPT(settings.size, CONTEXT, torch.float32).bfloat16()
    numel = sum(param.numel() for param in model.parameters())
    result = RunResult(settings=settings.section(), num_parameters=numel)
    baseline = _warm_up(model, batches(text, MICRO_BATCH, settings.seed + 2))
    optimizer = OffloadAdamW(
        model.parameters(),
        lr=LEARNING_RATE * min(1.0, LEARNING_RATE_WIDTH / settings.size.width),
        betas=(0.9, 0.95),
        weight_decay=WEIGHT_DECAY,
        offload=settings.section(),
    )
    with optimizer:
        training = TrainingByTurns(model, optimizer, batches(text, MICRO_BATCH, settings.seed), result)
        send("ready", None)
        for steps in told:
            training.turn(steps, send)
            send("turn ended", None)
        training.count_bytes()
        result.peak_resident_bytes, resident = peak_resident_bytes(), settled_resident_bytes()
        if resident is not None and baseline is not None:
            result.optimizer_resident_bytes = resident - baseline
        result.stats = dataclasses.asdict(optimizer.stats())
        result.digests = _digest_all(model, optimizer)
    send("result", result)


def _warm_up(model: nn.Module, stream: Iterator[tuple[Tensor, Tensor]]) -> int | None:
    """Forward and backward that change nothing; gives the memory that is resident afterwards.

    An optimizer of torch's is made, too: the first one of a process imports much of torch that is not our doing.
    """
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    for _ in range(WARM_UP_PASSES):
        _forward_backward(model, stream)
        model.zero_grad(set_to_none=True)
    return settled_resident_bytes()


def _forward_backward(model: nn.Module, stream: Iterator[tuple[Tensor, Tensor]], passing: Any = nullcontext) -> float:
    """Accumulate the gradient of one step; gives the loss."""
    total = 0.0
    for inputs, targets in islice(stream, ACCUMULATION):
        with passing("forward"):
            loss = model(inputs, targets) / ACCUMULATION
        with passing("backward"):
            loss.backward()
        total += loss.item()
    return total


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


class TrainingByTurns:
    """The loop over the steps of one run; `result` gets what is found."""

    def __init__(
        self, model: nn.Module, optimizer: OffloadAdamW, stream: Iterator[tuple[Tensor, Tensor]], result: RunResult
    ) -> None:
        self._model, self._optimizer, self._stream, self._result = model, optimizer, stream, result
        self._moved_before = 0
        self._first_counts = storage_bytes(), self._moved()

    def turn(self, steps: int, send: Send) -> None:
        """Take some steps, each sent when it is done; nothing runs on while another process trains."""
        started = time.perf_counter()
        self._optimizer.begin_iteration()
        for _ in range(steps):
            if len(self._result.samples) == MEASURED_FROM:
                self._optimizer.synchronize()
                self._first_counts = storage_bytes(), self._moved()
            self._result.samples.append(self._step())
            send("step", self._result.samples[-1])
        self._complete_sample()
        self._result.train_seconds += time.perf_counter() - started

    def count_bytes(self) -> None:
        """Note what was read and written from the second step on."""
        (process, counted), process_now = self._first_counts, storage_bytes()
        if process is not None and process_now is not None:
            self._result.process_bytes = process_now[0] - process[0], process_now[1] - process[1]
        now = self._moved()
        self._result.counted_bytes = now[0] - counted[0], now[1] - counted[1]

    def _moved(self) -> tuple[int, int]:
        stats = self._optimizer.stats()
        return stats.bytes_read, stats.bytes_written

    def _step(self) -> StepSample:
        optimizer, started = self._optimizer, time.monotonic_ns()
        loss = _forward_backward(self._model, self._stream, optimizer.passing)
        computed = time.monotonic_ns()
        self._complete_sample()
        began = time.monotonic_ns()
        optimizer.step()
        returned = time.monotonic_ns()
        optimizer.zero_grad()
        iteration = optimizer.stats().iteration
        return StepSample(
            loss=loss,
            forward_backward_seconds=(computed - started) / 1e9,
            optimizer_seconds=(returned - computed) / 1e9,
            total_norm=optimizer.stats().total_norm,
            started_ns=started,
            began_ns=began,
            returned_ns=returned,
            share_of_ideal=iteration.share_of_ideal if iteration else None,
            limit=iteration.limit if iteration else "",
        )

    def _complete_sample(self) -> None:
        """Add to the latest sample what is only known when its last write is done.

        Called before the next step, when these writes have had the whole forward and backward to end in.
        """
        self._optimizer.synchronize()
        moved, samples = sum(self._moved()), self._result.samples
        if samples:
            latest = samples[-1]
            spans = [span for span in self._optimizer.timeline() if span.start_ns < latest.returned_ns]
            bytes_moved = latest.bytes_moved + moved - self._moved_before
            samples[-1] = dataclasses.replace(latest, spans=spans, bytes_moved=bytes_moved)
        self._moved_before = moved
