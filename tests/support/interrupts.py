"""An exception, or a real SIGINT, at the n-th point where CPython would run a signal handler inside our packages.

CPython 3.11 and later run handlers after a call, at the entry of a function and at a jump back (`CHECK_EVAL_BREAKER` in
its ceval.c), and nowhere else. Tracing opcodes finds those points one by one; a test goes through all of them.
"""

from __future__ import annotations

import contextlib
import dis
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count, islice, pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

from nvme_offload import aio_native, offload, optim

PACKAGES = tuple(f"{Path(package.__file__).parent}/" for package in (aio_native, offload, optim))
"""How the names of files begin that have our code."""
OURS = (*PACKAGES, contextlib.__file__, threading.__file__)
"""Besides, what a ``with`` or a thread of ours goes through."""
TORCH = (f"{Path(torch.__file__).parent}/",)
"""How those of torch begin."""
Point = tuple[CodeType, int]
"""Code, and the offset of the instruction after which a handler runs."""
_HANDLERS_RUN_AFTER = ("CALL", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")


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

    Args:
        when: the number of the point, from 1 on; or says of each whether it is the one.
        strike: raises, or sends a signal.
        inside: how file names begin whose code is struck.
        keep: keep what came out of the block, and with it all that its frames have, for as long as this object: as an
            ``except`` block does, and a notebook until the next exception.
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
        self._is_due = _nth(when) if isinstance(when, int) else when
        self._strike = strike
        self._previous: dict[FrameType, int] = {}

    def __enter__(self) -> Interrupt:
        sys.settrace(self._on_call)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        sys.settrace(None)
        self._previous.clear()
        self.kept = error if self._keep else None

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(self._inside):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._on_opcode

    def _on_opcode(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if event in ("return", "exception"):  # after a call that raised CPython runs no handler
            self._previous.pop(frame, None)
        elif event == "opcode":
            last = self._previous.get(frame, -1)
            before = _points_of(frame.f_code).get(last)
            self._previous[frame] = frame.f_lasti
            has_jumped = before and (frame.f_lasti < last or not before.startswith("POP_JUMP"))
            if has_jumped and self._is_due((frame.f_code, last)):
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name}, after {before})"
                sys.settrace(None)
                self._strike()
        return self._on_opcode


@cache
def _points_of(code: CodeType) -> dict[int, str]:
    """Names of the opcodes after which handlers run, by offset.

    What a handler raises after a call comes out of that call, and tracing can let it come out of the next opcode only.
    Where a block (with, try) ends between the two, as in ``return f()``, that would be behind its end: left out.
    """
    guards = dis.Bytecode(code).exception_entries

    def guard_of(offset: int) -> object:
        return next((guard for guard in guards if guard.start <= offset < guard.end), None)

    return {
        this.offset: this.opname
        for this, following in pairwise([*dis.get_instructions(code), None])
        if this.opname.split("_IF_")[0] in _HANDLERS_RUN_AFTER
        and ("JUMP_BACKWARD" in this.opname or following is None or guard_of(this.offset) == guard_of(following.offset))
    }


def _nth(number: int) -> Callable[[Point], bool]:
    numbers = count(1)
    return lambda point: next(numbers) == number


def struck(interrupt: Interrupt, call: Callable[[], object]) -> BaseException | None:
    """Call while an interrupt waits for its point; what came of it, or None."""
    try:
        with interrupt:
            call()
    except (Struck, KeyboardInterrupt) as error:
        return error
    return None


STRIKES = pytest.mark.parametrize(
    "strike",
    [
        # What is raised in a finalizer that a collection runs just then is printed, whoever wrote the finalizer.
        pytest.param(strike, marks=pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))
        for strike in (raise_struck, send_sigint)
    ],
)
EACH = 0
"""In place of a stride: each point of the code, when it is passed for the first and for the second time."""


def strided(stride: int) -> pytest.MarkDecorator:
    """Some of the points, and each of the code's where there is time."""
    return pytest.mark.parametrize("stride", [stride, pytest.param(EACH, marks=pytest.mark.slow)])


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
        yield Interrupt(look_out_for(wanted), strike, inside, keep=num_struck % 2 == 0)
