"""Keep parameters and gradients of split shards on tiers of their own, beside the optimizer's state."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nvme_offload.aio_native.engine import EngineStats
from nvme_offload.offload._torch_private import local_tensor
from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.devices.device import HOST, is_device
from nvme_offload.offload.errors import ConfigError
from nvme_offload.offload.host.page_locks import PageLocks
from nvme_offload.offload.shards.in_files import layout_of
from nvme_offload.offload.shards.param_tier import KIND as PARAMS
from nvme_offload.offload.shards.param_tier import ParamTier
from nvme_offload.offload.shards.stored import ResidentShard, TieredShard, UnbornShard
from nvme_offload.offload.staging.block_cache import Block, BlockCache
from nvme_offload.offload.storage.file_ranges import FileIdentity
from nvme_offload.offload.storage.foreign_file import FileExtent
from nvme_offload.offload.storage.memory_tier import HostTier
from nvme_offload.offload.storage.nvme_tier import NvmeTier
from nvme_offload.offload.storage.tier import Tier as StorageTier
from nvme_offload.offload.storage.tier_plan import Tier, Unit
from nvme_offload.offload.warn import warn_user
from ..kernels import KernelPool
from ..layout.flat import PartitionStandIn
from ..layout.subgroup import Subgroup
from .grad_tier import KIND as GRADS
from .grad_tier import GradTier
from .parts import GatherGroup, parts_of
from .units import grad_unit, keep_first, param_unit, staging_unit


@dataclass(frozen=True)
class Admission:
    """Groups that are to get a place: for `params`, for `grads`, or both."""

    numbered: list[GatherGroup] = field(default_factory=list)
    """Groups that had no number before."""
    params: list[GatherGroup] = field(default_factory=list)
    grads: list[GatherGroup] = field(default_factory=list)

    @property
    def groups(self) -> list[GatherGroup]:
        """All of them, each once."""
        return list(dict.fromkeys([*self.params, *self.grads]))

    def groups_of(self, kind: str) -> list[GatherGroup]:
        """Return the groups that need a place for this kind."""
        return self.params if kind == PARAMS else self.grads


class BlockTiers:
    """The optimizer's side of the parameter tier and the gradient tier. Without them it does nothing.

    A block is one group of parameters that FSDP2 gathers together. Subgroups of the optimizer's state then lie within
    one block each, so that a step holds one block of parameters and one of gradients at a time. Within a host budget
    the tier plan may leave the parameters of a group in host memory, its gradients, or both; its number stays.
    """

    def __init__(self, config: OffloadConfig, kernels: KernelPool, locks: PageLocks) -> None:
        self.params: ParamTier | None = None
        self.grads: GradTier | None = None
        self.bases: Mapping[str, FileIdentity] = {}
        """See `note_bases`."""
        self._config = config
        self._kernels = kernels
        self._locks = locks
        section = config.zero_optimization.offload_param
        try:
            if section.device == "nvme":
                self.params = self._param_tier(NvmeTier(config, paths=section.nvme_path))
            if config.offload_gradients.device == "nvme":
                self.grads = self._grad_tier(NvmeTier(config, paths=config.offload_gradients.nvme_path))
        except BaseException:
            self.close()  # where the second tier cannot be made, the first one leaves no swap file
            raise
        self._numbers: dict[GatherGroup, int] = {}
        self._param_places: dict[GatherGroup, list[TieredShard]] = {}
        self._param_blocks: dict[int, Block] = {}
        self._grad_blocks: dict[int, Block] = {}
        self.beside: list[torch.Tensor] = []
        """Frozen shards in parts whose dtype the optimizer does not take: a quantized base has such."""
        self._placed: dict[str, dict[GatherGroup, Unit]] = {cache.kind: {} for cache, _ in self._caches()}
        """The units of blocks that have a place, by kind."""

    def _param_tier(self, tier: StorageTier) -> ParamTier:
        return ParamTier(self._config.zero_optimization.offload_param, tier, self._checksum, self._locks)

    def _grad_tier(self, tier: StorageTier) -> GradTier:
        section, tile_sums = self._config.offload_gradients, self._kernels.tile_sq_sums
        return GradTier(section, tier, tile_sums, self._checksum, self._locks)

    @property
    def _checksum(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        return self._kernels.tile_checksums if self._config.aio.checksums else None

    def _take_from_device(self, leaves: Iterable[torch.Tensor]) -> None:
        """Make tiers in host memory for parameters on a device, where the section asks for that."""
        if not any(is_device(local_tensor(leaf).device) for leaf in leaves):
            return
        if self.params is None and self._config.zero_optimization.offload_param.device == "cpu":
            self.params = self._param_tier(HostTier())
            self._placed[PARAMS] = {}
        if self.grads is None and self._config.offload_gradients.device == "cpu":
            self.grads = self._grad_tier(HostTier())
            self._placed[GRADS] = {}

    @property
    def exist(self) -> bool:
        """Whether there is a parameter tier or a gradient tier."""
        return self.params is not None or self.grads is not None

    def takes_turns(self, number: int) -> bool:
        """Whether updates of a block's parameters need what a gather, or backward, may be using: one thread's work."""
        # Gradients that stay in memory are in nobody's way: before the next ones come, a gather has had them used.
        return number in self._param_blocks or self._moving_grads(number) is not None

    def number_of(self, leaf: torch.Tensor) -> int:
        """Return the number of a parameter's block, wherever it lives; -1 if there is no tier for it."""
        parts = parts_of(leaf) if self.exist else None
        return self._numbers.get(parts.group, -1) if parts is not None else -1

    def leaves_device(self, leaf: torch.Tensor) -> bool:
        """Whether neither a parameter nor its gradient stays on its device during a step."""
        if parts_of(leaf) is None or self._config.zero_optimization.offload_param.device == "none":
            return False
        if self._config.offload_gradients.device == "none":
            return False
        has_tier = self.grads is not None and self.grads.takes(leaf)
        # If its block was laid out without it, its gradient stays: see `_warn_of_late`.
        return has_tier or self.number_of(leaf) not in self._grad_blocks

    def admit(self, trained: Iterable[torch.Tensor], frozen: Iterable[torch.Tensor]) -> Admission:
        """Number the groups of these parameters and return those without a place, for `reserve` or `drop`.

        `trained` get their first gradient, or will. `frozen` have had none: their groups are gathered from the
        parameter tier, too. It raises ConfigError if there is nothing to put on a tier.
        """
        trained = list(trained)
        self._take_from_device(trained)  # not in the constructor: parameters say whether there is a device
        if not self.exist:
            return Admission()
        trained = [leaf for leaf in trained if parts_of(leaf) is not None]
        self._warn_of_late(trained)
        of_trained = _groups_of(trained)
        of_frozen = _groups_of([*frozen, *self.beside]) if self.params is not None else ()
        of_all = list(dict.fromkeys([*of_trained, *of_frozen]))
        if not of_all and not self._numbers:  # the section asks for a tier on which nothing would ever be
            self._refuse()
        new = [group for group in of_all if group not in self._numbers]
        self._numbers.update({group: number for number, group in enumerate(new, start=len(self._numbers))})
        return Admission(
            new,
            [group for group in of_all if self.params is not None and group not in self._placed[PARAMS]],
            [group for group in of_trained if self.grads is not None and group not in self._placed[GRADS]],
        )

    def _warn_of_late(self, leaves: Iterable[torch.Tensor]) -> None:
        """Warn of gradients that come first now and have no room in the block of their group."""
        if self.grads is None:
            return
        grads, blocks = self.grads, self._grad_blocks
        late = [leaf for leaf in leaves if self.number_of(leaf) in blocks and not grads.takes(leaf)]
        if late:
            names = sorted({group.name for group in _groups_of(late)})
            warn_user(
                f"parameters of {', '.join(names)} have their first gradient, in blocks of gradients that are laid out "
                "without them: these gradients stay in memory. Parameters that require a gradient when the optimizer "
                "is made have a place on the tier",
                of_this_rank=True,
            )

    def units(self, admitted: Admission) -> list[Unit]:
        """Return all that the tier plan places: for each tier staging buffers, the blocks of before, and new ones."""
        units = []
        for cache, _ in self._caches():
            new = [(self._unit(cache, group), group.forms) for group in admitted.groups_of(cache.kind)]
            left = self._may_stay if cache.kind == PARAMS else 0  # `max_in_cpu` is about parameters alone
            blocks = [*self._placed[cache.kind].values(), *keep_first(left, new)]
            staging = staging_unit(self._config, cache.kind, blocks, cache.most_buffers, cache.buffer_bytes)
            units += [staging, *blocks]
        return units

    @property
    def _may_stay(self) -> int:
        """The elements of parameters that the section lets stay in memory besides those that do."""
        placed = self._placed[PARAMS].items()
        stay = [form.numel for group, unit in placed if unit.tiers == ("host",) for form in group.forms]
        return (self._config.zero_optimization.offload_param.max_in_cpu or 0) - sum(stay)

    def reserve(self, admitted: Admission, tiers: Sequence[Tier]) -> None:
        """Reserve blocks for what is to be on NVMe, with all of their space promised; the rest stays where it is.

        `tiers` are those of `units`, in order. Call `take` once the optimizer's state has its place; after an error,
        `drop`. It raises ConfigError where FSDP2 gathers more blocks together than there may be staging buffers,
        OutOfSpaceError with the bytes needed and free.
        """
        # With one tier alone, so that later plans leave it there.
        placed = [replace(unit, tiers=(tier,)) for unit, tier in zip(self.units(admitted), tiers, strict=True)]
        for kind, before in self._placed.items():  # before any block is made: `_divided` goes by it
            units = [unit for unit in placed if unit.kind == kind]
            self._placed[kind] = dict(zip([*before, *admitted.groups_of(kind)], units, strict=True))
        if self.params is not None:
            device = next((group.device for group in admitted.params), HOST)
            for groups, in_memory in self._divided(admitted, PARAMS):
                forms, together = [(group.name, group.forms) for group in groups], [group.together for group in groups]
                in_files = {} if in_memory else self._extents_in_files(groups)
                placed_in = self.params.reserve(
                    forms, device, in_memory=in_memory, together=together, in_files=in_files
                )
                for group, places in zip(groups, placed_in, strict=True):
                    self._param_places[group] = places
                    self._param_blocks[self._numbers[group]] = places[0].block
        if self.grads is not None:
            for groups, in_memory in self._divided(admitted, GRADS):
                blocks = self.grads.reserve([(group.name, group.partitions) for group in groups], in_memory=in_memory)
                self._grad_blocks.update(zip((self._numbers[group] for group in groups), blocks, strict=True))

    def _extents_in_files(self, groups: Sequence[GatherGroup]) -> dict[int, FileExtent]:
        """Return the extents of those groups, by number, whose bytes others wrote."""
        found = {}
        for number, group in enumerate(groups):
            if (layout := layout_of([parts.stored for parts in group.parts])) is not None:
                tier = self.params.cache.tier if self.params is not None else None
                assert isinstance(tier, NvmeTier)  # groups that stay in memory do not come here
                found[number] = tier.extent_in_files(layout)
        return found

    def note_bases(self, files: Mapping[str, FileIdentity]) -> None:
        """Note the files, by name, in which frozen parameters are that are read there."""
        self.bases = files

    def drop(self, admitted: Admission) -> None:
        """Undo `admit`, `reserve` and a `take` that failed, as far as they came."""
        # The latest first: the index of a block is its place in the cache.
        for group in reversed(admitted.grads):
            if self.grads is not None and (block := self._grad_blocks.pop(self._numbers[group], None)) is not None:
                self.grads.drop([block])
            self._placed[GRADS].pop(group, None)
        for group in reversed(admitted.params):
            if self.params is not None and (block := self._param_blocks.pop(self._numbers[group], None)) is not None:
                self.params.drop([block])
                del self._param_places[group]
            self._placed[PARAMS].pop(group, None)
        for group in admitted.numbered:  # last: blocks were found by their numbers
            del self._numbers[group]

    def take(self, admitted: Admission) -> None:
        """Bring what is stored to its tier, group by group, then free its memory; and take gradients from now on.

        If a write fails all is in memory as before: call `drop`.
        """
        before = [(parts, parts.stored) for group in admitted.params for parts in group.parts]
        try:
            for group in admitted.params:
                self._take_params(group)
        except BaseException:
            for parts, stored in before:  # of all groups: `drop` takes the blocks of those that were written, too
                parts.store_in(stored)
            raise
        if self.grads is not None:  # last: from here on gradients come, and `drop` takes no hook back
            found = (self._grad_blocks.get(self._numbers[group]) for group in admitted.grads)
            self.grads.take([block for block in found if block is not None])

    def _take_params(self, group: GatherGroup) -> None:
        all_parts = group.parts
        if self.params is not None and group in self._param_places:
            places = self._param_places[group]
            self.params.put(places, [parts.stored for parts in all_parts])  # before a gather looks there
            for parts, place in zip(all_parts, places, strict=True):
                parts.store_in(place)
        for parts in all_parts:
            if isinstance(parts.stored, UnbornShard):  # of a model on meta, and its block stays in memory
                form = parts.stored.form
                parts.store_in(ResidentShard(torch.zeros(form.shape, dtype=form.dtype, device="cpu")))

    def begin_step(self, inside: Sequence[Subgroup], behind: Sequence[Subgroup]) -> None:
        """Read blocks ahead for a step that will go through these subgroups in this order.

        Args:
            inside: are updated before it returns.
            behind: are updated when they are gathered, which reads their parameters.
        """
        if self.grads is not None:
            due = (self._moving_grads(subgroup.block) for subgroup in behind)
            self.grads.begin_step([block for block in due if block is not None])  # `zero_grad` leaves these
        # Whoever gathers parameters of `behind` reads them: that use is learnt, and not announced.
        for cache, blocks in self._caches():
            cache.order.begin_step(_indices([*inside, *(behind if cache.kind == GRADS else ())], blocks))

    def end_step(self, inside: Sequence[Subgroup], behind: Sequence[Subgroup]) -> None:
        """Note that a step goes in this order: inside it, the next one goes in the other."""
        for cache, blocks in self._caches():  # inside see `in_direction`; behind goes as the forward does
            cache.order.end_step(_indices([*inside[::-1], *(behind if cache.kind == GRADS else ())], blocks))

    def advance(self) -> None:
        """Start reads that have become possible: in a step that waits for something else, and after it."""
        for cache, _ in self._caches():
            cache.advance()

    def keep_gathered(self, keeps: bool) -> None:
        """Keep blocks of parameters in their buffers from their gather to the next one; or keep none."""
        if self.params is not None:
            self.params.keep_latest(keeps)

    def park(self) -> None:
        """Give the memory of staging buffers back until a block is used."""
        self.keep_gathered(False)  # or the cache refuses: somebody holds a block
        for cache, _ in self._caches():
            cache.park()

    def wake(self) -> None:
        """Take it again."""
        for cache, _ in self._caches():
            cache.wake()

    def forget_gradients(self, number: int) -> None:
        """Keep no gradients of a block, which were all used."""
        if self.grads is not None and (block := self._moving_grads(number)) is not None:
            self.grads.forget(block)

    def _moving_grads(self, number: int) -> Block | None:
        """The gradients of a block, if they come and go."""
        block = self._grad_blocks.get(number)
        return block if block is not None and not block.stays else None

    def held_for_update(
        self, subgroup: Subgroup, grads: Mapping[int, torch.Tensor], *, in_order: bool, is_gathered: bool
    ) -> AbstractContextManager[object]:
        """Keep the parameters and gradients of a subgroup in memory while a step updates it.

        If a read fails nothing was updated.

        Args:
            subgroup: which.
            grads: flat, by index.
            in_order: the step goes through subgroups as `begin_step` was told; else backward has just come to this one.
            is_gathered: its parameters are being gathered, or were: they are written when another block is.
        """
        number = subgroup.block
        with ExitStack() as held:
            if self.grads is not None and (block := self._moving_grads(number)) is not None:
                if in_order:  # noted before it is held: with the hold begins the read of what comes next
                    self.grads.cache.order.note_in_step(block.index)
                    if not self.grads.cache.order.is_next_in_step(block.index):  # its last subgroup
                        self.grads.end_use(block)
                # None is there if they came late, see `_warn_of_late`, or not at all: then nothing is read.
                if any(isinstance(grads.get(run.param), PartitionStandIn) for run in subgroup.runs):
                    held.enter_context(self.grads.cache.holding(block, in_order=in_order))
            if self.params is not None and (stored := self._param_blocks.get(number)) is not None:
                if not (stored.stays or is_gathered):  # the gather has noted its use
                    self.params.cache.order.note_in_step(stored.index)
                held.enter_context(self.params.holding(stored, lambda: None, change=True, in_order=not is_gathered))
            return held.pop_all()  # what fails before this lets go of all that is held

    @property
    def engine_stats(self) -> list[EngineStats]:
        """Counters of each tier's engine."""
        return [cache.tier.stats() for cache, _ in self._caches()]

    @property
    def staging_bytes(self) -> int:
        """Host memory of the staging buffers."""
        return sum(cache.staging_bytes for cache, _ in self._caches())

    def stats(self) -> dict[str, Any]:
        """Return the fields ``param_*`` and ``grad_*`` of `OptimizerStats`."""
        fields: dict[str, Any] = {}
        for cache, _ in self._caches():
            prefix = "grad" if cache.kind == GRADS else "param"
            engine, placed = cache.tier.stats(), self._placed[cache.kind].values()
            named = {
                **vars(cache.stats),
                "bytes_read": engine.bytes_read,
                "bytes_written": engine.bytes_written,
                "host_bytes": sum(unit.size_bytes for unit in placed if unit.tiers == ("host",)),
            }
            fields |= {f"{prefix}_{name}": value for name, value in named.items()}
        return fields

    def synchronize(self) -> None:
        """Wait for what is being read and written. A write that failed is tried again by the next call."""
        if self.grads is not None:
            self.grads.flush()  # first: blocks that are open for gradients have no write to wait for
        for cache, _ in self._caches():
            cache.synchronize()
            cache.advance()  # reads that found no buffer while these were written

    def close(self) -> None:
        """Free the memory and delete the swap files. Idempotent."""
        for tier in (self.params, self.grads):
            if tier is not None:
                tier.close()

    def land_gradients(self) -> None:
        """Wait for gradients that are on their way from a device, and take their sums."""
        if self.grads is not None:
            self.grads.land()

    def _caches(self) -> Iterator[tuple[BlockCache, Mapping[int, Block]]]:
        if self.params is not None:
            yield self.params.cache, self._param_blocks
        if self.grads is not None:
            yield self.grads.cache, self._grad_blocks

    def _unit(self, cache: BlockCache, group: GatherGroup) -> Unit:
        page = cache.tier.alignment
        if cache.kind == PARAMS:
            layout = layout_of([parts.stored for parts in group.parts])
            return param_unit(
                self._config,
                group.name,
                group.forms,
                trainable=bool(group.partitions),
                page=page,
                in_files=layout.size_bytes if layout is not None else None,
            )
        sizes = [(local_tensor(leaf).numel(), dtype) for leaf, dtype in group.partitions]
        return grad_unit(self._config, group.name, sizes, page=page)

    def _divided(self, admitted: Admission, kind: str) -> list[tuple[list[GatherGroup], bool]]:
        """Return the groups whose blocks of a kind are on NVMe, then those whose are kept in memory beside a device."""
        groups = admitted.groups_of(kind)
        moving = [group for group in groups if self._placed[kind][group].tiers == ("nvme",)]
        # On the CPU what stays in memory needs no block: it is where it was.
        return [(moving, False), ([group for group in groups if group not in moving and is_device(group.device)], True)]

    def _refuse(self) -> None:
        # Of two sections one is named: the remedy is the same.
        name, device = "offload_gradients", self._config.offload_gradients.device
        if self.params is not None:
            name, device = "zero_optimization.offload_param", self._config.zero_optimization.offload_param.device
        what = "no parameter is a shard in parts, which could move; use initialize, or call split_parameters(model, "
        raise ConfigError([f'{name}.device = "{device}": {what}fp32_too=True) before the optimizer is made'])


def _indices(order: Sequence[Subgroup], blocks: Mapping[int, Block]) -> list[int]:
    """Return the indices, in their cache, of the blocks of these subgroups; blocks that stay in memory have none."""
    found = (blocks.get(subgroup.block) for subgroup in order)
    return [block.index for block in found if block is not None and not block.stays]


def _groups_of(leaves: Iterable[torch.Tensor]) -> list[GatherGroup]:
    """Return the groups that these parameters belong to, each once."""
    # In the order of the parameters, by which blocks are numbered.
    return list(dict.fromkeys(parts.group for leaf in leaves if (parts := parts_of(leaf)) is not None))
