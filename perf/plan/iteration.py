"""What an iteration has to do, in seconds of its pieces, and how long it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from nvme_offload.optim.stats import CLOSE, Limit
from nvme_offload.optim.step.schedule import OverlapStep

OVERLAPS: tuple[OverlapStep, ...] = ("off", "forward", "backward", "speculate")
IN_BACKWARD: tuple[OverlapStep, ...] = ("backward", "speculate")
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

    def seconds(self, part: Part) -> float:
        """Seconds of a pass when the drive is not waited for."""
        if part == "forward":
            return max(self.forward, self.forward_pcie)
        return max(self.backward, self.backward_pcie)


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

    @property
    def busy(self) -> float:
        """Seconds from one update to the next when the drive is not waited for."""
        return max(self.update, self.pcie)

    @property
    def is_resident(self) -> bool:
        """Whether its state is in host memory for good."""
        return not (self.read or self.write)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What an iteration has to do."""

    groups: tuple[GroupTime, ...]
    """In the order of the forward. Backward goes the other way."""
    subgroups: tuple[SubgroupTime, ...]
    """In the order of the forward."""
    num_buffers: int
    """Staging buffers of the optimizer's state."""
    micro_batches: int = 1
    tier_ahead: int = 1
    """Groups whose parameters are read before they are needed."""

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
    def ideal(self) -> float:
        """Seconds of an iteration in which everything overlaps."""
        return max(self.compute, self.nvme, self.update, self.pcie)


@dataclass(frozen=True, kw_only=True)
class IterationTime:
    """Seconds of one iteration, and where they go."""

    work: Work
    overlap_step: OverlapStep
    seconds: float
    waiting: dict[Part, float]
    """Seconds in which computing stands still: in forward, in backward, in ``step()``."""

    @property
    def share_of_ideal(self) -> float:
        """Seconds of the ideal iteration over those of this one. More than 1 where buffers keep much of the state."""
        return self.work.ideal / self.seconds

    @property
    def limit(self) -> Limit | Literal["PCIe"]:
        """What would have to be more or faster for a shorter iteration."""
        work = self.work
        if work.pcie > max(work.compute, work.nvme, work.update):
            return "PCIe"
        if work.update >= max(work.compute, work.nvme):
            return "kernel"
        if self.share_of_ideal >= CLOSE:
            return "drive" if work.nvme > work.compute else "compute"
        return "drive" if self.overlap_step == "off" else "staging buffers"

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
            "compute": self.work.compute,
            "nvme": self.work.nvme,
            "update": self.work.update,
            "pcie": self.work.pcie,
            "parts": self.parts,
            "waiting": self.waiting,
        }
