"""Settings for every test."""

import os
import signal
from collections.abc import Iterator

import pytest

# Before torch is imported: its idle threads sleep instead of spinning, which on a busy two-core machine is the
# difference between seconds and minutes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell that starts the suite in the background has it ignore Ctrl-C, and children inherit that. Tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process without a launcher, and without a process group afterwards."""
    import torch.distributed as dist  # not before OMP_WAIT_POLICY is set

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
