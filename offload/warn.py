"""Warnings and errors that point at the user's line; one rank says a warning for all."""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from opcode import opmap
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, ParamSpec, TypeVar

from .foreign import printable

P = ParamSpec("P")
R = TypeVar("R")
_PACKAGE = str(Path(__file__).parent.parent)


def warn_user(message: str, category: type[Warning] = RuntimeWarning, *, of_this_rank: bool = False) -> None:
    """Issue a warning for the innermost caller outside of torch and this package.

    A fixed ``stacklevel`` cannot do this: torch, schedulers and ``GradScaler`` wrap ``step`` in layers of their own.
    The first rank speaks for all, unless it is `of_this_rank`: others may have nothing of the kind to say.
    """
    if not (of_this_rank or speaks_for_all()):
        return
    libraries = _libraries()
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(libraries):
        level, frame = level + 1, frame.f_back
    warnings.warn(printable(message), category, stacklevel=level)


def _libraries() -> tuple[str, ...]:
    torch = sys.modules.get("torch")  # a section is read without it
    return (_PACKAGE, str(Path(torch.__file__ or "").parent)) if torch else (_PACKAGE,)


class Once:
    """Warn of each matter once in the life of what holds this: an optimizer, an engine, a run."""

    def __init__(self) -> None:
        self._said: set[object] = set()

    def warn(
        self, about: object, message: str, category: type[Warning] = RuntimeWarning, *, of_this_rank: bool = False
    ) -> bool:
        """See `warn_user`. Returns whether this was the first time that it is `about` this."""
        if is_new := about not in self._said:
            self._said.add(about)
            warn_user(message, category, of_this_rank=of_this_rank)
        return is_new


def speaks_for_all() -> bool:
    """Return whether this is rank 0: of the process group, or before there is one, as a launcher says."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return bool(dist.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"


def door(call: Callable[P, R]) -> Callable[P, R]:
    """Have errors that the package raises by itself begin at `call`: their message says all. The log has the rest.

    An error out of the user's code, or out of a defect of ours, keeps its traceback.
    """

    @wraps(call)
    def through(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            if not _is_meant(error.__traceback__):
                raise
            logging.getLogger(__name__).debug("%s raised:", call.__qualname__, exc_info=error)
            raise error.with_traceback(None) from None

    return through


def _is_meant(traceback: TracebackType | None) -> bool:
    """Whether a ``raise`` of this package ends a traceback with no frames of others in it, but for torch's."""
    known = (*_libraries(), contextlib.__file__)
    frames: list[tuple[CodeType, int]] = []
    while traceback is not None:
        frames.append((traceback.tb_frame.f_code, traceback.tb_lasti))
        traceback = traceback.tb_next
    code, instruction = frames[-1]
    is_raise = code.co_code[instruction] == opmap["RAISE_VARARGS"] and code.co_filename.startswith(_PACKAGE)
    return is_raise and all(each.co_filename.startswith(known) for each, _ in frames)
