"""Write one entry of a log: what a step did to a subgroup, in bytes that another process can do it again from.

::

    [ header | a record for each run | offsets of its tiles | gradients, and parameters as they were found ]

An entry needs nothing beside the subgroup's base: whether a run had a gradient, its dtype and the scalars of the step
are in it. What is in the last part, and where, the kernel says (`KernelPool.update_and_log`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nvme_offload.offload.storage.tier import Memory
from nvme_offload.offload.units import round_up
from ..kernels import LoggedStep, make_logged_step
from ..layout.master import TILE_NUMEL, num_tiles
from ..layout.subgroup import Subgroup

MAX_SCALARS = 12
"""The most that a rule's step may have for its updates to be logged."""

_MAGIC = int.from_bytes(b"nvmelog1", "little")
_HEADER = np.dtype([("magic", "<u8"), ("runs", "<i8"), ("data_bytes", "<i8")])
_ABOUT_GRAD = [("grad_dtype", "<i4"), ("num_scalars", "<i4"), ("grad_scale", "<f4")]
_RECORD = np.dtype([*_ABOUT_GRAD, ("scalars", "<f4", MAX_SCALARS)])
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NO_GRAD = -1
_LINE = 64  # bytes: what the kernel begins each tile at


@dataclass(frozen=True)
class EntryFormat:
    """Says where things are in the entries of one subgroup. All offsets are bytes from an entry's beginning."""

    numels: tuple[int, ...]
    """Elements of each run."""
    grad_itemsize: int
    """Bytes of a gradient's element, at most."""

    @classmethod
    def of(cls, subgroup: Subgroup, grad_dtype: torch.dtype) -> EntryFormat:
        """Return the format of a subgroup whose gradients have this dtype."""
        return cls(tuple(run.numel for run in subgroup.runs), grad_dtype.itemsize)

    @property
    def offsets_at(self) -> int:
        """Return where the offsets of tiles begin."""
        return round_up(_HEADER.itemsize + len(self.numels) * _RECORD.itemsize, _LINE)

    @property
    def data_at(self) -> int:
        """Return where gradients begin."""
        return round_up(self.offsets_at + 16 * sum(map(num_tiles, self.numels)), _LINE)

    @property
    def most_bytes(self) -> int:
        """The bytes of an entry with every gradient, and no parameter that was found changed."""
        tiles = [min(TILE_NUMEL, numel - first) for numel in self.numels for first in range(0, numel, TILE_NUMEL)]
        return self.data_at + sum(round_up(tile * self.grad_itemsize, _LINE) for tile in tiles)

    def begin(self, memory: Memory) -> None:
        """Make an entry in which no run has a gradient yet."""
        self._bytes(memory, 0, self.offsets_at).zero_()
        header, records = self._head(memory)
        header["magic"], header["runs"] = _MAGIC, len(self.numels)
        records["grad_dtype"] = _NO_GRAD

    def note_run(
        self, memory: Memory, run: int, *, grad_dtype: torch.dtype, grad_scale: float, scalars: Sequence[float]
    ) -> torch.Tensor:
        """Note with what a run is updated; return the offsets of its tiles, which `make_segment` has filled in."""
        if len(scalars) > MAX_SCALARS or grad_dtype.itemsize > self.grad_itemsize:
            raise ValueError(
                f"a gradient of {grad_dtype} with {len(scalars)} scalars: entries here are of gradients of at most "
                f"{self.grad_itemsize} bytes, with at most {MAX_SCALARS} scalars"
            )
        _, records = self._head(memory)
        record = records[run : run + 1]
        record["grad_dtype"], record["num_scalars"] = _DTYPES.index(grad_dtype), len(scalars)
        record["grad_scale"] = grad_scale
        record["scalars"][0, : len(scalars)] = scalars
        return self._offsets(memory, run)

    def data(self, memory: Memory, entry_bytes: int) -> torch.Tensor:
        """Return the part that the kernel fills, of an entry that may take so many bytes: 1D uint8."""
        return self._bytes(memory, self.data_at, entry_bytes - self.data_at)

    def finish(self, memory: Memory, data_bytes: int) -> int:
        """Note how much the kernel filled; return the bytes of the entry."""
        header, _ = self._head(memory)
        header["data_bytes"] = data_bytes
        return self.data_at + data_bytes

    def steps(self, memory: Memory) -> list[LoggedStep | None]:
        """Return what to do again, by run (None: it had no gradient). ValueError: the memory has no such entry."""
        header, records = self._head(memory)
        if header["magic"] != _MAGIC or header["runs"] != len(self.numels):
            raise ValueError(f"no log entry of {len(self.numels)} runs: it begins with {header['magic']:#x}")
        data = self._bytes(memory, self.data_at, int(header["data_bytes"]))
        return [self._step(memory, run, record, data) for run, record in enumerate(records)]

    def _step(self, memory: Memory, run: int, record: np.void, data: torch.Tensor) -> LoggedStep | None:
        if record["grad_dtype"] == _NO_GRAD:
            return None
        return make_logged_step(
            entry=data,
            offsets=self._offsets(memory, run),
            numel=self.numels[run],
            grad_dtype=_DTYPES[record["grad_dtype"]],
            scalars=record["scalars"][: record["num_scalars"]].tolist(),
            grad_scale=float(record["grad_scale"]),
        )

    def _head(self, memory: Memory) -> tuple[np.ndarray, np.ndarray]:
        """Return the header, 0D, and the records, 1D: views."""
        content = self._bytes(memory, 0, self.offsets_at).numpy()
        header = content[: _HEADER.itemsize].view(_HEADER).reshape(())
        records = content[_HEADER.itemsize :][: len(self.numels) * _RECORD.itemsize].view(_RECORD)
        return header, records

    def _offsets(self, memory: Memory, run: int) -> torch.Tensor:
        tiles = [num_tiles(numel) for numel in self.numels]
        begin = self.offsets_at + 16 * sum(tiles[:run])
        return memory.view(torch.int64, begin, 2 * tiles[run]).view(-1, 2)

    @staticmethod
    def _bytes(memory: Memory, at: int, size_bytes: int) -> torch.Tensor:
        return memory.view(torch.uint8, at, size_bytes)


@dataclass(frozen=True)
class PartOfMemory:
    """Memory that begins at byte `start` of other memory."""

    memory: Memory
    start: int

    def view(self, dtype: torch.dtype, byte_offset: int, numel: int) -> torch.Tensor:
        """Return a 1D tensor [numel] over the bytes from `byte_offset`."""
        return self.memory.view(dtype, self.start + byte_offset, numel)
