"""What travels between the demo and its child processes: plain data, no torch."""

from dataclasses import dataclass, field
from typing import Any

from nvme_offload.perf.experiments.demo.spans import Span

GRADIENT_CLIPPING = 1.0
BUFFER_COUNT = 4
MEASURED_FROM = 1  # the first step also creates what later steps only use


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What one child process is to do."""

    state_device: str
    """Where optimizer state lives: `nvme` or `cpu`."""
    layers: int
    width: int
    sub_group_size: int
    steps: int
    """Length of the learning-rate schedule."""
    seed: int
    engine: str
    compute_device: str
    swap_path: str | None
    threads: int
    arithmetic: str = "auto"
    """Precision of forward and backward: `bf16`, `fp32`, or `auto` for bf16 where the processor is quick at it."""

    def section(self) -> dict[str, Any]:
        """The offload section of this run, as a user would write it."""
        optimizer: dict[str, Any] = {"device": self.state_device}
        if self.state_device == "nvme":
            optimizer |= {"nvme_path": self.swap_path, "buffer_count": BUFFER_COUNT}
        return {
            "zero_optimization": {"sub_group_size": self.sub_group_size, "offload_optimizer": optimizer},
            "aio": {"engine": self.engine, "direct": "optional"},
            "gradient_clipping": GRADIENT_CLIPPING,
        }


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
    """How near the iteration came to the longer of its computing and its bytes; None is not known."""
    limit: str = ""
    """What limited the iteration."""
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
        if self.share_of_ideal is None:
            return f"{self.seconds:.2f} s per step"
        return f"{self.seconds:.2f} s per step, {self.share_of_ideal:.0%} of the ideal ({self.limit})"


@dataclass(kw_only=True)
class RunResult:
    """What one child process found."""

    settings: dict[str, Any]
    num_parameters: int
    arithmetic: str
    samples: list[StepSample] = field(default_factory=list)
    train_seconds: float = 0.0
    peak_resident_bytes: int | None = None
    optimizer_resident_bytes: int | None = None
    """Resident memory after training, less what was resident before the optimizer existed; no gradients in either."""
    cuda_peak_bytes: int | None = None
    process_bytes: tuple[int, int] | None = None
    """Bytes read and written by the process from the second step on, as the kernel counts them."""
    counted_bytes: tuple[int, int] = (0, 0)
    """Bytes read and written from the second step on, as the optimizer counts them."""
    stats: dict[str, Any] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    corpus: dict[str, Any] = field(default_factory=dict)
    torch_version: str = ""

    @property
    def measured(self) -> list[StepSample]:
        """The steps that times and bytes are taken from."""
        return self.samples[MEASURED_FROM:] or self.samples
