"""Offer a store one object that says how long its state lasts: perhaps longer than its process."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from nvme_offload.aio_native.bell import Bell
from nvme_offload.offload.storage.nvme_tier import NvmeTier
from ..kernels import KernelPool
from ..layout.subgroup import Subgroup
from ..telemetry.stats import Meter
from ..updates.log_state import LogState
from ..updates.mirrored import DeviceMirror
from ..updates.work import Fused, Means
from .pipeline import Seal, StepPipeline
from .slots import SlotRecord
from .table import ParamRecord, ParamTable


class Ground(NamedTuple):
    """A store makes these first; all else of an optimizer stands on them."""

    table: ParamTable
    kernels: KernelPool
    mirror: DeviceMirror
    meter: Meter
    fused: Fused

    def param_of(self, index: int) -> torch.Tensor:
        """Return what is in this process's memory of a parameter."""
        return self.table[index].param

    def computing(self, subgroup: int) -> AbstractContextManager[None]:
        """Count the time inside as that of a subgroup's update."""
        return self.meter.computing("compute", subgroup)


class Durability:
    """Answers what a store asks of its state's life. With this class state ends with the process.

    The state of a durable run has a class of its own (`optim.durable.state`), which the optimizer hands to the store.
    So nothing here and below asks whether a run is durable.
    """

    run_found: str | None = None
    """The name of a run that another process has left, until it is resumed."""
    takes_all = False
    """Whether all state is written, also what lives in memory."""
    may_write = True
    """Whether a write would begin at once. Otherwise it waits for a commit."""
    period = 1
    """A subgroup is rewritten at least every so many steps."""
    seal: Seal | None = None
    """Completes what is written, so that another process can go on with it."""

    def __init__(self, tier: NvmeTier | None) -> None:
        self.tier = tier

    # Placing.

    def means(self, ground: Ground) -> Means:
        """Return what the updaters of an optimizer work with."""
        return Means(ground.kernels, ground.param_of, ground.fused, ground.computing)

    def new_log(self) -> LogState | None:
        """Return what a slot needs besides, if anything."""
        return None

    def size_in_buffer(self, subgroup: Subgroup) -> int:
        """Return the bytes that a subgroup takes in a staging buffer."""
        return subgroup.size_bytes

    def log_itemsize(self, record: ParamRecord) -> int:
        """Return the bytes of log that are read beside an element's state, at most."""
        return 0

    def space_of(self, subgroups: Sequence[Subgroup]) -> list[int]:
        """Return the bytes of each extent that new subgroups need on NVMe."""
        return [subgroup.size_bytes for subgroup in subgroups]

    def promise(self, subgroups: Sequence[Subgroup]) -> None:
        """Promise new subgroups their extents, where `takes_all`. OutOfSpaceError: nothing has changed."""
        raise AssertionError("whoever does not take all promises nothing")

    def drop(self, first: int) -> None:
        """Take back what was promised to the subgroups from `first` on."""

    # Steps.

    def in_order_of_reading(self, slots: Sequence[SlotRecord]) -> list[SlotRecord]:
        """Return subgroups in the order in which a step had better go through them."""
        return list(slots)

    def is_as_committed(self, slot: SlotRecord) -> bool:
        """Return whether the latest commit has all of a subgroup as it is now, so that `take_back` brings that back."""
        return False

    def take_back(self, slots: Sequence[SlotRecord], pipeline: StepPipeline) -> None:
        """Bring subgroups that `is_as_committed` held for back to that: their state and their parameters.

        Nobody else may use the pipeline meanwhile. What an error or a signal cuts short is made good by another call.
        """
        raise AssertionError("nothing is as committed where nothing is committed")

    def end_updates(self, pipeline: StepPipeline, bell: Bell) -> None:
        """Note that the updates behind a step are done; ring `bell` when they last. The caller owns the state."""

    # Its life.

    def begin_load(self, subgroups: Iterable[Subgroup]) -> None:
        """Note that other state replaces all there is. ResumeError: the run that was found is of another model."""

    def close(self) -> None:
        """Close the files, after all transfers are done. Idempotent."""
        if self.tier is not None:
            self.tier.close()


OpenDurability = Callable[[Ground], Durability]
"""Opens the files of an optimizer's state. What fails leaves nothing behind."""
