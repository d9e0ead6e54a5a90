"""Ask what the kernel has of a file in memory, with mincore(2), which tells it of files that the caller may write."""

import ctypes
import mmap

_libc = ctypes.CDLL(None, use_errno=True)


def cached_pages(fd: int, size_bytes: int) -> int | None:
    """Count the pages in memory of the first bytes of an open file; None where the kernel does not say.

    The descriptor is for reading and writing, and the file is at least so long.
    """
    try:
        mapped = mmap.mmap(fd, size_bytes)
    except (OSError, ValueError):  # a file system without mappings, an empty file
        return None
    found = ctypes.create_string_buffer(-(-size_bytes // mmap.PAGESIZE))
    start = ctypes.c_char.from_buffer(mapped)
    refused = _libc.mincore(ctypes.byref(start), ctypes.c_size_t(size_bytes), found)
    del start
    mapped.close()
    return None if refused else sum(page & 1 for page in found.raw)
