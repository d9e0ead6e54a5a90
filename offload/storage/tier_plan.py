"""The tier plan: what lives in which memory, from sizes and budgets. A pure function; it moves nothing."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..units import format_bytes

Tier = Literal["device", "host", "nvme"]
TIERS: tuple[Tier, ...] = ("device", "host", "nvme")
"""Names of all tiers, the fastest first."""


@dataclass(frozen=True)
class Unit:
    """A unit is placed whole: state of a subgroup, a block of parameters, a gradient partition, staging buffers."""

    name: str
    kind: str
    """Totals are kept under this name, for example "optimizer state"."""
    size_bytes: int
    bytes_read: int = 0
    """Bytes that one step reads of the unit from NVMe, if it lives there."""
    bytes_written: int = 0
    tiers: tuple[Tier, ...] = ("host", "nvme")
    """Tiers on which the unit may live; the last one is for when no budget holds it. One alone: that is decided."""

    @property
    def moved_per_byte(self) -> float:
        """Bytes that one step moves of the unit for each byte of it, if it lives on NVMe."""
        # Two digits: rounding up to whole pages makes small units look a little dearer than large ones.
        return float(f"{(self.bytes_read + self.bytes_written) / max(1, self.size_bytes):.1e}")


@dataclass(frozen=True)
class TierPlan:
    """A plan says what lives where. ``str(plan)`` is a table."""

    units: tuple[Unit, ...]
    tiers: tuple[Tier, ...]
    """The tier of each unit, in the order of `units`."""
    budgets: Mapping[Tier, int]
    """Bytes that each tier may hold; a tier that is absent has no limit."""

    def units_on(self, tier: Tier, kind: str | None = None) -> list[Unit]:
        """Return the units of a tier, of one kind if it is given, in their order."""
        pairs = zip(self.units, self.tiers, strict=True)
        return [unit for unit, its_tier in pairs if its_tier == tier and kind in (None, unit.kind)]

    def bytes_on(self, tier: Tier, kind: str | None = None) -> int:
        """Return the bytes that live on a tier, of one kind if it is given."""
        return sum(unit.size_bytes for unit in self.units_on(tier, kind))

    def excess(self, tier: Tier) -> int:
        """Return the bytes by which a tier's budget is too small for what can live nowhere else; 0 if it fits."""
        return max(0, self.bytes_on(tier) - self.budgets[tier]) if tier in self.budgets else 0

    @property
    def missing(self) -> dict[Tier, int]:
        """Return the `excess` of each tier that has any; empty where everything fits."""
        return {tier: excess for tier in TIERS if (excess := self.excess(tier))}

    @property
    def bytes_read(self) -> int:
        """Bytes read from NVMe in one step, at most: what a step finds in staging buffers is not read."""
        return sum(unit.bytes_read for unit in self.units_on("nvme"))

    @property
    def bytes_written(self) -> int:
        """Bytes written to NVMe in one step."""
        return sum(unit.bytes_written for unit in self.units_on("nvme"))

    def __str__(self) -> str:
        row = "{:<8}{:<18}{:>7}{:>12}{:>12}{:>14}".format
        lines = [row("tier", "what", "units", "bytes", "read/step", "written/step")]
        for tier in TIERS:
            for kind in dict.fromkeys(unit.kind for unit in self.units_on(tier)):
                units, moves = self.units_on(tier, kind), tier == "nvme"
                read = format_bytes(sum(unit.bytes_read for unit in units)) if moves else "-"
                written = format_bytes(sum(unit.bytes_written for unit in units)) if moves else "-"
                lines.append(row(tier, kind, len(units), format_bytes(self.bytes_on(tier, kind)), read, written))
            if tier in self.budgets:
                size, budget = format_bytes(self.bytes_on(tier)), format_bytes(self.budgets[tier])
                lines.append(row(tier, "together", "", size, "", "") + f"  of {budget}")
        return "\n".join(lines)


def plan_tiers(units: Iterable[Unit], budgets: Mapping[Tier, int]) -> TierPlan:
    """Place units: what may live on one tier only goes there first, the rest as high up as budgets allow.

    Of what competes for a tier, that comes first which moves most per byte of memory. Units that move about the same
    are spread evenly, in the order in which a step visits them, so that work on those that stay hides the transfers of
    those that move. A plan is made also where a budget is too small: see `TierPlan.excess`.
    """
    units = tuple(units)
    tiers: list[Tier | None] = [unit.tiers[0] if len(unit.tiers) == 1 else None for unit in units]
    left = dict(budgets)
    for unit, fixed in zip(units, tiers, strict=True):
        if fixed in left:
            left[fixed] -= unit.size_bytes
    for tier in TIERS:
        undecided = [i for i, fixed in enumerate(tiers) if fixed is None and tier in units[i].tiers]
        moves = {i: units[i].moved_per_byte for i in undecided}
        for most in sorted(set(moves.values()), reverse=True):
            candidates = [i for i, moved in moves.items() if moved == most]
            sizes = [units[i].size_bytes for i in candidates]
            for place in _spread(sizes, left[tier]) if tier in left else range(len(sizes)):
                tiers[candidates[place]] = tier
                if tier in left:
                    left[tier] -= sizes[place]
    placed = (fixed or unit.tiers[-1] for unit, fixed in zip(units, tiers, strict=True))
    return TierPlan(units, tuple(placed), dict(budgets))


def _spread(sizes: Sequence[int], budget: int) -> list[int]:
    """Indices of as many units as fit into a budget, evenly over all of them."""
    total = sum(sizes)
    chosen, used, passed = [], 0, 0
    for i, size in enumerate(sizes):
        passed += size
        # The middle of this unit among those chosen must have been passed among all (Bresenham's rule).
        if used + size <= budget and (2 * used + size) * total <= 2 * budget * passed:
            chosen.append(i)
            used += size
    for i in sorted(set(range(len(sizes))) - set(chosen)):
        if used + sizes[i] <= budget:
            chosen.append(i)
            used += sizes[i]
    return sorted(chosen)
