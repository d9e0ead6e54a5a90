"""Plan where the state of each subgroup and each block lives: as the configuration says, within the host budget."""

import math
import mmap
import sys
from collections.abc import Callable, Sequence

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.errors import ConfigError
from nvme_offload.offload.storage.tier_plan import Tier, TierPlan, Unit, plan_tiers
from nvme_offload.offload.units import MiB, format_bytes, round_up
from ..layout.master import TILE_NUMEL, MasterForm, state_itemsize
from ..layout.subgroup import Subgroup
from ..rules.rule import UpdateRule
from ..tiers.units import STAGING
from ..updates.mirrored import DeviceMirror
from .pipeline import KIND
from .slots import SlotRecord

_GRAD_ITEMSIZE = 4  # the widest
LEAST_BUDGET = 64 * MiB
"""Staging buffers within a smaller `host_budget` are so small that a drive does not reach its rate."""
_STAGING_PART = 8
"""Staging buffers take one part in so many of a larger `host_budget`: what they take no state can have."""


class StatePlacement:
    """The budgets of one optimizer, and the tier plans they make.

    Args:
        config: the whole section. A host budget of "auto" is fixed by `fix_budget`.
        rule: of the optimizer; a group may have fewer states than it has at most.
        period: every how many steps a durable run is rewritten; None: it is not measured yet.
        size_of: gives the bytes that a durable run's subgroups take in a buffer; None: they hold the state alone.
    """

    def __init__(
        self,
        config: OffloadConfig,
        rule: UpdateRule,
        period: int | None = None,
        size_of: Callable[[Subgroup], int] | None = None,
    ) -> None:
        self._section = config.zero_optimization.offload_optimizer
        every = self._section.rewrite_every
        period = period or (every if isinstance(every, int) else 1)
        self._num_logged = period - 1 if self._section.run_name is not None else None
        """Log entries that are read beside a subgroup of a durable run, at most; None where there is no log."""
        self._size_of = size_of
        # A master that is not beside its parameter has it in a tail: sealed or not, the widest form is the same.
        widest = state_itemsize(MasterForm.FULL, rule.widest_states) + (self._num_logged or 0) * _GRAD_ITEMSIZE
        self._largest_block_bytes = int(TILE_NUMEL * widest)
        # The mirrors of a device take as much memory as this many more staging buffers, at most.
        narrowest = max(state_itemsize(MasterForm.ITSELF, rule.states), 1)
        self._mirrors_in_buffers = math.ceil(DeviceMirror.BYTES_PER_ELEMENT / narrowest)
        self._on_nvme = self._section.device == "nvme"
        self._is_found = config.host_budget == "auto"
        self._found_bytes = LEAST_BUDGET
        self.host_budget = None if config.host_budget == "auto" else config.host_budget
        """Bytes; None is no limit, and no wish to have state in host memory that may be on NVMe."""
        self.device_budget = config.device_budget
        """Bytes of state; None: no state stays on a device."""
        if self._on_nvme:
            self._check_staging_budget()

    def fix_budget(self, found: Callable[[], int]) -> None:
        """Replace a host budget of "auto" by the bytes that are found, before anything is placed.

        A step needs staging buffers on a full machine, too: they are taken from what "auto" leaves free.
        """
        if self._is_found:
            self._found_bytes = max(0, found())
            self.host_budget = max(LEAST_BUDGET, self._found_bytes) if self._on_nvme else self._found_bytes

    @property
    def scarcity(self) -> str:
        """Say that "auto" found less than `LEAST_BUDGET`; empty where it found more, or was not asked."""
        if self._found_bytes >= LEAST_BUDGET or not self._on_nvme:
            return ""
        return (
            f'host_budget = "auto" found {format_bytes(self._found_bytes)} of memory that training may take: '
            f"{format_bytes(LEAST_BUDGET)} are taken for staging buffers all the same, and state beyond that is on "
            "NVMe. Free memory, or write a host_budget in bytes"
        )

    def max_subgroup_bytes(self, host_state_bytes: int, with_mirrors: bool) -> int:
        """Return the bytes that one staging buffer, and with it the state of one new subgroup, may have.

        `host_state_bytes` live in host memory already: subgroups, blocks, and the staging buffers of blocks.
        """
        if not self._on_nvme:
            return sys.maxsize
        num_buffers = self._section.buffer_count
        share = self._section.staging_budget // num_buffers
        if self.host_budget is not None:
            num_shares = num_buffers + (self._mirrors_in_buffers if with_mirrors else 0)
            most = (self.host_budget - host_state_bytes) // num_shares
            share = min(share, most, max(most // _STAGING_PART, LEAST_BUDGET // num_shares))
        share -= self._sealed_beside(share)
        return max(share // mmap.PAGESIZE * mmap.PAGESIZE, self._largest_block_bytes)

    def num_buffers(self, subgroups: Sequence[Subgroup], *, may_stay: bool = False) -> int:
        """Return how many staging buffers these need: no more than they are, nor more bytes than all of them have.

        `may_stay`: some may stay in host memory. Within a host budget all buffers have room then, for what comes later.
        """
        count = self._section.buffer_count
        if may_stay and self.host_budget is not None:
            return count
        sizes = [self.size_bytes(subgroup) for subgroup in subgroups]
        return max(1, min(count, sum(sizes) // max([1, *sizes])))

    def size_bytes(self, subgroup: Subgroup) -> int:
        """Return the bytes that a subgroup takes in memory: its state, and what a durable run writes beside it."""
        return subgroup.size_bytes if self._size_of is None else self._size_of(subgroup)

    def check_whole(self, rule: UpdateRule, needed_bytes: int, name: str) -> None:
        """Raise ConfigError if no staging buffer holds the state of a parameter that its rule needs whole."""
        needed_bytes += self._sealed_beside(needed_bytes)
        if rule.whole and self._on_nvme and needed_bytes > self._buffer_bytes:
            state, buffer = f"the state of {name} ({format_bytes(needed_bytes)})", format_bytes(self._buffer_bytes)
            what = f"{rule.name} needs matrices whole, and {state} is larger than a staging buffer ({buffer})"
            raise self._refused_budget(what, round_up(needed_bytes, MiB))

    def plan(
        self,
        placed: Sequence[SlotRecord],
        new: Sequence[Subgroup],
        staging_bytes: int,
        page: int,
        blocks: Sequence[Unit] = (),
        *,
        on_device: bool = False,
    ) -> TierPlan:
        """Plan what lives where: staging buffers first, then what has its place, then as much as fits of the new.

        ConfigError: the host budget does not hold what must be in host memory.

        Args:
            placed: subgroups that have their place; they stay where they are.
            new: subgroups to place.
            staging_bytes: host memory of the staging buffers (and mirrors) that all of them need.
            page: extents are rounded up to this, in bytes.
            blocks: of parameters and gradients, with their staging buffers: see `BlockTiers.units`.
            on_device: the parameters of new subgroups are on a device.

        Returns:
            A plan of `blocks`, the staging buffers of the state, `placed` and `new`, in this order.
        """
        choice: tuple[Tier, ...] = ("nvme",) if self._on_nvme else ("host",)
        if self._on_nvme and self.host_budget is not None:
            choice = ("host", "nvme")
        units = list(blocks)
        units += [Unit(f"{STAGING} of {KIND}", STAGING, staging_bytes, tiers=("host",))] if staging_bytes else []
        units += [self._unit(slot.subgroup, page, (slot.home.tier,)) for slot in placed]
        units += [self._unit(subgroup, page, self._choice(subgroup, choice, on_device)) for subgroup in new]
        budgets: dict[Tier, int] = {} if self.host_budget is None else {"host": self.host_budget}
        if self.device_budget is not None:
            budgets["device"] = self.device_budget
        plan = plan_tiers(units, budgets)
        if plan.excess("host"):
            raise ConfigError([self._too_small(plan)])
        return plan

    def _choice(self, subgroup: Subgroup, choice: tuple[Tier, ...], on_device: bool) -> tuple[Tier, ...]:
        """Return where a new subgroup may be. The host updates whole matrices."""
        # Without a byte of state, as that of plain SGD over fp32 parameters, there is nothing to put on a drive.
        usual: tuple[Tier, ...] = choice if self.size_bytes(subgroup) else ("host",)
        may_stay = on_device and self.device_budget is not None and not subgroup.rule.whole
        return ("device", *usual) if may_stay else usual

    def _unit(self, subgroup: Subgroup, page: int, tiers: tuple[Tier, ...]) -> Unit:
        size_bytes = round_up(self.size_bytes(subgroup), page)
        read_bytes = round_up(subgroup.size_bytes, page)
        return Unit(f"subgroup {subgroup.index}", KIND, size_bytes, read_bytes, size_bytes, tiers)

    @property
    def _buffer_bytes(self) -> int:
        return self._section.staging_budget // self._section.buffer_count // mmap.PAGESIZE * mmap.PAGESIZE

    def _check_staging_budget(self) -> None:
        least = self._largest_block_bytes
        least += self._sealed_beside(least)
        if self._buffer_bytes < least:
            buffers = f"each of the {self._section.buffer_count} staging buffers"
            raise self._refused_budget(f"{buffers} must hold the state of {TILE_NUMEL} parameters", least)

    def _refused_budget(self, why: str, buffer_bytes: int) -> ConfigError:
        budget = f"zero_optimization.offload_optimizer.staging_budget = {format_bytes(self._section.staging_budget)}"
        needed = format_bytes(self._section.buffer_count * buffer_bytes)
        return ConfigError([f"{budget}: {why}; write at least {needed}, or a smaller buffer_count"])

    def _sealed_beside(self, size_bytes: int) -> int:
        """Return the most bytes that a durable run's buffer has beside these of state, parameters and gradients.

        A trailer has 8 bytes for each 256 KiB, a log entry 16 for each tile; each of these parts is rounded up.
        """
        if self._num_logged is None:
            return 0
        beside = 4 * mmap.PAGESIZE + size_bytes // 32768
        return beside + self._num_logged * 4 * mmap.PAGESIZE + (size_bytes // 4096 if self._num_logged else 0)

    def _too_small(self, plan: TierPlan) -> str:
        found = f' ("auto" found {format_bytes(self._found_bytes)})' if self._is_found else ""
        shown = f"host_budget = {format_bytes(self.host_budget or 0)}{found}"
        needed = format_bytes(round_up(plan.bytes_on("host"), MiB))
        buffers = {unit.name: format_bytes(unit.size_bytes) for unit in plan.units_on("host", STAGING)}
        of_blocks = [f"{name} {size}" for name, size in buffers.items() if not name.endswith(KIND)]
        if not self._on_nvme:
            device = self._section.device
            beside = f" beside {', '.join(of_blocks)}" if of_blocks else ""
            why = f'device = "{device}" keeps all state in host memory{beside}'
            return f'{shown}: {why}; write at least {needed}, or "nvme"'
        kept = sum(plan.bytes_on("host", kind) for kind in {unit.kind for unit in plan.units} - {STAGING})
        beside = f" beside {format_bytes(kept)} of state that is there already" if kept else ""
        own = buffers.get(f"{STAGING} of {KIND}", "0 B")
        more = f" ({KIND}), {', '.join(of_blocks)}" if of_blocks else ""
        why = f"the {self._section.buffer_count} staging buffers take {own}{more}{beside}"
        return f"{shown}: {why}; write at least {needed}, or a smaller buffer_count"
