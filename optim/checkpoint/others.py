"""Ranks say to the first one through files what they have written: no collective runs beside those of training."""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from pathlib import Path

from nvme_offload.offload.errors import CheckpointWriteError
from nvme_offload.optim.checkpoint.files import SAID
from nvme_offload.optim.checkpoint.storage import RankFile

_FAILED = "failed: "
_LOOK_SECONDS = 0.05
_PATIENCE_SECONDS = 600.0
"""The first rank gives the others up when no file of a checkpoint has grown for so long."""


class Others:
    """The ranks that write one checkpoint, into a folder that all of them see."""

    def __init__(self, folder: Path, rank: int, num_ranks: int) -> None:
        self._folder = folder
        self._rank = rank
        self._num_ranks = num_ranks

    def say(self, written: RankFile) -> None:
        """Say that this rank has written its part."""
        self._say(written.as_json())

    def say_failed(self, failure: BaseException) -> None:
        """Say that this rank has not, so that nobody waits for it any longer."""
        with suppress(OSError):
            self._say(_FAILED + f"{type(failure).__name__}: {failure}")

    def heard(self) -> list[RankFile]:
        """Return what all ranks have written; CheckpointWriteError if one has failed, or is not heard of any more."""
        return [self._heard_of(rank) for rank in range(self._num_ranks)]

    def clear(self) -> None:
        """Remove what was said: it is no part of a checkpoint."""
        for rank in range(self._num_ranks):
            self._path(rank).unlink()

    def _heard_of(self, rank: int) -> RankFile:
        grown, size_bytes = time.monotonic(), -1
        while not self._path(rank).exists():
            os.listdir(self._folder)  # a network file system looks again
            if (now := self._size_bytes()) != size_bytes:
                grown, size_bytes = time.monotonic(), now
            elif time.monotonic() - grown > _PATIENCE_SECONDS:
                raise CheckpointWriteError(errno.ETIMEDOUT, self._folder, f"nothing is heard of rank {rank}")
            time.sleep(_LOOK_SECONDS)
        said = self._path(rank).read_text(encoding="utf-8")
        if said.startswith(_FAILED):
            raise CheckpointWriteError(errno.EIO, self._folder, f"on rank {rank}: {said.removeprefix(_FAILED)}")
        return RankFile.from_json(said)

    def _size_bytes(self) -> int:
        size_bytes = 0
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):  # another rank has renamed it since it was listed
                size_bytes += path.stat().st_size
        return size_bytes

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank{rank}{SAID}"

    def _say(self, text: str) -> None:
        path = self._path(self._rank)
        new = path.with_suffix(f".new{SAID}")
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)
