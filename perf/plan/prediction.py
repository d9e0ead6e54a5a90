"""What one rank will hold on each tier, what a step will move, and how long it will take: a pure function.

The optimizer's own planner decides what of its state lives where (`optim.state.placement`), and its own cache what is
read again (`perf.plan.traffic`), so a plan says what a run will do, not what it might.
"""

from __future__ import annotations

import mmap
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.durable.rewrite_every import SECONDS_PER_DAY, DurableBytes
from nvme_offload.offload.errors import ConfigError
from nvme_offload.offload.shards.param_tier import KIND as PARAMS
from nvme_offload.offload.shards.param_tier import Padded
from nvme_offload.offload.storage.tier_plan import TIERS, Tier, TierPlan, Unit, plan_tiers
from nvme_offload.offload.units import MiB
from nvme_offload.optim.layout.master import TILE_NUMEL, sealed_itemsize, state_itemsize
from nvme_offload.optim.layout.subgroup import ParamToPlace, Subgroup, plan_subgroups
from nvme_offload.optim.precision.plan import precision_of
from nvme_offload.optim.rules.registry import rule_of
from nvme_offload.optim.state.pipeline import KIND as STATE
from nvme_offload.optim.state.placement import StatePlacement
from nvme_offload.optim.step.schedule import OverlapStep, hindrance, schedule_of
from nvme_offload.optim.tiers.grad_tier import KIND as GRADS
from nvme_offload.optim.tiers.units import grad_unit, param_unit, staging_unit
from nvme_offload.optim.updates.choice import way_of
from nvme_offload.optim.updates.mirrored import DeviceMirror
from nvme_offload.perf.plan.iteration import OVERLAPS, IterationTime
from nvme_offload.perf.plan.kept_state import KeptState
from nvme_offload.perf.plan.machine import Machine
from nvme_offload.perf.plan.residents import Residents
from nvme_offload.perf.plan.schedule import iteration_time
from nvme_offload.perf.plan.shape import ModelShape
from nvme_offload.perf.plan.traffic import Phase, StepTraffic, Traffic, of_gradients, of_parameters, of_state
from nvme_offload.perf.plan.work import Copies, on_one_processor, work_of

LIBRARIES_BYTES = 384 * MiB
"""Resident memory of a process that has loaded torch, transformers' models and this package, and trained nothing."""

MAX_SUBGROUPS = 4096
"""Most subgroups of a plan; beyond, they are larger. A plan of ten terabytes is no better for being made of 100,000."""

