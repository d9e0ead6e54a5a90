"""Many seeds in several processes; a seed that fails is told with its case, and shrunk."""

import contextlib
import faulthandler
import json
import os
import re
import select
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.simulator.case import Case, draw_case
from tests.support.simulator.install import freeze, install
from tests.support.simulator.mutations import MUTATIONS
from tests.support.simulator.run import run_case
from tests.support.simulator.subjects import SUBJECTS

PATIENCE = 60.0  # seconds of a real clock after which a case counts as hung. The slowest takes a quarter of one.
_WARM_UP = range(-40, 0)
_MOST_ATTEMPTS = 150


_roots: list[tempfile.TemporaryDirectory[str]] = []
"""Of all folders that cases work in; goes with the process that made it."""


@dataclass
class Report:
    """What came of some seeds."""

    num_seeds: int = 0
    seconds: float = 0.0
    violations: dict[int, str] = field(default_factory=dict)  # what was wrong, by seed
    courses: dict[int, list[int]] = field(default_factory=dict)  # what `run_case` says of each seed that ended well


def prepare() -> None:
    """Make this process, and those forked from it, one that simulates."""
    # In memory, where there is such a file system: nothing of a case outlives its process.
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    _roots[:] = [tempfile.TemporaryDirectory(prefix="simulated-", dir=memory)]
    install()
    freeze()
    for seed in _WARM_UP:  # what is imported and made once and kept: a case is the same whatever was before it
        violation_of(draw_case(seed, SUBJECTS))
    freeze()


def begin_process(mutation: str | None = None) -> None:
    """After a fork: perhaps with a broken package."""
    if mutation is not None:
        MUTATIONS[mutation]()
    freeze()


def run_seeds(
    seeds: Sequence[int], workers: int = 1, *, until_first: bool = False, mutation: str | None = None
) -> Report:
    """Run the cases of some seeds, shared out over processes; `mutation`: break the package in this way first."""
    report, begun = Report(), time.monotonic()
    running = [_Worker(seeds[number::workers], mutation) for number in range(workers)]
    while running:
        ready, _, _ = select.select([worker.pipe for worker in running], [], [])
        for worker in [worker for worker in running if worker.pipe in ready]:
            if worker.take(report):
                running.remove(worker)
                if worker.left and not (until_first and report.violations):
                    running.append(_Worker(worker.left, mutation))
        if until_first and report.violations:
            break
    for worker in running:
        worker.stop()
    report.seconds = time.monotonic() - begun
    return report


class _Worker:
    """A process that runs the cases of some seeds and ends with the first that fails: its world is a wreck."""

    def __init__(self, seeds: Sequence[int], mutation: str | None) -> None:
        self.left = list(seeds)
        self.pipe, theirs = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.pipe)
            begin_process(mutation)
            _run_all(seeds, theirs)
        os.close(theirs)
        self._lines = os.fdopen(os.dup(self.pipe), "rb", buffering=0)

    def take(self, report: Report) -> bool:
        """Take in what it says; whether it has ended."""
        data = self._lines.read(1 << 20)
        for line in (data or b"").splitlines():
            said = json.loads(line)
            self.left.remove(said["seed"])
            report.num_seeds += 1
            report.courses[said["seed"]] = said["course"]
            if "wrong" in said:
                report.violations[said["seed"]] = said["wrong"]
        if data:
            return False
        _, status = os.waitpid(self.pid, 0)
        if status and self.left and not os.WIFEXITED(status):
            report.violations[self.left.pop(0)] = f"the process died of signal {os.WTERMSIG(status)}"
        elif os.WEXITSTATUS(status) == 1 and self.left:
            report.violations[self.left.pop(0)] = f"no end after {PATIENCE} seconds; where it stood is on stderr"
        self._close()
        return True

    def stop(self) -> None:
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)
        self._close()

    def _close(self) -> None:
        self._lines.close()
        os.close(self.pipe)


def _run_all(seeds: Sequence[int], pipe: int) -> None:
    """In a process of its own."""
    for seed in seeds:
        course: list[int] = []
        wrong = violation_of(draw_case(seed, SUBJECTS), course)
        said = {"seed": seed, "course": course} | ({"wrong": wrong} if wrong else {})
        os.write(pipe, json.dumps(said).encode() + b"\n")
        if wrong:
            os._exit(3)
    os._exit(0)


def violation_of(case: Case, course: list[int] | None = None) -> str:
    """Run a case; what was wrong with it, or nothing. What `run_case` returns is added to `course`."""
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    with _folder() as folder:
        try:
            found = run_case(case, SUBJECTS, folder)
            if course is not None:
                course += found
        except BaseException as error:
            return "".join(traceback.format_exception(error, limit=-12))
        finally:
            faulthandler.cancel_dump_traceback_later()
    return ""


def differing(report: Report, seeds: Sequence[int]) -> list[int]:
    """Those seeds that take another course when each is alone in its process."""
    alone = [run_seeds([seed]) for seed in seeds]
    return [seed for seed, its in zip(seeds, alone, strict=True) if its.courses[seed] != report.courses[seed]]


def fails(case: Case, mutation: str | None = None) -> str:
    """What is wrong with a case, in a process of its own."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        begin_process(mutation)
        text = violation_of(case).encode()
        while text:
            text = text[os.write(writing, text) :]
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    return said or (f"ended with status {status}" if status else "")


def shrunk(case: Case, mutation: str | None = None) -> tuple[list[int], list[int]]:
    """Places of the calls and faults that are enough to fail: fewer of them, found by leaving out ever smaller runs."""
    attempts, kind = iter(range(_MOST_ATTEMPTS)), _kind(fails(case, mutation))
    calls, faults = list(range(len(case.calls))), list(range(len(case.faults)))

    def still_fails(calls: list[int], faults: list[int]) -> bool:
        return next(attempts, None) is not None and _kind(fails(case.keeping(calls, faults), mutation)) == kind

    calls = _fewer(calls, lambda kept: still_fails(kept, faults))
    faults = _fewer(faults, lambda kept: still_fails(calls, kept))
    return calls, faults


def _kind(wrong: str) -> str:
    """What two violations of one kind have in common: the error, without numbers and places."""
    lines = [line for line in wrong.splitlines() if re.match(r"[\w.]+(:|$)", line)]
    return re.sub(r"\d+", "", lines[-1].partition("{")[0][:60]) if lines else wrong[:60]


def _fewer(places: list[int], still_fails: Callable[[list[int]], bool]) -> list[int]:
    size = len(places)
    while size:
        start = 0
        while start < len(places):
            kept = places[:start] + places[start + size :]
            if still_fails(kept):
                places = kept
            else:
                start += size
        size //= 2
    return places


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """For one case."""
    folder = Path(tempfile.mkdtemp(dir=_roots[0].name))
    try:
        (folder / "drive").mkdir()
        yield folder / "drive"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
