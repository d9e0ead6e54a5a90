"""The configuration section."""

from .section import OffloadConfig

__all__ = ["OffloadConfig"]
