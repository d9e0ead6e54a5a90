"""Safetensors in the Hugging Face layout, written tensor by tensor: complete, or not at all."""

import errno
import hashlib
import json
import os
import shutil
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from nvme_offload.aio_native.interrupt import DeferredInterrupt
from .._torch_private import local_tensor, sharded_like
from ..errors import HalfRenamedError
from ..progress import progress
from ..shards.split_tensor import SplitTensor
from ..sync import make_folder, sync_file, sync_folder
from ..units import format_bytes
from ..user_path import user_path
from .reader import DIGEST, DTYPES, INDEX_FILE, MAX_HEADER_BYTES, SINGLE_FILE
from .staging import ADAPTER_CONFIG, ADAPTER_FILE, WEIGHT_FILE, HiddenFolder

_KINDS = {dtype: kind for kind, dtype in DTYPES.items()}
_PIECE_NUMEL = 1 << 22
_METADATA = "__metadata__"
_MAX_OFFSET = 2**64
_ALONE = (SINGLE_FILE, ADAPTER_FILE)


@dataclass
class _Shard:
    """One file and what will be in it."""

    entries: list[tuple[str, torch.Tensor, torch.dtype]] = field(default_factory=list)
    size_bytes: int = 0
    header_bytes: int = 256
    """At most as many, with what is no tensor's."""
    name: str = ""
    digest: str = "0" * 64
    """SHA-256 of the bytes of its tensors, in the order of the file; zeros until these are written."""

    def add(self, name: str, tensor: torch.Tensor, dtype: torch.dtype, header_bytes: int) -> None:
        self.entries.append((name, tensor, dtype))
        self.size_bytes += tensor.numel() * dtype.itemsize
        self.header_bytes += header_bytes

    def header(self) -> bytes:
        """The header of the file, of one length whatever the digest. A file that is alone needs no digest."""
        metadata = {"format": "pt"} if self.name in _ALONE else {"format": "pt", DIGEST: self.digest}
        described: dict[str, Any] = {_METADATA: metadata}
        at = 0
        for name, tensor, dtype in self.entries:
            stop = at + tensor.numel() * dtype.itemsize
            described[name] = entry_of(tensor, dtype, at, stop)
            at = stop
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8, as readers that map files expect
        return struct.pack("<Q", len(text)) + text


