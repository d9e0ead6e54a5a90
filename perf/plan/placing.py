"""A job is placed as the optimizer itself would: where one rank's state goes, and what else is in memory."""

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from math import inf
from typing import Any, NamedTuple, Self

import torch

from nvme_offload.offload.config.overlap import OVERLAPS, OverlapStep
from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.host.available_memory import auto_budget
from nvme_offload.offload.shards.param_tier import KIND as PARAMS
from nvme_offload.offload.shards.stored import Padded
from nvme_offload.offload.storage.tier_plan import Tier, TierPlan, Unit
from nvme_offload.offload.units import MiB, round_up
from nvme_offload.optim.layout.master import TILE_NUMEL, sealed_itemsize, state_itemsize
from nvme_offload.optim.layout.subgroup import Subgroup, plan_subgroups
from nvme_offload.optim.precision.parameter import DTYPES, ParameterPrecision
from nvme_offload.optim.precision.plan import precision_of
from nvme_offload.optim.rules.muon import BESIDE_MATRICES, Muon
from nvme_offload.optim.rules.registry import rule_of
from nvme_offload.optim.rules.rule import UpdateRule
from nvme_offload.optim.state.account import Account, GroupSize, ShardSize
from nvme_offload.optim.state.pipeline import KIND as STATE
from nvme_offload.optim.state.placement import StatePlacement
from nvme_offload.optim.step.schedule import hindrance, schedule_of
from nvme_offload.optim.tiers.grad_tier import KIND as GRADS
from nvme_offload.optim.tiers.units import STAGING
from nvme_offload.optim.updates.choice import way_of
from nvme_offload.optim.updates.mirrored import DeviceMirror
from .kept_state import KeptState
from .lora import FULL_BITS
from .machine import Machine
from .shape import ModelShape
from .traffic import Phase

LIBRARIES_BYTES = 384 * MiB
"""Resident memory of a process that has loaded torch, transformers' models and this package, and trained nothing."""

