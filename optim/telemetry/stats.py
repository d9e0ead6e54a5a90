"""The optimizer tells this about itself."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from itertools import takewhile
from typing import Any, Literal, NamedTuple, get_args

SpanKind = Literal["forward", "backward", "step", "norm", "wait", "read", "compute", "write", "commit"]
Cause = Literal["drive", "staging buffers", "kernel", "device"]
"""Somebody waits for it: a transfer, a buffer to read into, another's update, what a device computes and copies."""
Limit = Literal["compute", "drive", "staging buffers", "kernel", "norm", "device"]

CLOSE = 0.9
"""Share of the ideal from which on only the longer of computing and moving limits an iteration."""


class Span(NamedTuple):
    """Something that took time in an iteration, on the clock of ``time.monotonic_ns``.

    "forward" and "backward" are passes of a micro-batch through a training engine, "step" is all of ``step()``, "wait"
    is inside these; "read", "compute" (the update) and "write" are of one subgroup; "commit" makes a step of a
    durable run last, when its writes are done.
    """

    kind: SpanKind
    subgroup: int
    """Index of the subgroup; -1 for what belongs to none."""
    start_ns: int
    end_ns: int


class DriveTotals(NamedTuple):
    """Drives have done this since construction."""

    bytes_moved: int = 0
    """Bytes read and written, of state, parameters and gradients."""
    busy_seconds: float = 0.0
    """Seconds in which they had anything to do."""
    wait_seconds: float = 0.0
    """Seconds that forward and backward waited for parameters and gradients."""


@dataclass(frozen=True, kw_only=True)
class IterationStats:
    """Seconds of an iteration, from the end of the step before it to the end of its own. ``str()`` sums it up."""

    seconds: float
    """All of it."""
    compute_seconds: float
    """Forward and backward, and all else that is neither waiting nor a part of the step."""
    drive_seconds: float
    """The time to move this iteration's bytes at the rate of this run: bytes over the time with any under way."""
    norm_seconds: float
    """The norm of all gradients."""
    kernel_seconds: float
    """Updates inside ``step()``."""
    wait_seconds: dict[Cause, float]
    """Seconds of waiting, by what was waited for."""

    @property
    def ideal_seconds(self) -> float:
        """Seconds of an iteration that hides the shorter of computing and moving behind the longer."""
        return max(self.compute_seconds, self.drive_seconds)

    @property
    def share_of_ideal(self) -> float:
        """Return how near the iteration came to the ideal: 1 is all of it."""
        return min(1.0, self.ideal_seconds / self.seconds) if self.seconds else 1.0

    @property
    def limit(self) -> Limit:
        """The cause of its length: near the ideal the longer of its two parts, else what most of the rest went to."""
        if self.share_of_ideal >= CLOSE:
            return "drive" if self.drive_seconds > self.compute_seconds else "compute"
        rest: dict[Limit, float] = {"norm": self.norm_seconds, "kernel": self.kernel_seconds}
        for cause, seconds in self.wait_seconds.items():
            rest[cause] = rest.get(cause, 0.0) + seconds
        return max(rest, key=lambda name: rest[name])

    def __str__(self) -> str:
        return f"{self.seconds:.3g} s, {self.share_of_ideal:.0%} of the ideal, limited by: {self.limit}"


