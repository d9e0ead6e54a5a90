"""Distributed checkpoints in files: torch's format, written item by item with digests, read without running code."""

import io
import json
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Self, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from nvme_offload.offload._torch_private import METADATA_GLOBALS, storage_info, storage_place
from nvme_offload.offload.errors import CheckpointError
from .contents import StreamedSavePlanner
from .files import FileRecord, HashingStream, durable_file

METADATA = ".metadata"
_NUM_PROPERTIES = 5
"""Every torch knows so many properties of a tensor, and reads them. 2.15 adds strides, which no checkpoint here has."""
_ITEM_OVERHEAD_BYTES = 2048  # of torch.save's container, and of the metadata, per item


class RankFile(NamedTuple):
    """One rank wrote this."""

    name: str
    """The name of its file."""
    record: FileRecord
    results: list[WriteResult]
    """The place of each item, in the order of the plan."""

    def as_json(self) -> str:
        """Return the same as text, for another process."""
        results = [_result_as_json(each) for each in self.results]
        return json.dumps({"name": self.name, "record": [*self.record], "results": results})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return what another process wrote. All go this way: a pickle's bytes depend on who made its objects."""
        said = json.loads(text)
        name = str(said["name"])
        return cls(name, FileRecord(*said["record"]), [_result_from_json(name, each) for each in said["results"]])


class PlannedItems(FileSystemWriter):
    """This rank writes these items into an empty folder: all ranks agree on who writes what before the first byte."""

    plan: SavePlan
    """This rank's own."""
    metadata: Metadata
    """The checkpoint's own, but for where things are; on the coordinator."""

    def __init__(self, folder: Path, planner: StreamedSavePlanner, host: str) -> None:
        super().__init__(folder)
        self._folder = folder
        self._planner = planner
        self._host = host

    def storage_meta(self) -> StorageMeta:
        """Describe no storage: the folder is about to get another name."""
        return StorageMeta()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Keep the plan of this rank."""
        self.plan = plan
        future: Future[list[WriteResult]] = Future()
        future.set_result([])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Keep the metadata on the coordinator."""
        self.metadata = metadata

    @property
    def size_bytes(self) -> int:
        """Return about how many bytes are written."""
        return sum(_size_of(item) for item in self.plan.items)

    def keep_aside(self) -> None:
        """Have what is in memory written as it is now, whatever becomes of it: see `StreamedSavePlanner.keep_aside`."""
        self._planner.keep_aside(self.plan, self._folder)

    def write(self, advance: Callable[[int], None]) -> RankFile:
        """Write the items into one file and forget each at once: torch's writer holds on to one of every name."""
        name = f"{self.plan.storage_data.prefix}0.distcp"
        results = []
        with durable_file(self._folder / name) as stream:
            for item in self.plan.items:
                start = stream.tell()
                _save(_compact(self._planner.resolve_data(item)), stream)
                length = stream.tell() - start
                results.append(WriteResult(item.index, length, storage_info(name, start, length)))
                advance(_size_of(item))
        return RankFile(name, stream.record._replace(host=self._host), results)


def _result_as_json(result: WriteResult) -> list[Any]:
    index = result.index
    _, start, length = storage_place(result.storage_data)
    return [index.fqn, None if index.offset is None else [*index.offset], index.index, start, length]


def _result_from_json(name: str, said: Sequence[Any]) -> WriteResult:
    fqn, offset, number, start, length = said
    index = MetadataIndex(fqn, None if offset is None else torch.Size(offset), number)
    return WriteResult(index, length, storage_info(name, start, length))


def metadata_bytes(metadata: Metadata, written: Iterable[RankFile], tied: Mapping[str, str]) -> bytes:
    """Return the file `METADATA`, which says what is where. The `tied` names of an entry cost no bytes."""
    stored = {result.index: result.storage_data for of_rank in written for result in of_rank.results}
    for alias, name in tied.items():
        metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[name]
        stored |= {
            MetadataIndex(alias, index.offset, index.index): place
            for index, place in list(stored.items())
            if index.fqn == name
        }
    metadata.storage_data = stored
    metadata.storage_meta = StorageMeta()
    buffer = io.BytesIO()
    _Pickler(buffer).dump(metadata)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Writes what the oldest torch reads, too."""

    def reducer_override(self, value: Any) -> Any:
        """Say how to make an object anew."""
        if type(value) is not TensorProperties:
            return NotImplemented
        made: Any = value.__reduce_ex__(2)
        return (*made[:2], made[2][:_NUM_PROPERTIES])


class _Properties(TensorProperties):
    """Takes the properties of a tensor, whichever torch wrote them."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state[:_NUM_PROPERTIES])  # type: ignore[no-untyped-call]  # of torch


class VerifiedReader(FileSystemReader):
    """Reads what `read_metadata` found good."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        """Give the metadata as it was read and checked before."""
        return self._metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave this rank's plan as it is."""
        return plan


def read_metadata(folder: Path, files: Mapping[str, FileRecord]) -> Metadata:
    """Return what is where, by an unpickler that makes containers of data alone; CheckpointError for all else."""
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _DataUnpickler(path, file).load()
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        raise CheckpointError(path, f"cannot be read: {error!r}; load another checkpoint") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(path, "is not the metadata of a checkpoint")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(path, f"holds {name!r}, which is no tensor")
    for index, info in metadata.storage_data.items():
        name, offset, length = storage_place(info)
        if name not in files or not 0 <= offset <= offset + length <= files[name].size_bytes:
            raise CheckpointError(path, f"places {index.fqn!r} in {name!r}, outside the checkpoint")
    return metadata


class _DataUnpickler(pickle.Unpickler):
    """Refuses every name that is not on the list: unpickling can call whatever it finds."""

    def __init__(self, path: Path, file: Any) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """Return the class of that name, if it is on the list."""
        if (module, name) not in METADATA_GLOBALS:
            raise CheckpointError(self._path, f"asks for {module}.{name}, which could run code: it is not from here")
        found = super().find_class(module, name)
        return _Properties if found is TensorProperties else found


def _size_of(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    itemsize = item.tensor_data.properties.dtype.itemsize
    return int(item.tensor_data.chunk.sizes.numel()) * itemsize + _ITEM_OVERHEAD_BYTES


def _save(tensor: Any, stream: HashingStream) -> None:
    """Write as torch.save does, but without CRC-32, which takes longer than all else; the digest finds damage, too."""
    computes = get_crc32_options()
    set_crc32_options(False)
    try:
        torch.save(tensor, cast(IO[bytes], stream))
    finally:
        set_crc32_options(computes)


def _compact(tensor: Any) -> Any:
    """Return a tensor on the CPU, without the rest of the storage it is a view of: torch.save would write that too."""
    tensor = tensor.detach().cpu()
    is_compact = tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous()
    return tensor if is_compact else tensor.clone()