MAX_SUBGROUPS = 1024
"""Most subgroups of a plan; beyond, they are larger. A plan of ten terabytes is no better for being made of 100,000."""
LOGITS_BYTES = 16
"""Bytes of a logit when forward ends: itself in 16 bits and fp32, its log-softmax, the gradients of two of these."""
CHUNK_TOKENS = 1024
"""Tokens that a loss in chunks takes at a time, about as Liger's and TRL's do."""
LAYER_ELEMENTS, LAYER_MASKS = 16, 2
"""Elements, and bytes of dropout masks, that a layer without recomputation keeps for backward per element of its hidden
state, with an attention that does not keep its scores: Korthikanti et al., arXiv:2205.05198, section 4.1."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job says what is to be trained, and how."""

    shape: ModelShape
    config: OffloadConfig  # the section, as `initialize` completes it
    tokens: int  # tokens of one micro-batch on one rank
    checkpointing: bool  # whether each layer's activations are computed again in backward
    sequence: int = 0  # tokens of one sequence, each of which attends to those before it; 0: not known, nor counted
    chunked_loss: bool = False  # whether the loss is computed of `CHUNK_TOKENS` at a time, with a head that is fused
    baseline_bytes: int = LIBRARIES_BYTES  # resident memory of a process before it trains

    def with_keys(self, **keys: Any) -> Self:
        """Return the job with other values of these keys of its section."""
        return replace(self, config=self.config.model_copy(update=keys))

    @property
    def layer_bytes(self) -> int:
        """Bytes that a layer which is not computed again keeps of a micro-batch."""
        widened = max(1.0, self.shape.intermediate_size / (4 * self.shape.hidden_size))
        itemsize = DTYPES[self.config.autocast_dtype or self.config.compute_dtype].itemsize
        return round(self.tokens * self.shape.hidden_size * (LAYER_ELEMENTS * itemsize + LAYER_MASKS) * widened)

    @property
    def kept_bytes(self) -> int:
        """Bytes that all layers keep from a forward to its backward: their inputs, and results of attention, or all."""
        if not self.computes_again:
            return self.shape.num_layers * self.layer_bytes
        tensors, tied = self.shape.num_layers, 0
        if self.waits_block_by_block:
            # Block by block what enters each layer waits for backward, of every micro-batch, and a gradient of it. So
            # does the gradient of a head that shares its weight, for what the embedding adds to it.
            tensors = (tensors + 1) * self.micro_batches
            gathered = precision_of(self.config, safe=True).gather
            tied = 0 if self.shape.adapters else self.shape.tied_numel * self.micro_batches * gathered.itemsize
        elif self.keeps_attention:
            tensors *= 2
        return tensors * self.tokens * self.shape.hidden_size * self._hidden_itemsize + tied

    @property
    def _hidden_itemsize(self) -> int:
        """Bytes of an element of what goes from layer to layer: fp32 with autocast, whose sums are."""
        return DTYPES["fp32" if self.config.autocast_dtype else self.config.compute_dtype].itemsize

    @property
    def boundaries_bytes(self) -> int:
        """Bytes of what enters a layer in all micro-batches that are kept at once."""
        waiting = self.micro_batches if self.waits_block_by_block else 1
        return waiting * self.tokens * self.shape.hidden_size * self._hidden_itemsize

    @property
    def base_in_place(self) -> bool:
        """Whether frozen parameters on NVMe are read in the files they come in, which take no space of the drives."""
        return bool(self.shape.adapters) and self.config.zero_optimization.offload_param.frozen != "copy"

    @property
    def keeps_attention(self) -> bool:
        """Whether results of attention are kept where the rest of a layer is computed again."""
        section = self.config.activations
        return not self.waits_block_by_block and section.device != "none" and section.keep == "attention"

    @property
    def waits_block_by_block(self) -> bool:
        """Whether several micro-batches wait for one another at each layer."""
        return self.config.rounds < self.micro_batches

    @property
    def micro_batches(self) -> int:
        """Number of forwards and backwards in a step."""
        return self.config.gradient_accumulation_steps or 1

    @property
    def computes_again(self) -> bool:
        """Whether layers are computed once more in backward, as they are where micro-batches go block by block."""
        section = self.config.activations
        return self.config.goes_by_blocks or (self.checkpointing if section.device == "none" else section.keep != "all")


class Copies(NamedTuple):
    """Bytes that cross between host and device for each parameter of one rank; all zero where the host computes."""

    forward: float = 0  # to the device in each forward, of parameters that are not kept there
    backward: float = 0  # in each backward, in the busier direction: of parameters there, of gradients back
    update: int = 0  # in the update, in the busier direction: of parameters and gradients that are kept on the device


