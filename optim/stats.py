"""What the optimizer tells about itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

SpanKind = Literal["read", "compute", "write", "norm"]


class Span(NamedTuple):
    """Something that took time in a step, on the clock of ``time.monotonic_ns``."""

    kind: SpanKind
    subgroup: int
    """Index of the subgroup; -1 for the norm."""
    start_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True)
class OptimizerStats:
    """Counters since construction, unless said otherwise."""

    steps: int
    """Steps taken."""
    skipped_steps: int
    """Steps left out because a gradient was not finite."""
    bytes_read: int
    """Bytes of optimizer state that came from the drive."""
    bytes_written: int
    """Bytes of optimizer state that went to the drive."""
    step_seconds: float
    """Seconds spent inside ``step()``."""
    wait_seconds: float
    """Seconds spent waiting for reads and writes inside ``step()``, and where state is looked at."""
    compute_seconds: float
    """Seconds spent in kernels, inside ``step()`` and behind it, the norm included."""
    achieved_depth: float
    """Mean number of requests in flight while any was."""
    engine: str
    """Name of the engine, or "host memory"."""
    engine_reason: str
    """Why the I/O is done by this engine and no other."""
    num_subgroups: int
    staging_bytes: int
    """Host memory of all staging buffers and, for CUDA parameters, of the mirrors beside them."""
    state_bytes: int
    """Bytes of optimizer state, wherever it lives."""
    host_state_bytes: int
    """Bytes of optimizer state that live in host memory for good; the rest lives on NVMe."""
    total_norm: float
    """Global gradient norm of the latest step, before clipping; NaN before the first."""
    clip_coef: float
    """What clipping multiplied the latest gradients by."""
    resplit_blocks: int
    """Tiles of 65536 elements whose parameter was changed by someone else between steps."""
    updates_behind: int = 0
    """Updates of subgroups that were done behind a step, under the next forward."""
    updates_in_backward: int = 0
    """Updates of subgroups that were done before their step, in backward."""
    overlap_wait_seconds: float = 0.0
    """Seconds that forwards, and whoever else wanted parameters or state, waited for updates behind a step."""
    param_uses: int = 0
    """Times a block of the parameter tier was needed: gathers, updates, accesses from outside."""
    param_reads: int = 0
    """Reads of blocks of the parameter tier. Other uses found the block still in its buffer."""
    param_reads_ahead: int = 0
    """Reads of blocks of parameters that were started before the block was needed."""
    param_reads_unused: int = 0
    """Reads of blocks of parameters that were given up again unused: the order was not that of the step before."""
    param_wait_seconds: float = 0.0
    """Seconds spent waiting for blocks of parameters."""
    param_bytes_read: int = 0
    """Bytes of parameters that came from the drive."""
    param_bytes_written: int = 0
    """Bytes of parameters that went to the drive."""
    param_host_bytes: int = 0
    """Bytes of parameters that the tier plan keeps in host memory although their tier is NVMe."""
    grad_uses: int = 0
    """Times a block of the gradient tier was needed: accumulations and updates."""
    grad_reads: int = 0
    """Reads of blocks of the gradient tier."""
    grad_reads_ahead: int = 0
    """Reads of blocks of gradients that were started before the block was needed."""
    grad_reads_unused: int = 0
    """Reads of blocks of gradients that were given up again unused."""
    grad_wait_seconds: float = 0.0
    """Seconds spent waiting for blocks of gradients."""
    grad_bytes_read: int = 0
    """Bytes of gradients that came from the drive."""
    grad_bytes_written: int = 0
    """Bytes of gradients that went to the drive."""
    grad_host_bytes: int = 0
    """Bytes of gradients that the tier plan keeps in host memory although their tier is NVMe."""


@dataclass
class Meter:
    """Collects what `OptimizerStats` and the timeline report."""

    steps: int = 0
    skipped_steps: int = 0
    resplit_blocks: int = 0
    changed_behind: int = 0
    """Tiles found changed that nobody has been told of."""
    updates_behind: int = 0
    updates_in_backward: int = 0
    step_seconds: float = 0.0
    wait_seconds: float = 0.0
    compute_seconds: float = 0.0
    spans: list[Span] = field(default_factory=list)
    """Spans of the latest step; writes that still run behind it are added when they are seen to be done."""

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Count the time inside as step."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self.step_seconds += (time.monotonic_ns() - start) / 1e9

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self.wait_seconds += (time.monotonic_ns() - start) / 1e9

    @contextmanager
    def computing(self, kind: SpanKind, subgroup: int) -> Iterator[None]:
        """Count the time inside as computing and put it on the timeline."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            end = time.monotonic_ns()
            self.compute_seconds += (end - start) / 1e9
            self.spans.append(Span(kind, subgroup, start, end))
