"""Two workloads lie above the engine: `TensorSwapper`, and ``OffloadAdamW.step()``."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

import torch

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.swapper.tensor_swapper import TensorSwapper
from nvme_offload.offload.units import MiB
from nvme_offload.optim.optimizers.adamw import OffloadAdamW
from nvme_offload.optim.telemetry.stats import Span
from nvme_offload.perf.measure.command_line import BUFFERS_PER_RING, Rw, Settings
from nvme_offload.perf.measure.sections import section
from nvme_offload.perf.measure.workloads import Gauge, Sample

STEP_BUFFERS = 4
STEPS_PER_PASS = 2
"""A pass waits for its last writes. In training they go on behind the next forward, so that weighs less here, too."""
MIN_STEP_STAGING_BYTES, MAX_STEP_STAGING_BYTES = 4 * MiB, 512 * MiB
STATE_BYTES_PER_PARAMETER = 10
"""bf16: 2 for the lower half of the master weight, 4 for each moment."""
VERIFIED_NUMEL = 1 << 20
MAX_SWAPPER_RINGS = 64 // BUFFERS_PER_RING
"""A section takes at most 64 staging buffers (`buffer_count`)."""


def section_of(settings: Settings, buffer_bytes: int, num_buffers: int) -> OffloadConfig:
    """The configuration section that says what the knobs say; the staging buffers decide about subgroups."""
    paths = [str(path) for path in settings.paths]
    state = {"nvme_path": paths, "buffer_count": num_buffers, "staging_budget": num_buffers * buffer_bytes}
    aio = {"engine": settings.ioengine, "block_size": settings.bs, "queue_depth": settings.iodepth}
    aio |= {"rings": settings.numjobs, "direct": settings.direct}
    return OffloadConfig.from_dict(section(settings.paths[0], state=state, sub_group_size=2**31, aio=aio))


class SwapperTarget(AbstractContextManager["SwapperTarget"]):
    """Tensors of one transfer each, swapped out and in by name; copies between tensor and staging buffer included."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        step = settings.transfer_bytes
        self._swapper = TensorSwapper(section_of(settings, step, settings.num_buffers))
        self.engine = self._swapper.tier.opened
        self.direct = self._swapper.tier.direct
        self._tensors = {
            f"tensor {index}": torch.randint(-(2**31), 2**31 - 1, (step // 4,), dtype=torch.int32)
            for index in range(settings.size // step)
        }
        self._order = list(self._tensors)

    def __exit__(self, *exception: object) -> None:
        self._swapper.close()

    def prepare(self) -> None:
        """Swap all tensors out, twice so that no extent is new, and compare what comes back bit by bit."""
        for _ in range(2):
            for transfer in [self._swapper.swap_out(name, tensor) for name, tensor in self._tensors.items()]:
                transfer.wait()
        for name, tensor in self._tensors.items():
            if not torch.equal(self._swapper.swap_in(name).wait(), tensor):
                raise RuntimeError(f"{name} came back with other bits")

    def run(self, rw: Rw, size_bytes: int) -> Sample:
        """Move tensors in turn; ``mixed`` swaps each one in and out again."""
        step = self._settings.transfer_bytes
        num_names = -(-size_bytes // step // (2 if rw == "mixed" else 1)) or 1
        transfers: list[Any] = []
        with Gauge(lambda: self._swapper.stats().engine_stats) as gauge:
            for _ in range(num_names):
                name = self._order.pop(0)
                self._order.append(name)
                if rw != "write":
                    transfers.append(self._swapper.swap_in(name, out=self._tensors[name]))
                if rw != "read":
                    transfers.append(self._swapper.swap_out(name, self._tensors[name]))
            for transfer in transfers:
                transfer.wait()
        spans = [(transfer.operation.submitted_ns, transfer.operation.completed_ns) for transfer in transfers]
        return gauge.sample(rw, spans, step * len(transfers))


class StepTarget(AbstractContextManager["StepTarget"]):
    """Optimizer steps over bf16 parameters whose state fills the region: bytes moved per second of a whole step."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        budget = max(MIN_STEP_STAGING_BYTES, min(MAX_STEP_STAGING_BYTES, settings.size // 8))
        self._section = section_of(settings, budget // STEP_BUFFERS, STEP_BUFFERS)
        self._param = self._parameter(settings.size // STATE_BYTES_PER_PARAMETER)
        self.optimizer = OffloadAdamW([self._param], lr=1e-6, offload=self._section)
        tier = self.optimizer.store.tier
        assert tier is not None  # the section says nvme
        self.engine, self.direct, self._tier = tier.opened, tier.direct, tier

    def __exit__(self, *exception: object) -> None:
        self.optimizer.close()

    def prepare(self) -> None:
        """Take the first step, which writes all state, and one more; compare a small model with the host tier."""
        bits = []
        for offload in (self._section, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}):
            param = self._parameter(min(VERIFIED_NUMEL, self._param.numel()))
            with OffloadAdamW([param], lr=1e-3, offload=offload) as optimizer:
                for _ in range(3):
                    optimizer.step()
            bits.append(param.detach().view(torch.int16))
        if not torch.equal(*bits):
            raise RuntimeError("three steps on NVMe and in host memory gave different bits")
        for _ in range(2):
            self.optimizer.step()
        self.optimizer.synchronize()

    def run(self, rw: Rw, size_bytes: int) -> Sample:
        """Whole steps, of which each moves at most twice the region; the last one's writes are waited for.

        `rw` is ``mixed``: a step has no other. What the step before left in the staging buffers is not read again.
        """
        spans: set[Span] = set()  # what runs behind a step is in the next timeline, too
        start = time.monotonic_ns()
        with Gauge(self._tier.stats) as gauge:
            for _ in range(max(1, size_bytes // (2 * self._settings.size))):
                self.optimizer.step()
                spans.update(self.optimizer.timeline())
            self.optimizer.synchronize()
            seconds = (time.monotonic_ns() - start) / 1e9
        moved = gauge.counted.bytes_read + gauge.counted.bytes_written
        moving = [span for span in spans if span.kind in ("read", "write") and span.start_ns >= start]
        return gauge.sample(rw, [(span.start_ns, span.end_ns) for span in moving], moved, seconds)

    def _parameter(self, numel: int) -> torch.nn.Parameter:
        source = torch.Generator().manual_seed(0)
        noise = torch.randn(1 << 20, generator=source).bfloat16()
        values = noise.repeat(-(-numel // noise.numel()))[:numel]
        param = torch.nn.Parameter(values)
        param.grad = values * 1e-2
        return param
