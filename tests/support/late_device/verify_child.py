"""The process in which `offload verify` makes its checks, with the stand-in as the GPU, and perhaps a mistake."""

from contextlib import nullcontext
from typing import Any

from nvme_offload.perf.verify.command import work
from tests.support.late_device.module import late_device
from tests.support.late_device.mutations import MUTATIONS


def on_late_device(mutation: str, told: Any, send: Any) -> None:
    """Make checks on it."""
    with late_device(), MUTATIONS[mutation]() if mutation else nullcontext():
        work(told, send)
