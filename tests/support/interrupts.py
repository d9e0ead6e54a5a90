"""An exception, or a real SIGINT, at the n-th point where CPython would run a signal handler inside our packages.

CPython 3.11 and later run handlers after a call, at the entry of a function and at a jump back (`CHECK_EVAL_BREAKER` in
its ceval.c), and nowhere else. Tracing opcodes finds those points one by one; a test goes through all of them.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count, islice, pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

from nvme_offload import aio_native, offload, optim
from nvme_offload.optim.updates.choice import NativeKernel
from nvme_offload.optim.updates.in_torch import WholeMatrix
from nvme_offload.optim.updates.logged import LoggedKernel

PACKAGES = tuple(f"{Path(package.__file__).parent}/" for package in (aio_native, offload, optim))
"""How the names of files begin that have our code."""
OURS = (*PACKAGES, contextlib.__file__, threading.__file__)  # besides, what a ``with`` or a thread of ours goes through
TORCH = (f"{Path(torch.__file__).parent}/",)  # how those of torch begin
_ENTRY = "RESUME"
_HANDLERS_RUN_AFTER = ("CALL", "CALL_FUNCTION_EX", _ENTRY, "JUMP_BACKWARD", "POP_JUMP_BACKWARD")


@dataclass(frozen=True, eq=False)
class Point:
    """An instruction after which a handler runs. Each has one object, which is compared by identity."""

    code: CodeType
    opcode: str


class Struck(BaseException):
    """What a handler raises that is nobody's to catch."""


def raise_struck() -> None:
    """Any handler that raises: of a SIGALRM, a watchdog, a second Ctrl-C."""
    raise Struck


def send_sigint() -> None:
    """Ctrl-C."""
    signal.raise_signal(signal.SIGINT)


class Interrupt:
    """Calls `strike` at one point inside the block, in this thread; `place` says where, if it came to that.

    Inside the block nothing collects garbage on its own: a point has the same number each time. `inside` is how file
    names begin whose code is struck. `keep`: keep what came out of the block, and with it all that its frames have, for
    as long as this object: as an ``except`` block does, and a notebook until the next exception.
    """

    def __init__(
        self,
        when: int | Callable[[Point], bool],
        strike: Callable[[], None],
        inside: tuple[str, ...] = OURS,
        *,
        keep: bool = False,
    ) -> None:
        self.place = ""
        self.kept: BaseException | None = None
        self._inside = inside
        self._keep = keep
        numbers = count(1)
        self._is_due = (lambda point: next(numbers) == when) if isinstance(when, int) else when
        self._strike = strike
        self._collects = gc.isenabled()

    def __enter__(self) -> Interrupt:
        # A collection would come at any allocation and run the finalizers of whatever the tests before left behind.
        self._collects = gc.isenabled()
        gc.disable()
        sys._getframe().f_trace_opcodes = True  # else CPython 3.12 says nothing of opcodes in the first frames
        sys.settrace(self._on_call)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        sys.settrace(None)
        if self._collects:
            gc.enable()
        self.kept = error if self._keep else None

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(self._inside):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        points, last = _points_of(frame.f_code), -1
        if entry := points.get(frame.f_lasti):
            self._pass(entry, frame)

        def on_opcode(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
            nonlocal last
            if event == "exception":  # after a call that raised CPython runs no handler
                last = -1
            elif event == "opcode":
                before, this = points.get(last), frame.f_lasti
                has_jumped = before and (this < last or not before.opcode.startswith("POP_JUMP"))
                last = this
                if has_jumped and before.opcode != _ENTRY:
                    self._pass(before, frame)
            return on_opcode

        return on_opcode

    def _pass(self, point: Point, frame: FrameType) -> None:
        if self._is_due(point):
            where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            self.place = f"{where} ({frame.f_code.co_name}, after {point.opcode})"
            sys.settrace(None)
            self._strike()


@cache
def _points_of(code: CodeType) -> dict[int, Point]:
    """Return the points of code, by offset.

    What a handler raises after a call comes out of that call, and tracing can let it come out of the next opcode only.
    Where a block (with, try) ends between the two, as in ``return f()``, that would be behind its end: left out.
    """
    guards = dis.Bytecode(code).exception_entries

    def guard_of(offset: int) -> object:
        return next((guard for guard in guards if guard.start <= offset < guard.end), None)

    return {
        this.offset: Point(code, this.opname)
        for this, following in pairwise([*dis.get_instructions(code), None])
        if this.opname.split("_IF_")[0] in _HANDLERS_RUN_AFTER
        and ("CALL" not in this.opname or following is None or guard_of(this.offset) == guard_of(following.offset))
    }


def struck(interrupt: Interrupt, call: Callable[[], object]) -> BaseException | None:
    """Call while an interrupt waits for its point; what came of it, or None."""
    try:
        with interrupt:
            call()
    except (Struck, KeyboardInterrupt) as error:
        return error
    return None


@contextlib.contextmanager
def at_update(number: int, act: Callable[[], object]) -> Iterator[None]:
    """Have `act` done right before the `number`-th subgroup from now is updated, and not then if it raises."""
    numbers = count(1)
    with pytest.MonkeyPatch.context() as patch:
        for kernel in (NativeKernel, LoggedKernel, WholeMatrix):

            def prepared(*arguments: Any, prepare: Callable[..., Callable[[], int]] = kernel.prepare) -> Any:
                update = prepare(*arguments)

                def update_of_number() -> int:
                    if next(numbers) == number:
                        act()
                    return update()

                return update_of_number

            patch.setattr(kernel, "prepare", prepared)
        yield


def sigint_at_update(number: int, times: int = 1) -> contextlib.AbstractContextManager[None]:
    """Ctrl-C, so often, in an update."""
    return at_update(number, lambda: [os.kill(os.getpid(), signal.SIGINT) for _ in range(times)])


STRIKES = pytest.mark.parametrize(
    "strike",
    [
        # What is raised in a finalizer is printed.
        pytest.param(strike, marks=pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))
        for strike in (raise_struck, send_sigint)
    ],
)
EACH = 0  # in place of a stride: each point of the code, when it is passed for the first and for the second time
SLOW = (pytest.mark.slow, pytest.mark.timeout(7200))  # marks of what strikes at each point: it takes minutes