MAX_LAYERS = 2048
"""No deeper model is looked for: of small layers, terabytes hold millions."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be trained, and how."""

    shape: ModelShape
    config: OffloadConfig
    """The section. Its host budget is in bytes or none; "auto" is for the machine to decide: `Machine.host_budget`."""
    tokens: int
    """Tokens of one micro-batch on one rank."""
    checkpointing: bool
    """Whether each layer's activations are computed again in backward."""
    baseline_bytes: int = LIBRARIES_BYTES
    """Resident memory of a process before it trains."""

    @property
    def micro_batches(self) -> int:
        """Number of forwards and backwards in a step."""
        return self.config.gradient_accumulation_steps or 1

    def num_shards(self, machine: Machine) -> int:
        """Ranks that share a parameter; with stage 0 each has all of it."""
        return 1 if self.config.zero_optimization.stage == 0 else machine.ranks


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What an iteration of a job needs on a machine, for one rank: all micro-batches and the step."""

    job: Job
    machine: Machine
    tiers: TierPlan
    """Where everything is that one rank holds; units of memory that comes and goes are at their peak."""
    traffic: dict[str, StepTraffic]
    """Bytes that one rank moves in a step, by kind."""
    overlap_step: OverlapStep
    """The schedule that will run."""
    times: dict[OverlapStep, IterationTime]
    """Time from one step to the next with each schedule; empty where the machine's rates are not known."""
    kept: KeptState | None
    """How the state outlives a kill; None where it ends with the process."""
    state: dict[Tier, DurableBytes]
    """What there is of the state of one rank, by tier, if it were kept."""

    @property
    def time(self) -> IterationTime | None:
        """Time from one step to the next with the schedule that will run; None where rates are not known."""
        return self.times.get(self.overlap_step)

    @property
    def total_traffic(self) -> Traffic:
        """Bytes of all kinds that one rank moves in a step."""
        return sum((moved.total for moved in self.traffic.values()), Traffic())

    @property
    def peak_host_bytes(self) -> int:
        """Host memory of one rank, the process itself included."""
        return self.tiers.bytes_on("host")

    @property
    def excess(self) -> dict[Tier, int]:
        """Bytes that are missing for one rank, by tier; empty where everything fits."""
        return {tier: missing for tier in TIERS if (missing := self.tiers.excess(tier))}

    @property
    def written_per_day(self) -> float | None:
        """Bytes per node and day of steps one after another; None where their time is not known."""
        if self.time is None:
            return None
        return self.total_traffic.written * self.machine.ranks_per_node * SECONDS_PER_DAY / self.time.seconds

    @property
    def days_of_life(self) -> float | None:
        """Days until the drives' endurance is used up; None where it is not known, or nothing is written."""
        endurance, per_day = self.endurance, self.written_per_day
        return endurance / per_day if endurance is not None and per_day else None

    @property
    def endurance(self) -> float | None:
        """Bytes that a node's drives may still be written: as the machine is described, or as the section says."""
        drives, own = self.machine.drives, self.job.config.zero_optimization.offload_optimizer.endurance
        return own if drives is None or drives.endurance is None else drives.endurance

    def to_dict(self) -> dict[str, Any]:
        """The prediction in plain types, for JSON."""
        kinds = dict.fromkeys(unit.kind for unit in self.tiers.units)
        return {
            "model": {
                "name": self.job.shape.name,
                "parameters": self.job.shape.numel,
                "layers": self.job.shape.num_layers,
            },
            "ranks": self.machine.ranks,
            "bytes_per_rank": {
                kind: {tier: size for tier in TIERS if (size := self.tiers.bytes_on(tier, kind))} for kind in kinds
            },
            "available_per_rank": dict(self.tiers.budgets),
            "missing_per_rank": self.excess,
            "traffic_per_rank_and_step": {
                kind: {"read": round(moved.total.read), "written": round(moved.total.written)}
                for kind, moved in self.traffic.items()
            },
            "iteration": None if self.time is None else self.time.to_dict(),
            "rewrite_every": None if self.kept is None else self.kept.period,
            "written_per_node_and_day": self.written_per_day,
            "days_of_life": self.days_of_life,
        }


@dataclass(frozen=True)
class _StatePlan:
    """Where one rank's optimizer state goes, and its blocks of parameters and gradients if they may be on NVMe."""

    subgroups: list[Subgroup]
    tiers: TierPlan
    buffer_bytes: int
    """Bytes of one staging buffer."""
    kept: KeptState | None
    """How it outlives a kill; None where it does not."""

    @property
    def tiers_of_state(self) -> list[Tier]:
        """Where the state of each subgroup is."""
        pairs = zip(self.tiers.units, self.tiers.tiers, strict=True)
        return [tier for unit, tier in pairs if unit.kind == STATE]

    @property
    def on_nvme(self) -> list[int]:
        """Bytes of state of each subgroup that is on NVMe, in order."""
        return [unit.bytes_read for unit in self.tiers.units_on("nvme", STATE)]

    def blocks_on_nvme(self, kind: str) -> dict[int, Unit]:
        """Blocks of a kind that are on NVMe, by the number of their group."""
        pairs = zip(self.tiers.units, self.tiers.tiers, strict=True)
        tiers = [(unit, tier) for unit, tier in pairs if unit.kind == kind]
        return {number: unit for number, (unit, tier) in enumerate(tiers) if tier == "nvme"}


def predict(job: Job, machine: Machine) -> Prediction:
    """Plan a job on a machine.

    Raises:
        ConfigError: a budget of the section is too small for what must be within it.
    """
    kept = KeptState.of(job.config, machine)
    state = _state_plan(job, machine, kept)
    traffic = _traffic(job, machine, state)
    return Prediction(
        job=job,
        machine=machine,
        tiers=_tier_plan(job, machine, state),
        traffic=traffic,
        overlap_step=overlap_of(job, machine, state),
        times=_times(job, machine, state, traffic),
        kept=kept,
        state=_bytes_by_tier(job, state),
    )


