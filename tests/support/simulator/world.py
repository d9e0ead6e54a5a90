"""The world of a case: one thread runs at a time, and a seed says which; time passes when all of them wait."""

import random
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

MAX_STEPS = 200_000  # hand-overs after which a case counts as hung. The longest take a few thousand.


Found = TypeVar("Found")


class Hang(AssertionError):  # noqa: N818 - what happened, in a word
    """Nobody can go on, or nobody comes to an end."""


@dataclass(eq=False)
class Thread:
    """A thread of the world: it runs while it holds the baton."""

    name: str
    gate: threading.Lock = field(default_factory=threading.Lock)  # opened by whoever hands the baton over
    ready: Callable[[], bool] | None = None  # what it waits for; None: it could go on
    deadline_ns: int | None = None
    finished: bool = False
    waits_for: str = ""

    def __post_init__(self) -> None:
        self.gate.acquire()


def _unseen(call: Callable[[], Found]) -> Found:
    """Call what is not the package's: nothing strikes in it, and nobody hands over."""
    traced = sys.gettrace()
    sys.settrace(None)
    try:
        return call()
    finally:
        sys.settrace(traced)


class World:
    """Hands one baton around among the threads and the drive, at hand-over points with probability `restlessness`."""

    def __init__(self, seed: str, restlessness: float) -> None:
        self.draw = random.Random(seed)
        self.now_ns = 1
        self.num_steps = 0
        self.restlessness = restlessness
        self.events: list[Callable[[], bool]] = []  # what happens by itself: each makes one thing happen, or says False
        self.drive: Any = None  # the drive of the world's engines
        self.trace: Callable[..., object] | None = None  # trace function of the threads that are started from here on
        self.deaths: list[BaseException] = []  # what threads ended with
        self.on_wait: Callable[[], None] | None = None
        """Called when the first thread begins to wait; may raise, as a signal handler does."""
        self._first = self._current = Thread("main")
        self.threads = [self._first]
        self._broken: Hang | None = None

    @property
    def in_first(self) -> bool:
        """Whether the thread that runs is the one that made the world."""
        return self._current is self._first

    @property
    def current(self) -> Thread:
        """The thread that runs."""
        return self._current

    def pause(self) -> None:
        """A hand-over point: perhaps somebody else goes on."""
        if self.draw.random() < self.restlessness:
            self.hand_over()

    def hand_over(self) -> None:
        """Somebody goes on, perhaps the same."""
        self._hand_over(self._next())

    def block(self, ready: Callable[[], bool], timeout: float | None = None, what: str = "") -> bool:
        """Wait until `ready`, or until the timeout in seconds of the world's clock; whether it is ready."""
        self.pause()
        if ready():
            return True
        if timeout is not None and timeout <= 0:
            self.hand_over()  # who asks again and again lets others work
            return ready()
        if self.in_first and self.on_wait is not None:
            self.on_wait()
        me = self._current
        me.ready, me.waits_for = ready, what
        me.deadline_ns = None if timeout is None else self.now_ns + max(1, round(timeout * 10**9))
        try:
            self._hand_over(self._next())
        finally:
            me.ready = me.deadline_ns = None
        return ready()

    def start(self, thread: Thread, run: Callable[[], None]) -> None:
        """Have a thread take part; it begins when the baton comes to it."""
        real = threading.Thread(target=self._run, args=(thread, run), name=thread.name, daemon=True)

        def begin() -> None:
            self.threads.append(thread)
            real.start()

        _unseen(begin)  # the package has another thread start each of its own

    def _run(self, thread: Thread, run: Callable[[], None]) -> None:
        thread.gate.acquire()
        try:
            sys.settrace(self.trace)  # type: ignore[arg-type]
            run()
        except BaseException as error:
            self.deaths.append(error)
        finally:
            sys.settrace(None)
            thread.finished = True
            self.threads.remove(thread)
            self._hand_over(self._next())

    def _next(self) -> Thread:
        return _unseen(self._decide)  # what happens by itself looks at objects of the package

    def _decide(self) -> Thread:
        """Who goes on. What happens by itself happens meanwhile."""
        while True:
            self.num_steps += 1
            self.now_ns += 1000
            if self.num_steps > MAX_STEPS:
                return self._break(f"no end after {MAX_STEPS} hand-overs")
            able = [thread for thread in self.threads if self._can_go_on(thread)]
            choice = self.draw.randrange(len(able) + len(self.events)) if able or self.events else 0
            if choice < len(able):
                return able[choice]
            if any(event() for event in self.draw.sample(self.events, len(self.events))) or able:
                continue
            deadlines = [thread.deadline_ns for thread in self.threads if thread.deadline_ns is not None]
            if not deadlines:
                return self._break("everybody waits for ever")
            self.now_ns = max(self.now_ns, min(deadlines))

    def _can_go_on(self, thread: Thread) -> bool:
        if thread.finished:
            return False
        if thread.ready is None:
            return True
        return thread.ready() or (thread.deadline_ns is not None and thread.deadline_ns <= self.now_ns)

    def _hand_over(self, to: Thread) -> None:
        me = self._current
        if to is not me:
            self._current = to
            to.gate.release()
            if me.finished:
                return
            me.gate.acquire()
        if me is self._first and self._broken is not None:
            raise self._broken

    def _break(self, why: str) -> Thread:
        """Nothing more can be done: the first thread says so."""
        frames = sys._current_frames()
        places = []
        for real in threading.enumerate():
            frame = frames.get(real.ident or 0)
            if frame is not None:
                places.append(f"{real.name}\n" + "".join(traceback.format_stack(frame)[-6:]))
        waits = ", ".join(f"{thread.name} waits for {thread.waits_for or 'nothing'}" for thread in self.threads)
        self._broken = Hang(f"{why}: {waits}\n" + "\n".join(places))
        return self._first
