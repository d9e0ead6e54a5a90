"""Shows how runs get on: a bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nvme_offload.perf.demo.records import StepSample

PLAIN_LINES = 10


class PlainMeter:
    """A meter that prints about ten lines a run."""

    def __init__(self, console: Console, name: str, steps: int) -> None:
        self.console = console
        self.name = name
        self.steps = steps
        self.done = 0
        self.started = time.monotonic()

    def __call__(self, sample: StepSample) -> None:
        """Counts a step and says so now and then."""
        self.done += 1
        every = max(1, self.steps // PLAIN_LINES)
        if self.done == 1 or self.done % every == 0 or self.done == self.steps:
            self.console.print(
                f"{self.name}: step {self.done}/{self.steps}, loss {sample.loss:.3f}, "
                f"{sample.pace}, {time.monotonic() - self.started:.0f} s",
                highlight=False,
            )


class BarMeter:
    """A meter that redraws a bar in place."""

    def __init__(self, progress: Progress, name: str, steps: int) -> None:
        self.progress = progress
        self.task = progress.add_task(name, total=steps, loss="starting")

    def __call__(self, sample: StepSample) -> None:
        """Moves the bar by one step."""
        self.progress.update(self.task, advance=1, loss=f"loss {sample.loss:.3f}  {sample.pace}")


@contextmanager
def meters(console: Console, steps: Mapping[str, int]) -> Iterator[Mapping[str, Callable[[StepSample], None]]]:
    """Gives, by the name of a run, what is to be called after each of its steps, of which there will be so many."""
    if not console.is_terminal:
        yield {name: PlainMeter(console, name, number) for name, number in steps.items()}
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield {name: BarMeter(progress, name, number) for name, number in steps.items()}
