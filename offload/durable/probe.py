"""A moment tells how fast a drive is, as far as it can: "auto" has to go by that."""

import time
from collections.abc import Callable
from contextlib import ExitStack

from nvme_offload.offload.durable.rewrite_every import DurableRates
from nvme_offload.offload.host.buffer_pool import BufferPool, StagingBuffer
from nvme_offload.offload.storage.nvme_tier import NvmeTier
from nvme_offload.offload.storage.transfer import Transfer
from nvme_offload.offload.units import MiB

_PIECES = 8
_PIECE_BYTES = 16 * MiB


def measure_rates(tier: NvmeTier) -> DurableRates:
    """Write some MiB through a tier, all at once, and read them again; the space is free after it.

    A drive with a cache for writes is found faster than it is for hours.
    """
    extents = tier.reserve([_PIECE_BYTES] * _PIECES)
    pool = BufferPool(_PIECES, _PIECE_BYTES)
    try:
        with ExitStack() as leases:
            pairs = [(extent, leases.enter_context(pool.acquire())) for extent in extents]
            writing = _seconds(lambda: [tier.write(*pair, what="a measurement", kind="probe") for pair in pairs])
            reading = _seconds(lambda: [tier.read(*pair, what="a measurement", kind="probe") for pair in pairs])
    finally:
        pool.close()
        for extent in extents:
            tier.free(extent)
    moved = _PIECES * _PIECE_BYTES
    return DurableRates(read=moved / reading, write=len(tier.space.copies.written) * moved / writing)


def _seconds(start: Callable[[], list[Transfer[StagingBuffer]]]) -> float:
    begun = time.perf_counter()
    for transfer in start():
        transfer.wait()
    return time.perf_counter() - begun