@dataclass(frozen=True, kw_only=True)
class OptimizerStats:
    """Counters since construction, unless said otherwise."""

    steps: int
    """Steps taken."""
    skipped_steps: int
    """Steps left out because a gradient was not finite."""
    bytes_read: int
    """Bytes of optimizer state that came from the drive."""
    bytes_written: int
    """Bytes of optimizer state that went to the drive."""
    step_seconds: float
    """Seconds spent inside ``step()``."""
    wait_seconds: float
    """Seconds spent waiting for reads, writes and devices inside ``step()``, and where state is looked at."""
    compute_seconds: float
    """Seconds spent in kernels, inside ``step()`` and behind it, the norm included."""
    achieved_depth: float
    """Mean number of requests in flight while any was."""
    engine: str
    """Name of the engine, or "host memory"."""
    engine_reason: str
    """Why the I/O is done by this engine and no other."""
    num_subgroups: int
    """Subgroups whose state has a place."""
    staging_bytes: int
    """Host memory of all staging buffers and, for parameters on a device, of the mirrors beside them."""
    state_bytes: int
    """Bytes of optimizer state, wherever it lives."""
    host_state_bytes: int
    """Bytes of optimizer state that live in host memory for good; the rest lives on NVMe, or on a device."""
    total_norm: float
    """Global gradient norm of the latest step, before clipping; NaN before the first."""
    clip_coef: float
    """Clipping multiplied the latest gradients by this."""
    resplit_blocks: int
    """Tiles of 65536 elements whose parameter was changed by someone else between steps."""
    iteration: IterationStats | None = None
    """Seconds of the latest iteration, and what limited it; None before the second step."""
    updates_behind: int = 0
    """Updates of subgroups that were done behind a step, under the next forward."""
    updates_in_backward: int = 0
    """Updates of subgroups that were done before their step, in backward."""
    guesses: int = 0
    """Steps that began in backward with a guess of what their gradients would be multiplied by."""
    wrong_guesses: int = 0
    """The number of them that were taken back, because it was another factor, or somebody needed what was before."""
    updates_taken_back: int = 0
    """Updates of subgroups that were done with a wrong guess, and taken back."""
    overlap_wait_seconds: float = 0.0
    """Seconds that forwards, and whoever else wanted parameters or state, waited for updates behind a step."""
    commits: int = 0
    """Steps of a durable run that were made to last, and other commits."""
    failed_commits: int = 0
    """Commits that failed: the run went on, with the one before still whole."""
    commit_failure: str | None = None
    """Why the latest commit failed, with the remedy; None where it lasts, or is under way."""
    commit_seconds: float = 0.0
    """Seconds that commits took, in all; most of them hidden behind the next forward and backward."""
    commit_wait_seconds: float = 0.0
    """Seconds that steps, and whoever else wanted to write, waited for a commit."""
    committed_step: int | None = None
    """The latest step that lasts; None before the first, and where nothing does."""
    rewrite_every: int | None = None
    """Every how many steps the state of a durable run is rewritten; None where it ends with the process."""
    written_per_day: float | None = None
    """Bytes a day that go to drives, of all kinds, at the rate since the first step; None before the second."""
    checkpoint_progress: float | None = None
    """The share that is done of a checkpoint that is written in the background, 0 to 1; None where none is."""
    device_state_bytes: int = 0
    """Bytes of optimizer state that live on a device for good, and are updated there."""
    param_uses: int = 0
    """Times a block of the parameter tier was needed: gathers, updates, accesses from outside."""
    param_reads: int = 0
    """Reads of blocks of the parameter tier. Other uses found the block still in its buffer."""
    param_reads_ahead: int = 0
    """Reads of blocks of parameters that were started before the block was needed."""
    param_reads_unused: int = 0
    """Reads of blocks of parameters that were given up again unused: the order was not that of the step before."""
    param_wait_seconds: float = 0.0
    """Seconds spent waiting for blocks of parameters."""
    param_bytes_read: int = 0
    """Bytes of parameters that came from the drive."""
    param_bytes_written: int = 0
    """Bytes of parameters that went to the drive."""
    param_host_bytes: int = 0
    """Bytes of parameters that the tier plan keeps in host memory although their tier is NVMe."""
    grad_uses: int = 0
    """Times a block of the gradient tier was needed: accumulations and updates."""
    grad_reads: int = 0
    """Reads of blocks of the gradient tier."""
    grad_reads_ahead: int = 0
    """Reads of blocks of gradients that were started before the block was needed."""
    grad_reads_unused: int = 0
    """Reads of blocks of gradients that were given up again unused."""
    grad_wait_seconds: float = 0.0
    """Seconds spent waiting for blocks of gradients."""
    grad_bytes_read: int = 0
    """Bytes of gradients that came from the drive."""
    grad_bytes_written: int = 0
    """Bytes of gradients that went to the drive."""
    grad_host_bytes: int = 0
    """Bytes of gradients that the tier plan keeps in host memory although their tier is NVMe."""
    drive_busy_seconds: float = 0.0
    """Seconds in which any request was in flight, of state, parameters or gradients."""

    def scalars(self, prefix: str = "") -> dict[str, float]:
        """Every number, flat, for a monitor: TensorBoard's ``add_scalar``, ``wandb.log``, ``mlflow.log_metrics``.

        The names are always the same: of the fields here and, with ``iteration_`` before them, of `IterationStats`.
        What is not known yet is NaN.

        Args:
            prefix: put before each name: ``offload/`` makes them one section of TensorBoard.
        """
        known = {name: value for name, value in vars(self).items() if name not in _NO_NUMBERS}
        known = {name: math.nan if value is None else value for name, value in known.items()}
        numbers = {name: value for name, value in known.items() if isinstance(value, int | float)}
        return {prefix + name: value for name, value in (numbers | _of_iteration(self.iteration)).items()}

    @staticmethod
    def is_counter(name: str) -> bool:
        """Whether a number of `scalars` only grows, from construction on; all others go up and down."""
        return name not in _GAUGES and not name.startswith("iteration_")


