"""Give a model on the meta device its values block by block, each straight onto its tier; never whole in memory."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from nvme_offload.offload._torch_private import give_shard, local_tensor
from nvme_offload.offload.progress import tracked
from nvme_offload.offload.shards.in_files import ShardInFiles
from nvme_offload.offload.shards.split_tensor import SplitTensor
from nvme_offload.offload.shards.stored import Padded, ResidentShard, StoredShard, UnbornShard
from nvme_offload.offload.storage.file_ranges import FileIdentity, FileRange
from ..access.split import StateParts
from ..access.values import LiveValues
from ..kernels import KernelPool
from ..layout.master import TILE_NUMEL
from ..layout.subgroup import Run
from ..state.body import StateBody
from ..state.slots import SlotRecord
from ..tiers.parts import (
    COPIED,
    GatherGroup,
    OnePart,
    OwnParts,
    ShardParts,
    Storage,
    StorageOf,
    UnbornParts,
    gather_groups,
    install_parts,
    parts_of,
    split_shard,
)
from .adapters import adapter_units
from .in_place import BasePlaces
from .initializers import Init, Initializers, SharedRandomNumbers, check_initializers
from .new_tensors import BirthPlan, NewTensor, units
from .weight_files import WeightSource

Elements = Callable[[int, int], torch.Tensor]
"""It gives elements from one index to another of this rank's shard, flat, in any floating dtype, on the CPU."""

Write = Callable[[torch.Tensor, Elements], None]
"""It sets the master weights of a parameter, whose values it asks for in order, a few million at a time."""

_PIECE_NUMEL = 64 * TILE_NUMEL


def is_on_meta(model: nn.Module) -> bool:
    """Return whether a model has parameters, all of them without data."""
    return {param.device.type for param in model.parameters()} == {"meta"}


