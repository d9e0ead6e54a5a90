"""The child process of one run: settings, then numbers of steps come as JSON on standard input, a line each.

After each number the child takes so many steps and is quiet again; at the end of the input it takes digests and ends.
Messages leave as lines of JSON.

A process of its own makes the peak of its resident memory honest. Standard output carries messages only; whatever
else is written there, by native code say, goes to standard error.
"""

import dataclasses
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import TextIO

from nvme_offload.perf.demo.records import RunSettings, StepSample


def _stop(number: int, frame: FrameType | None) -> None:
    """Leaves through every `with`, so that the swap is removed."""
    raise SystemExit(128 + number)


def _claim_output() -> TextIO:
    """Gives the message channel and points standard output to standard error."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return channel


def main() -> int:
    """Trains as told; the exit code is 0 where a result was sent."""
    signal.signal(signal.SIGTERM, _stop)
    channel = _claim_output()
    settings = RunSettings(**json.loads(sys.stdin.readline()))

    def send(kind: str, content: object) -> None:
        channel.write(json.dumps({"kind": kind, "content": content}, default=str) + "\n")

    def report(sample: StepSample) -> None:
        send("step", dataclasses.asdict(sample))

    def turns(arithmetic: str) -> Iterator[int]:
        send("ready", arithmetic)
        for line in sys.stdin:
            yield json.loads(line)
            send("turn ended", None)

    # torch's threads would otherwise spin while they wait. Beside another process on the same cores that can make a
    # step ten times slower, and they would take time from the optimizer's own threads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be deterministic
    try:
        from nvme_offload.perf.demo.training import Run  # imports torch: seconds, in which SIGTERM already works

        run = Run(settings, report)
        send("result", dataclasses.asdict(run.train(turns(run.result.arithmetic))))
    except BrokenPipeError:
        return 1  # the demo itself is gone
    except Exception as error:
        traceback.print_exc()
        send("failure", f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
