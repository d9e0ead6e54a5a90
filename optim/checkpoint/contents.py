"""A checkpoint consists of items, and two planners move it item by item."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from nvme_offload.offload._torch_private import local_tensor
from nvme_offload.offload.weights.writer import named_tensors
from ..access.values import Values
from ..layout.geometry import Chunk, Part
from ..rules.rule import UpdateRule
from ..state.body import StateBody
from ..state.table import step_entry
from .places import MAX_CHUNK_NUMEL, InMemory, Place, Stored, Visitor, copied_aside

MODEL, OPTIMIZER = "model", "optim.state"
"""The names of a model's tensors, and of an optimizer's, begin with these."""


class Kind(NamedTuple):
    """A kind says what a tensor of the checkpoint is as a whole."""

    size: torch.Size
    dtype: torch.dtype


def _is_converted(name: str, own: Kind, saved: Kind) -> bool:
    """Whether a tensor of another dtype is taken by value: a state, and a count of steps, which fp32 may round."""
    dtypes = {torch.float32, torch.bfloat16 if own.size else torch.float64}
    return name.startswith(OPTIMIZER) and own.size == saved.size and {own.dtype, saved.dtype} <= dtypes


class Item(NamedTuple):
    """One chunk of one tensor, and where its values are."""

    name: str
    chunk: Chunk
    place: Place


@dataclass(frozen=True)
class Wanted:
    """A load takes this of a checkpoint beside weights and buffers; all else stays as it is."""

    strict: bool = True
    """Whether model and checkpoint must have the same tensors. If not, those are taken that both have."""
    optimizer: bool = True
    """State of the optimizer, its hyperparameters and the loss scale."""
    lr_scheduler: bool = True
    """State of the schedule."""
    counters: bool = True
    """Steps taken."""


@dataclass
class Contents:
    """Everything that is saved and loaded: the items are those of this rank, the names those of all."""

    kinds: dict[str, Kind] = field(default_factory=dict)
    """The kind of every tensor, on whatever ranks its parts are."""
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The place of each name in the nested dict that torch's own tools make of a checkpoint."""
    tied: dict[str, str] = field(default_factory=dict)
    """Names that are other names of a parameter or buffer."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """Each rank has these as a whole, perhaps computed from its own data; the first rank's are saved."""
    items: list[Item] = field(default_factory=list)
    """The items of this rank, in the order in which the tiers are visited best."""
    steps: dict[int, torch.Tensor] = field(default_factory=dict)
    """Step counts of the optimizer's parameters, fp64 scalars, by index of the parameter."""
    names: dict[int, str] = field(default_factory=dict)
    """Qualified names of the optimizer's parameters, by index."""
    in_files: dict[str, Any] = field(default_factory=dict)
    """The names of parameters that are left out, and the identities of the files that have them; see `bases`."""
    group_names: list[list[str]] = field(default_factory=list)
    """Qualified names of the parameters of each parameter group."""

    def add(self, kind: Kind, *path: str) -> str:
        """Take a tensor on; returns its name."""
        name = ".".join(path)
        self.kinds[name], self.paths[name] = kind, path
        return name

    def keep(self, names: Iterable[str]) -> None:
        """Leave out all tensors but these."""
        kept = set(names)
        self.kinds = {name: kind for name, kind in self.kinds.items() if name in kept}
        self.tied = {alias: name for alias, name in self.tied.items() if name in kept}
        self.items = [item for item in self.items if item.name in kept]

    def narrow(self, wanted: Wanted, metadata: Metadata) -> Metadata:
        """Leave out of both, this and a checkpoint, what a load does not take of it; return what is left of that."""
        saved = metadata.state_dict_metadata
        if not wanted.optimizer:
            self.steps = {}
            self.keep(name for name in self.kinds if name.startswith(f"{MODEL}."))
            saved = {name: entry for name, entry in saved.items() if name.startswith(f"{MODEL}.")}
        if not wanted.strict:
            self.keep(self.kinds.keys() & saved.keys())
            saved = {name: saved[name] for name in saved if name in self.kinds or name in self.tied}
        return replace(metadata, state_dict_metadata=saved)

    def add_param(self, name: str, shape: torch.Size, steps: int, rule: UpdateRule) -> torch.Tensor:
        """Take on a parameter of this whole shape that has state, and return its count of steps, an fp64 scalar.

        `tier_items` says where parameter and state lie.
        """
        self.add(Kind(shape, torch.float32), MODEL, name)
        entry = step_entry(steps)
        step_name = self.add(Kind(entry.shape, entry.dtype), OPTIMIZER, name, "step")
        count = entry.double()
        self.items += plain_items(step_name, count)
        for state in rule.states:
            self.add(Kind(shape, state.shown_dtype), OPTIMIZER, name, state.name)
        return count


