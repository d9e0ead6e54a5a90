"""Starts runs in child processes that train by turns, and follows them."""

import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from nvme_offload.perf.demo.records import RunResult, RunSettings, StepSample

SECONDS_TO_STOP = 20.0


class RunFailedError(RuntimeError):
    """A child process ended without a result; the message says why."""


class Child(contextlib.AbstractContextManager["Child"]):
    """A run in a process of its own: it is started, trains when it is told to, and ends with its result.

    The child has a process group of its own, so Ctrl-C on the terminal reaches this process alone, which then asks the
    child to leave in order.

    Args:
        settings: What to do.
        log: Where the child's standard error goes.
    """

    def __init__(self, settings: RunSettings, log: Path) -> None:
        command = [sys.executable, "-m", "nvme_offload.perf.demo.worker"]
        self._log = log
        self.samples: list[StepSample] = []
        """The steps taken so far."""
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, process_group=0
            )
        self._tell(dataclasses.asdict(settings))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _stop(self._process)

    def wait_until_ready(self) -> str:
        """Wait until the child could train; gives the precision of its forward and backward.

        Raises:
            RunFailedError: The child failed.
        """
        return str(self._expect("ready"))

    def train(self, steps: int, on_step: Callable[[StepSample], None]) -> None:
        """Have the child take some steps, and wait until it has nothing left to do.

        Args:
            steps: How many.
            on_step: Called after every step.

        Raises:
            RunFailedError: The child failed.
        """
        self._tell(steps)

        def note(sample: StepSample) -> None:
            self.samples.append(sample)
            on_step(sample)

        self._expect("turn ended", note)

    def finish(self) -> RunResult:
        """Have the child look at what it trained, and end; gives the result.

        Raises:
            RunFailedError: The child failed.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        result = self._expect("result")
        self._process.wait()
        assert isinstance(result, dict)
        return RunResult.from_dict(result)

    def _tell(self, content: object) -> None:
        """Send one line. A child that is gone says so where an answer is expected."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(content) + "\n")
            self._process.stdin.flush()

    def _expect(self, wanted: str, on_step: Callable[[StepSample], None] = lambda sample: None) -> Any:
        """The content of the next message of this kind."""
        assert self._process.stdout is not None
        for kind, content in _messages(self._process.stdout):
            if kind == "failure":
                raise RunFailedError(str(content))
            if kind == "step" and isinstance(content, dict):
                on_step(StepSample(**content))
            elif kind == wanted:
                return content
        self._process.wait()
        how = _end_of(self._process.returncode)
        raise RunFailedError(f"the child process {how} and gave no result; its output is in {self._log}")


def _end_of(code: int) -> str:
    """How a child process ended, in words; a killed one often ran out of memory."""
    if code >= 0:
        return f"ended with code {code}"
    return f"was ended by signal {-code} ({signal.strsignal(-code)})"


def _messages(stream: IO[str]) -> Iterator[tuple[str, object]]:
    for line in stream:
        message = json.loads(line)
        yield message["kind"], message["content"]


def _stop(child: subprocess.Popen[str]) -> None:
    """Ends the child if it still runs: it gets time to remove its swap."""
    with uninterrupted():
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(SECONDS_TO_STOP)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignores Ctrl-C for the moment that cleaning up takes."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
