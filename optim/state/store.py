"""Place the state of an optimizer's parameters on tiers and in buffers, and end its life."""

import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.devices.device import is_device
from nvme_offload.offload.errors import ConfigError, ConfigWarning
from nvme_offload.offload.host.available_memory import auto_host_budget, num_processors_of_rank
from nvme_offload.offload.host.away import Away
from nvme_offload.offload.host.buffer_pool import BufferPool
from nvme_offload.offload.host.page_locks import PageLocks
from nvme_offload.offload.progress import tracked
from nvme_offload.offload.shards.stored import ResidentShard
from nvme_offload.offload.staging.home import VISITING, Home
from nvme_offload.offload.storage.memory_tier import DeviceRegion, DeviceTier, HostTier
from nvme_offload.offload.storage.nvme_tier import NvmeTier
from nvme_offload.offload.storage.tier import Tier
from nvme_offload.offload.storage.tier_plan import TIERS, TierPlan, Unit, plan_tiers
from nvme_offload.offload.storage.tier_plan import Tier as TierName
from nvme_offload.offload.units import format_bytes, round_up
from nvme_offload.offload.warn import warn_user
from ..fused.door import fused_kernels
from ..kernels import KernelPool, tile_weights
from ..layout.master import FORM_OF_DTYPE, sealed_itemsize, state_itemsize
from ..layout.subgroup import ParamToPlace, Subgroup, plan_subgroups
from ..rules.rule import UpdateRule
from ..telemetry.stats import Meter
from ..tiers.block_tiers import Admission, BlockTiers
from ..tiers.parts import ShardParts, parts_of, split_shard
from ..updates.choice import updater_of, way_of
from ..updates.mirrored import DeviceMirror
from .account import account_of
from .body import StateBody, StepState, check_sole
from .condition import Need, UnresumedRun
from .durability import Durability, Ground, OpenDurability
from .masters import give_birth
from .pipeline import StepPipeline
from .placement import StatePlacement
from .slots import SlotRecord
from .table import ParamRecord, ParamTable

NewParts = Callable[[StateBody, int, ShardParts], ShardParts]
"""It makes parts for a split parameter: from the state, the parameter's index in it, and its parts until now."""


