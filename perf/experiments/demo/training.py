"""One training run: the same for both places where optimizer state can live."""

import dataclasses
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nvme_offload import OffloadAdamW
from nvme_offload.perf.experiments.demo.records import MEASURED_FROM, RunResult, RunSettings, StepSample
from nvme_offload.perf.experiments.demo.spans import Span
from nvme_offload.perf.measure.child import Send
from nvme_offload.perf.measure.corpus import load_corpus
from nvme_offload.perf.measure.gpt import ByteGPT, ModelSize
from nvme_offload.perf.measure.machine import peak_resident_bytes, settled_resident_bytes, storage_bytes

CONTEXT = 128
MICRO_BATCH = 8
ACCUMULATION = 2
LEARNING_RATE = 2e-3
LEARNING_RATE_WIDTH = 384  # wider models get less, in proportion
FINAL_LEARNING_RATE = 0.1
WARM_UP = 0.1
WEIGHT_DECAY = 0.1
WARM_UP_PASSES = 2
ARITHMETIC = {"bf16": torch.bfloat16, "fp32": torch.float32}
PROBE_SIZE = 512
MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up over the first tenth, then half a cosine down to a tenth."""
    warm_up = max(1, round(WARM_UP * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    progress = min(1.0, (step - warm_up) / max(1, steps - warm_up))
    return FINAL_LEARNING_RATE + (1 - FINAL_LEARNING_RATE) * 0.5 * (1 + math.cos(math.pi * progress))


def batches(text: bytes, seed: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless inputs and targets, each [MICRO_BATCH, CONTEXT], the same for the same seed."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - CONTEXT - 1, (MICRO_BATCH,), generator=generator)
        windows = torch.stack([data[i : i + CONTEXT + 1] for i in starts.tolist()]).long().to(device)
        yield windows[:, :-1], windows[:, 1:]


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups of a model: its matrices decay, the gains of its norms do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def settle_torch(settings: RunSettings) -> None:
    """Makes arithmetic repeatable: the same threads in every process, deterministic kernels on a GPU."""
    torch.set_num_threads(settings.threads)
    if settings.compute_device == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError("--device cuda: this torch sees no CUDA device; use --device cpu")
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it to be deterministic
        torch.use_deterministic_algorithms(True)
        torch.cuda.reset_peak_memory_stats()


def quick_arithmetic(device: str) -> str:
    """bf16, or fp32 where that is much quicker: processors without bf16 instructions take many times as long."""
    if device == "cuda":
        return "bf16"
    seconds = {}
    for name, dtype in ARITHMETIC.items():
        matrix = torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=dtype)
        times = []
        for _ in range(5):
            started = time.perf_counter()
            torch.mm(matrix, matrix)
            times.append(time.perf_counter() - started)
        seconds[name] = min(times)
    return "fp32" if seconds["fp32"] * 2 < seconds["bf16"] else "bf16"


def _untimed(kind: Literal["forward", "backward"]) -> AbstractContextManager[None]:
    return nullcontext()


def forward_backward(
    model: nn.Module,
    stream: Iterator[tuple[Tensor, Tensor]],
    device: str,
    passing: Callable[[Literal["forward", "backward"]], AbstractContextManager[None]] = _untimed,
) -> tuple[float, float]:
    """Accumulates the gradient of one step; gives the loss and the seconds it took."""
    started = time.perf_counter()
    total = 0.0
    for _ in range(ACCUMULATION):
        inputs, targets = next(stream)
        with passing("forward"):
            loss = model(inputs, targets) / ACCUMULATION
        with passing("backward"):
            loss.backward()
        total += loss.item()
    if device == "cuda":
        torch.cuda.synchronize()
    return total, time.perf_counter() - started


def digest_all(model: nn.Module, optimizer: OffloadAdamW) -> dict[str, str]:
    """SHA-256 of every parameter and of all its state, one tensor in memory at a time."""
    digests = {}

    def add(name: str, tensor: Tensor) -> None:
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digests[name] = hashlib.sha256(raw.numpy().data).hexdigest()

    for name, parameter in model.named_parameters():
        add(name, parameter)
        state = optimizer.state[parameter]
        for key in ("master", *MOMENTS):
            add(f"{name} {key}", state[key])
        digests[f"{name} step"] = str(float(state["step"]))
    return digests


def moved_bytes(optimizer: OffloadAdamW) -> tuple[int, int]:
    """Bytes read and written so far, as the optimizer counts them."""
    stats = optimizer.stats()
    return stats.bytes_read, stats.bytes_written


def difference(later: tuple[int, int] | None, earlier: tuple[int, int] | None) -> tuple[int, int] | None:
    """Elementwise difference of two counts, or None where one of them is unknown."""
    return None if later is None or earlier is None else (later[0] - earlier[0], later[1] - earlier[1])


class Run:
    """Model, data and optimizer of one run, and the loop over its steps."""

    def __init__(self, settings: RunSettings, report: Callable[[StepSample], None]) -> None:
        """Builds the model and the data; the optimizer follows in `train`."""
        settle_torch(settings)
        self.settings = settings
        self.report = report
        self.moved_before = 0
        self.corpus = load_corpus()
        torch.manual_seed(settings.seed)
        size = ModelSize(layers=settings.layers, width=settings.width)
        arithmetic = settings.arithmetic
        if arithmetic == "auto":
            arithmetic = quick_arithmetic(settings.compute_device)
        self.model = ByteGPT(size, CONTEXT, ARITHMETIC[arithmetic]).to(
            device=settings.compute_device, dtype=torch.bfloat16
        )
        self.result = RunResult(
            settings=settings.section(),
            arithmetic=arithmetic,
            num_parameters=sum(p.numel() for p in self.model.parameters()),
            torch_version=torch.__version__,
        )
        self.result.corpus = {
            "num_files": self.corpus.num_files,
            "bytes": len(self.corpus.text),
            "sha256": self.corpus.sha256,
        }

    def train(self, turns: Iterable[int]) -> RunResult:
        """Trains, then takes digests; what the optimizer holds on a drive is gone afterwards, also after an error.

        Args:
            turns: Numbers of steps; between two of them nothing is done here.
        """
        settings, result = self.settings, self.result
        baseline = self.warm_up()
        optimizer = OffloadAdamW(
            parameter_groups(self.model),
            lr=LEARNING_RATE * min(1.0, LEARNING_RATE_WIDTH / settings.width),
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=WEIGHT_DECAY,
            offload=settings.section(),
        )
        with optimizer:
            self.loop(optimizer, turns)
            result.peak_resident_bytes = peak_resident_bytes()
            resident = settled_resident_bytes()
            if resident is not None and baseline is not None:
                result.optimizer_resident_bytes = resident - baseline
            if settings.compute_device == "cuda":
                result.cuda_peak_bytes = torch.cuda.max_memory_allocated()
            result.stats = dataclasses.asdict(optimizer.stats())
            result.digests = digest_all(self.model, optimizer)
        return result

    def warm_up(self) -> int | None:
        """Forward and backward that change nothing; gives the memory that is resident afterwards.

        An optimizer of torch's is made, too: the first one of a process imports much of torch that is not our doing.
        """
        torch.optim.SGD([nn.Parameter(torch.zeros(1))])
        stream = batches(self.corpus.text, self.settings.seed + 2, self.settings.compute_device)
        for _ in range(WARM_UP_PASSES):
            forward_backward(self.model, stream, self.settings.compute_device)
            self.model.zero_grad(set_to_none=True)
        del stream  # it holds a copy of the text, as the one of training does only while it lasts
        return settled_resident_bytes()

    def loop(self, optimizer: OffloadAdamW, turns: Iterable[int]) -> None:
        """Take all steps."""
        settings, result = self.settings, self.result
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, settings.steps))
        stream = batches(self.corpus.text, settings.seed, settings.compute_device)
        process_before, counted_before = storage_bytes(), moved_bytes(optimizer)
        for steps in turns:
            started = time.perf_counter()
            optimizer.begin_iteration()
            for step in range(len(result.samples), len(result.samples) + steps):
                if step == MEASURED_FROM:
                    optimizer.synchronize()
                    process_before, counted_before = storage_bytes(), moved_bytes(optimizer)
                sample = self.step(optimizer, stream)
                schedule.step()
                result.samples.append(sample)
                self.report(sample)
            self.complete_sample(optimizer)  # nothing runs on while another process trains
            result.train_seconds += time.perf_counter() - started
        result.process_bytes = difference(storage_bytes(), process_before)
        counted = difference(moved_bytes(optimizer), counted_before)
        result.counted_bytes = counted or (0, 0)

    def step(self, optimizer: OffloadAdamW, stream: Iterator[tuple[Tensor, Tensor]]) -> StepSample:
        """Take one step: forward, backward and update."""
        started = time.monotonic_ns()
        loss, seconds = forward_backward(self.model, stream, self.settings.compute_device, optimizer.passing)
        waited = self.complete_sample(optimizer)
        began = time.monotonic_ns()
        optimizer.step()
        returned = time.monotonic_ns()
        optimizer.zero_grad()
        iteration = optimizer.stats().iteration
        return StepSample(
            loss=loss,
            forward_backward_seconds=seconds,
            optimizer_seconds=waited + (returned - began) / 1e9,
            total_norm=optimizer.stats().total_norm,
            started_ns=started,
            began_ns=began,
            returned_ns=returned,
            share_of_ideal=iteration.share_of_ideal if iteration else None,
            limit=iteration.limit if iteration else "",
        )

    def complete_sample(self, optimizer: OffloadAdamW) -> float:
        """Adds to the latest sample what is only known when its last write is done; gives the seconds waited for it.

        Called before the next step, when these writes have had the whole forward and backward to end in.
        """
        started = time.perf_counter()
        optimizer.synchronize()
        waited = time.perf_counter() - started
        moved = sum(moved_bytes(optimizer))
        if self.result.samples:
            latest = self.result.samples[-1]
            spans: list[Span] = [
                (span.kind, span.subgroup, span.start_ns, span.end_ns)
                for span in optimizer.timeline()
                if span.start_ns < latest.returned_ns
            ]
            bytes_moved = latest.bytes_moved + moved - self.moved_before
            self.result.samples[-1] = dataclasses.replace(latest, spans=spans, bytes_moved=bytes_moved)
        self.moved_before = moved
        return waited


def work(told: Iterator[Any], send: Send) -> None:
    """Train in a child process: it is told settings, then numbers of steps; after each it is quiet until the next."""
    settings: RunSettings = next(told)
    run = Run(settings, partial(send, "step"))

    def turns() -> Iterator[int]:
        send("ready", run.result.arithmetic)
        for steps in told:
            yield steps
            send("turn ended", None)

    send("result", run.train(turns()))