def entry_of(tensor: torch.Tensor, dtype: torch.dtype, start: int, stop: int) -> dict[str, Any]:
    """Return what a header says of a tensor whose bytes are there."""
    return {"dtype": _KINDS[dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}


def named_tensors(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return a module's tensors, each under its first name, and the first name by each other name.

    Nothing is gathered or copied; what is no tensor is left out.
    """
    first: dict[int, str] = {}
    tensors, tied = {}, {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if (known := first.setdefault(id(tensor), name)) == name:
            tensors[name] = tensor
        else:
            tied[name] = known
    return tensors, tied


def weight_items(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Name and tensor of everything in a module's state dict, tied weights once; nothing is gathered or copied."""
    return list(named_tensors(module)[0].items())


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Gather all shards of a tensor, if it has some; every rank must call it. fp8 goes as bytes: gloo knows no such."""
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.is_floating_point() and tensor.itemsize == 1:
        as_bytes = sharded_like(local_tensor(tensor).view(torch.uint8), tensor)
        return as_bytes.full_tensor().view(tensor.dtype)
    return tensor.full_tensor()


def write_sharded(
    path: str | os.PathLike[str],
    items: Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    max_shard_bytes: int = 5_000_000_000,
    stored: Callable[[str, torch.Tensor, torch.dtype], torch.Tensor] | None = None,
    group: dist.ProcessGroup | None = None,
    writes: bool | None = None,
    adapter_config: bytes | None = None,
) -> list[Path]:
    """Write tensors as ``model.safetensors``, or as numbered shards and ``model.safetensors.index.json``.

    One tensor at a time is made whole: of a DTensor the shards of all ranks are gathered, of a split parameter the
    halves are joined. With several ranks every rank must call this; rank 0 writes. Files are written into a hidden
    folder, renamed when all are complete, the index last; then files of an earlier export in the folder are removed,
    as is at the beginning what a killed one left. Header of a shard and index have the digest of the shard's tensors.

    Args:
        path: folder; made if it does not exist.
        items: name and tensor, see `weight_items`. Shapes are looked at before the first value, so hand over
            parameters, not whole copies of them.
        dtype: of floating-point tensors in the files; None: as they are. Other tensors keep theirs.
        max_shard_bytes: no file has more bytes of tensors, unless a single tensor has. Nor has one a header beyond
            100 MB, which is the most that the format allows.
        stored: makes of a name, its tensor and the dtype in the file what is to be written, sharded as the tensor is;
            every rank calls it, and must raise the same. By default the tensor itself.
        group: the ranks that have the tensors; None: all.
        writes: whether this rank writes all of them, as one of each host may; by default rank 0.
        adapter_config: the content of PEFT's ``adapter_config.json``. The tensors are an adapter then: all of them go
            to ``adapter_model.safetensors`` beside it, and no other file is touched.

    Returns:
        The files, in order.

    Raises:
        ValueError: a name comes twice, or a name or a dtype has no place in safetensors.
        OSError: the folder cannot be used, another export is writing into it (EBUSY), or it has too little space
            (ENOSPC; bytes needed and free). Nothing was left behind, and an earlier export is as it was.
        HalfRenamedError: it failed at the very end, between two renames.
    """
    single, most = (SINGLE_FILE, max_shard_bytes) if adapter_config is None else (ADAPTER_FILE, _MAX_OFFSET)
    shards = _plan(list(items), dtype, most, single)
    export = _Export(user_path(path), shards, stored, group, writes, adapter_config)
    try:
        export.do(export.make_room)
        export.agree()
        with progress("exporting the weights", sum(shard.size_bytes for shard in shards)) as advance, torch.no_grad():
            for shard in shards:
                export.write_shard(shard, advance)
        export.do(export.put_in_place)
        export.agree()
    finally:
        export.clean_up()
    return [export.folder / shard.name for shard in shards]


class _Export:
    """Files on their way into a folder. What goes wrong on a rank that writes waits until all ranks `agree`."""

    def __init__(
        self,
        folder: Path,
        shards: Sequence[_Shard],
        stored: Callable[[str, torch.Tensor, torch.dtype], torch.Tensor] | None,
        group: dist.ProcessGroup | None,
        writes: bool | None,
        adapter_config: bytes | None,
    ) -> None:
        self.folder = folder
        self._stored = stored or (lambda name, tensor, dtype: tensor)
        self._group = group
        self._shards = shards
        self._written = 0
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._staging: HiddenFolder | None = None
        self._adapter_config = adapter_config
        self._writes = self._alone or (dist.get_rank(group) == 0 if writes is None else writes)
        self._error: OSError | None = None
        self._renaming = False

    def do(self, action: Callable[..., None], *arguments: Any) -> None:
        """Act on the rank that writes, unless something has gone wrong already."""
        if not self._writes or self._error is not None:
            return
        try:
            action(*arguments)
        except OSError as error:
            self._error = self._explained(error)

    def agree(self) -> None:
        """Raise on every rank what went wrong."""
        if not self._alone:
            errors: list[OSError | None] = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(errors, self._error, group=self._group)
            self._error = next((error for error in errors if error is not None), None)
        if self._error is not None:
            raise self._error

    def make_room(self) -> None:
        make_folder(self.folder)
        self._staging = HiddenFolder(self.folder)
        free_bytes = shutil.disk_usage(self.folder).free
        if free_bytes < self._total:
            what = f"needed {format_bytes(self._total)}, free {format_bytes(free_bytes)}"
            raise OSError(errno.ENOSPC, what)

    def write_shard(self, shard: _Shard, advance: Callable[[int], None]) -> None:
        """Write one file; ranks that do not write, or no longer, only take part in the gathering."""
        self.do(self._begin, shard)
        for name, tensor, dtype in shard.entries:
            self.do(self._write_tensor, whole_of(self._stored(name, tensor, dtype)), dtype)
            advance(tensor.numel() * dtype.itemsize)
        self.do(self._complete, shard)

    def put_in_place(self) -> None:
        """Rename what is complete, and let go of the hidden folder."""
        if self._adapter_config is None:
            self._put_weights()
        else:
            with DeferredInterrupt():
                self._put_adapter(self._adapter_config)
        self._temporary.remove()  # before other ranks hear that all is done

    def _put_adapter(self, config: bytes) -> None:
        """Rename; at every moment the folder holds the old adapter, the new one, or one without its config.

        Where the config stays as it is, there is one rename, and no third case. PEFT loads nothing without a config.
        """
        file = self.folder / ADAPTER_CONFIG
        changes = not file.is_file() or file.read_bytes() != config
        if changes:
            self._open(ADAPTER_CONFIG, config)
            self._finish()
            file.unlink(missing_ok=True)
            self._renaming = True
            sync_folder(self.folder)
        self._temporary.path(ADAPTER_FILE).replace(self.folder / ADAPTER_FILE)
        sync_folder(self.folder)
        if changes:
            self._temporary.path(ADAPTER_CONFIG).replace(file)
            sync_folder(self.folder)
        self._renaming = False

    def _put_weights(self) -> None:
        """Rename; at every moment the folder holds the old export, the new one, or shards without an index.

        Each step is on the drive before the next begins, so this holds after a power loss, too. If a rename fails, or
        the process is killed between two, shards without an index stay and may be of both exports:
        `SafetensorsReader` refuses them.
        """
        index, single = self.folder / INDEX_FILE, len(self._shards) == 1
        if not single:
            self._write_index()
            index.unlink(missing_ok=True)
            self._renaming = True
            sync_folder(self.folder)
        for shard in self._shards:
            self._temporary.path(shard.name).replace(self.folder / shard.name)
        sync_folder(self.folder)
        if not single:
            self._temporary.path(INDEX_FILE).replace(index)
            sync_folder(self.folder)
        self._renaming = False
        self._remove_earlier(single)
        sync_folder(self.folder)

    def clean_up(self) -> None:
        """Close and remove what is not in place."""
        if self._file is not None:
            self._file.close()
        if self._staging is not None:
            self._staging.remove()

    @property
    def _alone(self) -> bool:
        return not dist.is_initialized() or dist.get_world_size(self._group) == 1

    @property
    def _total(self) -> int:
        return sum(shard.size_bytes for shard in self._shards)

    @property
    def _temporary(self) -> HiddenFolder:
        assert self._staging is not None
        return self._staging

    def _remove_earlier(self, single: bool) -> None:
        """The files of an earlier export that the new one did not replace; the index, which names them, first."""
        if single:
            (self.folder / INDEX_FILE).unlink(missing_ok=True)
            sync_folder(self.folder)
        names = {shard.name for shard in self._shards}
        for entry in list(self.folder.iterdir()):
            if WEIGHT_FILE.fullmatch(entry.name) and entry.name not in names:
                entry.unlink()

    def _write_index(self) -> None:
        index = {
            "metadata": {"total_size": self._total},
            "weight_map": {name: shard.name for shard in self._shards for name, _, _ in shard.entries},
            DIGEST: {shard.name: shard.digest for shard in self._shards},
        }
        self._open(INDEX_FILE, f"{json.dumps(index, indent=2)}\n".encode())
        self._finish()

    def _explained(self, error: OSError) -> OSError:
        what = error.strerror or str(error)
        if error.errno == errno.ENOSPC:
            after = f" after {format_bytes(self._written)} of {format_bytes(self._total)}" if self._written else ""
            what = f"too little space{after} ({what}); free space or choose another folder"
        kind = HalfRenamedError if self._renaming else OSError
        where = "" if self._alone else f" on host {socket.gethostname()}"
        return kind(error.errno, f"the weights were not written{where}: {what}", os.fspath(self.folder))

    def _open(self, name: str, first: bytes) -> None:
        self._file = self._temporary.path(name).open("xb", buffering=0)
        self._write(first)

    def _begin(self, shard: _Shard) -> None:
        self._open(shard.name, shard.header())
        self._digest = hashlib.sha256()

    def _complete(self, shard: _Shard) -> None:
        assert self._file is not None
        shard.digest = self._digest.hexdigest()
        self._file.seek(0)
        self._write(shard.header())
        self._finish()

    def _write_tensor(self, whole: torch.Tensor, dtype: torch.dtype) -> None:
        """Write a tensor in pieces: a second copy of a large one, in another dtype, need not fit."""
        plain = whole.joined() if isinstance(whole, SplitTensor) else whole.detach()
        flat = plain.contiguous().view(-1)
        for start in range(0, flat.numel(), _PIECE_NUMEL):
            piece = flat[start : start + _PIECE_NUMEL].to(device="cpu", dtype=dtype).contiguous()
            data = piece.view(torch.uint8).numpy().data
            self._write(data)
            self._written += len(data)
            if len(self._shards) > 1:  # a file that is alone belongs to no other
                self._digest.update(data)

    def _write(self, data: bytes | memoryview) -> None:
        assert self._file is not None
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def _finish(self) -> None:
        assert self._file is not None
        sync_file(self._file.fileno())
        self._file.close()
        self._file = None


def _plan(
    items: Sequence[tuple[str, torch.Tensor]], dtype: torch.dtype | None, max_shard_bytes: int, single: str
) -> list[_Shard]:
    shards = [_Shard()]
    names: set[str] = set()
    for name, tensor in items:
        if name in names:
            raise ValueError(f"{name} comes twice; a name can stand for one tensor only")
        names.add(name)
        stored = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if stored not in _KINDS:
            raise ValueError(f"{name} would be stored as {stored}; safetensors has {', '.join(map(str, _KINDS))}")
        size_bytes, header_bytes = tensor.numel() * stored.itemsize, _header_bytes(name, tensor, stored)
        if shards[-1].entries and (
            shards[-1].size_bytes + size_bytes > max_shard_bytes
            or shards[-1].header_bytes + header_bytes > MAX_HEADER_BYTES
        ):
            shards.append(_Shard())
        shards[-1].add(name, tensor, stored, header_bytes)
    for number, shard in enumerate(shards, 1):
        shard.name = single if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
    return shards


def _header_bytes(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Return how much a tensor takes of a header at most; ValueError for a name that no header can have."""
    size_bytes = len(json.dumps({name: entry_of(tensor, dtype, _MAX_OFFSET, _MAX_OFFSET)}))
    if name == _METADATA or name.encode(errors="replace").decode() != name:
        raise ValueError(f"{name!r} cannot be the name of a tensor in safetensors; rename the parameter or buffer")
    if size_bytes + _Shard.header_bytes > MAX_HEADER_BYTES:
        most = f"the header of a safetensors file has at most {MAX_HEADER_BYTES} bytes; rename it"
        raise ValueError(f"the name {name[:60]!r}... has {len(name)} characters, and {most}")
    return size_bytes
