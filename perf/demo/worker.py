"""The child process of one run: settings, then numbers of steps are told to it, a line each.

After each number the child takes so many steps and is quiet again; at the end of the input it takes digests and ends.
"""

import dataclasses
import os
import sys
from collections.abc import Iterator
from typing import Any

from nvme_offload.perf.demo.records import RunSettings, StepSample
from nvme_offload.perf.measure.child import Send, serve


def work(told: Iterator[Any], send: Send) -> None:
    """Trains as told."""
    settings = RunSettings(**next(told))

    def report(sample: StepSample) -> None:
        send("step", dataclasses.asdict(sample))

    def turns(arithmetic: str) -> Iterator[int]:
        send("ready", arithmetic)
        for steps in told:
            yield steps
            send("turn ended", None)

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be deterministic
    from nvme_offload.perf.demo.training import Run  # imports torch: seconds, in which SIGTERM already works

    run = Run(settings, report)
    send("result", dataclasses.asdict(run.train(turns(run.result.arithmetic))))


if __name__ == "__main__":
    sys.exit(serve(work))
