"""This rank's parts of parameters, gradients and states: what DeepSpeed's ``safe_get_local_...`` read and set."""

import torch

from nvme_offload.offload._torch_private import local_tensor
from nvme_offload.offload.warn import door
from nvme_offload.optim.access.entries import read_entries, set_entries
from nvme_offload.optim.access.full_values import check_state_name, owner_of, set_grad_part, set_param_part
from nvme_offload.optim.layout.flat import PartitionStandIn


@door
@torch.no_grad()
def get_own_part(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """Return a copy of this rank's part of a parameter's ``master``, ``grad`` or state, fp32; no other rank takes part.

    Returns:
        On the CPU, in the shape of the part; None where the parameter is frozen, or has no gradient.

    Raises:
        ValueError: it is no parameter of an open `OffloadOptimizer`, or has no such state.
        SwapIOError: it could not be read from its tier.
    """
    body, record = owner_of(param, "get_own_part")
    if not param.requires_grad:
        return None
    if optim_state_key == "grad":
        local = local_tensor(param.grad) if param.grad is not None else None
        part = local.partition.copy() if isinstance(local, PartitionStandIn) else local
    elif optim_state_key == "master" and optim_state_key not in record.entry_names:
        part = local_tensor(param)
    else:
        check_state_name(record, optim_state_key, "get_own_part")
        part = local_tensor(read_entries(body, {record.index: (optim_state_key,)})[record.index][optim_state_key])
    return part.detach().cpu().float().clone() if part is not None else None


@door
@torch.no_grad()
def set_own_part(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Set this rank's part of a parameter's ``master``, of its ``grad`` if there is one, or of a state.

    Raises:
        ValueError: as `get_own_part`, or the value has another shape than the part.
        SwapIOError: it could not be written to its tier.
    """
    body, record = owner_of(param, "set_own_part")
    if value.shape != (shape := local_tensor(param).shape):
        raise ValueError(f"set_own_part: this rank's part has shape {tuple(shape)}, not {tuple(value.shape)}")
    if optim_state_key == "master":
        set_param_part(param, body, record, value)
    elif optim_state_key != "grad":
        check_state_name(record, optim_state_key, "set_own_part")
        set_entries(body, {record.index: {optim_state_key: value}})
    elif param.grad is not None:
        set_grad_part(param.grad, value)
    else:
        raise ValueError("set_own_part: the parameter has no gradient; call it between backward and step")
