"""What is noted about the machine, and about this process."""

import contextlib
import ctypes
import gc
import os
import platform
import re
import subprocess
from pathlib import Path

from nvme_offload.offload.host.proc import PROC, read, status_field


def _status_bytes(name: str) -> int | None:
    """A size from /proc/self/status, or None where there is none."""
    field = status_field(name)
    return None if field is None else int(field.removesuffix(" kB")) * 1024


def settled_resident_bytes() -> int | None:
    """Memory of this process that is resident now, without what the C library's allocator keeps for later."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int | None:
    """The most memory of this process that was resident since it began, or since `reset_peak_resident_bytes`.

    Not `getrusage`: its figure survives an exec and so includes the parent.
    """
    return _status_bytes("VmHWM")


def reset_peak_resident_bytes() -> None:
    """Let the peak begin anew at what is resident now; see proc(5), clear_refs."""
    Path("/proc/self/clear_refs").write_text("5")


def storage_bytes() -> tuple[int, int] | None:
    """Bytes that this process made the storage layer read and write, as the kernel counts them."""
    try:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["read_bytes"]), int(fields["write_bytes"])
    except (OSError, KeyError, ValueError):
        return None


def num_cpus() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """The processor's name."""
    match = re.search(r"^model name\s*:\s*(.+)$", read(PROC / "cpuinfo") or "", re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Physical memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def git_commit() -> str | None:
    """The commit of the checkout that this file is part of, if it is one; `+` marks local changes."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    return f"{commit}+" if commit and git("status", "--porcelain") else commit
