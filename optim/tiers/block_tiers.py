"""Parameters and gradients of split shards on tiers of their own, beside the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from nvme_offload.aio_native import EngineStats
from nvme_offload.offload._torch_private import local_tensor
from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.errors import ConfigError
from nvme_offload.offload.host.region import give_back_freed_memory
from nvme_offload.offload.shards.param_tier import KIND as PARAMS
from nvme_offload.offload.shards.param_tier import ParamTier, ResidentUpper, TieredUpper, UnbornUpper
from nvme_offload.offload.staging.block_cache import Block, BlockCache
from nvme_offload.offload.storage.nvme_tier import NvmeTier
from nvme_offload.offload.storage.tier_plan import Tier, Unit
from nvme_offload.optim.kernels import KernelPool
from nvme_offload.optim.layout.subgroup import Subgroup
from nvme_offload.optim.tiers.grad_tier import KIND as GRADS
from nvme_offload.optim.tiers.grad_tier import GradTier, PartitionStandIn
from nvme_offload.optim.tiers.halves import GatherGroup, Halves, split_halves
from nvme_offload.optim.tiers.units import grad_unit, param_unit, staging_unit
from nvme_offload.optim.warn import warn_user


class BlockTiers:
    """What the optimizer does with the parameter tier and the gradient tier. Without them, nothing.

    A block is one group of parameters that FSDP2 gathers together. Subgroups of the optimizer's state then lie within
    one block each, so that a step holds one block of parameters and one of gradients at a time. Within a host budget
    the tier plan may leave the parameters of a group in host memory, its gradients, or both; its number stays.

    Args:
        config: the whole section.
        kernels: for norms and checksums.

    Raises:
        SwapIOError: a path cannot be used.
    """

    def __init__(self, config: OffloadConfig, kernels: KernelPool) -> None:
        self.params: ParamTier | None = None
        self.grads: GradTier | None = None
        checksum = kernels.tile_checksums if config.aio.checksums else None
        section = config.zero_optimization.offload_param
        if "nvme" in (section.device, config.offload_gradients.device):
            give_back_freed_memory()
        try:
            if section.device == "nvme":
                self.params = ParamTier(section, NvmeTier(config, paths=section.nvme_path), checksum)
            if config.offload_gradients.device == "nvme":
                tier = NvmeTier(config, paths=config.offload_gradients.nvme_path)
                self.grads = GradTier(config.offload_gradients, tier, kernels.tile_sq_sums, checksum)
        except BaseException:
            self.close()
            raise
        self._config = config
        self._numbers: dict[GatherGroup, int] = {}
        self._param_places: dict[GatherGroup, list[TieredUpper]] = {}
        self._param_blocks: dict[int, Block] = {}
        self._grad_blocks: dict[int, Block] = {}
        self._placed: dict[str, list[Unit]] = {cache.kind: [] for cache, _ in self._caches()}
        """The units of blocks that have a place, by kind and by number of the block."""

    @property
    def exist(self) -> bool:
        """Whether there is a parameter tier or a gradient tier."""
        return self.params is not None or self.grads is not None

    def number_of(self, leaf: torch.Tensor) -> int:
        """The block of a parameter, wherever it lives; -1 where there is no tier for such."""
        halves = split_halves(leaf) if self.exist else None
        return self._numbers.get(halves.group, -1) if halves is not None else -1

    def admit(self, leaves: Iterable[torch.Tensor]) -> list[GatherGroup]:
        """Number the groups that these parameters belong to, frozen members included.

        Returns:
            The groups that had no number yet. They still need a place: `reserve`, or `drop`.

        Raises:
            ConfigError: there is nothing to put on the tier.
        """
        found = [halves.group for leaf in leaves if (halves := split_halves(leaf)) is not None]
        groups = [group for group in dict.fromkeys(found) if group not in self._numbers]
        late = sorted({group.name for group in found if self._numbers.get(group) in self._grad_blocks})
        if late:
            warn_user(
                f"parameters of {', '.join(late)} have their first gradient, in blocks of gradients that are laid out "
                "without them: these gradients stay in memory. Parameters that require a gradient when the optimizer "
                "is made have a place on the tier"
            )
        if self.exist and not found and not self._numbers:
            self._refuse()
        self._numbers.update({group: number for number, group in enumerate(groups, start=len(self._numbers))})
        return groups

    def units(self, groups: Sequence[GatherGroup]) -> list[Unit]:
        """What the tier plan has to place: for each tier its staging buffers, the blocks of before, and new ones.

        Args:
            groups: from `admit`, still without a place.
        """
        units = []
        for cache, _ in self._caches():
            blocks = [*self._placed[cache.kind], *(self._unit(cache, group) for group in groups)]
            units += [staging_unit(cache.kind, blocks, cache.num_buffers, cache.buffer_bytes), *blocks]
        return units

    def reserve(self, groups: Sequence[GatherGroup], tiers: Sequence[Tier]) -> None:
        """Reserve blocks for what is to be on NVMe, with all of their space promised; the rest stays where it is.

        Hand the groups to `take` when the optimizer's state has its place too; after an error, to `drop`.

        Args:
            groups: from `admit`.
            tiers: of `units` for these groups, one for each.

        Raises:
            ConfigError: a block is too large for a staging buffer.
            OutOfSpaceError: names bytes needed and free.
        """
        placed = [replace(unit, tiers=(tier,)) for unit, tier in zip(self.units(groups), tiers, strict=True)]
        self._placed = {kind: [unit for unit in placed if unit.kind == kind] for kind in self._placed}
        if self.params is not None:
            moving = self._moving(groups, PARAMS)
            places = self.params.reserve([(group.name, group.padded_shapes) for group in moving])
            for group, uppers in zip(moving, places, strict=True):
                self._param_places[group] = uppers
                self._param_blocks[self._numbers[group]] = uppers[0].block
        if self.grads is not None:
            moving = self._moving(groups, GRADS)
            blocks = self.grads.reserve([(group.name, _partitions(group)) for group in moving])
            for group, block in zip(moving, blocks, strict=True):
                self._grad_blocks[self._numbers[group]] = block

    def drop(self, groups: Sequence[GatherGroup]) -> None:
        """Undo `admit`, `reserve` and a `take` that failed, as far as they came."""
        for group in reversed(groups):
            number = self._numbers.pop(group)
            if self.grads is not None and number in self._grad_blocks:
                self.grads.drop([self._grad_blocks.pop(number)])
            if self.params is not None and number in self._param_blocks:
                self.params.cache.drop([self._param_blocks.pop(number)])
                del self._param_places[group]
        for units in self._placed.values():
            del units[len(self._numbers) :]

    def take(self, groups: Sequence[GatherGroup]) -> None:
        """Bring the upper halves to their tier, group by group, then free their memory; and gradients from now on.

        Raises:
            SwapIOError: a write failed. The upper halves are in memory as before; hand the groups to `drop`.
        """
        before = [(half, half.upper) for group in groups for half in _halves_of(group)]
        try:
            for group in groups:
                self._take_params(group)
        except BaseException:
            for half, upper in before:
                half.upper = upper
            raise
        if self.grads is not None:
            self.grads.take([self._grad_blocks[self._numbers[group]] for group in self._moving(groups, GRADS)])

    def _take_params(self, group: GatherGroup) -> None:
        halves = _halves_of(group)
        if self.params is not None and group in self._param_places:
            places = self._param_places[group]
            self.params.put(places, [half.upper for half in halves])
            for half, place in zip(halves, places, strict=True):
                half.upper = place
        for half in halves:
            if isinstance(half.upper, UnbornUpper):
                half.upper = ResidentUpper(torch.zeros(half.upper.padded_shape, dtype=torch.bfloat16))

    def begin_step(self, order: Sequence[Subgroup]) -> None:
        """A step will go through these subgroups in this order: read their blocks ahead."""
        if self.grads is not None:
            self.grads.begin_step()
        for cache, blocks in self._caches():
            cache.order.begin_step(_indices(order, blocks))

    def end_step(self, order: Sequence[Subgroup]) -> None:
        """Note that a step has gone in this order: the next one goes in the other."""
        for cache, blocks in self._caches():
            cache.order.end_step(_indices(order[::-1], blocks))

    def advance(self) -> None:
        """Start reads that have become possible: in a step that waits for something else, and after it."""
        for cache, _ in self._caches():
            cache.advance()

    @contextmanager
    def held_for_update(self, subgroup: Subgroup, grads: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Keep the parameters and gradients of a subgroup in memory while a step updates it.

        Raises:
            SwapIOError: one of them cannot be read; nothing was updated.
        """
        number = subgroup.block
        with ExitStack() as held:
            if self.grads is not None and (block := self._grad_blocks.get(number)) is not None:
                self.grads.cache.order.note_in_step(block.index)
                if not self.grads.cache.order.is_next_in_step(block.index):
                    self.grads.end_use(block)
                if any(isinstance(grads.get(run.param), PartitionStandIn) for run in subgroup.runs):
                    held.enter_context(self.grads.cache.holding(block))
            if self.params is not None and (block := self._param_blocks.get(number)) is not None:
                self.params.cache.order.note_in_step(block.index)
                held.enter_context(self.params.holding(block, change=True, in_order=True))
            yield

    @property
    def engine_stats(self) -> list[EngineStats]:
        """Counters of the tier of parameters and of that of gradients, as far as there are such."""
        return [cache.tier.stats() for cache, _ in self._caches()]

    @property
    def staging_bytes(self) -> int:
        """Host memory of the staging buffers."""
        return sum(cache.staging_bytes for cache, _ in self._caches())

    def stats(self) -> dict[str, Any]:
        """The fields ``param_*`` and ``grad_*`` of `OptimizerStats`."""
        fields: dict[str, Any] = {}
        for cache, _ in self._caches():
            prefix = "grad" if cache.kind == GRADS else "param"
            counted, engine = cache.stats, cache.tier.stats()
            named = {
                "uses": counted.uses,
                "reads": counted.reads,
                "reads_ahead": counted.reads_ahead,
                "reads_unused": counted.reads_unused,
                "wait_seconds": counted.wait_seconds,
                "bytes_read": engine.bytes_read,
                "bytes_written": engine.bytes_written,
                "host_bytes": sum(unit.size_bytes for unit in self._placed[cache.kind] if unit.tiers == ("host",)),
            }
            fields |= {f"{prefix}_{name}": value for name, value in named.items()}
        return fields

    def synchronize(self) -> None:
        """Wait for what is being read and written.

        Raises:
            SwapIOError: a write failed. The bytes are still in memory; calling again writes them again.
        """
        if self.grads is not None:
            self.grads.flush()
        for cache, _ in self._caches():
            cache.synchronize()

    def close(self) -> None:
        """Free the memory and delete the swap files. Idempotent."""
        for tier in (self.params, self.grads):
            if tier is not None:
                tier.close()

    def _caches(self) -> Iterator[tuple[BlockCache, dict[int, Block]]]:
        if self.params is not None:
            yield self.params.cache, self._param_blocks
        if self.grads is not None:
            yield self.grads.cache, self._grad_blocks

    def _unit(self, cache: BlockCache, group: GatherGroup) -> Unit:
        partitions, page = _partitions(group), cache.tier.alignment
        if cache.kind == PARAMS:
            return param_unit(self._config, group.name, group.padded_shapes, trainable=bool(partitions), page=page)
        sizes = [(local_tensor(leaf).numel(), dtype) for leaf, dtype in partitions]
        return grad_unit(self._config, group.name, sizes, page=page)

    def _moving(self, groups: Sequence[GatherGroup], kind: str) -> list[GatherGroup]:
        """The groups whose blocks of a kind are on NVMe."""
        return [group for group in groups if self._placed[kind][self._numbers[group]].tiers == ("nvme",)]

    def _refuse(self) -> None:
        name = "zero_optimization.offload_param" if self.params is not None else "offload_gradients"
        why = "no parameter is an fp32 shard that FSDP2 gathers in bf16; enable bf16 in initialize, or call"
        raise ConfigError([f'{name}.device = "nvme": {why} split_parameters before the optimizer is made'])


def _indices(order: Sequence[Subgroup], blocks: Mapping[int, Block]) -> list[int]:
    """Indices in their cache of the blocks that these subgroups need; those that stay in memory are left out."""
    return [blocks[subgroup.block].index for subgroup in order if subgroup.block in blocks]


def _halves_of(group: GatherGroup) -> list[Halves]:
    return [halves for leaf in group.params if (halves := split_halves(leaf)) is not None]


def _partitions(group: GatherGroup) -> list[tuple[torch.Tensor, torch.dtype]]:
    """The parameters of a group that have gradients, and what those are accumulated in."""
    return [
        (leaf, halves.accumulation_dtype)
        for leaf in group.params
        if leaf.requires_grad and (halves := split_halves(leaf)) is not None and halves.accumulation_dtype is not None
    ]
