"""Runs in child processes that train by turns, and what they say."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvme_offload.perf.demo.records import RunResult, RunSettings, StepSample
from nvme_offload.perf.measure.child import Child


class RunChild(Child):
    """A run in a process of its own: it is started, trains when it is told to, and ends with its result.

    Args:
        settings: What to do.
        log: Where the child's standard error goes.
    """

    def __init__(self, settings: RunSettings, log: Path) -> None:
        super().__init__([sys.executable, "-m", "nvme_offload.perf.demo.worker"], log)
        self.samples: list[StepSample] = []
        """The steps taken so far."""
        self.tell(dataclasses.asdict(settings))

    def wait_until_ready(self) -> str:
        """Wait until the child could train; gives the precision of its forward and backward.

        Raises:
            ChildFailedError: The child failed.
        """
        return str(self.expect("ready"))

    def train(self, steps: int, on_step: Callable[[StepSample], None]) -> None:
        """Have the child take some steps, and wait until it has nothing left to do.

        Args:
            steps: How many.
            on_step: Called after every step.

        Raises:
            ChildFailedError: The child failed.
        """
        self.tell(steps)

        def note(kind: str, content: Any) -> None:
            if kind == "step":
                sample = StepSample(**content)
                self.samples.append(sample)
                on_step(sample)

        self.expect("turn ended", note)

    def finish(self) -> RunResult:
        """Have the child look at what it trained, and end; gives the result.

        Raises:
            ChildFailedError: The child failed.
        """
        self.end_input()
        result = self.expect("result")
        self.wait()
        return RunResult.from_dict(result)
