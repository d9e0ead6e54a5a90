"""Memory in disguise: files that are on no drive, whatever their file system is called."""

import mmap
import os
from contextlib import suppress
from pathlib import Path

from nvme_offload.aio_native.descriptor import Descriptor
from ..sync import sync_data
from .disks import disk_of, disks_below
from .page_cache import cached_pages
from .proc import mount_of, read

_RAM_DISK = "1:"  # the major number of /dev/ram0, with nothing else in /sys to tell it by


def memory_of(fd: int, alignment: int | None) -> str:
    """Say which memory the bytes of an open file are in; "" where they are on a drive, or the kernel does not tell.

    It looks at the kind of file system, at pages that stay in the cache after a direct write, and at the block device
    and what is below that. `alignment` is that of direct I/O through the descriptor, None without it. An empty file is
    written to, and empty again when this returns.
    """
    mount = mount_of(fd)
    if mount is None or mount.is_memory:
        return mount.kind if mount else ""
    with suppress(OSError):  # a full disk, a drive that fails: what comes next says so
        if alignment is not None and _stays_in_cache(fd, alignment):
            return f"{mount.kind} over memory"
    for option in mount.options if mount.kind == "overlay" else ():
        if option.startswith("upperdir=") and (below := _memory_of_folder(Path(option.removeprefix("upperdir=")))):
            return below
    disk = disk_of(os.fstat(fd).st_dev, mount)
    return next(filter(None, map(_memory_of_disk, disks_below(disk) if disk else ())), "")


def _stays_in_cache(fd: int, alignment: int) -> bool:
    is_empty = os.fstat(fd).st_size == 0
    try:
        if is_empty:
            os.pwrite(fd, mmap.mmap(-1, alignment), 0)
        sync_data(fd)  # others may have read or written a file that is kept, by folios larger than a page
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return bool(cached_pages(fd, mmap.PAGESIZE))
    finally:
        if is_empty:
            os.ftruncate(fd, 0)


def _memory_of_disk(directory: Path) -> str:
    """Say which memory a disk is, or its file is in; `directory` is its place below /sys."""
    is_memory = (directory / "mm_stat").exists()  # zram says there how much memory it takes
    if is_memory or (read(directory / "dev") or "").startswith(_RAM_DISK):
        return f"{directory.name}, a drive in memory"
    file = read(directory / "loop/backing_file")
    inner = _memory_of_folder(Path(file).parent) if file else ""
    return inner and f"{directory.name}, a drive whose file is on {inner}"


def _memory_of_folder(path: Path) -> str:
    """Say which memory a folder is in; "" also for one that is out of sight, as below the layers of a container."""
    for flags, alignment in ((os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, mmap.PAGESIZE), (os.O_RDONLY, None)):
        with suppress(OSError), Descriptor(os.open, path, flags | os.O_CLOEXEC) as fd:
            return memory_of(fd, alignment)
    return ""
