"""Going back to what the latest commit has of some subgroups, as if the step under way had not come to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version

from nvme_offload.optim.state.slots import SlotRecord
from nvme_offload.optim.state.store import StateStore


def is_as_committed(store: StateStore, slot: SlotRecord) -> bool:
    """Whether the latest commit has a subgroup and its parameters as they are now, so that an update can be undone.

    Raises:
        SwapIOError: a parameter is on a tier and cannot be read.
    """
    sealing = store.sealing
    if sealing is None or sealing.is_held or not sealing.run.extents.is_committed(slot.index):
        return False
    return not sealing.is_changed(slot)


@torch.no_grad()
def take_back(store: StateStore, slots: Sequence[SlotRecord]) -> None:
    """Bring subgroups back to the latest commit, which has all of them: their state and their parameters.

    Nobody else may use the pipeline meanwhile. What was cut short is made good by another call.

    Raises:
        SwapIOError, CorruptionError: a subgroup cannot be read.
    """
    sealing = store.sealing
    assert sealing is not None
    store.mirror.end_step()  # what is on its way to a device has come there before something else is put in its place
    for slot in slots:
        sealing.run.extents.take_back_write(slot.index)
        sealing.find(slot, store.pipeline)
    for position, slot in enumerate(slots):
        memory = store.pipeline.acquire(slots, position, for_change=False, replay=False)
        sealing.bring_back(slot, memory)
    increment_version([store.table[run.param].leaf for slot in slots for run in slot.subgroup.runs])
