"""An iteration has pieces, which take seconds, and takes so long in all."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal

from nvme_offload.offload.config.overlap import OVERLAPS, OverlapStep
from nvme_offload.offload.storage.tier_plan import Tier
from nvme_offload.optim.layout.subgroup import Subgroup
from nvme_offload.optim.telemetry.stats import CLOSE, Limit
from .machine import Machine
from .placing import PlacedJob
from .traffic import PHASES, Phase, StepTraffic, Traffic

Part = Literal["forward", "backward", "step"]
PARTS: tuple[Part, ...] = ("forward", "backward", "step")


@dataclass(frozen=True, kw_only=True)
class GroupTime:
    """Seconds of one micro-batch in a group that is gathered together."""

    forward: float
    backward: float
    forward_nvme: float = 0.0
    """Seconds that the drive moves parameters and gradients of the group for its forward, which waits for that."""
    backward_nvme: float = 0.0
    forward_pcie: float = 0.0
    """Seconds of the copies between host and device beside its forward: those of the next group go on while this one
    computes."""
    backward_pcie: float = 0.0
    forward_network: float = 0.0
    """Seconds in which its parameters are gathered from other nodes beside its forward, as with copies."""
    backward_network: float = 0.0
    """The same of backward, with the reduction of its gradients."""

    def seconds(self, part: Part) -> float:
        """Seconds of a pass when the drive is not waited for."""
        if part == "forward":
            return max(self.forward, self.forward_pcie, self.forward_network)
        return max(self.backward, self.backward_pcie, self.backward_network)


@dataclass(frozen=True, kw_only=True)
class SubgroupTime:
    """Seconds of one update of a subgroup."""

    first: int
    """The first group in the order of the forward that it has parameters of: there its gradient is final last."""
    last: int
    read: float
    update: float
    write: float
    pcie: float = 0.0
    """Seconds that its parameters and gradients take to the host, or back: one comes, one is updated, one leaves."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """An iteration has to do this."""

    groups: tuple[GroupTime, ...]  # in the order of the forward. Backward goes the other way.
    subgroups: tuple[SubgroupTime, ...]  # in the order of the forward
    num_buffers: int  # staging buffers of the optimizer's state
    micro_batches: int = 1
    tier_ahead: int = 1  # groups whose parameters are read before they are needed
    takes_turns: bool = False
    """Whether who computes also updates: each group where it is gathered, or where backward has gone through it."""

    @property
    def compute(self) -> float:
        """Seconds of all forwards and backwards."""
        return self.micro_batches * sum(group.forward + group.backward for group in self.groups)

    @property
    def nvme(self) -> float:
        """Seconds in which the drive moves everything once each way."""
        tiers = self.micro_batches * sum(group.forward_nvme + group.backward_nvme for group in self.groups)
        return tiers + sum(subgroup.read + subgroup.write for subgroup in self.subgroups)

    @property
    def update(self) -> float:
        """Seconds of all updates."""
        return sum(subgroup.update for subgroup in self.subgroups)

    @property
    def pcie(self) -> float:
        """Seconds of all copies between host and device, of the busier direction each time."""
        passes = self.micro_batches * sum(group.forward_pcie + group.backward_pcie for group in self.groups)
        return passes + sum(subgroup.pcie for subgroup in self.subgroups)

    @property
    def network(self) -> float:
        """Seconds of all gathers and reductions between nodes."""
        return self.micro_batches * sum(group.forward_network + group.backward_network for group in self.groups)

    @property
    def ideal(self) -> float:
        """Seconds of an iteration in which everything overlaps."""
        return max(self.compute, self.nvme, self.update, self.pcie, self.network)


@dataclass(frozen=True, kw_only=True)
class IterationTime:
    """Seconds of one iteration, and where they go."""

    work: Work
    overlap_step: OverlapStep
    seconds: float
    waiting: dict[Part, float]  # seconds in which computing stands still: in forward, in backward, in ``step()``

    @property
    def share_of_ideal(self) -> float:
        """Seconds of the ideal iteration over those of this one. More than 1 where buffers keep much of the state."""
        return self.work.ideal / self.seconds

    @property
    def limit(self) -> Limit | Literal["PCIe", "network"]:
        """Return what would have to be more or faster for a shorter iteration."""
        work = self.work
        if work.network > max(work.compute, work.nvme, work.update, work.pcie):
            return "network"
        if work.pcie > max(work.compute, work.nvme, work.update):
            return "PCIe"
        if work.update >= max(work.compute, work.nvme):
            return "kernel"
        if self.share_of_ideal >= CLOSE:
            return "drive" if work.nvme > work.compute else "compute"
        return "staging buffers" if OVERLAPS[self.overlap_step].hides else "drive"

    @property
    def parts(self) -> dict[Part, float]:
        """Seconds of forward, backward and ``step()``, waiting included."""
        batches, groups = self.work.micro_batches, self.work.groups
        computing: dict[Part, float] = {
            "forward": batches * sum(group.seconds("forward") for group in groups),
            "backward": batches * sum(group.seconds("backward") for group in groups),
            "step": 0.0,
        }
        return {part: computing[part] + self.waiting[part] for part in PARTS}

    def to_dict(self) -> dict[str, Any]:
        """The times in plain types, for JSON."""
        return {
            "overlap_step": self.overlap_step,
            "seconds": self.seconds,
            "share_of_ideal": self.share_of_ideal,
            "limit": self.limit,
            **{what: getattr(self.work, what) for what in ("compute", "nvme", "update", "pcie", "network")},
            "parts": self.parts,
            "waiting": self.waiting,
        }


def work_of(placed: PlacedJob, tiers: Sequence[StepTraffic], leaving: int = 0) -> Work | None:
    """The work of one rank; None where a rate is not known.

    `tiers` is the traffic of all but its state. So many bytes of activations are `leaving` in each forward, and come
    back in its backward: from a device to its host, or else by the processors that compute to staging buffers. Drives
    are shared by the ranks of a node. On a device an update takes next to no time.
    """
    job, machine, state_on = placed.job, placed.machine, placed.state_on
    if machine.flops is None or (machine.drives is None and ("nvme" in state_on or tiers)):
        return None
    zero, copies, pcie = job.config.zero_optimization, placed.copies, machine.pcie or inf
    group_numels = [sum(group) for group in job.shape.groups]
    moved = {phase: _seconds(machine, tiers, phase) for phase in PHASES}
    # Two operations per parameter and token forward, four backward, two more where layers are computed again.
    per_token = job.tokens * job.micro_batches / machine.flops
    # A token attends to half of its sequence, in two products.
    attention = 2.0 * job.sequence * job.shape.hidden_size * job.shape.num_layers * per_token
    work = job.shape.work
    products = 2.0 * sum(work) * per_token
    forward = products + attention
    # Of a frozen weight backward needs the gradient of what comes in alone.
    backward = products * (1 if job.shape.adapters else 2) + 2 * attention
    backward += forward * job.computes_again - attention * job.keeps_attention
    copying = 0.0 if placed.on_device else leaving * job.config.rounds / machine.copy_rate
    crossing = leaving * job.config.rounds / pcie if placed.on_device else 0.0
    of_blocks = moved["update"] / max(1, len(placed.subgroups)) / 2
    share_of_rank = 1 / placed.account.num_shards
    work_shares = [each / (max(1, sum(work)) * job.config.rounds) for each in work]
    shares = [numel / (sum(group_numels) * job.config.rounds) for numel in group_numels]
    gathering, reducing = _between_nodes(placed)
    return Work(
        groups=tuple(
            GroupTime(
                forward=busy * forward + share * copying,
                backward=busy * backward + share * copying,
                forward_nvme=share * moved["forward"],
                backward_nvme=share * moved["backward"],
                forward_pcie=numel * share_of_rank * copies.forward / pcie + share * crossing,
                backward_pcie=numel * share_of_rank * copies.backward / pcie + share * crossing,
                forward_network=numel * gathering,
                backward_network=numel * ((gathering if zero.stage == 3 else 0.0) + reducing),
            )
            for share, busy, numel in zip(shares, work_shares, group_numels, strict=True)
        ),
        subgroups=tuple(
            _subgroup_time(placed, subgroup, tier, of_blocks)
            for subgroup, tier in zip(placed.subgroups, state_on, strict=True)
        ),
        num_buffers=placed.num_buffers,
        micro_batches=job.config.rounds,
        tier_ahead=zero.offload_param.buffer_count - 1,
        takes_turns=placed.takes_turns,
    )


def moving_alone(placed: PlacedJob, sizes: Sequence[int]) -> Work:
    """Work that takes no time but for moving so many bytes of each subgroup's state, at a byte a second."""
    groups = [[placed.gathered_with[run.param] for run in subgroup.runs] for subgroup in placed.subgroups]
    return Work(
        groups=(GroupTime(forward=0.0, backward=0.0),) * len(placed.job.shape.groups),
        subgroups=tuple(
            SubgroupTime(first=min(its), last=max(its), read=size, update=0.0, write=size)
            for its, size in zip(groups, sizes, strict=True)
        ),
        num_buffers=placed.num_buffers,
        takes_turns=placed.takes_turns,
    )


