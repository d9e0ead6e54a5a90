"""Tensors in safetensors files: one file, or the shards of a Hugging Face index; read piece by piece.

The format: 8 bytes with the length of a header, the header as JSON (dtype, shape and byte range of each tensor), then
the bytes of the tensors, which fill the rest of the file. Files are read, not mapped into memory: the pages of a mapped
file count as resident memory of the process.
"""

import json
import math
import os
import re
import struct
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nvme_offload.aio_native.descriptor import Descriptor
from ..errors import WeightsError
from ..storage.file_ranges import FileIdentity
from ..user_path import user_path

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes of torch by the names that the format has for them."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DIGEST = "sha256"
"""Key of the SHA-256 of a file's tensors, in its header and in the index beside it. Ours; files of others have none."""

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

_SHARD = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
_DAMAGED = "the file is damaged or was not written completely: fetch or export it again"


@dataclass(frozen=True)
class HeaderEntry:
    """An entry says where a tensor is and what it is; it has no data."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    file: FileIdentity
    """The file as it was when its header was read."""

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.numel * self.dtype.itemsize


class SafetensorsReader(AbstractContextManager["SafetensorsReader"]):
    """The tensors of a file, or of several files as one.

    Making one reads and checks the headers of all files; a file is opened again when data of it is first read.

    Args:
        path: a ``.safetensors`` file, a folder in the Hugging Face layout (``model.safetensors``, or
            ``model.safetensors.index.json`` with the files it names; otherwise all ``*.safetensors`` in it, unless
            these are shards that have lost their index), or an index ``.json``.

    Raises:
        WeightsError: there is no such file, a header is damaged, a file is too short, an index names a file or tensor
            that is not there, a file in another folder or one of another export, or shards have no index.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = user_path(path)
        self._files: dict[Path, Descriptor] = {}
        self.tensors: dict[str, HeaderEntry] = _tensors_at(self.path)
        """In the order of the files."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Read elements `start` to `stop` of a tensor in row-major order: 1D, in the stored dtype."""
        stored = self.tensors[name]
        stop = stored.numel if stop is None else stop
        assert 0 <= start <= stop <= stored.numel
        itemsize = stored.dtype.itemsize
        data = torch.empty((stop - start) * itemsize, dtype=torch.uint8, device="cpu")
        self._read_into(memoryview(data.numpy().data), stored, stored.offset + start * itemsize)
        return data.view(stored.dtype)

    def close(self) -> None:
        """Close the files that are open. Idempotent."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read_into(self, target: memoryview, stored: HeaderEntry, offset: int) -> None:
        path = stored.path
        try:
            if path not in self._files:
                self._files[path] = Descriptor(os.open, path, os.O_RDONLY | os.O_CLOEXEC)
            now = FileIdentity.of(os.fstat(self._files[path].fileno()))
            if now != stored.file:
                changed = stored.file.differences(now)
                raise WeightsError(path, f"it was changed after its header was read: {changed}; begin again")
            while target:
                count = os.preadv(self._files[path].fileno(), [target], offset)
                if count == 0:
                    raise WeightsError(path, f"it ends at byte {offset} and did not when it was opened; {_DAMAGED}")
                target, offset = target[count:], offset + count
        except OSError as error:
            raise WeightsError(path, f"reading {len(target)} bytes at {offset}: {error.strerror}") from error


def read_header(path: Path) -> dict[str, HeaderEntry]:
    """Read the tensors of one file from its header; raises WeightsError where it is no intact safetensors file."""
    return _read_header(path)[0]


def _read_header(path: Path) -> tuple[dict[str, HeaderEntry], str | None]:
    try:
        with path.open("rb") as file:
            identity = FileIdentity.of(os.fstat(file.fileno()))
            size_bytes = identity.size_bytes
            prefix = file.read(8)
            header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size_bytes - 8):
                what = f"is no safetensors file: of {size_bytes} bytes its header would be {header_bytes}"
                raise WeightsError(path, f"{what}; {_DAMAGED}")
            text = file.read(header_bytes)
    except OSError as error:
        raise WeightsError(path, f"cannot be read: {error.strerror}") from error
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WeightsError(path, f"has a header that is no JSON ({error}); {_DAMAGED}") from error
    if not isinstance(header, dict):
        raise WeightsError(path, f"has a header that is no JSON object; {_DAMAGED}")
    metadata = header.pop("__metadata__", None)
    first = 8 + header_bytes
    tensors = {name: _stored(path, name, entry, first, identity) for name, entry in header.items()}
    _check_coverage(path, tensors, first, size_bytes)
    return tensors, metadata.get(DIGEST) if isinstance(metadata, dict) else None


def _check_coverage(path: Path, tensors: Mapping[str, HeaderEntry], first: int, size_bytes: int) -> None:
    """Raise unless the tensors lie one after the other and fill the file."""
    end = first
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].size_bytes)):
        if stored.offset != end:
            what = f"{name} begins at byte {stored.offset}, and what lies before it ends at {end}"
            raise WeightsError(path, f"{what}; {_DAMAGED}")
        end += stored.size_bytes
    if end != size_bytes:
        raise WeightsError(path, f"has {size_bytes} bytes, and its header describes {end}; {_DAMAGED}")


def _stored(path: Path, name: str, entry: Any, first: int, file: FileIdentity) -> HeaderEntry:
    try:
        kind, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sane = isinstance(kind, str) and all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop))
    except (TypeError, KeyError, ValueError):
        sane = False
    if not sane:
        raise WeightsError(path, f"{name}: its entry in the header is {entry!r}; {_DAMAGED}")
    if kind not in DTYPES:
        raise WeightsError(path, f"{name} is {kind}: this cannot be read; known are {', '.join(DTYPES)}")
    stored = HeaderEntry(path, DTYPES[kind], shape, first + start, file)
    if stop - start != stored.size_bytes:
        what = f"{stop - start} bytes for {kind} of shape {shape}, which takes {stored.size_bytes}"
        raise WeightsError(path, f"{name}: its entry in the header says {what}; {_DAMAGED}")
    return stored


def _look_at(path: Path) -> None:
    """Raise OSError for what cannot be opened, as `is_file` does before CPython 3.14; what is missing is no error."""
    with suppress(FileNotFoundError, NotADirectoryError, ValueError):
        path.stat()


def _tensors_at(path: Path) -> dict[str, HeaderEntry]:
    try:
        _look_at(path)
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:  # a name that is too long, for example: what is missing is no error
        raise WeightsError(path, f"cannot be opened: {error.strerror}") from error
    if is_folder:
        return _tensors_in_folder(path)
    if not is_file:
        raise WeightsError(path, "there is no such file or folder")
    return _tensors_of_index(path) if path.suffix == ".json" else read_header(path)


def _tensors_in_folder(folder: Path) -> dict[str, HeaderEntry]:
    if (single := folder / SINGLE_FILE).is_file():
        return read_header(single)
    if (index := folder / INDEX_FILE).is_file():
        return _tensors_of_index(index)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
        raise WeightsError(folder, f"holds no safetensors file: neither {SINGLE_FILE} nor {INDEX_FILE}, but {found}")
    # Without the index nobody knows whether these are all, and of one export: the writer removes it before it renames.
    if shard := next((file.name for file in files if _SHARD.fullmatch(file.name)), None):
        why = "an export was interrupted, or a file was not copied"
        raise WeightsError(folder, f"has {shard} and no {INDEX_FILE}: {why}; export again, or fetch the index")
    tensors: dict[str, HeaderEntry] = {}
    for file in files:
        for name, stored in read_header(file).items():
            if name in tensors:
                where = f"{tensors[name].path.name} and {file.name}"
                raise WeightsError(folder, f"{name} is in {where}; name the file you mean, or write an {INDEX_FILE}")
            tensors[name] = stored
    return tensors


def _tensors_of_index(index: Path) -> dict[str, HeaderEntry]:
    try:
        content = json.loads(index.read_bytes())
        places, digests = content["weight_map"], content.get(DIGEST, {})
        sane = all(
            isinstance(texts, Mapping) and all(isinstance(text, str) for text in texts.values())
            for texts in (places, digests)
        )
    except OSError as error:
        raise WeightsError(index, f"cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        sane = False
    if not sane:
        raise WeightsError(index, 'is no index: it must be a JSON object with "weight_map", names to file names')
    files = {place: _shard_beside(index, place) for place in places.values()}
    if absent := sorted(place for place, file in files.items() if not file.is_file()):
        lost = sum(place in absent for place in places.values())
        raise WeightsError(index, f"names {', '.join(absent)} for {lost} tensors, and there is no such file beside it")
    headers: dict[str, dict[str, HeaderEntry]] = {}
    for place, file in files.items():
        headers[place], digest = _read_header(file)
        if place in digests and digests[place] != digest:
            why = "an export over an earlier one was cut off, or a file was exchanged"
            what = f"names {place}, and that file is not the one it was written with: {why}; export again"
            raise WeightsError(index, what)
    if wrong := [f"{name} in {place}" for name, place in places.items() if name not in headers[place]]:
        raise WeightsError(index, f"names {', '.join(wrong[:4])}, and that file has no such tensor; {_DAMAGED}")
    return {name: headers[place][name] for name, place in places.items()}


def _shard_beside(index: Path, place: str) -> Path:
    """The file of that name in the folder of the index, or below; an index says nothing about other places.

    The file itself may be a link, as all files are in the cache of the Hugging Face hub; a folder below may not.
    """
    folder, file = index.parent, index.parent / place
    inside = bool(place) and "\0" not in place and not Path(place).is_absolute() and ".." not in Path(place).parts
    try:
        inside = inside and file.parent.resolve().is_relative_to(folder.resolve())
        _look_at(file)
    except OSError as error:
        what = f"names the file {_shortened(place)}, which cannot be opened: {error.strerror}"
        raise WeightsError(index, what) from error
    if not inside:
        what = f"names the file {_shortened(place)}, which is not in its folder"
        raise WeightsError(index, f"{what}: an index may only name files beside it; do not trust its source")
    return file


def _shortened(text: str) -> str:
    return repr(text) if len(text) <= 255 else f"{text[:60]!r}... ({len(text)} characters)"