def _bytes_by_tier(job: Job, state: _StatePlan) -> dict[Tier, DurableBytes]:
    kept = state.kept or KeptState(1, precision_of(job.config).accumulate.itemsize)
    found: dict[Tier, DurableBytes] = {}
    for subgroup, tier in zip(state.subgroups, state.tiers_of_state, strict=True):
        size = kept.size_of(subgroup)
        found[tier] = found[tier] + size if tier in found else size
    return found


def excess_of(job: Job, machine: Machine) -> dict[Tier, int]:
    """`Prediction.excess` alone, which takes no time.

    Raises:
        ConfigError: see `predict`.
    """
    tiers = _tier_plan(job, machine, _state_plan(job, machine, KeptState.of(job.config, machine)))
    return {tier: missing for tier in TIERS if (missing := tiers.excess(tier))}


def largest_model(job: Job, machine: Machine) -> ModelShape | None:
    """The deepest model of this kind of layer that fits; None where not even one layer does, or nothing limits it.

    One that has more than `MAX_LAYERS` need not be the deepest.
    """

    def fits(num_layers: int) -> bool:
        deeper = replace(job, shape=job.shape.with_layers(num_layers))
        try:
            return not excess_of(deeper, machine)
        except ConfigError:  # more than the section's budget holds
            return False

    budgets = _budgets(machine)
    if "nvme" in _tiers_used(job.config) and "nvme" not in budgets:
        return None
    if not fits(1):
        return None
    low, too_many = 1, MAX_LAYERS + 1
    if fits(too_many):
        return job.shape.with_layers(too_many)
    while too_many - low > 1:
        middle = (low + too_many) // 2
        low, too_many = (middle, too_many) if fits(middle) else (low, middle)
    return job.shape.with_layers(low)


def _tiers_used(config: OffloadConfig) -> set[str]:
    zero = config.zero_optimization
    return {zero.offload_optimizer.device, zero.offload_param.device, config.offload_gradients.device}


