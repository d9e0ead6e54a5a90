"""Plans what the section's activations keep of a forward, on which tier, and what that moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nvme_offload.offload.host.available_memory import auto_budget
from nvme_offload.offload.storage.tier_plan import Unit
from nvme_offload.perf.plan.machine import Machine
from nvme_offload.perf.plan.placing import Job
from nvme_offload.perf.plan.traffic import StepTraffic, Traffic

KIND = "kept activations"


@dataclass(frozen=True)
class KeptActivations:
    """One rank keeps so many bytes from forward to backward in host memory, and so many on NVMe."""

    host: int
    nvme: int

    @classmethod
    def of(cls, job: Job, machine: Machine, beside: Sequence[Unit]) -> KeptActivations | None:
        """Plan them `beside` all else that a rank holds which computes on its host; None where none are moved."""
        section = job.config.activations
        if section.device == "none" or machine.device_memory is not None:  # what is on a device stays there
            return None
        kept = job.kept_bytes
        if section.device == "cpu":
            return cls(kept, 0)
        if section.host_budget == "auto":
            held = sum(unit.size_bytes for unit in beside if unit.tiers == ("host",))
            budget = max(0, auto_budget(machine.host_memory, machine.ranks_per_node) - held)
        else:
            budget = section.host_budget
        return cls(min(kept, budget), max(0, kept - budget))

    def units(self) -> Iterator[Unit]:
        """Return what there is on each tier at the end of a forward."""
        yield Unit(KIND, KIND, self.host, tiers=("host",))
        yield Unit(KIND, KIND, self.nvme, tiers=("nvme",))

    def traffic(self, rounds: int) -> StepTraffic:
        """Bytes that a step moves which goes so often through all blocks: what has no room, out and back."""
        moved = self.nvme * rounds
        return StepTraffic({"forward": Traffic(0, moved), "backward": Traffic(moved, 0)})
