"""How long a step takes: in each phase, what overlaps costs its maximum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nvme_offload.perf.planning.machine import Drives, Machine
from nvme_offload.perf.planning.traffic import PHASES, Phase, StepTraffic, Traffic


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of one phase, by what takes them at the same time."""

    compute: float
    nvme: float

    @property
    def seconds(self) -> float:
        """Seconds of the phase: the larger of both, which run at the same time."""
        return max(self.compute, self.nvme)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step."""

    phases: dict[Phase, PhaseTime]

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(phase.seconds for phase in self.phases.values())

    def limit_of(self, phase: Phase) -> str:
        """Name of what a phase waits for."""
        time = self.phases[phase]
        if time.nvme > time.compute:
            return "NVMe"
        return "update kernel" if phase == "update" else "compute"

    @property
    def limit(self) -> str:
        """The resource that limits most of the step."""
        seconds: dict[str, float] = {}
        for phase, time in self.phases.items():
            name = self.limit_of(phase)
            seconds[name] = seconds.get(name, 0) + time.seconds
        return max(seconds, key=lambda name: seconds[name])

    def to_dict(self) -> dict[str, Any]:
        """The times in plain types, for JSON."""
        phases = {
            name: {"seconds": time.seconds, "compute": time.compute, "nvme": time.nvme, "limit": self.limit_of(name)}
            for name, time in self.phases.items()
        }
        return {"seconds": self.total, "limit": self.limit, "phases": phases}


def time_of(
    traffic: dict[str, StepTraffic], machine: Machine, operations: dict[str, float], shard_numel: int
) -> StepTime | None:
    """Seconds of a step; None where a rate that it depends on is not known.

    Args:
        traffic: by kind, of one rank.
        machine: whose drives are shared by the ranks of a node.
        operations: floating-point operations of "forward" and "backward" of one rank.
        shard_numel: parameters that one rank updates.
    """
    if machine.flops is None or (traffic and machine.drives is None):
        return None
    compute = {name: count / machine.flops for name, count in operations.items()}
    compute["update"] = shard_numel / machine.update_rate
    phases: dict[Phase, PhaseTime] = {}
    for name in PHASES:
        moved = sum((kind.phases.get(name, Traffic()) for kind in traffic.values()), Traffic())
        nvme = seconds_of(machine.drives, moved * machine.ranks_per_node) if machine.drives is not None else 0.0
        phases[name] = PhaseTime(compute[name], nvme)
    return StepTime(phases)


def seconds_of(drives: Drives, moved: Traffic) -> float:
    """Seconds that drives need: as much in both directions as goes moves at the mixed rate, the rest alone."""
    both = min(moved.read, moved.written)
    return 2 * both / drives.mixed + (moved.read - both) / drives.read + (moved.written - both) / drives.write
