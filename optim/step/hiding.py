"""Which updates can be hidden behind a step or in backward, as far as their parameters say."""

from __future__ import annotations

from nvme_offload.offload.devices.device import is_host
from nvme_offload.optim.state.state_parts import StateParts
from nvme_offload.optim.state.store import StateStore
from nvme_offload.optim.state.table import ParamRecord
from nvme_offload.optim.tiers.parts import parts_of


def waits_for_updates(store: StateStore, record: ParamRecord) -> bool:
    """Whether whoever reads this parameter finds it updated, also where the update is done behind a step."""
    return store.config.hides_steps and hindrance(store, record) is None


def hindrance(store: StateStore, record: ParamRecord) -> str | None:
    """Say why a parameter has to be updated inside `step()`; None where its gather can wait for the update."""
    if record.rule.whole:  # they are gathered over ranks, which no two threads of a process may do at once
        return f"{store.owner} updates whole parameters"
    if store.blocks.pass_through_buffers:
        return "parameters have a tier of their own (offload_param), or gradients are on NVMe (offload_gradients)"
    if isinstance(parts_of(record.leaf), StateParts) or (record.is_awaited and is_host(record.param.device)):
        return None
    return (
        "its parameters are neither in host memory and of a plain module that optimizer.overlap_with(model) was told, "
        "nor shards in parts, which initialize and split_parameters make"
    )
