"""Python in a child process that is not allowed everything: no io_uring, little locked memory, other file systems.

Nothing outside the child is changed, and its mounts disappear with it.
"""

import ctypes
import errno
import os
import platform
import resource
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.support.forked import run_code

NOBODY = 65534
IO_URING_CALLS = {"setup": 425, "enter": 426, "register": 427}
"""io_uring_setup, io_uring_enter, io_uring_register; the same numbers on every architecture."""

_SECCOMP = {"x86_64": 317, "aarch64": 277}  # seccomp(2), which glibc does not wrap
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_PR_SET_KEEPCAPS, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 8, 22, 38
_CAPABILITY_VERSION_3 = 0x20080522
_CAP_DAC_READ_SEARCH = 2
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000


def run_python(
    code: str,
    *arguments: object,
    forbid: Sequence[str] = (),
    ordinary_user: bool = False,
    memlock_bytes: int | None = None,
    mounts: Mapping[Path, str] | None = None,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run `code` with ``sys.argv[1:] == arguments`` in a confined child, which runs no exit handlers.

    Args:
        forbid: names out of `IO_URING_CALLS` that a seccomp filter answers with EPERM, as Docker's profile does.
        ordinary_user: run as `NOBODY` if this process is root. The child may still read every file, because a
            checkout below /root would be closed to it, but has no other privilege.
        mounts: empty file systems to mount, by existing directory; "tmpfs" or "ramfs", seen by the child alone.
    """
    prepare = partial(_confine, forbid, ordinary_user, memlock_bytes, mounts or {})
    return run_code(code, [*map(str, arguments)], timeout, prepare)


def can_mount() -> bool:
    """Whether `mounts` works here: as root, or as anyone where user namespaces are allowed."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    try:
        return subprocess.run(["unshare", *user, "--mount", "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


needs_mounts = pytest.mark.skipif(not can_mount(), reason="unshare(2) is refused: no mount namespace of one's own")


def can_filter() -> bool:
    """Whether `forbid` works on this architecture."""
    return platform.machine() in _AUDIT_ARCH


def _confine(calls: Sequence[str], ordinary_user: bool, memlock_bytes: int | None, mounts: Mapping[Path, str]) -> None:
    # In this order, because every step takes away what an earlier one needs.
    if mounts:
        _mount(mounts)
    if memlock_bytes is not None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock_bytes, memlock_bytes))
    if ordinary_user and os.geteuid() == 0:
        become_nobody()
    if calls:
        forbid(calls)


def _mount(file_systems: Mapping[Path, str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    check(libc.unshare(_CLONE_NEWNS | (_CLONE_NEWUSER if user else 0)), "unshare")
    if user:
        for name, content in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path("/proc/self", name).write_text(content)
    recursive_private = 0x4000 | 0x40000  # MS_REC | MS_PRIVATE: nothing of what follows reaches other processes
    check(libc.mount(b"none", b"/", None, ctypes.c_ulong(recursive_private), None), "mount --make-rprivate /")
    for directory, kind in file_systems.items():
        name, _, options = kind.partition(",")  # as "tmpfs,size=1m"
        data = ",".join(filter(None, ("mode=1777", options))).encode()
        made = libc.mount(name.encode(), os.fsencode(directory), name.encode(), ctypes.c_ulong(0), data)
        check(made, f"mount {kind}")


def become_nobody() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    check(libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0), "PR_SET_KEEPCAPS")
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    read_everything = 1 << _CAP_DAC_READ_SEARCH
    data = (ctypes.c_uint32 * 6)(read_everything, read_everything, 0, 0, 0, 0)  # effective, permitted, inheritable
    check(libc.capset(header, data), "capset")
    os.environ["HOME"] = "/nonexistent"


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction))]


def forbid(names: Sequence[str], *, all_threads: bool = False) -> None:
    """Install a seccomp filter that answers these of `IO_URING_CALLS` with EPERM, for good.

    For this thread and all that it starts, or also for all that there are in this process.
    """
    calls = [IO_URING_CALLS[name] for name in names]
    load, jump_if_equal, answer = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    allow, refuse = 0x7FFF0000, 0x00050000 | errno.EPERM  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO
    lines = [
        (load, 0, 0, 4),  # struct seccomp_data: arch
        (jump_if_equal, 0, len(calls) + 1, _AUDIT_ARCH[platform.machine()]),  # another one: allow
        (load, 0, 0, 0),  # nr
        *((jump_if_equal, len(calls) - place, 0, number) for place, number in enumerate(calls)),
        (answer, 0, 0, allow),
        (answer, 0, 0, refuse),
    ]
    instructions = (_Instruction * len(lines))(*(_Instruction(*line) for line in lines))
    program = _Program(len(lines), instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    if all_threads:  # SECCOMP_SET_MODE_FILTER with SECCOMP_FILTER_FLAG_TSYNC
        check(libc.syscall(_SECCOMP[platform.machine()], 1, 1, ctypes.byref(program)), "seccomp")
    else:
        check(libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0), "PR_SET_SECCOMP")


def check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)
