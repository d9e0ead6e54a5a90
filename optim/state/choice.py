"""Choose what leaves memory where a section leaves that open: ``"offload": "auto"``, `offload init`, `offload plan`.

Nothing is measured for it. Each candidate moves what the one before it moves, and more. A later one can be faster than
an earlier one that fits where the drive limits and stands still in backward, by what it writes of gradients there: the
plan compares them where rates are known.
"""

from typing import Any, NamedTuple

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.durable.run import DurableRun, places_in
from nvme_offload.offload.progress import say
from nvme_offload.offload.storage.tier_plan import TIERS, TierPlan
from nvme_offload.offload.units import format_bytes
from nvme_offload.offload.warn import speaks_for_all
from nvme_offload.optim.tiers.units import STAGING

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
    places = DurableRun.places(config)
    fitting = (number for number, each in enumerate(CANDIDATES) if places_in(each.applied(config)) == places)
    return next(fitting, None)
