"""Knobs of a measurement, checked before anything starts."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from nvme_offload.offload.units import KiB, format_bytes
from nvme_offload.perf.measure.settings import Settings

LIMITS = {"bs": (4 * KiB, 1 << 30), "iodepth": (1, 4096), "numjobs": (1, 64)}
MIN_BLOCKS = 64
"""Blocks of the smallest region: one of fewer says nothing about a drive."""


class KnobError(ValueError):
    """A knob has a value that cannot be used."""

    def __init__(self, knob: str, why: str) -> None:
        super().__init__(why)
        self.knob = knob


def check_range(knob: str, value: int, low: int, high: int) -> None:
    """Raise a KnobError unless `value` is from `low` to `high`."""
    if not low <= value <= high:
        raise KnobError(knob, f"{value} is out of range; choose {low} to {high}")


def check_settings(settings: Settings) -> None:
    """Find what no target could work with.

    Raises:
        KnobError: names the knob and what to write instead.
    """
    values = asdict(settings)
    for knob, (low, high) in LIMITS.items():
        check_range(knob, values[knob], low, high)
    if settings.bs % (4 * KiB):
        raise KnobError("bs", f"{settings.bs} bytes is no multiple of 4 KiB, which direct I/O needs")
    if settings.size < (least := MIN_BLOCKS * settings.bs * settings.numjobs):
        raise KnobError("size", f"{format_bytes(settings.size)} is too small for these blocks; at least {least} bytes")


def check_space(path: Path, needed: int) -> None:
    """Find out before anything is written whether `path` has room for `needed` bytes."""
    check_folder("path", path)
    system = os.statvfs(path)
    free = system.f_bavail * system.f_frsize
    if free < needed:
        raise KnobError(
            "size", f"{path} has {format_bytes(free)} free and {format_bytes(needed)} is needed; nothing was written"
        )


def check_folder(knob: str, path: Path) -> None:
    """Find out before measuring whether files can be made in `path`."""
    if not path.is_dir():
        raise KnobError(knob, f"{path} is no directory")
    if not os.access(path, os.W_OK | os.X_OK):
        raise KnobError(knob, f"{path} is not writable")


def check_save(folder: Path) -> None:
    """Find out before measuring whether `folder` takes the results; what is missing of it is made afterwards."""
    check_folder("save", next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place)))
