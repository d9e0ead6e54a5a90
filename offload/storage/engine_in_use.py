"""The engine behind a tier, and where ``auto`` chose it another one when it breaks."""

import errno
import threading
from collections.abc import Sequence
from pathlib import Path

from nvme_offload.aio_native import engine as engines
from nvme_offload.aio_native.registry import OpenedEngine, open_engine, open_next_engine, say_once
from ..errors import SwapIOError


class EngineInUse:
    """An engine, and those that broke before it. Thread-safe.

    The SwapIOError where the system refuses descriptors, memory or threads names `path`.
    """

    def __init__(self, name: str, options: engines.EngineOptions, path: Path, fds: Sequence[int]) -> None:
        self.opened = [_open(name, options, path)]
        """The engines, each in place of the one before it; the last does the I/O."""
        self.registration = engines.Registration()
        self.no_other = "" if name == "auto" else "it was asked for by name"
        """Why no other engine may take the place of one that breaks."""
        self._regions: list[tuple[int, int]] = []
        self._fds = fds
        self._lock = threading.RLock()  # re-entrant: a signal handler may use what it interrupted

    @property
    def latest(self) -> OpenedEngine:
        """The engine that does the I/O, and why it and no other."""
        return self.opened[-1]

    def register(self, regions: Sequence[tuple[int, int]]) -> engines.Registration:
        """Register memory and the files, in place of what was registered before. Says once what was refused."""
        self._regions = list(regions)
        engine = self.latest.engine
        self.registration = engines.Registration() if engine.breakdown else engine.register(regions, self._fds)
        for refusal in self.registration.refusals:
            say_once(refusal)
        return self.registration

    def replace(self, broken: engines.Engine) -> bool:
        """See that another engine is in use than one that broke; False where there is none, and `no_other` says why."""
        with self._lock:
            breakdown = broken.breakdown
            if breakdown is None or (self.latest.engine is broken and self.no_other):
                return False
            if not breakdown.ended:  # wherever it is done once more, the kernel may still be doing it the first time
                self.no_other = "the kernel did not say when it stopped using the memory of the transfers under way"
                return False
            if self.latest.engine is broken:
                try:
                    self.opened.append(open_next_engine(broken))
                except (engines.EngineUnavailable, OSError) as error:
                    self.no_other = str(error)
                    return False
                self.register(self._regions)
            return True

    def drain(self) -> None:
        """Wait until nothing is under way."""
        for opened in self.opened:
            opened.engine.drain()

    def stats(self) -> engines.EngineStats:
        """Add up the counters of all engines there were."""
        stats = [opened.engine.stats() for opened in self.opened]
        names = engines.EngineStats.__dataclass_fields__
        return engines.EngineStats(**{name: sum(getattr(each, name) for each in stats) for name in names})

    def close(self) -> None:
        """Wait for what is under way and close every engine. Idempotent."""
        for opened in self.opened:
            opened.engine.close()


def _open(name: str, options: engines.EngineOptions, path: Path) -> OpenedEngine:
    """`open_engine`; what the system refuses (descriptors, memory, threads) is said with its remedy."""
    try:
        return open_engine(name, options)
    except SwapIOError:
        raise
    except OSError as error:
        raise SwapIOError(error.errno or errno.EIO, path=path, direction="allocate", extent="the I/O engine") from error