_GAUGES = {
    *("achieved_depth", "num_subgroups", "staging_bytes", "state_bytes", "total_norm", "clip_coef", "committed_step"),
    *("rewrite_every", "written_per_day", "checkpoint_progress"),
    *(f"{kind}_bytes" for kind in ("host_state", "device_state", "param_host", "grad_host")),
}
"""Numbers that go up and down."""

_NO_NUMBERS = ("iteration", "commit_failure")
"""Fields that may be None and are no number otherwise."""


def _of_iteration(iteration: IterationStats | None) -> dict[str, float]:
    plain = ("seconds", "compute_seconds", "drive_seconds", "norm_seconds", "kernel_seconds")
    found = {name: getattr(iteration, name, math.nan) for name in (*plain, "ideal_seconds", "share_of_ideal")}
    for cause in get_args(Cause):
        seconds = iteration.wait_seconds.get(cause, 0.0) if iteration else math.nan
        found[f"wait_seconds_{cause.replace(' ', '_')}"] = seconds
    return {f"iteration_{name}": value for name, value in found.items()}


@dataclass
class Meter:
    """Collects what `OptimizerStats` and the timeline report."""

    steps: int = 0
    skipped_steps: int = 0
    resplit_blocks: int = 0
    changed_behind: int = 0
    """Tiles found changed that nobody has been told of."""
    updates_behind: int = 0
    updates_in_backward: int = 0
    guesses: int = 0
    wrong_guesses: int = 0
    updates_taken_back: int = 0
    step_seconds: float = 0.0
    wait_seconds: float = 0.0
    compute_seconds: float = 0.0
    spans: list[Span] = field(default_factory=list)
    """Spans of the latest iteration and what follows it; reads and writes are added when they are seen to be done."""
    iteration: IterationStats | None = None
    _began_ns: int = 0
    _ended: tuple[int, DriveTotals] | None = None
    """When the latest step ended, and what drives had done by then."""
    _inside: int | None = None
    """The thread that is in ``step()``."""
    _norm_seconds: float = 0.0
    _kernel_seconds: float = 0.0
    _waits: dict[Cause, float] = field(default_factory=dict)

    @property
    def stats(self) -> dict[str, Any]:
        """The fields of `OptimizerStats` that are collected here."""
        known = vars(self) | {"resplit_blocks": self.resplit_blocks + self.changed_behind}
        return {each.name: known[each.name] for each in fields(OptimizerStats) if each.name in known}

    def count_updates(self, *, behind: int = 0, in_backward: int = 0, taken_back: int = 0) -> None:
        """Count subgroups that were updated behind a step, or in backward, or whose update was taken back."""
        self.updates_behind += behind
        self.updates_in_backward += in_backward
        self.updates_taken_back += taken_back

    def count_guess(self, *, is_right: bool) -> None:
        """Count a step of which somebody guessed the factor."""
        self.guesses += 1
        self.wrong_guesses += not is_right

    def count_step(self, number: int) -> None:
        """Note which step was the latest. It may be cut short and done once more."""
        self.steps = number

    def skip_step(self) -> None:
        """Count a step that was skipped."""
        self.skipped_steps += 1

    def note_changed(self, tiles: int) -> None:
        """Note tiles that were found changed; `take_changed` tells of them."""
        self.changed_behind += tiles

    def take_changed(self) -> int:
        """Return how many tiles were found changed since the last call."""
        tiles, self.changed_behind = self.changed_behind, 0
        self.resplit_blocks += tiles
        return tiles

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Count the time inside as step."""

        def count(seconds: float) -> None:
            self._inside = None
            self.step_seconds += seconds

        with self.passing("step", count=count):
            self._inside = threading.get_ident()
            yield

    def begin_iteration(self, moved: DriveTotals) -> None:
        """Leave what was since the latest step out of any iteration; `moved` as in `end_iteration`."""
        self._ended = time.monotonic_ns(), moved
        self._waits, self._norm_seconds, self._kernel_seconds = {}, 0.0, 0.0

    def end_iteration(self, moved: DriveTotals) -> None:
        """Sum up what has been since the step before, and forget what was earlier; drives have `moved` this by now."""
        before, waits, norm, kernel = self._ended, self._waits, self._norm_seconds, self._kernel_seconds
        self.begin_iteration(moved)
        if before is None:
            return
        began, earlier = before
        now = time.monotonic_ns()
        waits["drive"] = waits.get("drive", 0.0) + (moved.wait_seconds - earlier.wait_seconds)
        seconds = (now - began) / 1e9
        bytes_moved = moved.bytes_moved - earlier.bytes_moved
        self.iteration = IterationStats(
            seconds=seconds,
            compute_seconds=max(0.0, seconds - norm - kernel - sum(waits.values())),
            drive_seconds=bytes_moved * moved.busy_seconds / moved.bytes_moved if bytes_moved > 0 else 0.0,
            norm_seconds=norm,
            kernel_seconds=kernel,
            wait_seconds=waits,
        )
        self._began_ns = began
        # In one piece: a thread may append meanwhile.
        del self.spans[: sum(1 for _ in takewhile(lambda span: span.end_ns <= began, self.spans))]

    def timeline(self) -> list[Span]:
        """Return what ended since the latest iteration began, by time."""
        found = [span for span in tuple(self.spans) if span.end_ns > self._began_ns]
        return sorted(found, key=lambda span: span.start_ns)

    def waiting(self, cause: Cause = "drive") -> AbstractContextManager[None]:
        """Count the time inside as waiting, and put it on the timeline."""

        def count(seconds: float) -> None:
            self.wait_seconds += seconds
            self._waits[cause] = self._waits.get(cause, 0.0) + seconds

        return self.passing("wait", count=count)

    def computing(self, kind: SpanKind, subgroup: int) -> AbstractContextManager[None]:
        """Count the time inside as computing and put it on the timeline."""

        def count(seconds: float) -> None:
            self.compute_seconds += seconds
            if self._inside == threading.get_ident():
                self._norm_seconds += seconds * (kind == "norm")
                self._kernel_seconds += seconds * (kind == "compute")

        return self.passing(kind, subgroup, count)

    @contextmanager
    def passing(
        self, kind: SpanKind, subgroup: int = -1, count: Callable[[float], None] | None = None
    ) -> Iterator[None]:
        """Put the time inside on the timeline, and `count` its seconds. From any thread."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            end = time.monotonic_ns()
            if count is not None:
                count((end - start) / 1e9)
            self.spans.append(Span(kind, subgroup, start, end))
