"""What a run is: all that must be equal where somebody goes on from what it committed."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from nvme_offload.optim.kernels import REVISION
from nvme_offload.optim.layout.subgroup import Subgroup
from nvme_offload.optim.state.body import StateBody


def identity_of(body: StateBody, rewrite_every: int) -> dict[str, Any]:
    """JSON that is equal for the same parameters, groups, rule, ranks, subgroups and kind of log."""
    logged = {"rewrite_every": rewrite_every} if rewrite_every > 1 else {}
    table = body.table
    numels = Counter(str(record.leaf.dtype).removeprefix("torch.") for record in table)
    total = sum(record.leaf.numel() for record in table)
    kinds = ", ".join(f"{count} in {dtype}" for dtype, count in sorted(numels.items()))
    return {
        **logged,
        "model": f"{len(table)} parameters ({kinds}), {total:,} elements",
        "optimizer": body.owner,
        "rank": dist.get_rank() if dist.is_initialized() else 0,
        "num_ranks": dist.get_world_size() if dist.is_initialized() else 1,
        "kernel_revision": REVISION,
        "parameters": {
            record.name: {
                "shape": list(record.leaf.shape),
                "of_this_rank": list(record.param.shape),
                "dtype": str(record.param.dtype).removeprefix("torch."),
                "group": record.group,
                "states": [state.name for state in record.rule.states],
                "has_state": record.is_placed,
            }
            for record in table
        },
        "num_subgroups": len(body.slots),
        "layout": _digest_of(slot.subgroup for slot in body.slots),
    }


def _digest_of(subgroups: Iterable[Subgroup]) -> str:
    """Of where every element is: what `sub_group_size` and the staging budget make of the parameters."""
    places = [(int(subgroup.form), subgroup.padded_numel, subgroup.runs) for subgroup in subgroups]
    return hashlib.blake2b(json.dumps(places).encode(), digest_size=16).hexdigest()
