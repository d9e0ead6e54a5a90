"""`threading`, `time` and `SimpleQueue` of a world: the same names, stepped by the seed."""

import queue
import threading
import time
from typing import Any

from tests.support.simulator.world import Thread, World

_worlds: list[World] = []  # the one world that there is, if there is one


def world() -> World:
    return _worlds[-1]


def enter(new: World) -> None:
    """Make a world the one that counts."""
    _worlds[:] = [new]


class Lock:
    def __init__(self) -> None:
        self._held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        free = lambda: not self._held  # noqa: E731
        if not blocking:
            world().pause()
        elif not world().block(free, None if timeout < 0 else timeout, "a lock"):
            return False
        if self._held:
            return False
        self._held = True
        return True

    def release(self) -> None:
        assert self._held, "a lock was released that nobody held"
        self._held = False
        world().pause()

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()


class RLock:
    def __init__(self) -> None:
        self._owner: Thread | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = world().current
        if self._owner is not me:
            free = lambda: self._owner is None  # noqa: E731
            if not world().block(free, None if timeout < 0 else timeout, "a lock"):
                return False
            self._owner = me
        self._count += 1
        return True

    def release(self) -> None:
        assert self._owner is world().current, "a lock was released by somebody else"
        self._count -= 1
        if not self._count:
            self._owner = None
            world().pause()

    def give_up(self) -> int:
        count, self._count, self._owner = self._count, 0, None
        return count

    def take_again(self, count: int) -> None:
        self.acquire()
        self._count = count

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()


class Condition:
    def __init__(self, lock: RLock | None = None) -> None:
        self._lock = lock or RLock()
        self._waiting: list[Lock] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        woken = Lock()
        woken.acquire()
        self._waiting.append(woken)
        count = self._lock.give_up()
        try:
            return woken.acquire(timeout=-1 if timeout is None else timeout)
        finally:
            self._lock.take_again(count)
            if woken in self._waiting:
                self._waiting.remove(woken)

    def notify(self, number: int = 1) -> None:
        for woken in self._waiting[:number]:
            self._waiting.remove(woken)
            woken.release()

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class SteppedThread:
    """`threading.Thread`, as far as this package uses it."""

    def __init__(self, *, target: Any, name: str, args: Any = (), kwargs: Any = None, daemon: bool = True) -> None:
        self._run = lambda: target(*args, **(kwargs or {}))
        self._thread = Thread(name)
        self.name = name

    @property
    def ident(self) -> int | None:
        """None until it is started."""
        return id(self) if self._thread.finished or self._thread in world().threads else None

    def start(self) -> None:
        world().start(self._thread, self._run)
        world().pause()

    def is_alive(self) -> bool:
        world().pause()
        return self.ident is not None and not self._thread.finished

    def join(self, timeout: float | None = None) -> None:
        world().block(lambda: self._thread.finished, timeout, f"the end of {self.name}")


class Event:
    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True
        world().pause()

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        return world().block(self.is_set, timeout, "an event")


class SimpleQueue:
    """`queue.SimpleQueue`, as far as this package uses it."""

    def __init__(self) -> None:
        self._items: list[Any] = []

    def put(self, item: Any) -> None:
        self._items.append(item)
        world().pause()

    def get(self, timeout: float | None = None) -> Any:
        if not world().block(lambda: bool(self._items), timeout, "a queue"):
            raise queue.Empty
        return self._items.pop(0)

    def empty(self) -> bool:
        return not self._items


class Threading:
    """The module `threading` of a world."""

    Lock, RLock, Condition, Event, Thread = Lock, RLock, Condition, Event, SteppedThread

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


class Time:
    """The module `time` of a world."""

    def monotonic(self) -> float:
        return world().now_ns / 1e9

    def monotonic_ns(self) -> int:
        return world().now_ns

    def sleep(self, seconds: float) -> None:
        world().block(lambda: False, seconds, "time to pass")

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
