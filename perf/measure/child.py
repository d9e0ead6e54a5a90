"""Child processes that do things when they are told to, and say how it went.

A process of its own makes the peak of its resident memory honest, and lets what cannot live together take turns. A
`multiprocessing` connection leads to the child, which any interpreter that has this package may run: to the child go
values, back come pairs of a kind and a value.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from signal import strsignal
from typing import Any, Self

SECONDS_TO_STOP = 20.0

Send = Callable[[str, Any], None]  # sends a message of this kind with this content
Work = Callable[[Iterator[Any], Send], None]
"""Done in a child: gets what it is told, one by one, and what sends messages. An exception becomes a "failure"."""


class ChildFailedError(RuntimeError):
    """A child process ended without the message that was expected; this message says why."""


class Child:
    """A process that is started, told things, and ends by itself, or with the block at the latest.

    It has a process group of its own, so Ctrl-C on the terminal reaches this process alone, which then asks the
    child to leave in order. `work` is a function of a module, or a partial of one; `log` takes what it writes to
    standard output and standard error; `environment` is what it has besides that of this process. Neither it nor what
    it starts imports from the working folder, in which others may write.
    """

    def __init__(
        self, work: Work, log: Path, *, python: str = sys.executable, environment: Mapping[str, str] | None = None
    ) -> None:
        self._log = log
        self._channel, theirs = Pipe()
        with log.open("wb") as said, theirs:
            self._process = subprocess.Popen(
                [python, "-m", "nvme_offload.perf.measure.child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=[theirs.fileno()],
                process_group=0,
                env={**os.environ, "PYTHONSAFEPATH": "1", **(environment or {})},
            )
        self.tell(work)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """End the child if it still runs: it gets time to remove its swap, in which Ctrl-C is ignored."""
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._process.terminate()
            try:
                self._process.wait(SECONDS_TO_STOP)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._channel.close()
        finally:
            signal.signal(signal.SIGINT, before)

    def tell(self, content: object) -> None:
        """Send a value; None says that nothing more will come. A child that is gone says so where it is expected to."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._channel.send(content)

    def expect(self, wanted: str, within: float | None = None) -> Any:
        """Return the content of the next message of this kind; those before it are passed over.

        After `within` seconds the child, with all that it started, is killed; None: it may take any time.
        """
        deadline = None if within is None else time.monotonic() + within
        while True:
            if not self._channel.poll(None if deadline is None else max(0.0, deadline - time.monotonic())):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
                raise ChildFailedError(f"it took longer than {within:g} s and was ended")
            try:
                kind, content = self._channel.recv()
            except (EOFError, ConnectionResetError):
                code = self._process.wait()  # a killed one often ran out of memory
                how = f"ended with code {code}" if code >= 0 else f"was ended by signal {-code} ({strsignal(-code)})"
                raise ChildFailedError(f"the child process {how} and gave no {wanted}; see {self._log}") from None
            if kind == "failure":
                raise ChildFailedError(content)
            if kind == wanted:
                return content

    def finish(self, wanted: str) -> Any:
        """Tell the child that nothing more will come, and wait for its last message, of this kind, and for its end."""
        self.tell(None)
        content = self.expect(wanted)
        self._process.wait()
        return content


def serve(channel: Connection) -> int:
    """Do the work that comes first through the channel; the exit code is 0 where nothing failed."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # leaves through every `with`
    # torch's threads would otherwise spin while they wait. Beside another process on the same cores that can make
    # a step ten times slower, and they would take time from the optimizer's own threads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        work: Work = channel.recv()
        work(iter(channel.recv, None), lambda kind, content: channel.send((kind, content)))
    except (BrokenPipeError, ConnectionResetError, EOFError):
        return 1  # who started this is gone
    except Exception as error:
        traceback.print_exc()
        channel.send(("failure", f"{type(error).__name__}: {error}"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(serve(Connection(int(sys.argv[1]))))
