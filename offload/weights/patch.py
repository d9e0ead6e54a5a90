"""Patches of weights: what has changed from one version to another, applied to a model, or as files in a folder.

In a folder each patch is a safetensors file, and ``versions.json`` names them in the order in which they follow. A
file gets its name when it is whole, and the index names it only then: whoever reads at any moment finds a chain.
Where a weight has few changes, the file has `values` and `gaps`: how many elements lie between two that changed, in
bytes (so a change of 16 bits takes 3 bytes, not 6 as with indices of 32 bits).
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..devices.device import HOST
from ..errors import StateError, WeightsError
from ..sync import make_folder, sync_file, sync_folder
from ..user_path import user_path
from .reader import SafetensorsReader
from .writer import entry_of

INDEX = "versions.json"
_FILE = f"{'[0-9]' * 8}.safetensors"  # other files in the folder are not ours
_FORMAT = 1  # of the index
_FURTHER = 255  # a byte of gaps that says: so many elements on, and no change there
_AT_ONCE = 1 << 16  # elements, so that int64 of all of them is nowhere
_MOST_IN_HEADER = 400  # bytes of an entry, without its name, which comes twice
_versions: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""The versions of models that patches were applied to."""


class WeightChange(NamedTuple):
    """The new values of one weight; the fields are those of vLLM's ``CheckpointWeightPatch``, in its order."""

    name: str
    shape: tuple[int, ...]
    """The shape of the whole weight."""
    dtype: torch.dtype
    values: torch.Tensor
    """1D [numel]: all values in row-major order, or those at `indices`."""
    indices: torch.Tensor | None = None
    """1D, increasing: where `values` go, in row-major order; int32, beyond 2**31 elements int64. None: everywhere."""

    @property
    def size_bytes(self) -> int:
        """Bytes of values and indices."""
        return sum(each.numel() * each.itemsize for each in (self.values, self.indices) if each is not None)


class WeightPatch:
    """Leads from the weights of a version to the present ones: its `WeightChange` s, which come once.

    Args:
        since: the version that it changes; None: it has all weights, and goes with any.
        version: what they are with it.
        reason: why it has all weights; "" where it has not.
        kinds: shapes and dtypes of all weights that may come, by name.
    """

    def __init__(
        self,
        since: str | None,
        version: str,
        reason: str,
        kinds: Mapping[str, tuple[torch.Size, torch.dtype]],
        changes: Iterator[WeightChange],
    ) -> None:
        self.since = since
        self.version = version
        self.reason = reason
        self.kinds = kinds
        self._changes = changes

    def __iter__(self) -> Iterator[WeightChange]:
        return self._changes

    def of(self, changes: Iterable[WeightChange]) -> "WeightPatch":
        """Return this patch with its changes as they were received or kept: to apply or save it more than once."""
        return WeightPatch(self.since, self.version, self.reason, self.kinds, iter(changes))

    def __repr__(self) -> str:
        what = f"since {self.since}" if self.since is not None else f"all weights: {self.reason}"
        return f"<WeightPatch to {self.version}, {what}>"


@torch.no_grad()
def apply_patch(model: nn.Module, patch: WeightPatch | str | os.PathLike[str], *, at: str | None = None) -> str:
    """Bring the weights of a plain model to another version.

    Args:
        model: its parameters and buffers have the names of the patch, as the trained model has, or the published one.
        patch: what `OffloadEngine.weights` returned, or a folder of `save_patch`: all in it that follows is applied.
        at: the version of the model, if no patch was applied to it before.

    Returns:
        The version of the model now.

    Raises:
        StateError: the patch does not follow the version that the model has; nothing has changed.
        WeightsError: files are damaged, or weights do not fit the model. Then the model takes a patch of all weights
            next, if it was changed; so it is after any other exception on the way, too.
    """
    have = _versions.get(model) if at is None else at
    if not isinstance(patch, WeightPatch):
        chain = _chain(user_path(patch), have)
        for link in chain:
            have = apply_patch(model, link, at=have)
        return have or ""
    if patch.since is not None and patch.since != have:
        actual = "a model without a version (pass at=...)" if have is None else f"one of version {have}"
        raise StateError("apply_patch", f"a model of version {patch.since}", actual)
    tensors = {name: each for name, each in model.state_dict(keep_vars=True).items() if isinstance(each, torch.Tensor)}
    _check_fits(tensors, patch.kinds)
    _versions.pop(model, None)  # until all is done it has none
    for change in patch:
        _apply(tensors[change.name].detach(), change)
    _versions[model] = patch.version
    return patch.version


