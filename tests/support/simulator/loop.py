"""An event loop that waits in a world."""

import asyncio
import selectors
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.simulator.primitives import world


class _SteppedSelector(selectors.EpollSelector):
    def select(self, timeout: float | None = None) -> Any:
        ready = super().select
        world().block(lambda: bool(ready(0)), timeout, "an event loop")
        return ready(0)


@contextmanager
def stepped_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop of its own, closed at the end."""
    loop = asyncio.SelectorEventLoop(_SteppedSelector())
    try:
        yield loop
    finally:
        loop.close()
