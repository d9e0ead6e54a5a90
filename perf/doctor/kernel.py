"""Look at what the kernel did with bytes: where a file has its blocks, and what a drive was written."""

import fcntl
import os
import struct
from array import array

from nvme_offload.offload.host.disks import disk_of
from nvme_offload.offload.host.proc import mount_of, read

_FIEMAP, _SYNC, _LAST = 0xC020660B, 0x1, 0x1  # linux/fiemap.h
_HEAD, _EXTENT = struct.Struct("=QQLLLL"), struct.Struct("=QQQQQLLLL")
_MOST_EXTENTS = 4096
_UNIT = 1024  # the smallest block of the file systems that say it


def blocks_of(fd: int) -> dict[int, int] | None:
    """Return where on its drive an open file has each KiB, by offset; None where the file system does not say."""
    answer = array("B", _HEAD.pack(0, 2**64 - 1, _SYNC, 0, _MOST_EXTENTS, 0) + bytes(_EXTENT.size * _MOST_EXTENTS))
    try:
        fcntl.ioctl(fd, _FIEMAP, answer)
    except OSError:
        return None
    num_extents = _HEAD.unpack_from(answer)[3]
    extents = [_EXTENT.unpack_from(answer, _HEAD.size + number * _EXTENT.size) for number in range(num_extents)]
    if not extents or not extents[-1][5] & _LAST:
        return None
    return {offset + at: place + at for offset, place, size_bytes, *_ in extents for at in range(0, size_bytes, _UNIT)}


def bytes_at_drive(fd: int) -> int | None:
    """Return how many bytes the drive of an open file was written since it is there; None where none is known."""
    disk = disk_of(os.fstat(fd).st_dev, mount_of(fd))
    counts = (read(disk / "stat") or "").split() if disk else []
    return int(counts[6]) * 512 if len(counts) > 6 else None
