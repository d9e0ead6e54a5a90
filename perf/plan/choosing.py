"""The section that suits a model and a machine: `offload init` writes it, `offload plan` plans it if none is given."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.errors import ConfigError
from nvme_offload.offload.storage.tier_plan import TierPlan
from nvme_offload.offload.units import MiB, format_bytes
from nvme_offload.perf.plan.machine import Machine
from nvme_offload.perf.plan.placing import Job, PlacedJob, account_of_job, residents
from nvme_offload.perf.plan.prediction import tier_plan
from nvme_offload.perf.plan.shape import ModelShape

LEAST_BUDGET = 64 * MiB  # staging buffers within less would be so small that a drive does not reach its rate


@dataclass(frozen=True)
class ChosenSection:
    """A section, why it is this one, and where everything of one rank has its place with it."""

    section: dict[str, Any]
    why: str
    job: Job
    tiers: TierPlan


@dataclass(frozen=True)
class Chooser:
    """For a machine, it finds the section that is the fastest of those that fit.

    What moves least comes first: everything in memory, the state on NVMe, then parameters and gradients too. Of what is
    on NVMe as much stays in memory as there is room for: `host_budget` is what is left beside all that it does not
    cover. More of it is never slower, and less than all of it never faster.
    """

    machine: Machine
    paths: Sequence[Path]
    tokens: int  # tokens of one micro-batch on one rank
    checkpointing: bool = True

    def choose(self, shape: ModelShape) -> ChosenSection:
        """Return the first section that fits; where none does, the one that lacks least."""
        choices = []
        for candidate in self._candidates(shape):
            if (choice := self._tried(shape, *candidate)) is not None:
                choices.append(choice)
                if not choice.tiers.missing:
                    return choice
        return min(choices, key=lambda choice: sum(choice.tiers.missing.values()))

    def fits(self, shape: ModelShape) -> bool:
        """Return whether any section lets a model be trained; the one that needs least memory is tried first."""
        tried = (self._tried(shape, *candidate) for candidate in reversed([*self._candidates(shape)]))
        return any(choice is not None and not choice.tiers.missing for choice in tried)

    def _tried(self, shape: ModelShape, section: dict[str, Any], why: str) -> ChosenSection | None:
        """Return what a section comes to; None: what is left for a budget is less than the staging buffers."""
        job = self.job(section, shape)
        try:
            return ChosenSection(section, why, job, tier_plan(PlacedJob(job, self.machine)))
        except ConfigError:
            return None

    def _candidates(self, shape: ModelShape) -> Iterator[tuple[dict[str, Any], str]]:
        """Sections from what moves least to what needs least memory, each with the reason to take it."""
        drive = {"device": "nvme", "nvme_path": [str(path.absolute()) for path in self.paths]}
        common = {"bf16": {"enabled": True}, "gradient_clipping": 1.0}
        memory = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
        yield common | {"zero_optimization": memory}, "everything fits into memory: no byte has to move to a drive"
        zero = {"stage": 3, "offload_optimizer": drive}
        state = common | {"zero_optimization": zero}
        everything = state | {"zero_optimization": zero | {"offload_param": drive}, "offload_gradients": drive}
        for section, why in (
            (state, "the optimizer state does not fit into memory beside parameters and gradients"),
            (everything, "parameters and gradients do not fit into memory beside what a step needs"),
        ):
            if (left := self._left(self.job(section, shape))) >= LEAST_BUDGET:
                budget = left // MiB * MiB
                stays = f"{why}: {format_bytes(budget)} are left for what stays there and for buffers"
                yield section | {"host_budget": f"{budget // MiB}MiB"}, f"{stays}, the rest is on NVMe"
        yield everything, "memory is scarce: everything is on NVMe that can go there"

    def job(self, section: Mapping[str, Any] | Path, shape: ModelShape) -> Job:
        """Return what training a model with a section is, as `initialize` completes that."""
        config = OffloadConfig.of(section).completed_for(self.machine.ranks)
        return Job(shape=shape, config=config, tokens=self.tokens, checkpointing=self.checkpointing)

    def _left(self, job: Job) -> int:
        """Bytes of host memory for one rank beside all that no budget covers."""
        held = [unit for unit in residents(job, account_of_job(job, self.machine)) if unit.tiers == ("host",)]
        return self.machine.host_memory // self.machine.ranks_per_node - sum(unit.size_bytes for unit in held)
