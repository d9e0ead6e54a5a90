"""Name what a step asks of all that its state is placed in: it knows no tier, no section and no run."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from nvme_offload.aio_native.bell import Bell
from nvme_offload.offload.config.overlap import Overlap, OverlapStep
from ..layout.subgroup import Subgroup
from .pipeline import StepPipeline
from .slots import SlotRecord


class StepSettings(Protocol):
    """The section's settings for steps; see `OffloadConfig`."""

    overlap_step: OverlapStep | None
    gradient_clipping: float
    gradient_accumulation_steps: int | None
    skip_non_finite: bool

    @property
    def overlap(self) -> Overlap:
        """The schedule that ``overlap_step`` names."""

    def hides_steps(self, *, on_device: bool) -> bool:
        """Whether updates go on behind a step, as far as who reads the parameters can wait for them."""


class Blocks(Protocol):
    """The tiers of parameters and gradients, if there are any; see `BlockTiers`."""

    @property
    def exist(self) -> bool:
        """Whether there is a tier."""

    def takes_turns(self, number: int) -> bool:
        """Whether updates of a block's parameters need what a gather, or backward, may be using."""

    def number_of(self, leaf: torch.Tensor) -> int:
        """Return the number of a parameter's block; -1 if there is no tier for it."""

    def land_gradients(self) -> None:
        """Wait for gradients that are on their way from a device."""

    def begin_step(self, inside: Sequence[Subgroup], behind: Sequence[Subgroup]) -> None:
        """Read blocks ahead for a step that will go through these subgroups in this order."""

    def held_for_update(
        self, subgroup: Subgroup, grads: Mapping[int, torch.Tensor], *, in_order: bool, is_gathered: bool
    ) -> AbstractContextManager[object]:
        """Keep the parameters and gradients of a subgroup in memory while a step updates it."""

    def keep_gathered(self, keeps: bool) -> None:
        """Keep each block of parameters in its buffer from its gather to the next one's; or keep none."""

    def forget_gradients(self, number: int) -> None:
        """Keep no gradients of a block, which were all used."""

    def advance(self) -> None:
        """Start reads that have become possible."""

    def synchronize(self) -> None:
        """Wait for what is being read and written."""

    def end_step(self, inside: Sequence[Subgroup], behind: Sequence[Subgroup]) -> None:
        """Note that a step goes in this order."""


class Commitments(Protocol):
    """A life that the state may have after its process; see `Durability`."""

    @property
    def may_write(self) -> bool:
        """Whether a write would begin at once."""

    def in_order_of_reading(self, slots: Sequence[SlotRecord]) -> list[SlotRecord]:
        """Return subgroups in the order in which a step had better go through them."""

    def is_as_committed(self, slot: SlotRecord) -> bool:
        """Return whether the latest commit has all of a subgroup as it is now."""

    def take_back(self, slots: Sequence[SlotRecord], pipeline: StepPipeline) -> None:
        """Bring subgroups that `is_as_committed` held for back to that."""

    def end_updates(self, pipeline: StepPipeline, bell: Bell) -> None:
        """Note that the updates behind a step are done."""
