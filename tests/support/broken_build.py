"""The process in which `offload verify` makes its checks, with a build whose drive gives back another byte."""

from __future__ import annotations

import sys
from typing import Any

import torch

from nvme_offload.offload.storage.nvme_tier import NvmeTier
from nvme_offload.perf.measure.child import serve
from nvme_offload.perf.verify.child import work


def broken(told: Any, send: Any) -> None:
    """Make checks with it."""
    write = NvmeTier.write

    def write_another_byte(tier: Any, extent: Any, buffer: Any, **named: Any) -> Any:
        buffer.view(torch.uint8, 0, 1).bitwise_xor_(1)
        return write(tier, extent, buffer, **named)

    NvmeTier.write = write_another_byte  # type: ignore[method-assign]
    work(told, send)


if __name__ == "__main__":
    sys.exit(serve(broken))
