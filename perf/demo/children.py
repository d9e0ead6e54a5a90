"""Starts a run in a child process and follows it."""

import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from nvme_offload.perf.demo.records import RunResult, RunSettings, StepSample

SECONDS_TO_STOP = 20.0


class RunFailedError(RuntimeError):
    """A child process ended without a result; the message says why."""


def follow(settings: RunSettings, log: Path, on_step: Callable[[StepSample], None]) -> RunResult:
    """Runs one child to its end and gives its result.

    The child has a process group of its own, so Ctrl-C on the terminal reaches this process alone, which then asks the
    child to leave in order.

    Args:
        settings: What to do.
        log: Where the child's standard error goes.
        on_step: Called after every step.

    Raises:
        RunFailedError: The child failed.
    """
    command = [sys.executable, "-m", "nvme_offload.perf.demo.worker"]
    with log.open("wb") as errors:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, process_group=0
        )
        try:
            result = _read(child, settings, on_step)
        finally:
            _stop(child)
    if result is not None:
        return result
    raise RunFailedError(f"the child process {_end_of(child.returncode)} and gave no result; its output is in {log}")


def _end_of(code: int) -> str:
    """How a child process ended, in words; a killed one often ran out of memory."""
    if code >= 0:
        return f"ended with code {code}"
    return f"was ended by signal {-code} ({signal.strsignal(-code)})"


def _read(
    child: subprocess.Popen[str], settings: RunSettings, on_step: Callable[[StepSample], None]
) -> RunResult | None:
    assert child.stdin is not None
    assert child.stdout is not None
    with contextlib.suppress(BrokenPipeError), child.stdin:
        json.dump(dataclasses.asdict(settings), child.stdin)
    for kind, content in _messages(child.stdout):
        if kind == "failure":
            raise RunFailedError(str(content))
        if not isinstance(content, dict):
            continue
        if kind == "step":
            on_step(StepSample(**content))
        else:
            child.wait()
            return RunResult.from_dict(content)
    child.wait()
    return None


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
        if child.stdout is not None:
            child.stdout.close()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignores Ctrl-C for the moment that cleaning up takes."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