def _budgets(machine: Machine) -> dict[Tier, int]:
    """Bytes that one rank may have on each tier."""
    budgets: dict[Tier, int] = {"host": machine.host_memory // machine.ranks_per_node}
    if machine.device_memory is not None:
        budgets["device"] = machine.device_memory
    if machine.capacity is not None:
        budgets["nvme"] = machine.capacity // machine.ranks_per_node
    return budgets


def _tier_plan(job: Job, machine: Machine, state: _StatePlan) -> TierPlan:
    """The plan of everything one rank holds: what is decided already, each unit on its tier."""
    residents = Residents(
        job.shape,
        job.config,
        ranks=job.num_shards(machine),
        tokens=job.tokens,
        checkpointing=job.checkpointing,
        on_device=machine.device_memory is not None,
    )
    units = [Unit("process", "process", job.baseline_bytes, tiers=("host",)), *residents.units()]
    sizes = Counter[tuple[str, Tier]]()
    for unit, tier in zip(state.tiers.units, state.tiers.tiers, strict=True):
        visits = unit.kind == STATE and tier == "nvme"  # a buffer, where logs have their place, too
        sizes[unit.kind, tier] += unit.bytes_read if visits else unit.size_bytes
    units += [Unit(kind, kind, size, tiers=(tier,)) for (kind, tier), size in sizes.items()]
    if state.kept is not None:
        units.append(state.kept.unit(state.subgroups, sum(state.on_nvme)))
    return plan_tiers(units, _budgets(machine))


def _state_plan(job: Job, machine: Machine, kept: KeptState | None) -> _StatePlan:
    """Plan the optimizer's state as the optimizer itself would."""
    config, section = job.config, job.config.zero_optimization.offload_optimizer
    rule = rule_of(config.optimizer)
    placement = (
        StatePlacement(config, rule) if kept is None else StatePlacement(config, rule, kept.period, kept.buffer_bytes)
    )
    has_mirrors = _copies(job, machine).update > 0
    blocks = _block_units(job, machine)
    precision = precision_of(config)
    num_shards = job.num_shards(machine)
    shards = [
        ParamToPlace(
            number,
            0,
            -(-numel // num_shards),
            precision.storage,
            rule,
            number if config.has_block_tiers else -1,
            kept.log_itemsize if kept is not None else 0,
        )
        for number, group in enumerate(job.shape.groups)
        for numel in group
    ]
    for shard in shards:
        itemsize_of = state_itemsize if kept is None else sealed_itemsize
        needed = shard.numel * itemsize_of(precision.master, rule.states)
        placement.check_whole(rule, needed, f"a parameter of {shard.numel * num_shards} elements")
    fixed = sum(unit.size_bytes for unit in blocks if unit.tiers == ("host",))
    max_bytes = placement.max_subgroup_bytes(fixed, has_mirrors)
    # None at all: as many elements as one may have.
    itemsize = max(itemsize_of(precision.master, rule.states) + (kept.log_itemsize if kept is not None else 0), 1)
    max_numel = config.zero_optimization.sub_group_size
    subgroups = _cut(shards, max_bytes, max_numel, itemsize, sealed=kept is not None)
    # Of a subgroup as the optimizer will cut it, which may be smaller than what is planned in one piece.
    most_numel = min(max_bytes // itemsize, -(-max_numel // TILE_NUMEL) * TILE_NUMEL)
    largest = min(max(map(placement.size_bytes, subgroups)), most_numel * itemsize)
    buffer_bytes = _whole_pages(largest) if section.device == "nvme" else 0
    staging = section.buffer_count * buffer_bytes
    if has_mirrors:
        staging += DeviceMirror.BYTES_PER_ELEMENT * (largest // itemsize)
    on_device = machine.device_memory is not None
    tiers = placement.plan([], subgroups, staging, mmap.PAGESIZE, blocks, on_device=on_device)
    return _StatePlan(subgroups, tiers, buffer_bytes, kept)


def _block_units(job: Job, machine: Machine) -> list[Unit]:
    """Blocks of parameters and gradients that may be on NVMe, and their staging buffers: see `BlockTiers.units`."""
    config, precision = job.config, precision_of(job.config)
    storage, accumulate = precision.storage, precision.accumulate
    num_shards = job.num_shards(machine)
    shards = [[-(-numel // num_shards) for numel in group] for group in job.shape.groups]
    units: list[Unit] = []
    section = config.zero_optimization.offload_param
    if section.device == "nvme":
        blocks = [
            param_unit(config, str(number), [Padded(torch.Size([n]), storage) for n in shard], trainable=True)
            for number, shard in enumerate(shards)
        ]
        units += [staging_unit(PARAMS, blocks, section.buffer_count), *blocks]
    if config.offload_gradients.device == "nvme":
        blocks = [
            grad_unit(config, str(number), [(numel, accumulate) for numel in shard])
            for number, shard in enumerate(shards)
        ]
        units += [staging_unit(GRADS, blocks, config.offload_gradients.buffer_count), *blocks]
    return units


def _cut(shards: list[ParamToPlace], max_bytes: int, max_numel: int, itemsize: int, *, sealed: bool) -> list[Subgroup]:
    pieces = sum(shard.numel for shard in shards) // max(1, min(max_bytes // itemsize, max_numel))
    coarser = 1 + pieces // MAX_SUBGROUPS
    return plan_subgroups(shards, max_bytes * coarser, max_numel * coarser, sealed=sealed)


def _traffic(job: Job, machine: Machine, state: _StatePlan) -> dict[str, StepTraffic]:
    """Bytes that one rank moves in one step, of the kinds that are on NVMe."""
    config = job.config
    zero = config.zero_optimization
    visits = _without_repetitions([subgroup.block for subgroup in state.subgroups])
    traffic = {}
    if state.on_nvme:
        buffers = zero.offload_optimizer.buffer_count
        alternates = overlap_of(job, machine, state) == "off"
        traffic[STATE] = of_state(state.on_nvme, buffers, state.buffer_bytes, alternates=alternates)
    if state.kept is not None:
        in_place = traffic.get(STATE, StepTraffic())
        traffic[STATE] = state.kept.traffic(in_place, state.subgroups, state.tiers_of_state)
    for kind, buffers in (
        (PARAMS, zero.offload_param.buffer_count),
        (GRADS, config.offload_gradients.buffer_count),
    ):
        moving = state.blocks_on_nvme(kind)
        sizes = [unit.size_bytes for unit in moving.values()]
        order = {number: place for place, number in enumerate(moving)}
        steps = _without_repetitions([order[number] for number in visits if number in order])
        if not moving:
            continue
        if kind == GRADS:
            traffic[kind] = of_gradients(sizes, buffers, job.micro_batches, steps)
            continue
        has_root = bool(job.shape.rest) and 0 in moving
        traffic[kind] = of_parameters(
            sizes, buffers, job.micro_batches, steps, has_root=has_root, twice=zero.stage == 3
        )
    return traffic


def _times(
    job: Job, machine: Machine, state: _StatePlan, traffic: dict[str, StepTraffic]
) -> dict[OverlapStep, IterationTime]:
    """Seconds of an iteration with each schedule; empty where a rate is not known."""
    zero = job.config.zero_optimization
    work = work_of(
        machine=machine,
        group_numels=[sum(group) for group in job.shape.groups],
        operations=_operations(job),
        subgroups=state.subgroups,
        state_on=state.tiers_of_state,
        kept=state.kept,
        tiers=[moved for kind, moved in traffic.items() if kind != STATE],
        num_buffers=zero.offload_optimizer.buffer_count,
        micro_batches=job.micro_batches,
        tier_ahead=zero.offload_param.buffer_count - 1,
        copies=_copies(job, machine),
    )
    if work is None:
        return {}
    possible = [name for name in OVERLAPS if name != "speculate" or zero.offload_optimizer.durable]
    alone = {name: work if machine.device_memory else on_one_processor(work, name) for name in possible}
    return {name: iteration_time(its_work, name) for name, its_work in alone.items()}


def _copies(job: Job, machine: Machine) -> Copies:
    """What one rank copies between its host and its device for each of its parameters."""
    if machine.device_memory is None:
        return Copies()
    zero, precision = job.config.zero_optimization, precision_of(job.config)
    stored, accumulated = precision.storage.itemsize, precision.accumulate.itemsize
    params_leave = zero.offload_param.device != "none"
    grads_leave = job.config.offload_gradients.device != "none"
    return Copies(
        forward=stored * params_leave,
        backward=max(stored * (params_leave and zero.stage == 3), accumulated * grads_leave),
        update=stored * (not params_leave) + accumulated * (not grads_leave),
    )


def overlap_of(job: Job, machine: Machine, state: _StatePlan) -> OverlapStep:
    """Return the schedule that `initialize` runs with this section, by the run's own rule."""
    config, on_device = job.config, machine.device_memory is not None
    params = config.zero_optimization.offload_param.device
    params_move = params == "nvme" or (on_device and params == "cpu")
    hindered = hindrance(
        "the optimizer",
        inside=way_of(rule_of(config.optimizer), is_durable=state.kept is not None, on_device=False).inside,
        through_buffers=params_move or bool(state.blocks_on_nvme(GRADS)),
    )
    return schedule_of(
        config.overlap_step,
        hides=config.hides_steps(on_device=on_device),
        hindered=hindered is not None,
        grads_on_way=on_device and config.offload_gradients.device != "none",
    )


def _without_repetitions(visits: list[int]) -> list[int]:
    """A block stays where it is from one of its subgroups to the next."""
    return visits[:1] + [block for before, block in pairwise(visits) if block != before]


def _operations(job: Job) -> dict[Phase, float]:
    """Floating-point operations of forward and of backward, of one rank in one step.

    Two per parameter and token forward, four backward, two more where layers are computed again. An embedding is looked
    up, not multiplied, but a head of the same size mostly is.
    """
    forward = 2.0 * job.shape.numel * job.tokens * job.micro_batches
    return {"forward": forward, "backward": forward * (3 if job.checkpointing else 2)}


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