def contents_of(model: nn.Module, body: StateBody, values: Values) -> Contents:
    """Return what a checkpoint of this model and optimizer has; ValueError where the two do not fit together."""
    tensors, tied = named_tensors(model)
    contents = Contents(tied={f"{MODEL}.{alias}": f"{MODEL}.{name}" for alias, name in tied.items()})
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"the model's state dict holds {name!r}, a {type(value).__name__}; only tensors are saved")
    for name, value in tensors.items():
        record = body.table.find(value)
        if record is not None and record.is_placed:
            contents.names[record.index] = name
            contents.steps[record.index] = contents.add_param(name, value.shape, record.steps, record.rule)
        else:  # a buffer, or frozen from the start: it has no state
            full_name = contents.add(Kind(value.shape, value.dtype), MODEL, name)
            contents.items.extend(plain_items(full_name, value))
            if not isinstance(value, DTensor):
                contents.buffers[full_name] = value
    for record in body.table:
        if record.is_placed and record.index not in contents.names:
            raise ValueError(f"{record.name} of the optimizer is not in the model's state dict")
    parts = {index: Part.of(body.table[index].leaf) for index in contents.names}
    contents.items.extend(tier_items(values, parts, contents.names))
    return contents


def plain_items(name: str, tensor: torch.Tensor) -> Iterator[Item]:
    """Yield the items of a tensor that is not in the optimizer's state."""
    local = local_tensor(tensor.detach())
    part, place = replace(Part.of(tensor), order=tuple(range(local.ndim))), InMemory(local)
    for start in range(0, local.numel(), MAX_CHUNK_NUMEL):
        for chunk in part.chunks(start, min(start + MAX_CHUNK_NUMEL, local.numel())):
            yield Item(name, chunk, place)


def tier_items(
    values: Values, parts: Mapping[int, Part], names: Mapping[int, str], weights: str = "master"
) -> Iterator[Item]:
    """Yield the items of parameters that have state, and of that, by subgroup; `weights` is the parameters' entry."""
    for slot in values.slots:
        entries = [weights, *(state.name for state in slot.subgroup.rule.states)]
        for piece in chain.from_iterable(run.pieces(MAX_CHUNK_NUMEL) for run in slot.subgroup.runs):
            param = names[piece.param]
            for entry in entries:
                name = f"{MODEL}.{param}" if entry == weights else f"{OPTIMIZER}.{param}.{entry}"
                place = Stored(values, slot, piece, entry)
                for chunk in parts[piece.param].chunks(piece.start, piece.stop):
                    yield Item(name, chunk, place)


class StreamedSavePlanner(DefaultSavePlanner):
    """Reads each item when it is its turn to be written."""

    def __init__(self, contents: Contents) -> None:
        super().__init__()
        self._contents = contents
        self._items = {MetadataIndex(item.name, item.chunk.saved.offsets): item for item in contents.items}
        self._visitor = Visitor()

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Accept the state dict without a look at it: the contents were given."""

    def create_local_plan(self) -> SavePlan:
        """Plan the items of this rank. Copies on other ranks are left out in the global plan."""
        contents = self._contents
        aliases = {alias: tuple(alias.split(".", 1)) for alias in contents.tied}
        return SavePlan(
            [_write_item(item, contents.kinds[item.name]) for item in contents.items],
            planner_data={**contents.paths, **aliases},
        )

    def keep_aside(self, plan: SavePlan, folder: Path) -> None:
        """Keep what `plan` writes from memory as it is now, in a file without a name; OSError if there is no room."""
        wanted = [self._items[write.index] for write in plan.items]
        places = {id(item.place): item.place for item in wanted if isinstance(item.place, InMemory)}
        copies = dict(zip(places, copied_aside([*places.values()], folder), strict=True))
        for index, item in self._items.items():
            if (copy := copies.get(id(item.place))) is not None:
                self._items[index] = item._replace(place=copy)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Read the values of one item."""
        item = self._items[write_item.index]
        values = item.chunk.view(self._visitor.read(item.place), item.place.start)
        return values.to(self._contents.kinds[item.name].dtype)  # what is kept in less is read as fp32


