"""Child processes that do things when they are told to, and say how it went: JSON both ways, a message a line.

A process of its own makes the peak of its resident memory honest, and lets what cannot live together take turns. To
the child go any JSON values; back come `{"kind": ..., "content": ...}`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

SECONDS_TO_STOP = 20.0

Send = Callable[[str, object], None]
"""Sends a message of this kind with this content."""


class ChildFailedError(RuntimeError):
    """A child process ended without the message that was expected; this message says why."""


class Child:
    """A process that is started, told things, and ends by itself, or with the block at the latest.

    It has a process group of its own, so Ctrl-C on the terminal reaches this process alone, which then asks the
    child to leave in order.

    Args:
        command: What to run.
        log: Where the child's standard error goes.
        environment: Its environment variables; those of this process by default.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                process_group=0,
                env=environment,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with uninterrupted():
            self._stop()

    def tell(self, content: object) -> None:
        """Send one line. A child that is gone says so where an answer is expected."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(content) + "\n")
            self._process.stdin.flush()

    def end_input(self) -> None:
        """Tell the child that nothing more will come."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def expect(
        self,
        wanted: str,
        on_other: Callable[[str, Any], None] = lambda kind, content: None,
        within: float | None = None,
    ) -> Any:
        """The content of the next message of this kind; those before it go to `on_other`.

        Args:
            wanted: The kind.
            on_other: Called with kind and content of others.
            within: Seconds after which the child, with all that it started, is killed; None: it may take any time.

        Raises:
            ChildFailedError: The child failed, ended without it, or took too long.
        """
        with self._killed_after(within) as has_been_killed:
            for kind, content in self._messages():
                if kind == "failure":
                    raise ChildFailedError(str(content))
                if kind == wanted:
                    return content
                on_other(kind, content)
            self._process.wait()
        if has_been_killed.is_set():
            raise ChildFailedError(f"it took longer than {within:g} s and was ended")
        how = _end_of(self._process.returncode)
        raise ChildFailedError(f"the child process {how} and gave no {wanted}; its output is in {self._log}")

    def wait(self) -> None:
        """Wait for the child's end."""
        self._process.wait()

    @contextlib.contextmanager
    def _killed_after(self, seconds: float | None) -> Iterator[threading.Event]:
        """Kill the child's process group when the time is over; the event says whether that has happened."""
        killed = threading.Event()

        def kill() -> None:
            killed.set()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

        if seconds is None:
            yield killed
            return
        timer = threading.Timer(seconds, kill)
        timer.start()
        try:
            yield killed
        finally:
            timer.cancel()

    def _messages(self) -> Iterator[tuple[str, Any]]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            yield message["kind"], message["content"]

    def _stop(self) -> None:
        """End the child if it still runs: it gets time to remove its swap."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(SECONDS_TO_STOP)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def serve(work: Callable[[Iterator[Any], Send], None]) -> int:
    """The child's side: do the work; the exit code is 0 where nothing failed.

    Standard output carries messages only; whatever else is written there, by native code say, goes to standard error.

    Args:
        work: Gets what it is told, line by line, and what sends messages. An exception of it becomes a "failure".
    """
    signal.signal(signal.SIGTERM, _leave)
    with os.fdopen(os.dup(1), "w", buffering=1) as channel:
        os.dup2(2, 1)

        def send(kind: str, content: object) -> None:
            channel.write(json.dumps({"kind": kind, "content": content}, default=str) + "\n")

        # torch's threads would otherwise spin while they wait. Beside another process on the same cores that can make
        # a step ten times slower, and they would take time from the optimizer's own threads.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        try:
            work(map(json.loads, iter(sys.stdin.readline, "")), send)
        except BrokenPipeError:
            return 1  # who started this is gone
        except Exception as error:
            traceback.print_exc()
            send("failure", f"{type(error).__name__}: {error}")
            return 1
    return 0


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignores Ctrl-C for the moment that cleaning up takes."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(number: int, frame: FrameType | None) -> None:
    """Leaves through every `with`, so that the swap is removed."""
    raise SystemExit(128 + number)


def _end_of(code: int) -> str:
    """How a child process ended, in words; a killed one often ran out of memory."""
    if code >= 0:
        return f"ended with code {code}"
    return f"was ended by signal {-code} ({signal.strsignal(-code)})"
