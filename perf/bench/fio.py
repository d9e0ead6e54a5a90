"""fio beside us: the same file system, block size, depth and bytes, in the same minute."""

import json
import os
import shutil
import subprocess
from contextlib import AbstractContextManager
from typing import Any

from nvme_offload.offload.storage.run_directory import FIO_NAME, RunDirectory
from nvme_offload.perf.measure.command_line import Rw, Settings

_RW = {"read": "read", "write": "write", "mixed": "rw"}
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Makes fio's buffers transparent huge pages (glibc 2.35 and later; ignored by others)."""


class FioError(RuntimeError):
    """fio is missing or failed; the message says what to do."""


def find_fio() -> str:
    """The path of fio."""
    path = shutil.which("fio")
    if path is None:
        raise FioError("fio is not installed (Debian: apt-get install fio; Fedora: dnf install fio)")
    return path


class Fio(AbstractContextManager["Fio"]):
    """fio on a file of its own, which is written once before anything is measured and removed at the end.

    It gets what our engine has, too: huge pages, registered buffers, registered files. Without them its speed depends
    on how scattered the pages are that it happens to get, up to a factor of two.
    """

    def __init__(self, settings: Settings) -> None:
        self._fio = find_fio()
        said = subprocess.run([self._fio, "--version"], capture_output=True, text=True, check=True)
        self.version = said.stdout.strip()
        self._settings = settings
        self._directory = RunDirectory(settings.paths[0])
        try:
            self.run("write", settings.size)
        except BaseException:
            self._directory.remove()
            raise

    def __exit__(self, *exception: object) -> None:
        self._directory.remove()

    def run(self, rw: Rw, size_bytes: int) -> float:
        """Move `size_bytes` and give the bytes per second, by fio's own clock: its start-up does not count."""
        command, variables = self.command(rw, size_bytes), {**os.environ, **_HUGE_PAGES}
        done = subprocess.run(command, capture_output=True, text=True, env=variables)
        if done.returncode:
            raise FioError(f"fio failed: {(done.stderr or done.stdout).strip()}")
        return bandwidth(json.loads(done.stdout))

    def command(self, rw: Rw, size_bytes: int) -> list[str]:
        """The command line that is run."""
        settings = self._settings
        offset_increment = self._share(settings.size) if settings.numjobs > 1 else 0
        options = {
            "name": "offload-bench",
            "filename": str(self._directory.path / FIO_NAME).replace(":", "\\:"),
            "filesize": settings.size,
            "io_size": self._share(size_bytes),
            "bs": settings.bs,
            "iodepth": settings.iodepth,
            "numjobs": settings.numjobs,
            "offset_increment": offset_increment,
            "ioengine": "io_uring",
            "direct": int(settings.direct != "disabled"),
            "rw": _RW[rw],
            "fixedbufs": 1,
            "registerfiles": 1,
            "group_reporting": 1,
            "output-format": "json",
        }
        return [self._fio, *(f"--{name}={value}" for name, value in options.items())]

    def _share(self, size_bytes: int) -> int:
        """Bytes that one job gets, in whole blocks, as direct I/O needs them; rounded up, so that all is written."""
        block = self._settings.bs
        return -(-size_bytes // (self._settings.numjobs * block)) * block


def bandwidth(report: dict[str, Any]) -> float:
    """Bytes per second, read and written together, of fio's report on one job group.

    fio gives runtimes in whole milliseconds, rounded up: on average it took half of one less.
    """
    directions = [report["jobs"][0][name] for name in ("read", "write")]
    runtime_ms = max(direction["runtime"] for direction in directions)
    if not runtime_ms:
        raise FioError("fio moved nothing; give --size more")
    return float(sum(direction["io_bytes"] for direction in directions) / ((runtime_ms - 0.5) / 1e3))
