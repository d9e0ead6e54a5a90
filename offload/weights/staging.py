"""The files of an export lie in a hidden folder of ours, inside the export's own, until all are complete."""

import contextlib
import errno
import os
import re
from pathlib import Path

from nvme_offload.aio_native.descriptor import Descriptor
from ..storage.run_folder import is_at
from .reader import INDEX_FILE

STAGING = ".nvme-offload-export"
"""Our name, so that the next export knows what a killed one left behind."""

WEIGHT_FILE = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")

ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""The two files of an adapter, by PEFT's names."""

_LOCK = "lock"
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_MOST_ATTEMPTS = 100


class HiddenFolder:
    """The hidden folder in `folder`, locked while this object has it; what a killed export left in it is removed.

    The lock is flock(2) on a file of ours, which the kernel drops when the process dies however it dies. Raises OSError
    if another export is under way there (EBUSY), or something else has the name (EEXIST).
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / STAGING
        self._lock: Descriptor | None = None
        try:
            self._take_lock()
            self._clear()
        except BaseException:  # whose traceback keeps this object, and would keep the lock
            self._drop_lock()
            raise

    def path(self, name: str) -> Path:
        """Return where the file lies meanwhile that will be called `name`."""
        return self._path / name

    def remove(self) -> None:
        """Delete what is in it and the folder itself, and drop the lock. Idempotent."""
        if self._lock is None:
            return
        with self._lock:
            self._lock = None
            with contextlib.suppress(OSError):  # the drive has failed, or somebody put something there: it stays
                self._clear()
                (self._path / _LOCK).unlink(missing_ok=True)
                self._path.rmdir()

    def _take_lock(self) -> None:
        path = self._path
        for _ in range(_MOST_ATTEMPTS):
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            if path.is_symlink() or not path.is_dir():
                raise FileExistsError(errno.EEXIST, f"{path} is in the way, and no folder of an export: move it away")
            try:
                self._lock = Descriptor(os.open, path / _LOCK, _LOCK_FLAGS, 0o600)
            except FileNotFoundError:  # whoever had it has just removed it
                continue
            if not self._lock.lock():
                raise OSError(errno.EBUSY, "another export into this folder is under way: wait for its end")
            if is_at(path / _LOCK, self._lock.fileno()):
                return
            self._drop_lock()
        raise OSError(errno.EBUSY, f"other exports into {path.parent} come and go: wait for their end")

    def _drop_lock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _clear(self) -> None:
        """Remove the files that an export puts there; never anybody else's, and nothing through a link."""
        for entry in list(os.scandir(self._path)):
            if WEIGHT_FILE.fullmatch(entry.name) or entry.name in (INDEX_FILE, ADAPTER_FILE, ADAPTER_CONFIG):
                os.unlink(entry.path)
