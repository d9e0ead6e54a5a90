"""The work of an iteration in seconds, from bytes, operations and a machine's rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from nvme_offload.offload.storage.tier_plan import Tier
from nvme_offload.optim.layout.subgroup import Subgroup
from nvme_offload.optim.step.schedule import OverlapStep
from nvme_offload.perf.plan.iteration import GroupTime, SubgroupTime, Work
from nvme_offload.perf.plan.kept_state import KeptState
from nvme_offload.perf.plan.machine import Drives, Machine
from nvme_offload.perf.plan.traffic import Phase, StepTraffic, Traffic


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Bytes that cross between host and device for each parameter of one rank; all zero where the host computes."""

    forward: int = 0
    """To the device in each forward, of parameters that are not kept there."""
    backward: int = 0
    """In each backward, in the busier direction: of parameters there, of gradients back."""
    update: int = 0
    """In the update, in the busier direction: of parameters and gradients that are kept on the device."""


def work_of(
    *,
    machine: Machine,
    group_numels: Sequence[int],
    operations: Mapping[Phase, float],
    subgroups: Sequence[Subgroup],
    state_on: Sequence[Tier],
    kept: KeptState | None,
    tiers: Sequence[StepTraffic],
    num_buffers: int,
    micro_batches: int,
    tier_ahead: int,
    copies: Copies,
) -> Work | None:
    """The work of one rank; None where a rate that it depends on is not known.

    Args:
        machine: whose drives are shared by the ranks of a node.
        group_numels: parameters of each group that is gathered together, in the order of the forward.
        operations: floating-point operations of "forward" and "backward" of one rank in one step.
        subgroups: of one rank. The parameters of their runs are numbered as the groups are.
        state_on: where each subgroup has its state. On a device an update takes next to no time.
        kept: how the state outlives a kill: what is written, and what updates are done again; None: it does not.
        tiers: traffic of parameters and of gradients in one step.
        num_buffers: staging buffers of the state.
        micro_batches: forwards and backwards of a step.
        tier_ahead: groups whose parameters are read before they are needed.
        copies: between host and device.
    """
    if machine.flops is None or (machine.drives is None and ("nvme" in state_on or tiers)):
        return None
    moved = {phase: _seconds(machine, tiers, phase) for phase in ("forward", "backward", "update")}
    total = sum(group_numels) * micro_batches
    shares = [numel / total for numel in group_numels]
    of_blocks = moved["update"] / max(1, len(subgroups)) / 2
    pcie = machine.pcie or inf
    share_of_rank = sum(subgroup.numel for subgroup in subgroups) / sum(group_numels)
    return Work(
        groups=tuple(
            GroupTime(
                forward=share * operations["forward"] / machine.flops,
                backward=share * operations["backward"] / machine.flops,
                forward_nvme=share * moved["forward"],
                backward_nvme=share * moved["backward"],
                forward_pcie=numel * share_of_rank * copies.forward / pcie,
                backward_pcie=numel * share_of_rank * copies.backward / pcie,
            )
            for share, numel in zip(shares, group_numels, strict=True)
        ),
        subgroups=tuple(
            _subgroup_time(subgroup, machine, tier, kept, of_blocks, copies)
            for subgroup, tier in zip(subgroups, state_on, strict=True)
        ),
        num_buffers=num_buffers,
        micro_batches=micro_batches,
        tier_ahead=tier_ahead,
    )


def on_one_processor(work: Work, overlap_step: OverlapStep) -> Work:
    """The work where forward and backward compute on the processor that also updates: one waits for the other.

    In ``step()`` they do so anyway. Behind it, an update is counted as a part of the forward that needs it.
    """
    if overlap_step == "off":
        return work
    updates = [0.0] * len(work.groups)
    for subgroup in work.subgroups:
        updates[subgroup.first] += subgroup.update / work.micro_batches
    return replace(
        work,
        groups=tuple(
            replace(group, forward=group.forward + update) for group, update in zip(work.groups, updates, strict=True)
        ),
        subgroups=tuple(replace(subgroup, update=0.0) for subgroup in work.subgroups),
    )


def seconds_of(drives: Drives, moved: Traffic) -> float:
    """Seconds that drives need: as much in both directions as goes moves at the mixed rate, the rest alone."""
    both = min(moved.read, moved.written)
    return 2 * both / drives.mixed + (moved.read - both) / drives.read + (moved.written - both) / drives.write


def _seconds(machine: Machine, tiers: Sequence[StepTraffic], phase: Phase) -> float:
    if machine.drives is None:
        return 0.0
    moved = sum((kind.phases.get(phase, Traffic()) for kind in tiers), Traffic())
    return seconds_of(machine.drives, moved * machine.ranks_per_node)


def _subgroup_time(
    subgroup: Subgroup, machine: Machine, tier: Tier, kept: KeptState | None, of_blocks: float, copies: Copies
) -> SubgroupTime:
    """Times of one subgroup; `of_blocks`: of parameters and gradients that are read and written for its update."""
    read = written = float(subgroup.size_bytes) if tier == "nvme" else 0.0
    updates = 1.0
    if kept is not None:
        costs = kept.costs_of(subgroup)
        read, written = costs.read if tier == "nvme" else 0.0, costs.written
        updates = costs.updates if tier == "nvme" else 1.0
    drives = machine.drives
    rate = machine.ranks_per_node / drives.mixed if drives is not None else 0.0
    groups = [run.param for run in subgroup.runs]
    by_host = subgroup.numel * (tier != "device")
    return SubgroupTime(
        first=min(groups),
        last=max(groups),
        read=of_blocks + read * rate,
        update=by_host * updates / machine.update_rate,
        write=of_blocks + written * rate,
        pcie=by_host * copies.update / (machine.pcie or inf),
    )