def _check_fits(tensors: Mapping[str, torch.Tensor], kinds: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
    for name, (shape, _) in kinds.items():
        if name not in tensors or tensors[name].shape != shape or isinstance(tensors[name], DTensor):
            what = f"shape {tuple(tensors[name].shape)}" if name in tensors else "no such weight"
            raise WeightsError("apply_patch", f"{name} of shape {tuple(shape)}: the model has {what}, or it is sharded")


def _apply(target: torch.Tensor, change: WeightChange) -> None:
    values = change.values.to(target.device, target.dtype)
    if change.indices is None:
        target.copy_(values.view(change.shape))
        return
    indices = change.indices.to(target.device, torch.int64)
    if target.is_contiguous():
        target.view(-1).index_put_((indices,), values)  # index_copy_ has no float8 on a CPU
    else:
        target.index_put_(torch.unravel_index(indices, change.shape), values)


def save_patch(patch: WeightPatch, folder: str | os.PathLike[str], *, writes: bool = True) -> Path | None:
    """Write a patch into a folder, where `apply_patch` finds it. Every rank goes through the patch; one `writes`.

    A patch of all weights begins the chain anew, also where the index is damaged, and the files before the previous one
    are removed. So is what a killed writer left.

    Returns:
        The file; None where this rank does not write.

    Raises:
        StateError: the patch does not follow the latest in the folder; it was gone through, and nothing was written.
        WeightsError: the index is damaged, and the patch has not all weights; nothing was written.
        OSError: the file could not be written. The folder is as it was.
    """
    place = user_path(folder)
    if not writes:
        for _ in patch:
            pass
        return None
    try:
        known = _read_index(place)
    except WeightsError as error:
        if patch.since is not None and not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise
        known = []
    kept = known if patch.since is not None else []
    if kept and kept[-1]["version"] != patch.since:
        raise StateError("save_patch", f"a patch since {kept[-1]['version']}", f"one since {patch.since}")
    make_folder(place)
    files = [*place.glob(_FILE)]
    name = f"{max((int(file.stem) for file in files), default=0) + 1:08d}.safetensors"
    link = {"since": patch.since, "version": patch.version, "file": name}
    _replace(place / name, lambda file: link.update(_write(file, patch)))
    text = json.dumps({"format": _FORMAT, "patches": [*kept, link]}).encode()
    _replace(place / INDEX, lambda file: file.write(text))
    spared = {each["file"] for each in (*known, link)}
    for old in (*files, *place.glob(f".{_FILE}.*"), *place.glob(f".{INDEX}.*")):
        if old.name not in spared:
            old.unlink(missing_ok=True)
    return place / name


def _replace(path: Path, write: Callable[[Any], Any]) -> None:
    """Give a file another content, or leave it as it is."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(hidden, "w+b") as file:
            write(file)
            file.flush()
            sync_file(file.fileno())
        os.replace(hidden, path)
    except OSError as error:
        if error.filename is not None:  # it says more than what is known here
            raise
        remedy = "free space, or begin a chain in another folder with a patch of all weights"
        what = f"the patch was not written, and the folder is as it was: {error.strerror}; {remedy}"
        raise OSError(error.errno, what, os.fspath(path)) from error
    finally:
        hidden.unlink(missing_ok=True)
    sync_folder(path.parent)


def _write(file: Any, patch: WeightPatch) -> dict[str, Any]:
    """Write tensors as they come, and before them the header, whose room was kept; return what the index says."""
    room = -(-(1024 + sum(2 * len(json.dumps(name)) + _MOST_IN_HEADER for name in patch.kinds)) // 8) * 8
    file.seek(8 + room)
    said = {"format": "pt", "since": patch.since or "", "version": patch.version}
    header: dict[str, Any] = {"__metadata__": said}
    at, sparse = 0, dict[str, tuple[int, ...]]()
    for change in patch:
        parts = {change.name: change.values.view(change.shape)} if change.indices is None else {}
        if change.indices is not None:
            sparse[change.name] = change.shape
            parts = {f"{change.name}:gaps": _gaps_of(change.indices), f"{change.name}:values": change.values}
        for name, tensor in parts.items():
            content = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            file.write(content)
            stop = at + len(content)
            header[name] = entry_of(tensor, tensor.dtype, at, stop)
            at = stop
    file.seek(0)
    file.write(struct.pack("<Q", room) + json.dumps(header, separators=(",", ":")).encode().ljust(room))
    file.seek(0)
    return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "sparse": sparse}


def _gaps_of(indices: torch.Tensor) -> torch.Tensor:
    """Return uint8 for increasing indices [n]: for each the elements since the one before it, by bytes of _FURTHER."""
    last, made = torch.tensor([-1], device=HOST), list[torch.Tensor]()
    for some in torch.split(indices.cpu(), _AT_ONCE):
        between = torch.diff(some.long(), prepend=last) - 1
        ends = torch.cumsum(between // _FURTHER + 1, 0) - 1
        gaps = torch.full((int(ends[-1]) + 1 if len(ends) else 0,), _FURTHER, dtype=torch.uint8, device=HOST)
        gaps[ends] = (between % _FURTHER).to(torch.uint8)
        made.append(gaps)
        last = some[-1:].long()
    return torch.cat(made)


def _indices_of(gaps: torch.Tensor, shape: Iterable[int]) -> torch.Tensor:
    """Undo `_gaps_of`, for a weight of this shape."""
    dtype = torch.int32 if math.prod(shape) < 2**31 else torch.int64
    last, made = torch.tensor([-1], device=HOST), list[torch.Tensor]()
    for some in torch.split(gaps, _AT_ONCE):
        is_end = some != _FURTHER
        at = torch.cumsum(some.long() + is_end, 0) + last
        made.append(at[is_end].to(dtype))
        last = torch.cat([last, at])[-1:]
    return torch.cat(made)


def _read_index(folder: Path) -> list[dict[str, Any]]:
    index = folder / INDEX
    try:
        content = json.loads(index.read_bytes())
        links: list[dict[str, Any]] = content["patches"]
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {_FORMAT}")
        sane = all(map(_is_sane, links))
        follows = all(after["since"] == before["version"] for before, after in pairwise(links))
    except OSError as error:
        raise WeightsError(index, f"cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(index, f"is no index of patches ({error}): write a patch of all weights anew") from error
    if not (sane and follows):
        raise WeightsError(index, "has patches that do not follow each other: write a patch of all weights anew")
    return links


def _is_sane(link: Mapping[str, Any]) -> bool:
    """Return whether what an index says of a file has the right types; what is not there raises."""
    is_numbered = link["file"] == f"{int(Path(link['file']).stem):08d}.safetensors"
    sizes = (size for shape in link["sparse"].values() for size in shape)
    strings = (link["version"], link["sha256"], link["since"] or "")
    return is_numbered and all(type(size) is int for size in sizes) and all(type(each) is str for each in strings)


def _chain(folder: Path, have: str | None) -> list[WeightPatch]:
    """Return the patches that lead from a version to the latest one in a folder."""
    links = _read_index(folder)
    if links and links[-1]["version"] == have:
        return []
    known = [link["since"] for link in links]
    since = have if have in known else None  # without a version, or with one that is no longer there, all weights
    if since not in known:
        there = f"patches since {links[0]['since']}" if links else "no patch"
        raise StateError("apply_patch", f"a patch since {have}, or one of all weights, in {folder}", there)
    return [_opened(folder, link) for link in links[known.index(since) :]]


def _opened(folder: Path, link: Mapping[str, Any]) -> WeightPatch:
    path, sparse = folder / link["file"], link["sparse"]
    stored = SafetensorsReader(path)
    _verify(path, link["sha256"])
    parts = {f"{name}:{part}" for name in sparse for part in ("gaps", "values")}
    if not parts <= stored.tensors.keys():
        raise WeightsError(folder / INDEX, f"does not fit {path.name}: write a patch of all weights anew")
    kinds = {name: (torch.Size(shape), stored.tensors[f"{name}:values"].dtype) for name, shape in sparse.items()}
    kinds |= {name: (torch.Size(each.shape), each.dtype) for name, each in stored.tensors.items() if name not in parts}

    def changes() -> Iterator[WeightChange]:
        with closing(stored):
            for name, (shape, dtype) in kinds.items():
                at = _indices_of(stored.read(f"{name}:gaps"), shape) if name in sparse else None
                values = stored.read(f"{name}:values" if name in sparse else name)
                yield WeightChange(name, tuple(shape), dtype, values, at)

    return WeightPatch(
        link["since"], link["version"], "a file of all weights" if link["since"] is None else "", kinds, changes()
    )


def _verify(path: Path, expected: str) -> None:
    try:
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise WeightsError(path, f"cannot be read: {error.strerror}") from error
    if actual != expected:
        raise WeightsError(path, "it is not the file that was written: the file is damaged")
