"""Safetensors in the Hugging Face layout, written tensor by tensor: complete, or not at all."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from nvme_offload.offload.shards.split_tensor import SplitTensor
from nvme_offload.offload.units import format_bytes
from nvme_offload.offload.weights.reader import DTYPES, INDEX_FILE, SINGLE_FILE

_KINDS = {dtype: kind for kind, dtype in DTYPES.items()}
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_PIECE_NUMEL = 1 << 22


@dataclass
class _Shard:
    """One file and what will be in it."""

    entries: list[tuple[str, torch.Tensor, torch.dtype]] = field(default_factory=list)
    size_bytes: int = 0
    name: str = ""

    def header(self) -> bytes:
        described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, tensor, dtype in self.entries:
            stop = at + tensor.numel() * dtype.itemsize
            described[name] = {"dtype": _KINDS[dtype], "shape": list(tensor.shape), "data_offsets": [at, stop]}
            at = stop
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8, as readers that map files expect
        return struct.pack("<Q", len(text)) + text


def weight_items(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Name and tensor of everything in a module's state dict, tied weights once; nothing is gathered or copied."""
    seen: set[int] = set()
    items = []
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            items.append((name, tensor))
    return items


def write_sharded(
    path: str | os.PathLike[str],
    items: Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    max_shard_bytes: int = 5_000_000_000,
    stored: Callable[[str, torch.Tensor, torch.dtype], torch.Tensor] | None = None,
    group: dist.ProcessGroup | None = None,
) -> list[Path]:
    """Write tensors as ``model.safetensors``, or as numbered shards and ``model.safetensors.index.json``.

    One tensor at a time is made whole: of a DTensor the shards of all ranks are gathered, of a split parameter the
    halves are joined. With several ranks every rank must call this; rank 0 writes. Files are written under temporary
    names, renamed when all are complete, the index last; then files of an earlier export in the folder are removed.

    Args:
        path: folder; made if it does not exist.
        items: name and tensor, see `weight_items`. Shapes are looked at before the first value, so hand over
            parameters, not whole copies of them.
        dtype: of floating-point tensors in the files; None: as they are. Other tensors keep theirs.
        max_shard_bytes: no file has more bytes of tensors, unless a single tensor has.
        stored: makes of a name, its tensor and the dtype in the file what is to be written, sharded as the tensor is;
            every rank calls it, and must raise the same. By default the tensor itself.
        group: the ranks that have the tensors; None: all.

    Returns:
        The files, in order.

    Raises:
        ValueError: a name comes twice, or a dtype has no place in safetensors.
        OSError: the folder cannot be used, or has too little space (ENOSPC; bytes needed and free). Nothing was left
            behind, and an earlier export is as it was.
        HalfRenamedError: it failed at the very end, between two renames.
    """
    shards = _plan(list(items), dtype, max_shard_bytes)
    export = _Export(Path(path), shards, stored, group)
    try:
        export.do(export.make_room)
        export.agree()
        for shard in shards:
            with torch.no_grad():
                export.write_shard(shard)
        export.do(export.put_in_place)
        export.agree()
    finally:
        export.clean_up()
    return [export.folder / shard.name for shard in shards]


class HalfRenamedError(OSError):
    """An export failed between two renames: shards of it and of an earlier one stay, without an index."""


