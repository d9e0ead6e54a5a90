"""By which schedule the parameters of a store are updated."""

from __future__ import annotations

from nvme_offload.offload.devices.device import is_device, is_host
from nvme_offload.optim.state.state_parts import StateParts
from nvme_offload.optim.state.store import StateStore
from nvme_offload.optim.state.table import ParamRecord
from nvme_offload.optim.step.schedule import OverlapStep, hindrance, schedule_of
from nvme_offload.optim.tiers.parts import parts_of
from nvme_offload.optim.updates.choice import way_of


def schedule_in(store: StateStore, record: ParamRecord) -> OverlapStep:
    """Return the schedule by which a parameter is updated."""
    return schedule_of(
        store.config.overlap_step,
        hides=store.config.hides_steps(on_device=is_device(record.param.device)),
        hindered=hindrance_in(store, record) is not None,
        grads_on_way=store.blocks.takes_gradient(record.leaf),
    )


def hindrance_in(store: StateStore, record: ParamRecord) -> str | None:
    """Say why a parameter has to be updated inside `step()`; None where whoever reads it finds it updated."""
    return hindrance(
        store.owner,
        inside=way_of(record.rule, is_durable=store.run is not None, on_device=False).inside,
        through_buffers=store.blocks.pass_through_buffers,
        readers_wait=isinstance(parts_of(record.leaf), StateParts)
        or (record.is_awaited and is_host(record.param.device)),
    )
