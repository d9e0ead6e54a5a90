"""The process in which `offload verify` makes its checks, with a build whose drive gives back another byte."""

import os
import sys
import time
from typing import Any

import torch

from nvme_offload.offload.storage.nvme_tier import NvmeTier
from nvme_offload.perf.verify.command import Outcome, work


def broken(told: Any, send: Any) -> None:
    """Make checks with it."""
    write = NvmeTier.write

    def write_another_byte(tier: Any, extent: Any, buffer: Any, **named: Any) -> Any:
        buffer.view(torch.uint8, 0, 1).bitwise_xor_(1)
        return write(tier, extent, buffer, **named)

    NvmeTier.write = write_another_byte  # type: ignore[method-assign]
    work(told, send)


def ends_badly(told: Any, send: Any) -> None:
    """Ends its process at one check and takes a minute for another; any other finds the number of the process."""
    next(told)
    for name in told:
        if name == "clipping":
            sys.stderr.write("what it said\n")
            sys.stderr.flush()
            os._exit(3)
        if name == "scaler":
            time.sleep(60)
        send("outcome", Outcome(name=name, status="ok", found=str(os.getpid()), seconds=0.0))
