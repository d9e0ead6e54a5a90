"""The section that suits a model and a machine: `offload init` writes it, `offload plan` plans it if none is given."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.errors import ConfigError
from nvme_offload.offload.storage.tier_plan import TierPlan
from nvme_offload.offload.units import MiB, format_bytes
from nvme_offload.optim.state.choice import ALL_FITS, CANDIDATES
from nvme_offload.optim.state.placement import LEAST_BUDGET
from nvme_offload.perf.plan.machine import Machine
from nvme_offload.perf.plan.placing import Job, PlacedJob, account_of_job, residents
from nvme_offload.perf.plan.prediction import LEAST_GAIN, faster_order, of_orders, predict, tier_plan
from nvme_offload.perf.plan.shape import ModelShape


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

    What moves least comes first: everything in memory, the state on NVMe, gradients too, then parameters too. Where
    rates are known, the first two that fit are compared. Of what is on NVMe as much stays in memory as there is room
    for: `host_budget` is what is left beside all that it does not cover. More of it is never slower.
    """

    machine: Machine
    paths: Sequence[Path]
    tokens: int  # tokens of one micro-batch on one rank
    checkpointing: bool = True
    sequence: int = 0  # tokens of one sequence; 0: not known
    micro_batches: int = 1  # of a step on one rank

    def choose(self, shape: ModelShape) -> ChosenSection:
        """Return the first section that fits, or the next one where it is faster; where none fits, what lacks least."""
        tried = (choice for each in self._candidates() if (choice := each.tried(self, shape)) is not None)
        lacking, fitting = list[ChosenSection](), list[ChosenSection]()
        while len(fitting) < 2 and (choice := next(tried, None)) is not None:
            (lacking if choice.tiers.missing else fitting).append(choice)
        if not fitting:
            return self._ordered(min(lacking, key=lambda choice: sum(choice.tiers.missing.values())))
        return self._ordered(fitting[-1] if len(fitting) == 2 and self._is_faster(*fitting) else fitting[0])

    def _is_faster(self, first: ChosenSection, second: ChosenSection) -> bool:
        """Return whether the second section is faster, as far as rates are known."""
        before, after = (predict(choice.job, self.machine, alone=True).time for choice in (first, second))
        return before is not None and after is not None and after.seconds < LEAST_GAIN * before.seconds

    def _ordered(self, choice: ChosenSection) -> ChosenSection:
        """Write the faster order of micro-batches into a section, where rates are known; else "auto" decides."""
        order = faster_order(of_orders(choice.job, self.machine))
        if order is None:
            return choice
        job = choice.job.with_keys(micro_batch_order=order)
        tiers = tier_plan(PlacedJob(job, self.machine))
        if tiers.missing and not choice.tiers.missing:
            return choice
        return replace(choice, section=choice.section | {"micro_batch_order": order}, job=job, tiers=tiers)

    def fits(self, shape: ModelShape) -> bool:
        """Return whether any section lets a model be trained; the one that needs least memory is tried first."""
        tried = (candidate.tried(self, shape) for candidate in reversed(self._candidates()))
        return any(choice is not None and not choice.tiers.missing for choice in tried)

    def _candidates(self) -> "list[_Candidate]":
        """Sections from what moves least to what needs least memory."""
        drive = {"device": "nvme", "nvme_path": [str(path.absolute()) for path in self.paths]}
        common: dict[str, Any] = {"bf16": {"enabled": True}, "gradient_clipping": 1.0}
        if self.micro_batches > 1:
            common["gradient_accumulation_steps"] = self.micro_batches
        memory = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
        state = OffloadConfig.from_dict(common | {"zero_optimization": {"stage": 3, "offload_optimizer": drive}})
        found = [_Candidate(common | {"zero_optimization": memory}, ALL_FITS)]
        for each in CANDIDATES:
            section = each.applied(state).model_dump(mode="json", exclude_defaults=True)
            found.append(_Candidate(section, each.why, each.within_budget))
        return found

    def job(self, section: Mapping[str, Any] | Path, shape: ModelShape) -> Job:
        """Return what training a model with a section is, as `initialize` completes that."""
        config = OffloadConfig.of(section).completed_for(self.machine.ranks)
        return Job(
            shape=shape, config=config, tokens=self.tokens, checkpointing=self.checkpointing, sequence=self.sequence
        )


@dataclass(frozen=True)
class _Candidate:
    """A section that may be taken, with the reason to take it."""

    section: dict[str, Any]
    why: str
    fills_memory: bool = False  # what no budget covers leaves memory, which becomes the `host_budget`

    def tried(self, chooser: Chooser, shape: ModelShape) -> ChosenSection | None:
        """Return what the section comes to; None: what is left for a budget is less than the staging buffers."""
        section, why = self.section, self.why
        if self.fills_memory:
            if (left := _left(chooser.job(section, shape), chooser.machine)) < LEAST_BUDGET:
                return None
            budget = left // MiB
            stays = f"{format_bytes(budget * MiB)} are left for what stays there and for buffers"
            section, why = section | {"host_budget": f"{budget}MiB"}, f"{why}: {stays}, the rest is on NVMe"
        job = chooser.job(section, shape)
        try:
            return ChosenSection(section, why, job, tier_plan(PlacedJob(job, chooser.machine)))
        except ConfigError:
            return None


def _left(job: Job, machine: Machine) -> int:
    """Bytes of host memory for one rank beside all that no budget covers."""
    held = [unit for unit in residents(job, account_of_job(job, machine)) if unit.tiers == ("host",)]
    return machine.host_memory // machine.ranks_per_node - sum(unit.size_bytes for unit in held)
