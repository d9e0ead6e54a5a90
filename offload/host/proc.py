"""The kernel says much in /proc and /sys; None stands for what it does not say."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
SYS = Path("/sys")


def read(path: Path) -> str | None:
    """Return the stripped text of a file, None if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def read_int(path: Path) -> int | None:
    """Return the number in a file, None if there is none."""
    try:
        return int(read(path) or "")
    except ValueError:
        return None


def status_field(name: str) -> str | None:
    """Return a field of /proc/self/status."""
    match = re.search(rf"^{name}:\s*(.*)$", read(PROC / "self/status") or "", re.MULTILINE)
    return match[1] if match else None


def meminfo() -> dict[str, int]:
    """Return the fields of /proc/meminfo, in bytes."""
    lines = re.findall(r"^(\S+):\s+(\d+) kB$", read(PROC / "meminfo") or "", re.MULTILINE)
    return {name: int(size) * 1024 for name, size in lines}


def has_open(pid: int, fd: int) -> bool:
    """Whether a process has the file that is open here as `fd`, by another descriptor; True where nobody may look."""
    folder = PROC / str(pid) / "fd"
    own = str(fd) if pid == os.getpid() else None
    try:
        numbers = [number for number in os.listdir(folder) if number != own]
    except OSError:
        return True
    return any(_is_of(folder / number, fd) for number in numbers)


def _is_of(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except OSError:
        return False  # it was closed meanwhile


@dataclass(frozen=True)
class Mount:
    """A line of /proc/self/mountinfo."""

    number: int
    root: str
    """The directory of the file system that is mounted."""
    point: str
    kind: str
    source: str
    options: tuple[str, ...]
    """Options of the mount and of its file system."""

    @property
    def is_memory(self) -> bool:
        """Whether its files are in host memory."""
        return self.kind in ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")


def mounts() -> list[Mount]:
    """Return what this process sees mounted."""
    return [_mount(line) for line in (read(PROC / "self/mountinfo") or "").splitlines()]


def mount_of(fd: int) -> Mount | None:
    """Return the mount that an open file is on. Exact, also where mounts cover one another."""
    match = re.search(r"^mnt_id:\s*(\d+)", read(PROC / f"self/fdinfo/{fd}") or "", re.MULTILINE)
    return next((mount for mount in mounts() if match and mount.number == int(match[1])), None)


def _mount(line: str) -> Mount:
    before, _, after = line.partition(" - ")
    number, _, _, root, point, options, *_ = before.split()
    kind, source, *rest = after.split()
    every_option = options.split(",") + (rest[0].split(",") if rest else [])
    return Mount(int(number), _unescape(root), _unescape(point), kind, _unescape(source), tuple(every_option))


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)  # a space is written as \040
