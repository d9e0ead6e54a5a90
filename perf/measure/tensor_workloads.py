"""The workload above the engine: ``OffloadAdamW.step()``."""

import time
from contextlib import AbstractContextManager

import torch

from nvme_offload.offload.units import MiB
from nvme_offload.optim.optimizers.adamw import OffloadAdamW
from nvme_offload.optim.telemetry.stats import Span
from nvme_offload.perf.measure.command_line import Rw, Settings
from nvme_offload.perf.measure.sections import section
from nvme_offload.perf.measure.workloads import Gauge, Sample

STEP_BUFFERS = 4
STEPS_PER_PASS = 2
"""A pass waits for its last writes. In training they go on behind the next forward, so that weighs less here, too."""
MIN_STEP_STAGING_BYTES, MAX_STEP_STAGING_BYTES = 4 * MiB, 512 * MiB
STATE_BYTES_PER_PARAMETER = 10  # bf16: 2 for the lower half of the master weight, 4 for each moment
VERIFIED_NUMEL = 1 << 20


class StepTarget(AbstractContextManager["StepTarget"]):
    """Optimizer steps over bf16 parameters whose state fills the region: bytes moved per second of a whole step."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        budget = max(MIN_STEP_STAGING_BYTES, min(MAX_STEP_STAGING_BYTES, settings.size // 8))
        paths = [str(path) for path in settings.paths]
        state = {"nvme_path": paths, "buffer_count": STEP_BUFFERS, "staging_budget": budget}
        aio = {"engine": settings.ioengine, "block_size": settings.bs, "queue_depth": settings.iodepth}
        aio |= {"rings": settings.numjobs, "direct": settings.direct}
        # The staging buffers decide how large subgroups are.
        self._section = section(settings.paths[0], state=state, sub_group_size=2**31, aio=aio)
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