class PlacedJob:
    """A job on a machine: where one rank has its optimizer state, and its blocks that may be on NVMe."""

    def __init__(self, job: Job, machine: Machine) -> None:
        self.job, self.machine = job, machine
        config = job.config
        self.precision, self.rule = precision_of(config), rule_of(config.optimizer)
        self.kept = KeptState.of(config, machine)
        """The state as it outlives a kill; None where it ends with the process."""
        self.account = account_of_job(job, machine)  # the memory beside the state
        self.on_device = self.account.on_device  # whether forward and backward compute on an accelerator
        logged = () if self.kept is None else (self.kept.period, self.kept.buffer_bytes)
        placement = self._placement = StatePlacement(config, self.rule, *logged)
        # What a host budget of "auto" comes to, for a model that is not in memory yet.
        free = auto_budget(machine.host_memory, machine.ranks_per_node) - job.baseline_bytes
        placement.fix_budget(lambda: free - self.account.to_come(on_meta=True))
        blocks = self.account.blocks()
        fixed = sum(unit.size_bytes for unit in blocks if unit.tiers == ("host",))
        max_bytes = placement.max_subgroup_bytes(fixed, self.copies.update > 0)
        self.subgroups, itemsize, most_numel = self._subgroups(placement, max_bytes)  # the subgroups of one rank
        # Of a subgroup as the optimizer will cut it, which may be smaller than what is planned in one piece.
        largest = min(max(map(placement.size_bytes, self.subgroups)), int(most_numel * itemsize))
        section = config.zero_optimization.offload_optimizer
        buffer_bytes = round_up(largest, mmap.PAGESIZE) if section.device == "nvme" else 0
        staging = placement.num_buffers(self.subgroups, may_stay=True) * buffer_bytes
        if self.copies.update:
            staging += DeviceMirror.BYTES_PER_ELEMENT * int(largest // itemsize)
        self.tiers: TierPlan = placement.plan(
            [], self.subgroups, staging, mmap.PAGESIZE, blocks, on_device=self.on_device
        )

    @cached_property
    def copies(self) -> Copies:
        """Return what one rank copies between its host and its device for each of its parameters."""
        if not self.on_device:
            return Copies()
        zero, grads = self.job.config.zero_optimization, self.job.config.offload_gradients
        stored, accumulated = self.precision.storage.itemsize, self.precision.accumulate.itemsize
        params_leave, grads_leave = zero.offload_param.device != "none", grads.device != "none"
        is_frozen = bool(self.job.shape.adapters)
        gathered = self.job.shape.base_bits / 8 if is_frozen else stored
        return Copies(
            forward=gathered * params_leave,
            backward=max(gathered * (params_leave and zero.stage == 3), accumulated * grads_leave * (not is_frozen)),
            update=stored * (not params_leave) + accumulated * (not grads_leave),
        )

    @property
    def num_buffers(self) -> int:
        """Return the number of staging buffers of the state."""
        pairs = zip(self.subgroups, self.state_on, strict=True)
        return self._placement.num_buffers([subgroup for subgroup, tier in pairs if tier == "nvme"])

    @property
    def state_on(self) -> list[Tier]:
        """Return where the state of each subgroup is."""
        return [tier for unit, tier in self._placed() if unit.kind == STATE]

    @cached_property
    def units(self) -> list[Unit]:
        """Everything that one rank holds, but for activations that the section moves."""
        units = list(residents(self.job, self.account))
        sums: dict[tuple[str, Tier], tuple[int, int, int]] = {}
        for unit, tier in self._placed():
            size, read, written = sums.get((unit.kind, tier), (0, 0, 0))
            if unit.kind == STATE and tier == "nvme":  # a buffer, where logs have their place, too
                size += unit.bytes_read
            elif tier != "nvme" or not (self.job.base_in_place and is_frozen(unit)):
                size += unit.size_bytes
            sums[unit.kind, tier] = size, read + unit.bytes_read, written + unit.bytes_written
        units += [Unit(kind, kind, *found, tiers=(tier,)) for (kind, tier), found in sums.items()]
        if self.kept is not None:
            units.append(self.kept.unit(self.subgroups, sum(self.on_nvme)))
        return units

    @property
    def on_nvme(self) -> list[int]:
        """Bytes of state of each subgroup that is on NVMe, in order."""
        return [unit.bytes_read for unit in self.tiers.units_on("nvme", STATE)]

    def blocks_on_nvme(self, kind: str) -> dict[int, Unit]:
        """Blocks of a kind that are on NVMe, by the number of their group."""
        tiers = [(unit, tier) for unit, tier in self._placed() if unit.kind == kind]
        numbers = [number for number, trains in enumerate(self.trained) if trains or kind == PARAMS]
        return {number: unit for number, (unit, tier) in zip(numbers, tiers, strict=bool(tiers)) if tier == "nvme"}

    @cached_property
    def trained(self) -> list[bool]:
        """Whether each group of the account is trained. A layer with adapters is two: its base, and these."""
        return [all(shard.trainable for shard in group.shards) for group in self.account.groups]

    @cached_property
    def gathered_with(self) -> list[int]:
        """Return where each group of the account is in the shape's `groups`."""
        return [int(group.name.partition(" ")[0]) for group in self.account.groups]

    @cached_property
    def overlap_step(self) -> OverlapStep:
        """The schedule that `initialize` runs with this section, by the run's own rule."""
        config = self.job.config
        inside = way_of(self.rule, is_durable=self.kept is not None, on_device=False).inside
        tiers = {config.zero_optimization.offload_param.device, config.offload_gradients.device}
        return schedule_of(
            config.overlap,
            hides=config.hides_steps(on_device=self.on_device),
            hindered=hindrance("the optimizer", inside=inside) is not None,
            crosses=self.on_device and tiers != {"none"},
        ).name

    @cached_property
    def takes_turns(self) -> bool:
        """Whether who computes also updates, in the buffers of the blocks: see `BlockTiers.takes_turns`."""
        params = self.job.config.zero_optimization.offload_param.device
        in_memory = self.on_device and params == "cpu"
        return in_memory or bool(self.blocks_on_nvme(PARAMS) or self.blocks_on_nvme(GRADS))

    def runs_as(self, overlap_step: OverlapStep) -> OverlapStep:
        """Return what a schedule comes to: what takes turns is updated in backward block by block alone."""
        in_backward = not self.takes_turns or self.job.config.goes_by_blocks
        return overlap_step if in_backward or not OVERLAPS[overlap_step].begins_in_backward else "forward"

    @property
    def updated_in(self) -> Phase:
        """Return where blocks on NVMe are updated."""
        phases: dict[OverlapStep, Phase] = {"off": "update", "forward": "forward"}
        return phases.get(self.runs_as(self.overlap_step), "backward")

    def _placed(self) -> list[tuple[Unit, Tier]]:
        return list(zip(self.tiers.units, self.tiers.tiers, strict=True))

    def _subgroups(self, placement: StatePlacement, max_bytes: int) -> tuple[list[Subgroup], float, int]:
        """Cut the state; give with it the bytes of an element, and the most elements of a subgroup in a run."""
        logged = 0 if self.kept is None else self.kept.grad_itemsize * (self.kept.period - 1)
        places = self.account.places(logged)
        size_of, form = state_itemsize if self.kept is None else sealed_itemsize, self.precision.master
        for place in (place for place in places if place.rule.whole):
            what = f"a parameter of {place.numel * self.account.num_shards} elements"
            placement.check_whole(place.rule, int(place.numel * size_of(form, place.rule.states)), what)
        state_bytes = max(size_of(form, rule.states) for rule in {place.rule for place in places})
        itemsize = max(state_bytes + logged, 1)  # none at all: as many elements as one may have
        numel = sum(place.numel for place in places)
        max_numel = self.job.config.zero_optimization.max_subgroup_numel(numel, on_device=self.on_device)
        fitting = int(max_bytes // itemsize)
        pieces = numel // max(1, min(fitting, max_numel))
        coarser = 1 + pieces // MAX_SUBGROUPS
        sealed = self.kept is not None
        subgroups = plan_subgroups(places, max_bytes * coarser, max_numel * coarser, sealed=sealed)
        return subgroups, itemsize, min(fitting, round_up(max_numel, TILE_NUMEL))


def account_of_job(job: Job, machine: Machine) -> Account:
    """Return the account of a rank that has this job, beside the state of its optimizer."""
    # Most parameters are of classes that autocast gathers in 16 bits.
    precision, rule = precision_of(job.config, safe=True), rule_of(job.config.optimizer)
    num_shards = 1 if job.config.zero_optimization.stage == 0 else machine.ranks  # with stage 0 each has all of it
    groups = _groups_of(job.shape, precision, rule, num_shards)
    return Account(job.config, groups, num_shards, machine.device_memory is not None)


@lru_cache(maxsize=4)  # sections that are compared have the same
def _groups_of(
    shape: ModelShape, precision: ParameterPrecision, rule: UpdateRule, num_shards: int
) -> Sequence[GroupSize]:
    beside = rule.of(BESIDE_MATRICES) if isinstance(rule, Muon) else rule  # what embeddings, heads and the rest have
    groups, first_layer = list[GroupSize](), shape.first_layer

    @cache  # most layers are alike
    def sizes_of(group: tuple[int, ...], its_rule: UpdateRule, base_bits: float | None) -> list[ShardSize]:
        its = precision if base_bits is None else _as_it_came(precision, base_bits)
        packed = 1.0 if base_bits is None else base_bits / 8 / its.storage.itemsize
        numels = [-(-numel * packed // 1) for numel in group]
        forms = [Padded(torch.Size([int(-(-numel // num_shards))]), its.storage) for numel in numels]
        pairs = zip(forms, numels, strict=True)
        return [ShardSize(form, int(numel), its, its_rule, base_bits is None) for form, numel in pairs]

    for number, group in enumerate(shape.groups):
        layer = number - first_layer
        is_layer = 0 <= layer < shape.num_layers
        owner = None if shape.rest and not number else number
        frozen = (shape.base_bits if is_layer else FULL_BITS) if shape.adapters else None
        groups.append(GroupSize(str(number), sizes_of(group, rule if is_layer else beside, frozen), owner, is_layer))
        if is_layer and shape.adapters and shape.adapters[layer]:
            groups.append(GroupSize(f"{number} adapters", sizes_of(shape.adapters[layer], rule, None), owner))
    return groups


def may_fit(job: Job, machine: Machine) -> bool:
    """Return False where a job cannot fit, wherever its state, blocks and kept activations have their places.

    This takes a hundredth of what placing them takes.
    """
    account, activations = account_of_job(job, machine), job.config.activations.device
    left = {"device": 0.0, "nvme": inf} | machine.budgets
    for unit in residents(job, account):
        left[unit.tiers[0]] -= unit.size_bytes
    blocks = [unit for unit in account.blocks() if unit.kind != STAGING and not (job.base_in_place and is_frozen(unit))]
    moving = account.state_bytes + sum(unit.size_bytes for unit in blocks) + job.kept_bytes * (activations != "none")
    stays = job.config.device_budget is None and activations != "cpu"  # nothing of these goes to a device
    room = left["host"] + left["nvme"] + (0 if stays else left["device"])
    return min(left["host"], left["device"]) >= 0 and moving <= room


def is_frozen(unit: Unit) -> bool:
    """Whether a unit is a block of parameters that nobody updates."""
    return unit.kind == PARAMS and not unit.bytes_written


def _as_it_came(precision: ParameterPrecision, bits: float) -> ParameterPrecision:
    """Return the precision of a frozen parameter of so many bits: its own dtype, or bytes where it is packed."""
    return replace(precision, kept_as=torch.bfloat16 if bits == FULL_BITS else torch.uint8)


def residents(job: Job, account: Account) -> Iterator[Unit]:
    """Return what one rank holds that no budget of the section covers; what comes and goes at its peak.

    What may be on NVMe is placed with the state: see `PlacedJob`.
    """
    yield Unit("process", "process", job.baseline_bytes, tiers=("host",))
    yield from account.residents()
    device: Tier = "device" if account.on_device else "host"
    # What the section moves is planned by itself; of a layer that backward is in all is in memory.
    moves = job.config.activations.device != "none"
    layers = job.layer_bytes if moves else job.kept_bytes + job.computes_again * job.layer_bytes
    with_logits = min(job.tokens, CHUNK_TOKENS) if job.chunked_loss else job.tokens
    activations = layers + with_logits * job.shape.vocab_size * LOGITS_BYTES
    yield Unit("activations", "activations", activations, tiers=(device,))
    if job.shape.adapters and job.shape.base_bits < FULL_BITS:
        # A packed weight is unpacked while it is multiplied with, one at a time.
        yield Unit("unpacked", "unpacked weight", 2 * job.shape.largest_matrix, tiers=(device,))
