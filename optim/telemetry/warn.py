"""Warnings that point at the user's line."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))


def warn_user(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Issue a warning for the innermost caller outside of torch and this package.

    A fixed ``stacklevel`` cannot do this: torch, schedulers and ``GradScaler`` wrap ``step`` in layers of their own.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
