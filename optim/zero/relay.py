"""Functions that take turns: each in a thread of its own, of which one runs at any time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import Context, copy_context
from queue import SimpleQueue
from typing import Any

import torch

from nvme_offload.aio_native.starting import start
from nvme_offload.offload.devices.device import HOST, autocast_dtype, begin_thread


class Runner:
    """Runs a function in a thread, up to each place where it asks for something: a generator that needs no ``yield``.

    Who calls `advance` waits meanwhile, so that nothing runs beside anything. The thread has what torch and Python keep
    for the caller's: contextvars, the default device, autocast.
    """

    def __init__(self, function: Callable[[Runner], object], device: torch.device) -> None:
        self._answers: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        """Each gives, or raises, what the function asked for; None: it ends."""
        self._questions: SimpleQueue[Any] = SimpleQueue()
        self._errors: list[BaseException] = []
        self._is_stopped = False
        self._function: Callable[[Runner], object] | None = function
        surroundings = copy_context(), torch.get_default_device(), autocast_dtype(device.type)
        self._thread = threading.Thread(
            target=self._run, args=(device, *surroundings), name="nvme_offload: micro-batch", daemon=True
        )

    def advance(self, answer: Callable[[], Any]) -> Any:
        """Give the function what it asked for, and return what it asks for next; None: it has returned.

        `answer` is called in the function's thread and raises there; what the function raises is raised here.
        """
        if self._thread.ident is None:
            start(self._thread)
        self._answers.put(answer)
        question = self._questions.get()
        if self._errors:
            raise self._errors.pop()
        return question

    def ask(self, question: object) -> Any:
        """Hand over, from the function, and return the answer. `question` is not None."""
        self._questions.put(question)
        return self._answer()

    def stop(self) -> None:
        """End the function where it waits for an answer, or would. Idempotent."""
        self._is_stopped = True
        self._function = None
        self._answers.put(None)
        if self._thread.ident is not None:
            self._thread.join()
        self._errors.clear()

    def _answer(self) -> Any:
        answer = None if self._is_stopped else self._answers.get()
        if answer is None:
            raise SystemExit  # which is nobody's to catch
        return answer()

    def _run(self, device: torch.device, context: Context, default: torch.device, autocast: torch.dtype | None) -> None:
        begin_thread(device)
        try:
            self._answer()
            function, self._function = self._function, None
            with ExitStack() as surroundings:
                if default != HOST:
                    surroundings.enter_context(default)
                if autocast is not None:
                    surroundings.enter_context(torch.autocast(device.type, autocast))
                if function is not None:
                    context.run(function, self)
        except BaseException as error:
            if not self._is_stopped:
                self._errors.append(error)
        finally:
            self._questions.put(None)
