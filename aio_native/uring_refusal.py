"""Why a kernel says no to io_uring, in words."""

import ctypes
import errno
import os
import re
from pathlib import Path

SYSCTL = Path("/proc/sys/kernel/io_uring_disabled")
_CHARGES_RINGS_BEFORE = (5, 12)  # older kernels charge rings to RLIMIT_MEMLOCK, newer ones only registered buffers


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


def first_numbers(release: str) -> tuple[int, int]:
    """The first two numbers of a version: (6, 18) of "6.18.44-generic"."""
    match = re.match(r"(\d+)\.(\d+)", release)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def cause_of(code: int, seccomp: int | None = None) -> tuple[str, str]:
    """Return what it is that refuses io_uring with this errno, and what to type.

    `seccomp`: the mode of this process, 0 (off) to 2 (a filter), as /proc/self/status has it; None: not known.
    """
    if code in (errno.EPERM, errno.EACCES):
        if sysctl := io_uring_disabled():
            whom = "everybody" if sysctl == 2 else "processes without CAP_SYS_ADMIN outside kernel.io_uring_group"
            also = "" if seccomp != 2 else ", and a seccomp filter is active, which may forbid it as well"
            return f"the sysctl forbids io_uring to {whom}{also}", "sudo sysctl -w kernel.io_uring_disabled=0"
        if seccomp == 0:
            cause = "neither seccomp nor the sysctl forbids it: a security module (SELinux, AppArmor) does"
            return cause, "look for io_uring in: sudo dmesg; sudo ausearch -m avc -ts recent"
        return (
            "a seccomp filter forbids io_uring, as Docker's default profile does",
            "docker run --security-opt seccomp=unconfined, or a profile that allows io_uring_setup, "
            "io_uring_enter and io_uring_register (Kubernetes: seccompProfile.type Unconfined or Localhost)",
        )
    if code == errno.ENOSYS:
        hidden = "a seccomp filter hides it, or " if seccomp == 2 else ""
        cause = f"{hidden}this kernel is too old (Linux 5.6 or newer is needed) or built without io_uring"
        return cause, "use a kernel 6.1 or newer with CONFIG_IO_URING"
    if code == errno.ENOMEM:
        old = first_numbers(os.uname().release) < _CHARGES_RINGS_BEFORE
        cause = "RLIMIT_MEMLOCK is too small for the ring" if old else "the kernel is short of memory for the ring"
        return cause, "ulimit -l unlimited, or a smaller aio.queue_depth" if old else "write a smaller aio.queue_depth"
    if code in (errno.EMFILE, errno.ENFILE):
        return "no file descriptor is left", "ulimit -n 4096"
    return "io_uring_setup(2) explains this error", 'write another aio.queue_depth, or another engine than "io_uring"'


def explain_refusal(code: int) -> str:
    """Say in a sentence what `cause_of` an errno says."""
    cause, remedy = cause_of(code)
    return f"io_uring is refused with {errno.errorcode.get(code, code)}, {os.strerror(code)}: {cause}; {remedy}"
