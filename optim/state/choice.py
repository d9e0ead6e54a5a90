"""Choose what leaves memory where a section leaves that open: ``"offload": "auto"``, `offload init`, `offload plan`.

Nothing is measured for it. Each candidate moves what the one before it moves, and more. A later one can be faster than
an earlier one that fits where the drive limits and stands still in backward, by what it writes of gradients there: the
plan compares them where rates are known. What a forward saves is known when a first block has been computed: `Keeping`
is chosen then.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.durable.run import DurableRun, places_in
from nvme_offload.offload.progress import say
from nvme_offload.offload.storage.tier_plan import TIERS, TierPlan
from nvme_offload.offload.units import KiB, format_bytes
from nvme_offload.offload.warn import speaks_for_all
from ..tiers.units import STAGING

ALL_FITS = "everything fits into memory: no byte has to move to a drive"


class Candidate(NamedTuple):
    """A way to divide training state between memory and NVMe."""

    why: str
    gradients: bool = False
    """Whether gradients may leave memory, too."""
    params: bool = False
    """Whether parameters may."""
    within_budget: bool = True
    """Whether what memory has left becomes the `host_budget`."""

    def applied(self, config: OffloadConfig) -> OffloadConfig:
        """Return the section with what this chooses in place of ``"offload": "auto"``."""
        zero, gradients = config.zero_optimization, config.offload_gradients
        state, param = zero.offload_optimizer, zero.offload_param
        if state.durable and "rewrite_every" not in state.model_fields_set:
            state = state.model_copy(update={"rewrite_every": "auto"})
        drive = {"device": "nvme", "nvme_path": state.nvme_path}
        if self.params:
            param = param.model_copy(update=drive)
        if self.gradients:
            gradients = gradients.model_copy(update=drive)
        keys: dict[str, Any] = {
            "offload": None,
            "zero_optimization": zero.model_copy(update={"offload_optimizer": state, "offload_param": param}),
            "offload_gradients": gradients,
            "host_budget": config.host_budget or ("auto" if self.within_budget else None),
        }
        return config.model_copy(update=keys)

    def tell(self, plan: TierPlan) -> None:
        """Say once, in a line on standard error, where everything has its place on the first rank, and why."""
        if not speaks_for_all():
            return
        parts = []
        for kind in dict.fromkeys(unit.kind for unit in plan.units if unit.kind != STAGING):
            sizes = {tier: plan.bytes_on(tier, kind) for tier in TIERS}
            if there := [f"{format_bytes(size)} ({tier})" for tier, size in sizes.items() if size]:
                parts.append(f"{kind} {' + '.join(there)}")
        why = self.why if plan.units_on("nvme") else ALL_FITS
        say(f"nvme-offload: {why}. On this rank: {', '.join(parts)}")


CANDIDATES = (
    Candidate("the optimizer state does not fit into memory beside parameters and gradients"),
    Candidate("gradients do not fit into memory beside parameters and what a step needs", gradients=True),
    Candidate("parameters and gradients do not fit into memory beside what a step needs", gradients=True, params=True),
    Candidate("memory is scarce: everything is on NVMe that can go there", True, True, within_budget=False),
)
"""They come in the order of what they move; the last one needs least memory."""


def chosen_before(config: OffloadConfig) -> int | None:
    """Return the number of the candidate with which the durable run of a section began; None where nobody knows.

    Raises:
        ResumeError: what the run says of itself is damaged, or of a newer version.
    """
    places = DurableRun.said(config).get("places")
    fitting = (number for number, each in enumerate(CANDIDATES) if places_in(each.applied(config)) == places)
    return next(fitting, None)


class SavedSizes(NamedTuple):
    """One rank has seen these bytes when the first block of its first forward was computed."""

    room: int  # that a forward may save, where it computes
    inside: int  # that a block saves
    boundary: int  # that enters a block
    moving: int  # of parameters and gradients, that go to NVMe and come back in each pass through all blocks
    repeats: bool = True  # whether a block can be computed twice: it is given nothing that it may change


class Keeping(NamedTuple):
    """A run keeps this for backward, and has this order of micro-batches where they might go block by block."""

    keep: Literal["none", "boundaries", "all"]
    """See ``activations.keep``; on NVMe as far as memory is short. ``none``: all stays as the model has it."""
    order: Literal["auto", "horizontal"] = "auto"

    @classmethod
    def of(cls, found: Sequence[SavedSizes], blocks: int, waiting: int) -> Self:
        """Choose for all ranks by the worst of each number.

        Args:
            found: of each rank.
            blocks: how many there are.
            waiting: micro-batches that wait for one another at each block; 1: they come one after the other.
        """
        room, inside = min(one.room for one in found), max(one.inside for one in found)
        boundary, moving = max(one.boundary for one in found), max(one.moving for one in found)
        inside = max(inside, boundary)
        fits, waits = inside * blocks <= room, boundary * (blocks + 1) * waiting  # and gradients of one more
        one_by_one = 0 if fits else max(0, boundary * blocks - room)
        keep: Literal["boundaries", "all"] = "boundaries" if all(one.repeats for one in found) else "all"
        if waiting > 1 and waiting * (moving + 2 * one_by_one) < moving + 2 * max(0, waits - room):
            return cls("none" if fits else keep, "horizontal")
        return cls(keep if not fits or (waiting > 1 and waits > room) else "none")

    @classmethod
    def begun(cls, config: OffloadConfig) -> Self | None:
        """Return what the durable run of a section began with; None where nobody has chosen yet."""
        said = DurableRun.said(config).get("keeping")
        return cls(said.get("keep", "none"), said.get("order", "auto")) if isinstance(said, Mapping) else None

    @staticmethod
    def is_open(config: OffloadConfig) -> bool:
        """Whether a section with ``"offload": "auto"`` leaves open what is kept."""
        return not {"device", "keep"} & config.activations.model_fields_set

    def applied(self, config: OffloadConfig, room: int) -> OffloadConfig:
        """Return the section with what this chooses; tensors that are kept may have so many bytes of host memory."""
        kept, update = config.activations, dict[str, Any]()
        if self.order != "auto":
            update["micro_batch_order"] = self.order
        if self.keep != "none":
            budget = (
                max(_LEAST_KEPT, room) // _LEAST_KEPT * _LEAST_KEPT if kept.host_budget == "auto" else kept.host_budget
            )
            place = {"keep": self.keep, "device": "nvme", "nvme_path": config.nvme_paths, "host_budget": budget}
            update["activations"] = kept.model_copy(update=place)
        return config.model_copy(update=update)

    def tell(self, found: SavedSizes, blocks: int) -> None:
        """Say in a line on standard error what leaves memory, if anything does, or goes in another order."""
        if speaks_for_all() and (self.keep != "none" or self.order != "auto"):
            kept = "inputs of blocks are" if self.keep == "boundaries" else "all of it is"
            what = "all of it stays" if self.keep == "none" else f"{kept} kept, on NVMe as far as memory is short"
            order = ", and micro-batches go one after the other" if self.order != "auto" else ""
            sizes = f"{format_bytes(found.inside * blocks)} for backward, and memory has {format_bytes(found.room)}"
            say(f"nvme-offload: a forward saves {sizes}: {what}{order}")


_LEAST_KEPT = 4 * KiB