def strided(stride: int) -> pytest.MarkDecorator:
    """Some of the points, and each of the code's where there is time."""
    return pytest.mark.parametrize("stride", [stride, pytest.param(EACH, marks=SLOW)])


def every(stride: int, strike: Callable[[], None], inside: tuple[str, ...] = OURS) -> Iterator[Interrupt]:
    """One interrupt after the other, at every `stride`-th point, until a call has no such point any more.

    What every second one raises is kept until the next.
    """
    if stride == EACH:
        yield from _each(strike, inside)
        return
    number = 1
    while True:
        interrupt = Interrupt(number, strike, inside, keep=number // stride % 2 == 0)
        yield interrupt
        if not interrupt.place:
            assert number > 1, "there was no point to strike at"
            return
        number += stride


def _each(strike: Callable[[], None], inside: tuple[str, ...], passages: int = 2) -> Iterator[Interrupt]:
    """Loops make most points of a call the same ones. What a call comes to only after a strike is struck, too."""
    found: dict[tuple[Point, int], None] = {}
    """Points with the number of a passage, in the order in which they were first seen."""
    missed: list[tuple[Point, int]] = []
    """Return those that a call did not come to: threads take their own time, so they have a second chance."""
    num_struck = 0

    def look_out_for(wanted: tuple[Point, int] | None) -> Callable[[Point], bool]:
        passed: Counter[Point] = Counter()

        def is_due(point: Point) -> bool:
            passed[point] += 1
            this = point, passed[point]
            if passed[point] <= passages:
                found.setdefault(this)
            return this == wanted

        return is_due

    yield Interrupt(look_out_for(None), strike, inside)
    assert found, "there was no point to strike at"
    while num_struck < len(found):
        wanted = next(islice(found, num_struck, None))
        num_struck += 1
        interrupt = Interrupt(look_out_for(wanted), strike, inside, keep=num_struck % 2 == 0)
        yield interrupt
        if not interrupt.place:
            missed.append(wanted)
    for wanted in missed:
        yield Interrupt(look_out_for(wanted), strike, inside)
