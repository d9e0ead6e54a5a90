"""Who is compared, and in which environment each of them runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ENVIRONMENTS = Path(__file__).resolve().parents[3]
"""Where `make compare` makes an environment for each peer that needs one."""


@dataclass(frozen=True)
class Contender:
    """One way to train the model."""

    name: str
    text: str
    """Its name in the table."""
    package: str | None = None
    """The package that the peer needs; None: torch and this project alone."""

    def weights(self, folder: Path) -> Path:
        """The file in `folder` for its master weights at the end."""
        return folder / f"{self.name}.weights"

    def python(self) -> str | None:
        """The interpreter that has its package; None where there is none."""
        if self.package is None or find_spec(self.package):
            return sys.executable
        own = ENVIRONMENTS / f".venv-compare-{self.name}" / "bin" / "python"
        return str(own) if own.exists() else None


OURS = Contender("ours", "nvme-offload, state on NVMe")
MEMORY = Contender("memory", "FSDP2 and torch.optim.AdamW, all in memory")
CONTENDERS = (
    OURS,
    MEMORY,
    Contender("ours-memory", "nvme-offload, state in memory"),
    Contender("cpu-offload", "FSDP2 with CPUOffloadPolicy"),
    Contender("torchao", "torchao's CPUOffloadOptimizer", "torchao"),
    Contender("deepspeed", "DeepSpeed ZeRO-3, state on NVMe, pipelined", "deepspeed"),
)
BY_NAME = {contender.name: contender for contender in CONTENDERS}
