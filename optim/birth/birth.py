"""Give a model on the meta device its values block by block, each straight onto its tier; never whole in memory."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from nvme_offload.offload._torch_private import give_shard, local_tensor
from nvme_offload.offload.progress import tracked
from nvme_offload.offload.shards.split_tensor import SplitTensor
from nvme_offload.offload.shards.stored import Padded, ResidentShard, StoredShard, UnbornShard
from nvme_offload.optim.access.split import StateParts
from nvme_offload.optim.access.values import LiveValues
from nvme_offload.optim.birth.initializers import Init, Initializers, SharedRandomNumbers, check_initializers
from nvme_offload.optim.birth.new_tensors import BirthPlan, NewTensor, units
from nvme_offload.optim.birth.weight_files import WeightSource
from nvme_offload.optim.kernels import KernelPool
from nvme_offload.optim.layout.master import TILE_NUMEL
from nvme_offload.optim.layout.subgroup import Run
from nvme_offload.optim.state.body import StateBody
from nvme_offload.optim.state.slots import SlotRecord
from nvme_offload.optim.tiers.parts import (
    OnePart,
    OwnParts,
    ShardParts,
    StorageOf,
    UnbornParts,
    gather_groups,
    install_parts,
    parts_of,
    split_shard,
)

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
    """

    def __init__(
        self,
        model: nn.Module,
        weights: str | os.PathLike[str] | None,
        init: Init | None,
        *,
        params_on_tier: bool = False,
    ) -> None:
        self._model = model
        self._params_on_tier = params_on_tier
        self._init = init
        self._plan = BirthPlan(model)
        stored = weights is not None
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
            for record in records:
                shard, padded_size = local_tensor(record.sharded_param), record.padded_sharded_param_size
                if (storage := storage_of(record)) is None:
                    padded = torch.zeros(padded_size, dtype=shard.dtype, device=record.device)
                    give_shard(record, padded.view(-1)[: shard.numel()].view(shard.shape), padded)
                    continue
                stored = self._unborn(Padded(padded_size, storage.dtype), record.device)
                parts: ShardParts = OnePart(shard, stored, owner, group, storage.accumulate)
                if record.sharded_param.requires_grad:
                    parts = UnbornParts(owner, group, stored, storage.accumulate)
                elif shard.dtype is torch.float32:
                    parts = OwnParts(shard, stored, owner, group, storage.accumulate, kernels)
                install_parts(record, SplitTensor(parts, shard), give_shard)

    def _unborn(self, form: Padded, device: torch.device) -> StoredShard:
        """Return the place of what will be stored of a parameter. Memory of zeros takes none until it is written to."""
        if self._params_on_tier:
            return UnbornShard(form, device)
        return ResidentShard(torch.zeros(form.shape, dtype=form.dtype, device=device))

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
                self._fill_from_initializers(initializers, write, blocks)
            else:
                with closing(self._source) as source:
                    self._fill_from_files(source, initializers, write, device)
            masters.release()
            body.pipeline.synchronize()
            body.blocks.synchronize()

    def _fill_from_initializers(self, initializers: Initializers, write: Write, blocks: Iterable[nn.Module]) -> None:
        born: set[NewTensor] = set()

        def place(new: NewTensor, whole: torch.Tensor) -> None:
            if new in born:  # tied: the first module that has it gave the value
                return
            born.add(new)
            local = whole.reshape(-1)
            if new.shape:
                local = whole.narrow(*_local_range(new.current)).reshape(-1)
            _fill(new.current, lambda first, last: local[first:last], write)

        for unit in tracked("initializing the model", list(units(self._model, blocks)), len):
            initializers.run(unit, place)

    def _fill_from_files(
        self, source: WeightSource, initializers: Initializers, write: Write, device: torch.device
    ) -> None:
        for new in self._plan.buffers:
            if new.persistent:
                new.set_buffer(source.read(new, 0, new.shape.numel()).view(new.shape).to(device, new.dtype))
        for module in self._model.modules():
            if any(True for _ in self._plan.unborn_buffers(module)):
                initializers.run([module], place=None)
        for new in tracked("loading the weights", self._plan.params, lambda new: new.shape.numel()):
            _fill(new.current, _stored_values(source, new), write)


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