class StateStore(StepState):
    """Subgroups of all parameters on the tier that the configuration names.

    Args:
        config: the whole section.
        open_durability: opens the files of the state.
        new_parts: makes the parts of a split parameter whose state gets its place.
    """

    def __init__(
        self,
        config: OffloadConfig,
        meter: Meter,
        rule: UpdateRule,
        owner: str,
        open_durability: OpenDurability,
        new_parts: NewParts,
    ) -> None:
        self.config: OffloadConfig = config
        self._new_parts = new_parts
        self._placement = StatePlacement(config, rule)  # what is refused leaves no files behind
        self._tiers: dict[TierName, Tier] = {"host": HostTier()}
        """The tiers of the state; that of a device comes with the first state that stays there."""
        self.plan = plan_tiers([], {})
        self._arrived: list[ParamRecord] = []
        """Placed, with something still where it was before: see `_tidy_up`."""
        self._away = Away(), Away()
        """Parked shards, which also come back when they are gathered and outlive the store; and parked state."""
        table, kernels = ParamTable(), KernelPool(num_threads_of_rank())
        locks = PageLocks(config.zero_optimization.offload_optimizer.pin_memory, warn_user)
        mirror = DeviceMirror(meter, locks)
        ground = Ground(table, kernels, mirror, meter, fused_kernels)
        self.durability: Durability = open_durability(ground)
        durability = self.durability
        verifies = config.aio.checksums or config.zero_optimization.offload_optimizer.copies > 1
        try:
            if durability.tier is not None:
                self._tiers["nvme"] = durability.tier
            self._placement = StatePlacement(config, rule, durability.period, durability.size_in_buffer)
            self.means = durability.means(ground)
            pipeline = StepPipeline(
                # Not methods of this object, which would live until the garbage collector runs.
                lambda slot, memory: give_birth(slot, memory, table, kernels),
                meter,
                durability.tier,
                BufferPool(1, 1) if durability.tier is not None else None,
                kernels.tile_checksums if verifies else None,
                durability.seal,
            )
            self.blocks: BlockTiers = BlockTiers(config, kernels, locks)
            super().__init__(owner, table, kernels, pipeline, self.blocks, mirror)
            if durability.run_found is not None:  # until it is resumed, what is in memory is not its state
                self.enter(UnresumedRun(owner, durability.run_found))
        except BaseException:
            durability.close()
            raise

    @property
    def tier(self) -> NvmeTier | None:
        """The drives of the state; None where none of it is on NVMe."""
        return self.durability.tier

    @property
    def pool(self) -> BufferPool | None:
        """The staging buffers of the state; None where none of it is on NVMe, and once the optimizer is closed."""
        return self.pipeline.pool

    def updated_inside(self, record: ParamRecord) -> str:
        """Say why a parameter is updated inside `step()`; see `StepState`."""
        return way_of(record.rule, is_durable=self.durability.takes_all, on_device=False).inside

    def begin_load(self) -> None:
        """Begin a load, which gives up a run that was found. ResumeError: that run is of another model."""
        self.durability.begin_load(slot.subgroup for slot in self.slots)  # first: a refusal leaves all as it was
        self.table.marks.forget()
        self.note_half_written()

    def ensure_placed(self, records: Iterable[ParamRecord]) -> None:
        """Give parameters whose state has no place yet one; see `StateBody`."""
        self._tidy_up()
        self._fix_budget()
        wanted = {record.index for record in records}
        if wanted and not self.is_placed:
            wanted |= {record.index for record in self._trainable}
        missing = [record for record in self.table if record.index in wanted and not record.is_placed]
        check_sole(self, missing)
        frozen = [record.leaf for record in self.table if not (record.is_placed or record.leaf.requires_grad)]
        admitted = self.blocks.admit([record.leaf for record in missing], frozen)
        slots: list[SlotRecord] = []
        try:
            plan = self._place(missing, admitted, slots)
            self._write_rests(slots)
            self.blocks.take(admitted)
            self.table.note_placed(missing, True)
        except BaseException:
            self.table.note_placed(missing, False)  # the error may have come after some were noted
            self._give_up(slots)
            self.blocks.drop(admitted)
            raise
        # No call in between: a signal handler sees all of it or nothing.
        self.slots += slots
        self.plan = plan
        self._arrived = missing
        self._tidy_up()

    def foresee(self) -> None:
        """Check that the state of all that requires a gradient finds a place; only shards in parts get theirs now."""
        self._fix_budget()
        if self._placement.scarcity:
            warn_user(self._placement.scarcity, ConfigWarning)
        may_be_sharded = dist.is_initialized() and not any(isinstance(leaf, DTensor) for leaf in self.table.leaves)
        # Part of the weights of shards in parts goes to that place, and nobody shards them again.
        if any(split_shard(leaf) is not None for leaf in self.table.leaves) or (
            self.blocks.exist and not may_be_sharded
        ):
            self.place_trainable()
            return
        subgroups = self._cut([record for record in self._trainable if not record.is_placed], [])
        if may_be_sharded:  # nobody knows what this rank will have: it is asked for the least that it may be
            share = sum(self.durability.space_of(subgroups)) // dist.get_world_size()
            self._check_room([max(share - (self._placement.host_budget or 0), 0)])
            self.table.drop(0)  # or whoever shards the model could not free what it replaces
            return
        self.plan = self._plan(subgroups, [])
        tiers = self.plan.tiers[len(self.plan.tiers) - len(subgroups) :]
        takes_all = self.durability.takes_all
        moving = [group for group, tier in zip(subgroups, tiers, strict=True) if takes_all or tier == "nvme"]
        self._check_room(self.durability.space_of(moving))

    def _fix_budget(self) -> None:
        if not self.is_placed:
            self._placement.fix_budget(lambda: auto_host_budget() - account_of(self.config, self.table).to_come())

    def _check_room(self, sizes: Sequence[int]) -> None:
        if self.tier is not None:
            self.tier.check_room(sizes)

    def _tidy_up(self) -> None:
        """Let go of what `ensure_placed` brought elsewhere. Cut short, it is done again by the next one."""
        if not self._arrived:
            return
        for record in self._arrived:
            split, parts = split_shard(record.leaf), parts_of(record.leaf)
            if split is not None and parts is not None and not parts.is_in_state:  # it is where this was cut short
                split.use_parts(self._new_parts(self, record.index, parts))
        for record in self.table:
            record.note_place()
        for record in self.table:
            record.look_again()  # lets go of what was resident
        self._arrived = []

    def _place(self, missing: Sequence[ParamRecord], admitted: Admission, slots: list[SlotRecord]) -> TierPlan:
        """Promise places and fill in `slots`, one for each new subgroup; return the plan with them in it."""
        blocks, there = self.blocks.units(admitted), self._on_device
        subgroups = self._cut(missing, blocks)
        if not subgroups and not admitted.groups:
            return self.plan
        if self._placement.device_budget is not None and not self._params_stay_on_device:
            budget = format_bytes(self._placement.device_budget)
            why = "the parameters are on the CPU, or offload_param takes them there, where state is in host memory"
            remedy = 'leave it out, or move the model to a GPU first and write offload_param.device = "none"'
            raise ConfigError([f"device_budget = {budget}: {why} anyway; {remedy}"])
        plan = self._plan(subgroups, blocks)
        self.blocks.reserve(admitted, plan.tiers[: len(blocks)])
        tiers = plan.tiers[len(plan.tiers) - len(subgroups) :]
        for subgroup, tier in zip(subgroups, tiers, strict=True):
            log = self.durability.new_log()
            mirror = self.mirror if any(run.param in there for run in subgroup.runs) else None
            updater = updater_of(subgroup, self.means, log, on_device=tier == "device", mirror=mirror)
            slots.append(SlotRecord(subgroup, updater, log))
        on = {tier: [slot for slot, its in zip(slots, tiers, strict=True) if its == tier] for tier in TIERS}
        moving = on["nvme"]
        if moving:
            self.pipeline.synchronize()  # a write that failed says so before anything is promised
            visiting = self._visiting([slot.subgroup for slot in moving])  # a small model takes little memory
            buffer_bytes = max(map(self._placement.size_bytes, visiting))
            self.pipeline.fit_pool(self._placement.num_buffers(visiting), buffer_bytes)
        if there and len(on["device"]) < len(subgroups):
            largest = self._largest_numel([slot.subgroup for slot in (*on["host"], *moving)])
            self.mirror.fit(_only(set(there.values())), largest)
        # Last, because it is what would have to be given back.
        if self.durability.takes_all:  # what a host budget has room for is never read again
            self.durability.promise([slot.subgroup for slot in slots])
            for slot in set(slots) - set(moving):
                slot.place(Home("host", pool=BufferPool(1, self._placement.size_bytes(slot.subgroup))))
            return plan
        for tier, placed in on.items():
            if placed:
                self._reserve(tier, placed)
        return plan

    def _reserve(self, name: TierName, slots: Sequence[SlotRecord]) -> None:
        if name == "device" and name not in self._tiers:
            self._tiers[name] = DeviceTier(_only(self._devices))
        tier = self._tiers[name]
        for slot, extent in zip(slots, tier.reserve([slot.size_bytes for slot in slots]), strict=True):
            memory = tier.memory(extent)
            slot.place(VISITING if memory is None else Home(name, memory), extent)

    def _give_up(self, slots: Sequence[SlotRecord]) -> None:
        """Undo `_place` and `_write_rests`, as far as they came."""
        for slot in slots:
            self.pipeline.forget(slot)  # first: nothing is written any more where the space is free
        if self.durability.takes_all:
            self.durability.drop(len(self.slots))
            return
        for slot in slots:
            if slot.extent is not None:
                self._tiers[slot.home.tier].free(slot.extent)

    @property
    def run_directory(self) -> Path | None:
        """The directory of the state's swap file; None where no state is on NVMe."""
        return self.tier.space.directory if self.tier is not None else None

    @property
    def staging_bytes(self) -> int:
        """Host memory of all staging buffers and, for parameters on a device, of the mirrors beside them."""
        pool = self.pool.size_bytes if self.pool else 0
        return pool + self.mirror.size_bytes + self.blocks.staging_bytes

    @property
    def host_state_bytes(self) -> int:
        """State that lives in host memory for good."""
        kept = (slot.subgroup for slot in self.slots if slot.home.tier == "host")
        return sum(map(self._placement.size_bytes, kept))

    @property
    def device_state_bytes(self) -> int:
        """State that lives on a device for good."""
        return sum(slot.size_bytes for slot in self.slots if slot.home.on_device)

    def park(self) -> None:
        """Write what was changed, and give the memory of staging buffers, threads and devices back until it is used.

        Parameters that are not shards in parts stay: they are somebody else's.
        """
        with self.at_rest(parked=True):
            self.check(Need.STATE)
            self.table.marks.latest.drop()
            self.pipeline.park()
            self.blocks.park()
            self.kernels.end_workers()
            self.mirror.park()
            every = (parts_of(leaf) for leaf in (*self.table.leaves, *self.blocks.beside))
            shards = [parts.stored for parts in every if parts is not None and isinstance(parts.stored, ResidentShard)]
            away, state_away = self._away  # after what was written above, some of it from a device
            away.leave([shard.leaving(away.come_back) for shard in shards])
            state_away.leave(self._beside_parameters)
            tile_weights.cache_clear()  # which a device keeps for updates

    @property
    def _beside_parameters(self) -> list[torch.Tensor]:
        """State on a device, and what updates there need and leave besides."""
        state = [slot.home.memory.whole for slot in self.slots if isinstance(slot.home.memory, DeviceRegion)]
        sums = [record.sums_on_device for record in self.table if record.sums_on_device is not None]
        return [*state, *sums, *self.table.marks.on_device, *self.means.found_changed]

    def come_back(self) -> None:
        """See `StateBody.come_back`."""
        for away in self._away:
            away.come_back()

    def wake(self) -> None:
        """Take back what `park` gave; who uses any of it does it, too."""
        with self.at_rest():  # which brings back what has left a device
            self.pipeline.wake()
            self.blocks.wake()
            self.mirror.wake()

    def close(self) -> None:
        """Wait for what is under way, free the memory, delete the swap files. Idempotent; no-op in a forked child.

        It raises, once all is closed, what stopped updates behind the latest step.
        """
        if not self.is_own_process:
            return
        self.end_begun()
        self.end_updates()  # parameters stay, and stay as the latest step has them
        self.worker.stop()  # before what its shifts work with is closed
        self.is_closed = True  # and each part once more does no harm: an interrupted close can be repeated
        self.mirror.close()
        self._away = self._away[0], Away()  # nobody needs the state any more
        self.blocks.close()
        for tier in self._tiers.values():
            tier.close()
        self.durability.close()
        self.pipeline.close()  # after the tiers, which end the transfers in its buffers
        self.kernels.end_workers()
        self.slots.clear()
        if not self.is_whole:
            self.worker.raise_failure()

    def _write_rests(self, slots: Sequence[SlotRecord]) -> None:
        """Write the rests of split shards' masters to their tier, subgroup by subgroup. They also stay in memory."""
        found = ((record.index, parts_of(record.leaf)) for record in self.table)
        split = {index for index, parts in found if parts is not None and not parts.is_in_state}
        order = [
            slot
            for slot in slots
            if "master" in slot.subgroup.sections and any(run.param in split for run in slot.subgroup.runs)
        ]
        if not order:
            return  # in particular where nothing is new: a step does not wait for the writes of the one before
        for position, slot in enumerate(tracked("placing the state", order, lambda slot: slot.size_bytes)):
            self.pipeline.acquire(order, position)
            self.pipeline.will_change(slot)
            self.pipeline.release(slot)
        self.pipeline.synchronize()  # a write that fails says so while the placement can be undone

    def _cut(self, records: Sequence[ParamRecord], blocks: Sequence[Unit]) -> list[Subgroup]:
        places = [
            ParamToPlace(
                record.index,
                record.group,
                record.param.numel(),
                record.param.dtype,
                record.rule,
                self.blocks.number_of(record.leaf),
                self.durability.log_itemsize(record),
            )
            for record in records
        ]
        taken = self.host_state_bytes + sum(unit.size_bytes for unit in blocks if unit.tiers == ("host",))
        max_bytes = self._placement.max_subgroup_bytes(taken, bool(self._devices))
        numel, on_device = sum(place.numel for place in places), is_device(self.table.device)
        max_numel = self.config.zero_optimization.max_subgroup_numel(numel, on_device=on_device)
        for place in places:
            itemsize = sealed_itemsize if self.durability.takes_all else state_itemsize
            needed = int(place.numel * itemsize(FORM_OF_DTYPE[place.dtype], place.rule.states))
            self._placement.check_whole(place.rule, needed, self.table[place.number].name)
        return plan_subgroups(places, max_bytes, max_numel, first=len(self.slots), sealed=self.durability.takes_all)

    def _plan(self, subgroups: Sequence[Subgroup], blocks: Sequence[Unit]) -> TierPlan:
        staging, page = 0, mmap.PAGESIZE
        if self.pool is not None and self.tier is not None:
            page = self.tier.alignment
            largest = max(map(self._placement.size_bytes, subgroups), default=0)
            num_buffers = self._placement.num_buffers(self._visiting(subgroups), may_stay=True)
            staging = num_buffers * max(self.pool.buffer_bytes, round_up(largest, page))
        if self._devices:
            staging += DeviceMirror.BYTES_PER_ELEMENT * self._largest_numel(subgroups)
        on_device = self._params_stay_on_device
        return self._placement.plan(self.slots, subgroups, staging, page, blocks, on_device=on_device)

    @property
    def _params_stay_on_device(self) -> bool:
        return bool(self._devices) and self.config.zero_optimization.offload_param.device == "none"

    @property
    def _on_device(self) -> dict[int, torch.device]:
        """The devices of parameters that are there in a step, or have their gradients there, by index."""
        devices = {device for device in {record.param.device for record in self.table} if is_device(device)}
        return {
            record.index: record.param.device
            for record in self.table
            if record.param.device in devices and not self.blocks.leaves_device(record.leaf)
        }

    @property
    def _devices(self) -> set[torch.device]:
        return set(self._on_device.values())

    def _largest_numel(self, subgroups: Sequence[Subgroup]) -> int:
        return max(subgroup.padded_numel for subgroup in [*subgroups, *(slot.subgroup for slot in self.slots)])

    def _visiting(self, more: Sequence[Subgroup]) -> list[Subgroup]:
        return [*(slot.subgroup for slot in self.slots if slot.home.is_visited), *more]


def num_threads_of_rank() -> int:
    """Return as many as torch uses; under torchrun, which sets that to 1, this rank's share of the CPUs."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return max(torch.get_num_threads(), num_processors_of_rank())
    return torch.get_num_threads()


def _only(devices: set[torch.device]) -> torch.device:
    if len(devices) > 1:
        raise ValueError(f"parameters are on several devices ({', '.join(map(str, devices))}): use one per process")
    (device,) = devices
    return device