def on_one_processor(work: Work, overlap_step: OverlapStep) -> Work:
    """The work where forward and backward compute on the processor that also updates: one waits for the other.

    In ``step()`` they do so anyway. Behind it, an update is counted as a part of the forward that needs it.
    """
    if not OVERLAPS[overlap_step].hides:
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


def _between_nodes(placed: PlacedJob) -> tuple[float, float]:
    """Return the seconds that a parameter takes to be gathered, and its gradient to be reduced, for one micro-batch.

    The ranks of a node share its network: of what is gathered, each node gets once what the other nodes have.
    """
    job, machine = placed.job, placed.machine
    if machine.network is None:
        return 0.0, 0.0
    stage, precision = job.config.zero_optimization.stage, placed.precision
    crossing = (1 - 1 / machine.num_nodes) / machine.network
    reducing = precision.reduce.itemsize * crossing / (1 if stage in (2, 3) else job.config.rounds)
    if job.shape.adapters:
        return (job.shape.base_bits / 8 * crossing if stage else 0.0), 0.0
    if stage == 0:
        return 0.0, 2 * reducing  # an all-reduce: reduced, and gathered again
    return precision.gather.itemsize * crossing, reducing


def _seconds(machine: Machine, tiers: Sequence[StepTraffic], phase: Phase) -> float:
    if machine.drives is None:
        return 0.0
    moved = sum((kind.phases.get(phase, Traffic()) for kind in tiers), Traffic()) * machine.ranks_per_node
    drives, both = machine.drives, min(moved.read, moved.written)
    # As much in both directions as goes moves at the mixed rate, the rest alone.
    return 2 * both / drives.mixed + (moved.read - both) / drives.read + (moved.written - both) / drives.write


def _subgroup_time(placed: PlacedJob, subgroup: Subgroup, tier: Tier, of_blocks: float) -> SubgroupTime:
    """Times of one subgroup; `of_blocks`: of parameters and gradients that are read and written for its update."""
    machine, kept = placed.machine, placed.kept
    read = written = float(subgroup.size_bytes) if tier == "nvme" else 0.0
    updates = 1.0
    if kept is not None:
        costs = kept.costs_of(subgroup)
        read, updates = (costs.read, costs.updates) if tier == "nvme" else (0.0, 1.0)
        written = costs.written
    rate = machine.ranks_per_node / machine.drives.mixed if machine.drives is not None else 0.0
    groups = [placed.gathered_with[run.param] for run in subgroup.runs]
    by_host = subgroup.numel * (tier != "device")
    return SubgroupTime(
        first=min(groups),
        last=max(groups),
        read=of_blocks + read * rate,
        update=by_host * updates / machine.update_rate,
        write=of_blocks + written * rate,
        pcie=by_host * placed.copies.update / (machine.pcie or inf),
    )
