"""Seeded faults for the Python engines, at the completion source: below the code that checks and repeats."""

import errno
import random
import time
from collections.abc import Iterable
from typing import NamedTuple

from .engine import Op
from .faults import FaultSpec
from .requests import Request

Completion = tuple[Request, int]
"""A request and its result: bytes moved, or a negative errno."""


class _Held(NamedTuple):
    completion: Completion
    due_ns: int
    overtaken: bool
    """Whether the completion is seen behind the next one that passes, if one does before it is due."""


class FaultInjector:
    """Shortens requests before they are issued; overwrites, delays and reorders what completes."""

    def __init__(self, spec: FaultSpec, alignment: int) -> None:
        self._spec = spec
        self._alignment = alignment
        self._random = random.Random(spec.seed)
        self._held: list[_Held] = []

    def _hit(self, probability: float) -> bool:
        return probability > 0.0 and self._random.random() < probability

    def ask(self, size_bytes: int) -> int:
        """Return how many of `size_bytes` to ask the kernel for: a short transfer that stays legal with O_DIRECT."""
        num_blocks = -(-size_bytes // self._alignment)
        if num_blocks < 2 or not self._hit(self._spec.short):
            return size_bytes
        return self._random.randrange(1, num_blocks) * self._alignment

    def _overwrite(self, request: Request, result: int) -> int:
        spec = self._spec
        for probability, code in ((spec.eintr, errno.EINTR), (spec.eagain, errno.EAGAIN), (spec.eio, errno.EIO)):
            if self._hit(probability):
                return -code
        if request.op is Op.WRITE and self._hit(spec.enospc):
            return -errno.ENOSPC
        if 0 < result < request.size_bytes and self._random.random() < 0.5:
            # A file system may also stop in the middle of a block: the continuation has to round down.
            return self._random.randint(max(1, result - self._alignment + 1), result)
        return result

    def sift(self, arrived: Iterable[Completion]) -> list[Completion]:
        """Take what the kernel completed; give what is seen of it now, and what was held until now."""
        now = time.monotonic_ns()
        seen: list[Completion] = []
        for request, result in arrived:
            completion = (request, self._overwrite(request, result))
            if self._hit(self._spec.reorder):
                self._held.append(_Held(completion, now + self._spec.max_delay_us * 1000, overtaken=True))
            elif self._hit(self._spec.delay):
                delay_ns = self._random.randint(0, self._spec.max_delay_us * 1000)
                self._held.append(_Held(completion, now + delay_ns, overtaken=False))
            else:
                seen.append(completion)
        passed = bool(seen)
        released = [held for held in self._held if held.due_ns <= now or (held.overtaken and passed)]
        self._held = [held for held in self._held if held not in released]
        return seen + [held.completion for held in released]

    def patience(self) -> float | None:
        """Seconds until a held completion is due; None while none is held."""
        if not self._held:
            return None
        return max(0.0, (min(held.due_ns for held in self._held) - time.monotonic_ns()) / 1e9)
