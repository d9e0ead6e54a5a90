"""Page-locking of memory that is copied to and from a device, and what is said where the driver refuses it."""

import warnings
from collections.abc import Callable
from typing import Protocol

import torch


class Lockable(Protocol):
    """Host memory that can be page-locked, all of it or nothing."""

    def pin(self, device: torch.device) -> None:
        """See `HostRegion.pin`."""


class PageLocks:
    """Page-locks memory where the section allows it. Where the driver refuses, copies are slower, which is said once.

    `asked` is `offload_optimizer.pin_memory`. None: where it can be done. True: a refusal is an error. False: nowhere.
    """

    def __init__(self, asked: bool | None, warn: Callable[[str], object] = warnings.warn) -> None:
        self._asked = asked
        self._warn = warn
        self._is_said = False

    def lock(self, memory: Lockable, device: torch.device, remedy: str) -> None:
        """Page-lock all of some memory for a device; RuntimeError, with `remedy`, where the section insists on it."""
        if self._asked is False:
            return
        try:
            memory.pin(device)
        except RuntimeError as refusal:
            leave_out = "set zero_optimization.offload_optimizer.pin_memory to false"
            if self._asked:
                raise RuntimeError(f"{refusal}: {remedy}, or {leave_out}") from None
            if not self._is_said:
                self._is_said = True
                self._warn(
                    f"{refusal}: this memory is used without being page-locked, and copies between it and {device} are "
                    f"slower and do not run behind the host's back: {remedy}, or {leave_out} to have no warning"
                )