class Birth:
    """Takes one model from the meta device to values.

    It raises WeightsError if the files are damaged or do not fit, ValueError if nobody can give a parameter its value.

    Args:
        model: plain, all parameters on the meta device.
        weights: safetensors to load; None: the model's own initialisers.
        init: called with each module after its own initialiser.
        params_on_tier: parameters will be on the parameter tier.
        in_place: decides which frozen ones are read where they are; None: there is no such tier.
        buffer_count: staging buffers of that tier.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: str | os.PathLike[str] | None,
        init: Init | None,
        *,
        params_on_tier: bool = False,
        in_place: BasePlaces | None = None,
        buffer_count: int = 2,
    ) -> None:
        self._model = model
        self._params_on_tier = params_on_tier
        self._init = init
        stored = weights is not None
        self._plan = BirthPlan(model, from_files=stored)
        self._in_place = in_place if stored else None
        self._buffer_count = buffer_count
        self._trained: set[object] = set()
        """FSDP2 gathers these together, and some of each is trained."""
        if init is None:
            buffers = [new for new in self._plan.buffers if new.current.is_meta and not (stored and new.persistent)]
            check_initializers(model, buffers if stored else [*self._plan.params, *buffers])
        self._source = WeightSource(weights, model, self._plan) if weights is not None else None

    def give_shards(self, storage_of: StorageOf) -> None:
        """Replace FSDP2's shards on meta by shards that can take values, on the device of their mesh.

        Those in parts, as `storage_of` says, have memory for what is stored unless that is on the parameter tier.
        """
        kernels = KernelPool(torch.get_num_threads())
        for owner, group, records in gather_groups(self._model):
            storages = [storage_of(record) for record in records]
            ranges = self._ranges(group, records, storages)
            copied = GatherGroup(f"{group.name}{COPIED}", group.together) if any(ranges) else group
            for record, storage, in_files in zip(records, storages, ranges, strict=True):
                shard, padded_size = local_tensor(record.sharded_param), record.padded_sharded_param_size
                if storage is None:
                    padded = torch.zeros(padded_size, dtype=shard.dtype, device=record.device)
                    give_shard(record, padded.view(-1)[: shard.numel()].view(shard.shape), padded)
                    continue
                form, own = Padded(padded_size, storage.dtype), copied if in_files is None else group
                if in_files is not None:
                    stored: StoredShard = ShardInFiles(form, record.device, in_files)
                elif self._params_on_tier:
                    stored = UnbornShard(form, record.device)
                else:  # memory of zeros, which takes none until it is written to
                    stored = ResidentShard(torch.zeros(form.shape, dtype=form.dtype, device=record.device))
                parts: ShardParts = OnePart(shard, stored, owner, own, storage.accumulate)
                if record.sharded_param.requires_grad:
                    parts = UnbornParts(owner, own, stored, storage.accumulate)
                elif shard.dtype is torch.float32:
                    parts = OwnParts(shard, stored, owner, own, storage.accumulate, kernels)
                install_parts(record, SplitTensor(parts, shard), give_shard)
        if self._in_place is not None:
            self._in_place.say()

    def _ranges(
        self, group: GatherGroup, records: Sequence[Any], storages: Sequence[Storage | None]
    ) -> list[list[FileRange] | None]:
        """Return where the files have the shards of a group that are read there; None of others."""
        found: list[list[FileRange] | None] = [None for _ in records]
        if self._in_place is None or self._source is None:
            return found
        by_param = {id(new.current): new for new in self._plan.params}
        frozen = {}
        for number, (record, storage) in enumerate(zip(records, storages, strict=True)):
            if storage is None:
                continue
            if record.sharded_param.requires_grad:
                self._trained.add(group.together)
                continue
            new, form = by_param[id(record.sharded_param)], Padded(record.padded_sharded_param_size, storage.dtype)
            local = _local_range(new.current) if new.shape else (0, 0, 1)
            found[number] = self._in_place.ranges_of(new, self._source.pieces(new), form, local)
            frozen[number] = new, form
        kinds = len({found[number] is None for number in frozen}) + (group.together in self._trained)
        if kinds > self._buffer_count:
            for number, (new, form) in frozen.items():
                if found[number] is not None:
                    self._in_place.copy_beside(new, form)
                    found[number] = None
        return found

    @property
    def bases(self) -> dict[str, FileIdentity]:
        """The files, by name, in which frozen parameters are that are read there."""
        return self._in_place.files if self._in_place is not None else {}

    def fill(self, body: StateBody, blocks: Iterable[nn.Module], mesh: DeviceMesh) -> None:
        """Give every parameter and buffer its value. All ranks of `mesh` draw the same random numbers.

        `blocks` are in memory together while they are initialised. No state of the optimizer may be born.
        """
        for record in body.table:
            split = split_shard(record.leaf)
            if split is not None and isinstance(split.parts, UnbornParts):
                split.use_parts(StateParts(body, record.index, split.parts))
        device = torch.device(mesh.device_type)
        masters, runs = LiveValues(body), defaultdict[int, list[tuple[SlotRecord, Run]]](list)
        for slot in body.slots:
            for run in slot.subgroup.runs:
                runs[run.param].append((slot, run))

        def write(param: torch.Tensor, values: Elements) -> None:
            for slot, run in runs[body.table.of(param).index]:
                for piece in run.pieces(_PIECE_NUMEL):
                    masters.write(slot, piece, "master", values(piece.start, piece.stop).float().contiguous())

        with SharedRandomNumbers(mesh):
            initializers = Initializers(self._model, self._plan, self._init, device)
            if self._source is None:
                place = _placer(write)
                for unit in tracked("initializing the model", list(units(self._model, blocks)), len):
                    initializers.run(unit, place)
            else:
                with closing(self._source) as source:
                    self._fill_from_files(source, initializers, write, device)
            masters.release()
            body.pipeline.synchronize()
            body.blocks.synchronize()

    def _fill_from_files(
        self, source: WeightSource, initializers: Initializers, write: Write, device: torch.device
    ) -> None:
        for new in self._plan.buffers:
            if new.persistent:
                new.set_buffer(source.read(new, 0, new.shape.numel()).view(new.shape).to(device, new.dtype))
        for module in self._model.modules():
            if any(True for _ in self._plan.unborn_buffers(module)):
                initializers.run([module], place=None)
        place = _placer(write)
        for unit in adapter_units(self._model) if source.adapters else ():
            initializers.run(unit, place)
        adapters = set(source.adapters)
        unborn = [new for new in self._plan.params if new not in adapters and not _has_value(new.current)]
        for new in tracked("loading the weights", unborn, lambda new: new.shape.numel()):
            _fill(new.current, _stored_values(source, new), write)


def _placer(write: Write) -> Callable[[NewTensor, torch.Tensor], None]:
    born: set[NewTensor] = set()

    def place(new: NewTensor, whole: torch.Tensor) -> None:
        if new in born:  # tied: the first module that has it gave the value
            return
        born.add(new)
        local = whole.reshape(-1)
        if new.shape:
            local = whole.narrow(*_local_range(new.current)).reshape(-1)
        _fill(new.current, lambda first, last: local[first:last], write)

    return place


def _has_value(param: torch.Tensor) -> bool:
    parts = parts_of(param)
    return parts is not None and parts.stored.has_value


def _fill(param: torch.Tensor, values: Elements, write: Write) -> None:
    """Give a sharded parameter this rank's values, wherever it keeps them."""
    local, parts = local_tensor(param).detach(), parts_of(param)
    if parts is None or isinstance(parts, OnePart) or parts.stored.form.dtype is torch.float32:  # all in one place
        with parts.stored.held(change=True) if parts is not None else nullcontext(local.view(-1)) as flat:
            for start in range(0, local.numel(), _PIECE_NUMEL):
                stop = min(start + _PIECE_NUMEL, local.numel())
                flat[start:stop].copy_(values(start, stop))
    elif isinstance(parts, StateParts):
        write(param, values)
    else:
        parts.write(values(0, local.numel()).float().view(local.shape))


def _stored_values(source: WeightSource, new: NewTensor) -> Elements:
    dim, start, length = _local_range(new.current) if new.shape else (0, 0, 1)
    if dim == 0:
        first = start * new.shape[1:].numel()
        return lambda begin, end: source.read(new, first + begin, first + end)
    whole = source.read(new, 0, new.shape.numel()).view(new.shape)  # columns of every row: not one range of the file
    local = whole.narrow(dim, start, length).reshape(-1)
    return lambda begin, end: local[begin:end]


def _local_range(param: torch.Tensor) -> tuple[int, int, int]:
    """Return the dimension along which FSDP2 cut a parameter, where this rank's part begins, and how long it is."""
    assert isinstance(param, DTensor)
    cuts = [(number, place.dim) for number, place in enumerate(param.placements) if isinstance(place, Shard)]
    if len(cuts) > 1:
        raise ValueError(f"initialize: a parameter on meta is sharded as {param.placements}; one Shard can be born")
    if not cuts:
        return 0, 0, param.shape[0]
    number, dim = cuts[0]
    length = param.shape[dim]
    part = -(-length // param.device_mesh.size(number))
    start = min(param.device_mesh.get_local_rank(number) * part, length)
    return dim, start, min(part, length - start)