def _write_item(item: Item, kind: Kind) -> WriteItem:
    data = TensorWriteData(item.chunk.saved, TensorProperties(dtype=kind.dtype), kind.size)
    return WriteItem(MetadataIndex(item.name, item.chunk.saved.offsets), WriteItemType.SHARD, tensor_data=data)


class StreamedLoadPlanner(LoadPlanner):
    """Writes each item to where it belongs when it has been read; `advance` is told of its elements then."""

    def __init__(self, contents: Contents, advance: Callable[[int], None]) -> None:
        self._contents = contents
        self._items = {MetadataIndex(item.name, item.chunk.saved.offsets): item for item in contents.items}
        self._visitor = Visitor()
        self._metadata: Metadata | None = None
        self._advance = advance

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take note of what the checkpoint holds."""
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Plan what to read for every item of this rank, in their order."""
        assert self._metadata is not None
        wanted: dict[str, list[ChunkStorageMetadata]] = {}
        for item in self._contents.items:
            wanted.setdefault(item.name, []).append(item.chunk.saved)
        order = {index: position for position, index in enumerate(self._items)}
        reads: list[ReadItem] = []
        for name, chunks in wanted.items():
            entry = self._metadata.state_dict_metadata[name]
            assert isinstance(entry, TensorStorageMetadata)
            reads += create_read_items_for_chunk_list(name, entry, chunks)
        reads.sort(key=lambda read: (order[read.dest_index], tuple(read.dest_offsets)))
        return LoadPlan(reads)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are: every rank reads what it needs."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Leave this rank's plan as it was made."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Refuse: a checkpoint holds tensors alone, so that this is never called."""
        raise ValueError(f"{read_item.dest_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Say where to copy what is read."""
        item = self._items[read_item.dest_index]
        target = item.chunk.view(self._visitor.open(item.place), item.place.start)
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Say how far it is; the values are written when the next place is visited."""
        self._advance(tensor.numel())

    def finish(self) -> None:
        """Write the values of the last place that was visited."""
        self._visitor.leave()


def check_fits(contents: Contents, metadata: Metadata) -> None:
    """Compare names, shapes and dtypes; ValueError names what is missing, what is too much, and what differs."""
    saved = {
        name: Kind(entry.size, entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    own = {name: kind for name, kind in contents.kinds.items() if kind.size.numel()}
    own |= {alias: contents.kinds[name] for alias, name in contents.tied.items() if name in own}
    problems = [
        *_listed("not in the checkpoint", own.keys() - saved.keys()),
        *_listed("not in the model and its optimizer", saved.keys() - own.keys()),
        *(
            f"{name} is {_said(kind)}, in the checkpoint {_said(saved[name])}"
            for name, kind in own.items()
            if name in saved and saved[name] != kind and not _is_converted(name, kind, saved[name])
        ),
    ]
    places = {(index.fqn, index.offset): place for index, place in (metadata.storage_data or {}).items()}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel() or any(
            (name, chunk.offsets) not in places for chunk in entry.chunks
        ):
            problems.append(f"{name} is not whole in the checkpoint")
    for alias, name in contents.tied.items():
        if alias in saved and name in saved and not _same_bytes(metadata, places, alias, name):
            problems.append(f"{alias} and {name} are one parameter here, and two in the checkpoint")
    if problems:
        raise ValueError("the checkpoint does not fit; nothing was changed: " + "; ".join(problems[:20]))


def _same_bytes(metadata: Metadata, places: Mapping[Any, Any], alias: str, name: str) -> bool:
    entry = metadata.state_dict_metadata[alias]
    assert isinstance(entry, TensorStorageMetadata)
    return all(places.get((alias, chunk.offsets)) == places.get((name, chunk.offsets)) for chunk in entry.chunks)


def _listed(what: str, names: Iterable[str]) -> list[str]:
    found = sorted(names)
    more = f" and {len(found) - 10} more" if len(found) > 10 else ""
    return [f"{what}: {', '.join(found[:10])}{more}"] if found else []


def _said(kind: Kind) -> str:
    return f"{kind.dtype} of shape {tuple(kind.size)}"
