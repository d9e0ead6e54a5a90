"""Warnings that point at the user's line, and that one rank says for all."""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

from nvme_offload.offload.foreign import printable

_PACKAGE = str(Path(__file__).parent.parent)


def warn_user(message: str, category: type[Warning] = RuntimeWarning, *, of_this_rank: bool = False) -> None:
    """Issue a warning for the innermost caller outside of torch and this package.

    A fixed ``stacklevel`` cannot do this: torch, schedulers and ``GradScaler`` wrap ``step`` in layers of their own.
    The first rank speaks for all, unless it is `of_this_rank`: others may have nothing of the kind to say.
    """
    if not (of_this_rank or speaks_for_all()):
        return
    torch = sys.modules.get("torch")  # a section is read without it
    libraries = (_PACKAGE, str(Path(torch.__file__ or "").parent)) if torch else (_PACKAGE,)
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(libraries):
        level, frame = level + 1, frame.f_back
    warnings.warn(printable(message), category, stacklevel=level)


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
