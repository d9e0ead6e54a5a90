"""Why a kernel says no to io_uring, in words."""

import ctypes
import errno
import os
from pathlib import Path

SYSCTL = Path("/proc/sys/kernel/io_uring_disabled")


def io_uring_disabled() -> int | None:
    """Return the sysctl ``kernel.io_uring_disabled`` (0 allowed, 1 privileged only, 2 off); None before Linux 6.6."""
    try:
        return int(SYSCTL.read_text())
    except (OSError, ValueError):
        return None


def probe_errno(entries: int) -> int:
    """Set up a ring of so many entries, enter it once, and return the kernel's errno, or 0 if all is well.

    Both calls are made because a seccomp filter can allow the one and forbid the other.
    """
    sys_io_uring_setup, sys_io_uring_enter = 425, 426  # the same on every architecture, as is the size below
    sizeof_io_uring_params = 120
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    parameters = ctypes.create_string_buffer(sizeof_io_uring_params)
    ring_fd = syscall(ctypes.c_long(sys_io_uring_setup), ctypes.c_uint(entries), parameters)
    if ring_fd < 0:
        return ctypes.get_errno()
    nothing = ctypes.c_uint(0)
    entered = syscall(ctypes.c_long(sys_io_uring_enter), ctypes.c_uint(ring_fd), nothing, nothing, nothing, None, None)
    code = ctypes.get_errno() if entered < 0 else 0
    os.close(ring_fd)
    return code


def explain_refusal(code: int) -> str:
    """Say cause and remedy for the errno that io_uring_setup answered."""
    kernel = os.uname().release
    if code == errno.ENOSYS:
        return f"kernel {kernel} has no io_uring (Linux 5.6 or newer is needed), or a sandbox hides it"
    if code == errno.EPERM:
        setting = io_uring_disabled()
        if setting:
            who = "unprivileged processes" if setting == 1 else "everybody"
            return (
                f"the sysctl kernel.io_uring_disabled={setting} forbids io_uring to {who}; "
                "allow it with: sysctl kernel.io_uring_disabled=0"
            )
        return (
            "io_uring is forbidden (EPERM), most likely by a seccomp filter: Docker's default profile blocks it; "
            "run the container with --security-opt seccomp=unconfined or a profile that allows io_uring_setup, "
            "io_uring_enter and io_uring_register"
        )
    if code == errno.ENOMEM:
        return "io_uring needs more locked memory than RLIMIT_MEMLOCK allows; raise it (ulimit -l)"
    return f"io_uring_setup failed on kernel {kernel}: {os.strerror(code)} ({errno.errorcode.get(code, code)})"
