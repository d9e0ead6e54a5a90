"""Frozen parameters are read where others wrote them, or copied once: here that is decided."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from logging import getLogger
from typing import Literal

from nvme_offload.offload.errors import ConfigError
from nvme_offload.offload.shards.stored import Padded
from nvme_offload.offload.storage.file_ranges import FileIdentity, FileRange
from nvme_offload.offload.units import format_bytes
from nvme_offload.offload.warn import speaks_for_all
from .new_tensors import NewTensor
from .weight_files import StoredPiece

logger = getLogger(__name__)

KEY = "zero_optimization.offload_param.frozen"

_SHOWN = 4


@dataclass
class BasePlaces:
    """Decides it for one model. `frozen` is the key of the section."""

    frozen: Literal["in_place", "copy"] | None
    copied: dict[str, str] = field(default_factory=dict)
    """Why parameters are copied, by name."""
    copied_bytes: int = 0
    files: dict[str, FileIdentity] = field(default_factory=dict)
    """The files, by name, of what is read in place."""

    def ranges_of(
        self, new: NewTensor, pieces: Sequence[StoredPiece] | None, form: Padded, local: tuple[int, int, int]
    ) -> list[FileRange] | None:
        """Return where the bytes of this rank's shard are; None where it must be copied.

        `form` is what is stored of it, `local` the dimension along which it is cut, where the shard begins, how long.
        """
        if self.frozen == "copy":
            return None
        if why := self._reason(pieces, form, local[0]):
            self._note(new, form, why)
            return None
        row = new.shape[1:].numel() if new.shape else 1
        first, stop = local[1] * row, (local[1] + local[2]) * row
        ranges: list[FileRange] = []
        for piece in pieces or ():
            self.files[piece.entry.path.name] = piece.entry.file
            low, high = max(first, piece.start), min(stop, piece.start + piece.numel)
            if low < high:
                entry, itemsize = piece.entry, form.dtype.itemsize
                offset = entry.offset + (low - piece.start) * itemsize
                ranges.append(FileRange(entry.path, entry.file, offset, (high - low) * itemsize))
        return ranges

    @staticmethod
    def _reason(pieces: Sequence[StoredPiece] | None, form: Padded, dim: int) -> str:
        if pieces is None:
            return "its elements lie in another order in the files"
        if dim:
            return f"it is sharded along dimension {dim}"
        other = next((piece.entry for piece in pieces if piece.entry.dtype is not form.dtype), None)
        return f"it is {other.dtype} in {other.path.name} and kept as {form.dtype}" if other is not None else ""

    def copy_beside(self, new: NewTensor, form: Padded) -> None:
        """Note that a parameter is copied because there are too few staging buffers."""
        self._note(new, form, "others gathered with it cannot be read in place, and buffer_count is too low for both")

    def _note(self, new: NewTensor, form: Padded, why: str) -> None:
        self.copied[new.name] = why
        self.copied_bytes += form.numel * form.dtype.itemsize

    def say(self) -> None:
        """Say what is copied, and why; ConfigError where the section does not allow it."""
        if not self.copied:
            return
        listed = "; ".join(f"{name}: {why}" for name, why in list(self.copied.items())[:_SHOWN])
        more = f"; and {len(self.copied) - _SHOWN} more" if len(self.copied) > _SHOWN else ""
        if self.frozen == "in_place":
            raise ConfigError([f'{KEY} = "in_place": {listed}{more}: leave the key out, and these are copied once'])
        if speaks_for_all():
            size = format_bytes(self.copied_bytes)
            logger.warning("frozen parameters of %s are copied to the swap files once: %s%s", size, listed, more)
