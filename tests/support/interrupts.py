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
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from nvme_offload import aio_native, offload, optim

PACKAGES = tuple(f"{Path(package.__file__).parent}/" for package in (aio_native, offload, optim))
"""How the names of files begin that have our code."""
OURS = (*PACKAGES, contextlib.__file__, threading.__file__)
"""Besides, what a ``with`` or a thread of ours goes through."""
TORCH = (f"{Path(torch.__file__).parent}/",)
"""How those of torch begin."""
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
    """Calls `strike` at the `number`-th point inside the block, in this thread; `place` says where, if there is one.

    Args:
        number: from 1 on.
        strike: raises, or sends a signal.
        inside: how file names begin whose code is struck.
        keep: keep what came out of the block, and with it all that its frames have, for as long as this object: as an
            ``except`` block does, and a notebook until the next exception.
    """

    def __init__(
        self, number: int, strike: Callable[[], None], inside: tuple[str, ...] = OURS, *, keep: bool = False
    ) -> None:
        self.place = ""
        self.kept: BaseException | None = None
        self._inside = inside
        self._keep = keep
        self._left = number
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
            if before and (frame.f_lasti < last or not before.startswith("POP_JUMP")):  # else it has not jumped
                self._left -= 1
                if self._left == 0:
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


def every(stride: int, strike: Callable[[], None], inside: tuple[str, ...] = OURS) -> Iterator[Interrupt]:
    """One interrupt after the other, at every `stride`-th point, until a call has no such point any more.

    What every second one raises is kept until the next.
    """
    number = 1
    while True:
        interrupt = Interrupt(number, strike, inside, keep=number // stride % 2 == 0)
        yield interrupt
        if not interrupt.place:
            assert number > 1, "there was no point to strike at"
            return
        number += stride
