"""Ranks say through their store what they have written: no collective runs beside those of training."""

import errno
import socket
import time
from collections.abc import Iterable
from contextlib import suppress

from torch.distributed.distributed_c10d import Store

from nvme_offload.offload.errors import CheckpointWriteError

_KEY = "nvme_offload/checkpoint"
_LOOK_SECONDS = 0.05
_PATIENCE_SECONDS = 600.0
"""Other ranks are given up when none of them has gone on for so long."""


class Others:
    """The ranks that write one checkpoint.

    Args:
        store: of all of them.
        save: is of this checkpoint alone.
        rank: this one.
        where: the folder, for errors.
    """

    def __init__(self, store: Store, save: str, rank: int, where: object) -> None:
        self._store = store
        self._save = save
        self._rank = rank
        self._where = where

    def say(self, what: str, value: bytes = b"") -> None:
        """Let the others know that this rank has got so far. What it said of an earlier save is forgotten."""
        key = self._key(what, self._rank)
        self._set(f"{key}/value", value)
        self._set(key, self._save.encode())

    def say_failed(self, failure: BaseException) -> None:
        """Say that this rank goes no further; who waits for it need not any longer."""
        with suppress(RuntimeError):  # the store has ended, as what waits for this rank will notice
            self._set(
                f"{_KEY}/failure",
                f"on rank {self._rank}, host {socket.gethostname()}: {type(failure).__name__}: {failure}".encode(),
            )
            self._set(f"{_KEY}/failed", self._save.encode())

    def go_on(self) -> None:
        """Let who waits know that this rank is at work."""
        self._store.add(f"{_KEY}/items", 1)

    def heard(self, what: str, ranks: Iterable[int]) -> list[bytes]:
        """Return what ranks have said, when all of them have; raises CheckpointWriteError where one never will."""
        return [self._heard_of(rank, self._key(what, rank)) for rank in ranks]

    def _heard_of(self, rank: int, key: str) -> bytes:
        since, before = time.monotonic(), -1
        while not self._has_said(key):
            if self._has_said(f"{_KEY}/failed"):
                raise self._lost(errno.EIO, self._store.get(f"{_KEY}/failure").decode())
            if (now := self._store.add(f"{_KEY}/items", 0)) != before:
                since, before = time.monotonic(), now
            elif time.monotonic() - since > _PATIENCE_SECONDS:
                raise self._lost(errno.ETIMEDOUT, f"nothing is heard of rank {rank}")
            time.sleep(_LOOK_SECONDS)
        return self._store.get(f"{key}/value")

    def _has_said(self, key: str) -> bool:
        return self._store.check([key]) and self._store.get(key) == self._save.encode()

    def _set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # bytes are what it takes and gives

    def _key(self, what: str, rank: int) -> str:
        return f"{_KEY}/{what}/{rank}"

    def _lost(self, code: int, said: str) -> CheckpointWriteError:
        return CheckpointWriteError(code, str(self._where), said)