class _Export:
    """Files on their way into a folder.

    Only rank 0 writes. What goes wrong there is kept until all ranks can stop together: `agree`.
    """

    def __init__(
        self,
        folder: Path,
        shards: Sequence[_Shard],
        stored: Callable[[str, torch.Tensor, torch.dtype], torch.Tensor] | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.folder = folder
        self._stored = stored or (lambda name, tensor, dtype: tensor)
        self._group = group
        self._shards = shards
        self._total = sum(shard.size_bytes for shard in shards)
        self._written = 0
        self._file: BinaryIO | None = None
        self._alone = not dist.is_initialized() or dist.get_world_size(group) == 1
        self._writes = self._alone or dist.get_rank(group) == 0
        self._error: OSError | None = None
        self._renaming = False

    def do(self, action: Callable[..., None], *arguments: Any) -> None:
        """On the rank that writes, unless something has gone wrong already."""
        if not self._writes or self._error is not None:
            return
        try:
            action(*arguments)
        except OSError as error:
            self._error = self._explained(error)

    def agree(self) -> None:
        """Raise on every rank what went wrong."""
        if not self._alone:
            box = [self._error]
            dist.broadcast_object_list(box, group=self._group, group_src=0)
            self._error = box[0]
        if self._error is not None:
            raise self._error

    def make_room(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(self.folder).free
        if free_bytes < self._total:
            what = f"needed {format_bytes(self._total)}, free {format_bytes(free_bytes)}"
            raise OSError(errno.ENOSPC, what)

    def write_shard(self, shard: _Shard) -> None:
        """Write one file; ranks that do not write, or no longer, only take part in the gathering."""
        self.do(self._open, self._temporary(shard.name), shard.header())
        for name, tensor, dtype in shard.entries:
            part = self._stored(name, tensor, dtype)
            whole = part.full_tensor() if isinstance(part, DTensor) else part
            self.do(self._write_tensor, whole, dtype)
        self.do(self._finish)

    def put_in_place(self) -> None:
        """Rename; at every moment the folder holds the old export, the new one, or shards without an index.

        If a rename fails, or the process is killed between two, such shards stay and may be of both exports:
        `SafetensorsReader` refuses them.
        """
        index, names = self.folder / INDEX_FILE, {shard.name for shard in self._shards}
        single = len(self._shards) == 1
        if not single:
            places = {name: shard.name for shard in self._shards for name, _, _ in shard.entries}
            text = json.dumps({"metadata": {"total_size": self._total}, "weight_map": places}, indent=2)
            self._open(self._temporary(INDEX_FILE), f"{text}\n".encode())
            self._finish()
            index.unlink(missing_ok=True)
        self._renaming = not single
        for shard in self._shards:
            self._temporary(shard.name).replace(self.folder / shard.name)
        if not single:
            self._temporary(INDEX_FILE).replace(index)
        self._renaming = False
        for entry in list(self.folder.iterdir()):
            if _OURS.fullmatch(entry.name) and entry.name not in names:
                entry.unlink()
        if single:
            index.unlink(missing_ok=True)
        folder = os.open(self.folder, os.O_RDONLY)  # the names, too, outlive a power loss
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def clean_up(self) -> None:
        """Close and remove what is not in place."""
        if self._file is not None:
            self._file.close()
        if self._writes:
            for name in [*(shard.name for shard in self._shards), INDEX_FILE]:
                with suppress(OSError):
                    self._temporary(name).unlink(missing_ok=True)

    def _temporary(self, name: str) -> Path:
        return self.folder / f".{name}.{os.getpid()}.tmp"

    def _explained(self, error: OSError) -> OSError:
        what = error.strerror or str(error)
        if error.errno == errno.ENOSPC:
            after = f" after {format_bytes(self._written)} of {format_bytes(self._total)}" if self._written else ""
            what = f"too little space{after} ({what}); free space or choose another folder"
        kind = HalfRenamedError if self._renaming else OSError
        return kind(error.errno, f"the weights were not written: {what}", os.fspath(self.folder))

    def _open(self, path: Path, first: bytes) -> None:
        self._file = path.open("wb", buffering=0)
        self._write(first)

    def _write_tensor(self, whole: torch.Tensor, dtype: torch.dtype) -> None:
        """In pieces: a second copy of a large tensor, in another dtype, need not fit."""
        plain = whole.joined() if isinstance(whole, SplitTensor) else whole.detach()
        flat = plain.contiguous().view(-1)
        for start in range(0, flat.numel(), _PIECE_NUMEL):
            piece = flat[start : start + _PIECE_NUMEL].to(device="cpu", dtype=dtype).contiguous()
            self._write(piece.view(torch.uint8).numpy())

    def _write(self, data: Any) -> None:
        assert self._file is not None
        left = memoryview(data)
        while left:
            count = self._file.write(left)
            self._written += count
            left = left[count:]

    def _finish(self) -> None:
        assert self._file is not None
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None


def _plan(items: Sequence[tuple[str, torch.Tensor]], dtype: torch.dtype | None, max_shard_bytes: int) -> list[_Shard]:
    shards = [_Shard()]
    names: set[str] = set()
    for name, tensor in items:
        if name in names:
            raise ValueError(f"{name} comes twice; a name can stand for one tensor only")
        names.add(name)
        stored = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if stored not in _KINDS:
            raise ValueError(f"{name} would be stored as {stored}; safetensors has {', '.join(map(str, _KINDS))}")
        size_bytes = tensor.numel() * stored.itemsize
        if shards[-1].entries and shards[-1].size_bytes + size_bytes > max_shard_bytes:
            shards.append(_Shard())
        shards[-1].entries.append((name, tensor, stored))
        shards[-1].size_bytes += size_bytes
    for number, shard in enumerate(shards, 1):
        shard.name = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
    return shards
