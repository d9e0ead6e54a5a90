"""Decide by which schedule each parameter of a store is updated."""

from collections.abc import Iterable

from nvme_offload.offload.config.overlap import OFF, Overlap
from nvme_offload.offload.devices.device import is_device, is_host
from ..state.body import StepState
from ..state.table import ParamRecord
from ..tiers.parts import parts_of
from .schedule import hindrance, schedule_of


class Schedules:
    """Remembers the schedule of each placed parameter, so that a step does not decide it again."""

    def __init__(self, store: StepState) -> None:
        self._store = store
        self._of: dict[int, Overlap] = {}

    def decide(self) -> None:
        """Decide for all placed parameters. Call it when their places, or who waits for them, have changed."""
        self._of = {record.index: schedule_in(self._store, record) for record in self._store.table if record.is_placed}

    def forget(self) -> None:
        """Have every update inside `step()` until `decide`. Call it before places change."""
        self._of = {}

    def know(self, records: Iterable[ParamRecord]) -> bool:
        """Return whether all of these are decided."""
        return all(record.index in self._of for record in records)

    def of(self, index: int) -> Overlap:
        """Return the schedule of a parameter, by its index."""
        return self._of.get(index, OFF)


def schedule_in(store: StepState, record: ParamRecord) -> Overlap:
    """Return the schedule by which a parameter is updated."""
    on_device = is_device(record.param.device)
    hides = store.config.hides_steps(on_device=on_device)
    return schedule_of(
        store.config.overlap,
        hides=hides,
        hindered=hides and hindrance_in(store, record) is not None,
        crosses=on_device and store.blocks.number_of(record.leaf) >= 0,
    )


def hindrance_in(store: StepState, record: ParamRecord) -> str | None:
    """Say why a placed parameter has to be updated inside `step()`; None where whoever reads it finds it updated."""
    return hindrance(
        store.owner,
        inside=store.updated_inside(record),
        # Parts of what is placed are `StateParts`, or will be when the model is born.
        readers_wait=parts_of(record.leaf) is not None or (record.is_awaited and is_host(record.param.device)),
    )
