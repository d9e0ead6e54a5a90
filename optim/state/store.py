"""Where the state of an optimizer's parameters lives: placement, tiers, buffers, and their end."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.errors import ClosedError, ForkError
from nvme_offload.offload.host.available_memory import ranks_on_host
from nvme_offload.offload.host.buffer_pool import BufferPool
from nvme_offload.offload.shards.param_tier import TieredUpper
from nvme_offload.offload.storage.nvme_tier import NvmeTier
from nvme_offload.offload.storage.tier_plan import TierPlan, Unit, plan_tiers
from nvme_offload.optim.kernels import KernelPool
from nvme_offload.optim.layout.flat import Layout, storage_of
from nvme_offload.optim.layout.master import FORM_OF_DTYPE, MasterForm, num_blocks, state_itemsize
from nvme_offload.optim.layout.subgroup import ParamToPlace, Subgroup, plan_subgroups
from nvme_offload.optim.rules.rule import UpdateRule
from nvme_offload.optim.state.device_mirror import DeviceMirror
from nvme_offload.optim.state.masters import ParamTable, give_birth
from nvme_offload.optim.state.pipeline import StepPipeline
from nvme_offload.optim.state.placement import StatePlacement
from nvme_offload.optim.state.progress import UnfinishedStep
from nvme_offload.optim.state.slots import SlotRecord
from nvme_offload.optim.stats import Meter
from nvme_offload.optim.tiers.block_tiers import BlockTiers
from nvme_offload.optim.tiers.gatherers import remember_store
from nvme_offload.optim.tiers.halves import (
    GatherGroup,
    ResidentHalves,
    TierHalves,
    UnbornHalves,
    split_halves,
    split_shard,
)


class StateStore:
    """Subgroups of all parameters on the tier that the configuration names.

    Args:
        config: the whole section.
        meter: shared with the optimizer.
        rule: the optimizer's.
        owner: the optimizer's name, for messages.

    Raises:
        SwapIOError: a path cannot be used.
        ConfigError: a budget does not hold the smallest staging buffers.
    """

    def __init__(self, config: OffloadConfig, meter: Meter, rule: UpdateRule, owner: str) -> None:
        self.config = config
        self.owner = owner
        self._rules: list[UpdateRule] = []
        """Of each parameter, by index."""
        self.table = ParamTable()
        self.kernels = KernelPool(_num_kernel_threads())
        self.slots: list[SlotRecord] = []
        self.steps: list[int] = []
        """Updates that each parameter has had, by index."""
        self.indices: dict[torch.Tensor, int] = {}
        self.unfinished: UnfinishedStep | None = None
        """Set while a step or a load is under way, and left behind by one that stopped early."""
        self.tier: NvmeTier | None = None
        self.pool: BufferPool | None = None
        self.mirror: DeviceMirror | None = None
        self._groups: list[int] = []
        self._placed: set[int] = set()
        self._untidy = False
        self._owner_pid = os.getpid()
        self._closed = False
        self._placement = StatePlacement(config, rule)
        self.plan = plan_tiers([], {})
        """What lives where."""
        if config.zero_optimization.offload_optimizer.device == "nvme":
            self.pool = BufferPool(self._num_buffers, 1)
            self.tier = NvmeTier(config)  # with a finalizer of its own, should anything after it fail
        checksum = self.kernels.block_checksums if config.aio.checksums else None
        table, kernels = self.table, self.kernels  # not `self`, which would live until the garbage collector runs
        self.pipeline = StepPipeline(
            lambda slot, memory: give_birth(slot, memory, table, kernels), meter, self.tier, self.pool, checksum
        )
        try:
            self.blocks = BlockTiers(config, self.kernels)
        except BaseException:
            if self.tier is not None:
                self.tier.close()
            raise

    def add_params(self, group: int, rule: UpdateRule, params: Sequence[torch.Tensor], names: Sequence[str]) -> range:
        """Take parameters on, without giving them a place yet; returns their indices.

        Raises:
            ValueError: another optimizer has half of one of them; none was taken.
        """
        for leaf, name in zip(params, names, strict=True):
            self._check_not_elsewhere(leaf, name)
        first = len(self.table.params)
        for leaf, name in zip(params, names, strict=True):
            param = storage_of(leaf)
            is_master = FORM_OF_DTYPE[param.dtype] is MasterForm.ITSELF
            blocks = num_blocks(param.numel())
            index = self.indices[leaf] = len(self.table.params)
            split = split_shard(leaf)
            if split is not None and isinstance(split.halves, ResidentHalves):
                self.table.first_lower[index] = split.halves.lower
                self._note_upper(index, split.halves)
            self.table.leaves.append(leaf)
            self.table.params.append(param)
            self.table.names.append(name)
            self.table.layouts.append(Layout.of(leaf))
            self.table.checksums.append(None if is_master else torch.zeros(blocks, dtype=torch.int64))
            self.steps.append(0)
            self._rules.append(rule)
            self._groups.append(group)
        remember_store(self)
        return range(first, len(self.table.params))

    def drop_params(self, first: int) -> None:
        """Forget the parameters from index `first` on, which have no place yet, as far as they were taken on."""
        table = self.table
        for leaf in [leaf for leaf, index in self.indices.items() if index >= first]:
            del self.indices[leaf]
        for by_index in (table.first_lower, table.uppers):
            for index in [index for index in by_index if index >= first]:
                del by_index[index]
        for column in (table.leaves, table.params, table.names, table.checksums, table.layouts):
            del column[first:]
        del self.steps[first:], self._rules[first:], self._groups[first:]

    def members(self, groups: Iterable[Mapping[str, Any]]) -> list[int]:
        """Indices of the parameters that are in the optimizer's groups now; the state of others rests.

        Raises:
            ValueError: somebody put others in their place, which would never be updated, or one into two places.
        """
        places: dict[int, str] = {}
        for number, group in enumerate(groups):
            for place, param in enumerate(group["params"]):
                where = f"parameter {place} of group {number}"
                index = self.indices.get(param)
                if index is None:
                    raise ValueError(
                        f"{where} (shape {tuple(param.shape)}) is not one that this "
                        "optimizer was made with. Whoever shards a model later puts other parameters in their place, "
                        "as accelerate's FSDP does: shard it first (optim.initialize, or fully_shard), then make the "
                        "optimizer. New parameters come with add_param_group"
                    )
                if index in places:
                    raise ValueError(
                        f"{places[index]} and {where} are the same parameter ({self.table.names[index]}): which "
                        "hyperparameters it has would be chance; remove it from one of the two"
                    )
                places[index] = where
        return sorted(places)

    def _check_not_elsewhere(self, leaf: torch.Tensor, name: str) -> None:
        """Two optimizers of one split parameter would each change the upper half under the other's lower one."""
        halves = split_halves(leaf)
        if not isinstance(halves, TierHalves) or halves.store is self:
            return
        if halves.store._closed:
            raise ValueError(
                f"{name} belonged to an {halves.store.owner} that is closed, and the lower half of its weights went "
                "with that: load a checkpoint into a new model, and make the optimizer for that one"
            )
        raise ValueError(
            f"{name} belongs to another {halves.store.owner}, which holds the lower half of its weights: go on "
            "with that one (load_state_dict gives it another state), or load model.state_dict() into a new model"
        )

    @property
    def has_split_params(self) -> bool:
        """Whether the state has the lower half of any parameter."""
        return any(split_shard(leaf) is not None for leaf in self.table.leaves)

    def rule_of(self, index: int) -> UpdateRule:
        """The rule of a parameter."""
        return self._rules[index]

    def is_placed(self, index: int) -> bool:
        """Whether the parameter has a place (it has had state, or was trainable when it came)."""
        return index in self._placed

    def place_trainable(self, indices: Iterable[int] | None = None) -> None:
        """`ensure_placed` of those (by default of all) that require a gradient now; a frozen one waits for its first.

        Raises:
            OutOfSpaceError, ConfigError, SwapIOError: see `ensure_placed`.
        """
        leaves = self.table.leaves
        wanted = range(len(leaves)) if indices is None else indices
        self.ensure_placed(index for index in wanted if leaves[index].requires_grad)

    def ensure_placed(self, indices: Iterable[int]) -> None:
        """Give parameters that have no place yet one, with all of its space promised.

        Raises:
            OutOfSpaceError: names bytes needed and free.
            ConfigError: the host budget does not hold what must be in host memory.
            SwapIOError: what is in host memory could not be written to its tier.
            Nothing was placed then.
        """
        self._tidy_up()
        missing = [index for index in indices if index not in self._placed]
        groups = self.blocks.admit([self.table.leaves[index] for index in missing])
        records: list[SlotRecord] = []
        try:
            plan = self._place(missing, groups, records)
            self._write_lower_halves(records)
            self.blocks.take(groups)
        except BaseException:
            self._give_up(records)
            self.blocks.drop(groups)
            raise
        placed = self._placed.union(missing)
        # No call in between: a signal handler sees all of it or nothing.
        self.slots += records
        self.plan = plan
        self._placed = placed
        self._untidy = True
        self._tidy_up()

    def _tidy_up(self) -> None:
        """Let go of what `ensure_placed` brought elsewhere. Cut short, it is done again by the next one."""
        if not self._untidy:
            return
        self._let_go_of_lower_halves()
        for index, leaf in enumerate(self.table.leaves):
            if (halves := split_halves(leaf)) is not None:
                self._note_upper(index, halves)
        self.table.params[:] = [storage_of(leaf) for leaf in self.table.leaves]  # lets go of what was resident
        self._untidy = False

    def _place(self, missing: Sequence[int], groups: Sequence[GatherGroup], records: list[SlotRecord]) -> TierPlan:
        """Promise places and fill in `records`, one for each new subgroup; returns the plan with them in it."""
        blocks = self.blocks.units(groups)
        subgroups = self._cut(missing, blocks)
        if not subgroups and not groups:
            return self.plan
        plan = self._plan(subgroups, blocks)
        self.blocks.reserve(groups, plan.tiers[: len(blocks)])
        records += [SlotRecord(subgroup) for subgroup in subgroups]
        tiers = plan.tiers[len(plan.tiers) - len(subgroups) :]
        moving = [record for record, tier in zip(records, tiers, strict=True) if tier == "nvme"]
        if moving:
            self.pipeline.synchronize()  # a write that failed says so before anything is promised
            self._fit_pool(max(record.subgroup.size_bytes for record in moving))
        if subgroups:
            self._fit_mirror(subgroups)
        # Last, because it is what would have to be given back.
        if self.tier is not None:
            extents = self.tier.reserve([record.subgroup.size_bytes for record in moving])
            for record, extent in zip(moving, extents, strict=True):
                record.extent = extent
        return plan

    def _give_up(self, records: Sequence[SlotRecord]) -> None:
        """Undo `_place` and `_write_lower_halves`, as far as they came."""
        self.pipeline.forget(records)
        for record in records:
            if record.extent is not None:
                assert self.tier is not None
                self.tier.free(record.extent)

    def check_usable(self) -> None:
        """Raise ClosedError after ``close``, ForkError in another process."""
        if self._closed:
            raise ClosedError(self.owner)
        if (pid := os.getpid()) != self._owner_pid:
            raise ForkError(self.owner, self._owner_pid, pid)

    def check_whole(self) -> None:
        """Raise unless all state is of the same step: see `UnfinishedStep`."""
        self.check_usable()
        if self.unfinished is not None:
            raise self.unfinished.refusal("whole state")

    @property
    def staging_bytes(self) -> int:
        """Host memory of all staging buffers and, for CUDA parameters, of the mirrors beside them."""
        pool = self.pool.size_bytes if self.pool else 0
        return pool + (self.mirror.size_bytes if self.mirror else 0) + self.blocks.staging_bytes

    @property
    def host_state_bytes(self) -> int:
        """State that lives in host memory for good."""
        return sum(slot.subgroup.size_bytes for slot in self.slots if slot.extent is None)

    def close(self) -> None:
        """Wait for what is under way, free the memory, delete the swap files. Idempotent; no-op in a forked child."""
        if self._closed or os.getpid() != self._owner_pid:
            return
        self._closed = True
        if self.mirror is not None:
            self.mirror.close()
        self.blocks.close()
        if self.tier is not None:
            self.tier.close()
        if self.pool is not None:
            self.pool.close()
        self.pipeline.close()
        self.kernels.end_workers()
        # The memory goes with its last user, and this object may be kept.
        self.pool, self.mirror = None, None
        self.slots.clear()

    @property
    def _num_buffers(self) -> int:
        return self.config.zero_optimization.offload_optimizer.buffer_count

    def _write_lower_halves(self, records: Sequence[SlotRecord]) -> None:
        """Bring the lower halves of split shards to their tier, subgroup by subgroup. They stay in memory as well."""
        moving = self._resident_lower_halves(records)
        if not moving:
            return  # in particular where nothing is new: a step does not wait for the writes of the one before
        order = [record for record in records if any(run.param in moving for run in record.subgroup.runs)]
        for position, record in enumerate(order):
            self.pipeline.acquire(order, position)
            self.pipeline.will_change(record)
            self.pipeline.release(record)
        self.pipeline.synchronize()

    def _let_go_of_lower_halves(self) -> None:
        """From now on those on the tier count."""
        for index in self._placed & self.table.first_lower.keys():
            split = split_shard(self.table.leaves[index])
            assert split is not None
            if isinstance(split.halves, ResidentHalves):  # not where this was cut short before
                split.use_halves(TierHalves(self, index, split.halves))
            del self.table.first_lower[index]

    def _resident_lower_halves(self, records: Sequence[SlotRecord]) -> set[int]:
        """Indices of the parameters in these subgroups whose lower halves are still in memory."""
        return {run.param for record in records for run in record.subgroup.runs} & self.table.first_lower.keys()

    def _note_upper(self, index: int, halves: ResidentHalves | UnbornHalves | TierHalves) -> None:
        if isinstance(halves.upper, TieredUpper):
            self.table.uppers[index] = halves.upper

    def _cut(self, indices: Sequence[int], blocks: Sequence[Unit]) -> list[Subgroup]:
        params, number_of = self.table.params, self.blocks.number_of
        places = [
            ParamToPlace(
                i,
                self._groups[i],
                params[i].numel(),
                params[i].dtype,
                self.rule_of(i),
                number_of(self.table.leaves[i]),
            )
            for i in indices
        ]
        taken = self.host_state_bytes + sum(unit.size_bytes for unit in blocks if unit.tiers == ("host",))
        max_bytes = self._placement.max_subgroup_bytes(taken, bool(self._cuda_devices))
        max_numel = self.config.zero_optimization.sub_group_size
        for place in places:
            needed = place.numel * state_itemsize(FORM_OF_DTYPE[place.dtype], place.rule.states)
            self._placement.check_whole(place.rule, needed, self.table.names[place.index])
        return plan_subgroups(places, max_bytes, max_numel, first=len(self.slots))

    def _plan(self, subgroups: Sequence[Subgroup], blocks: Sequence[Unit]) -> TierPlan:
        """Place new subgroups and blocks beside the present ones."""
        staging, page = 0, mmap.PAGESIZE
        if self.pool is not None and self.tier is not None:
            page = self.tier.alignment
            largest = max((subgroup.size_bytes for subgroup in subgroups), default=0)
            staging = self._num_buffers * max(self.pool.buffer_bytes, -(-largest // page) * page)
        if self._cuda_devices:
            staging += DeviceMirror.BYTES_PER_ELEMENT * self._largest_numel(subgroups)
        return self._placement.plan(self.slots, subgroups, staging, page, blocks)

    @property
    def _cuda_devices(self) -> set[torch.device]:
        return {param.device for param in self.table.params if param.device.type == "cuda"}

    def _largest_numel(self, subgroups: Sequence[Subgroup]) -> int:
        return max(slot.padded_numel for slot in [*subgroups, *(record.subgroup for record in self.slots)])

    def _fit_pool(self, buffer_bytes: int) -> None:
        """Buffers are as large as the largest subgroup and no larger: a small model takes little memory."""
        assert self.tier is not None
        if self.pool is not None and buffer_bytes <= self.pool.buffer_bytes:
            return
        larger = BufferPool(self._num_buffers, buffer_bytes)
        self.pipeline.drop_copies()
        self.tier.register([larger])
        if self.pool is not None:
            self.pool.close()
        self.pool = self.pipeline.pool = larger

    def _fit_mirror(self, subgroups: Sequence[Subgroup]) -> None:
        devices = self._cuda_devices
        if not devices:
            return
        if len(devices) > 1:
            raise ValueError(f"parameters are on several devices ({', '.join(map(str, devices))}): use one per process")
        pinned = self.config.zero_optimization.offload_optimizer.pin_memory is not False
        larger = DeviceMirror(devices.pop(), self._largest_numel(subgroups), pinned=pinned)
        if self.mirror is not None:
            self.mirror.close()
        self.mirror = larger


def _num_kernel_threads() -> int:
    """As many as torch uses; under torchrun, which sets that to 1, this rank's share of the CPUs."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return max(torch.get_num_threads(), len(os.sched_getaffinity(0)) // ranks_on_host())
    return torch.get_num_threads()
