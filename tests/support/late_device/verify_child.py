"""The process in which `offload verify` makes its checks, with the stand-in as the GPU, and perhaps a mistake."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

from nvme_offload.perf.measure.child import serve
from nvme_offload.perf.verify.child import work
from tests.support.late_device.module import late_device
from tests.support.late_device.mutations import MUTATIONS


def on_late_device(told: Any, send: Any) -> None:
    """Make checks on it."""
    mutation = sys.argv[1] if len(sys.argv) > 1 else ""
    with late_device(), MUTATIONS[mutation]() if mutation else nullcontext():
        work(told, send)


if __name__ == "__main__":
    sys.exit(serve(on_late_device))
