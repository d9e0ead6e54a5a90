"""Every engine asks this of the segments it is given."""

import fcntl
import os
from collections.abc import Sequence

from nvme_offload.aio_native.engine import Segment


def check_segments(segments: Sequence[Segment], alignment: int) -> None:
    """Raise ValueError for empty work, and for what the kernel would refuse with a bare EINVAL on an O_DIRECT file."""
    if not segments:
        raise ValueError("an operation needs at least one segment")
    direct_fds: dict[int, bool] = {}
    for fd, offset, address, size_bytes in segments:
        if size_bytes <= 0:
            raise ValueError(f"segment of {size_bytes} bytes at offset {offset}: the size must be positive")
        if offset < 0:
            # io_uring takes -1 for the file's current position, and would move the right bytes to the wrong place.
            raise ValueError(f"segment at offset {offset}: offsets are counted from the start of the file")
        if (offset | address | size_bytes) % alignment == 0:
            continue
        if fd not in direct_fds:
            direct_fds[fd] = _is_direct(fd)
        if direct_fds[fd]:
            raise ValueError(
                f"offset {offset}, address {address:#x} and size {size_bytes} must all be multiples of {alignment} "
                "for a file opened with O_DIRECT"
            )


def _is_direct(fd: int) -> bool:
    """Whether the file was opened with O_DIRECT; a descriptor that is none is left for the request to fail on."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
    except (OSError, ValueError):
        return False
