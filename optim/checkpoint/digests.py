"""Digests of files: SHA-256 over the checksums of their blocks, which several threads take while they read.

A checksum is the kernels' (`KernelPool.tile_checksums`), of 64 KiB each, the last block being shorter. It finds damage
as a hash does, and takes a tenth of the time.
"""

import hashlib
import os
from collections.abc import Callable
from contextlib import closing
from queue import SimpleQueue

import torch

from nvme_offload.aio_native.starting import ThreadPool
from nvme_offload.offload.host.region import HostRegion
from ..kernels import KernelPool
from ..state.store import num_threads_of_rank

BLOCKS = "sha256_of_blocks"
"""The kind of digest, as manifests name it."""
PORTION_BYTES = 1 << 22
"""So much is read, written and digested at once: a whole number of blocks."""


class BlockDigest:
    """The digest of bytes that come in portions; all but the last have `PORTION_BYTES`."""

    def __init__(self) -> None:
        self._kernels = KernelPool(num_threads_of_rank())
        self._sums = hashlib.sha256()

    def update(self, portion: torch.Tensor) -> None:
        """Take the next portion, uint8 [bytes] on the CPU."""
        self._sums.update(_sums_of(portion, self._kernels))

    def hexdigest(self) -> str:
        """Return the digest of all portions so far."""
        return self._sums.hexdigest()


def digest_of_file(descriptor: int, size_bytes: int, advance: Callable[[int], None]) -> str:
    """Return the digest of a whole file, which several threads take. `advance` is told of the bytes read."""
    starts = range(0, size_bytes, PORTION_BYTES)
    num_threads = min(num_threads_of_rank(), len(starts))
    readers: SimpleQueue[tuple[torch.Tensor, KernelPool]] = SimpleQueue()  # room and kernels of one thread each
    for _ in range(num_threads):
        readers.put((HostRegion(PORTION_BYTES).view(torch.uint8, 0, PORTION_BYTES), KernelPool(1)))
    digest = hashlib.sha256()

    def read(start: int) -> bytes:
        room, kernels = reader = readers.get()
        try:
            return _sums_of(room[: _fill(descriptor, room, start)], kernels)
        finally:
            readers.put(reader)

    with closing(ThreadPool(num_threads, "digest")) as threads:
        portions = [threads.submit(read, start) for start in starts]
        for start, portion in zip(starts, portions, strict=True):
            digest.update(portion.result())
            advance(min(PORTION_BYTES, size_bytes - start))
    return digest.hexdigest()


def _fill(descriptor: int, room: torch.Tensor, start: int) -> int:
    view, done = room.numpy().data, 0
    while done < len(view) and (got := os.preadv(descriptor, [view[done:]], start + done)):
        done += got
    return done


def _sums_of(portion: torch.Tensor, kernels: KernelPool) -> bytes:
    return kernels.tile_checksums(portion).numpy().tobytes()
