"""The state of a durable run moves and takes bytes by how often it is rewritten."""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.durable.chain import SlotLayout, bytes_needed
from nvme_offload.offload.durable.rewrite_every import DurableBytes, DurableRates, PeriodCosts, auto_period, costs_of
from nvme_offload.offload.durable.seal import ExtentLayout
from nvme_offload.offload.storage.tier_plan import Tier, Unit
from nvme_offload.optim.layout.master import DTYPE_OF_FORM, MasterForm, num_tiles, state_itemsize
from nvme_offload.optim.layout.subgroup import Subgroup
from nvme_offload.optim.precision.plan import precision_of
from nvme_offload.optim.rules.registry import rule_of
from nvme_offload.optim.updates.logs import is_loggable
from .machine import Machine
from .traffic import StepTraffic, Traffic

_OF_TILE = 16  # bytes of an entry, for each tile

KIND = "durable state"  # its space on the drives is counted as this, beyond that of state which ends with the process


@dataclass(frozen=True)
class KeptState:
    """The state is rewritten so often, and that has costs."""

    period: int  # every how many steps, where updates are logged; else in every one
    grad_itemsize: int  # bytes of a gradient in a log
    steps_back: int = 1  # the number of steps that can be gone back to
    copies: int = 1  # each on drives of its own

    @classmethod
    def of(cls, config: OffloadConfig, machine: Machine) -> Self | None:
        """As the optimizer would begin; None where the state ends with the process.

        "auto" takes what suits the drives; where they are not known, 1.
        """
        section = config.zero_optimization.offload_optimizer
        if not section.durable:
            return None
        precision, rule, period = precision_of(config), rule_of(config.optimizer), section.rewrite_every
        rates, grad_itemsize = rates_of(machine), precision.accumulate.itemsize
        if not is_loggable(precision.master, rule) or (period == "auto" and rates is None):
            period = 1
        elif period == "auto" and rates is not None:
            state = state_itemsize(precision.master, rule.states)
            size = DurableBytes(state=state, tail=_tail_itemsize(precision.master), grad=grad_itemsize)
            limit = section.wear_limit and section.wear_limit / machine.ranks_per_node
            period = auto_period(size, rates, limit, section.copies)
        assert period != "auto"
        return cls(period, grad_itemsize, section.rewind_steps, section.copies)

    def size_of(self, subgroup: Subgroup) -> DurableBytes:
        """Return what there is of a subgroup."""
        return DurableBytes(
            state=subgroup.size_bytes,
            tail=_tail_itemsize(subgroup.form) * subgroup.numel,
            grad=self.grad_itemsize * subgroup.numel,
            numel=subgroup.numel,
        )

    def costs_of(self, subgroup: Subgroup) -> PeriodCosts:
        """Return what an average step costs of a subgroup."""
        return costs_of(self.size_of(subgroup), self.period, self.copies)

    def buffer_bytes(self, subgroup: Subgroup) -> int:
        """Bytes that a subgroup takes in memory: its base, and the longest log that is read with it."""
        size = self.size_of(subgroup)
        return round(size.base + size.grad * (self.period - 1))

    def traffic(self, in_place: StepTraffic, subgroups: Sequence[Subgroup], tiers: Sequence[Tier]) -> StepTraffic:
        """Return what a step moves: all is written, and as much of what is on drives read as `in_place` reads of it.

        `in_place` is what the state on the drives would move if it ended with the process.
        """
        pairs = [(subgroup, self.costs_of(subgroup), tier) for subgroup, tier in zip(subgroups, tiers, strict=True)]
        on_drives = sum(subgroup.size_bytes for subgroup, _, tier in pairs if tier == "nvme")
        stays = 1 - in_place.total.read / on_drives if on_drives else 0.0
        read = sum(costs.read - self._staying(group, stays) for group, costs, tier in pairs if tier == "nvme")
        return StepTraffic({"update": Traffic(read, sum(costs.written for _, costs, _ in pairs))})

    def _staying(self, subgroup: Subgroup, share: float) -> float:
        """Return what a step need not read, for each of equal subgroups, of which this share stays in the buffers.

        A step ends with those that have the longest logs: see `Sealing.in_order_of_reading`.
        """
        size, period, bytes_kept = self.size_of(subgroup), self.period, 0.0
        reads = [size.state, *(size.base + size.grad * logged for logged in range(1, period))]
        for read in reversed(reads):
            part = min(share, 1 / period)
            bytes_kept, share = bytes_kept + part * read, share - part
        return bytes_kept

    def unit(self, subgroups: Sequence[Subgroup], on_drives: int) -> Unit:
        """The space that bases and logs take besides the state that is counted on the drives already."""
        space = sum(bytes_needed(map(self._layout_of, subgroups), self.steps_back))
        return Unit(KIND, KIND, self.copies * space - on_drives, tiers=("nvme",))

    def _layout_of(self, subgroup: Subgroup) -> SlotLayout:
        tail_bytes = _tail_itemsize(subgroup.form) * subgroup.padded_numel
        base = ExtentLayout(subgroup.size_bytes, tail_bytes, mmap.PAGESIZE)
        if self.period == 1:
            return SlotLayout(base)
        gradients = self.grad_itemsize * subgroup.numel + _OF_TILE * num_tiles(subgroup.numel)
        return SlotLayout(base, ExtentLayout(gradients, 0, mmap.PAGESIZE).size_bytes, self.period)


def rates_of(machine: Machine) -> DurableRates | None:
    """Return what one rank has of a machine; None without drives."""
    drives, ranks = machine.drives, machine.ranks_per_node
    if drives is None:
        return None
    return DurableRates(
        read=drives.read / ranks, write=drives.write / ranks, mixed=drives.mixed / ranks, update=machine.update_rate
    )


def _tail_itemsize(form: MasterForm) -> int:
    return 0 if form is MasterForm.FULL else DTYPE_OF_FORM[form].itemsize
