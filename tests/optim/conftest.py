"""Optimizers that are closed when the test ends, and what closing must leave behind: nothing."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_offload import OffloadAdamW
from tests.support.training import SETTINGS, section

MakeAdamW = Callable[..., OffloadAdamW]


@pytest.fixture
def make_adamw(drive: Path) -> Iterator[MakeAdamW]:
    """``make_adamw(params, device="nvme", **section and AdamW arguments)``."""
    with contextlib.ExitStack() as on_exit:

        def make(params: Any, device: str = "nvme", **arguments: Any) -> OffloadAdamW:
            options = {**SETTINGS, **{key: arguments.pop(key) for key in SETTINGS if key in arguments}}
            path = arguments.pop("path", drive) if device == "nvme" else None
            return on_exit.enter_context(OffloadAdamW(params, offload=section(path, **arguments), **options))

        yield make
    assert list(drive.iterdir()) == []


@pytest.fixture
def num_threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's threads, from which the kernel pool takes its number, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(num_threads: Callable[[int], None]) -> None:
    """As ranks have. torch's threads spin while they wait, and how many there are decides the order of some sums."""
    num_threads(1)
