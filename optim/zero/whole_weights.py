"""Calls that need whole weights are refused in words by a module whose parameters are sharded."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nvme_offload.offload._torch_private import refuse_ddp
from ..checkpoint.peft_files import has_adapters


def refuse_what_needs_whole_weights(model: nn.Module) -> None:
    """Have a sharded model say what to write in the place of a call that would end deep inside of torch."""
    for module in model.modules():
        module.register_load_state_dict_pre_hook(_check_loaded)  # type: ignore[no-untyped-call]
        if callable(save := getattr(module, "save_pretrained", None)):
            module.__dict__["save_pretrained"] = partial(_save_pretrained, module, save)
        if isinstance(module, FSDPModule):  # its class is made by FSDP2, and pickle does not find it
            module.__dict__["__reduce_ex__"] = _refuse_to_pickle
    refuse_ddp(
        model,
        "DistributedDataParallel around engine.module: its parameters are sharded, and the engine reduces their "
        'gradients over all ranks. Call the engine itself; "stage": 0 keeps a copy of them on each rank',
    )


def _refuse_to_pickle(_protocol: int) -> None:
    raise TypeError(
        "engine.module cannot be pickled or copied: its parameters are shards. Save dict(engine.weights()), "
        "the whole weights by name; or call engine.save_checkpoint(folder), which writes the optimizer's state, too"
    )


def _check_loaded(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], *_: object
) -> None:
    """Raise TypeError before a load that would mix whole tensors and shards, or put others in their place."""
    for name, param in module.named_parameters(remove_duplicate=False):
        value = state_dict.get(prefix + name)
        if not isinstance(param, DTensor) or not isinstance(value, torch.Tensor):
            continue
        if local_metadata.get("assign_to_params_buffers"):
            what = "assign=True would put other tensors in the place of parameters that the optimizer trains"
            raise TypeError(f"load_state_dict: {prefix}{name}: {what}: leave it out")
        if not isinstance(value, DTensor):
            raise TypeError(
                f"load_state_dict: {prefix}{name} is sharded here, and whole in this state dict. Call set_full_param("
                "param, value) for each parameter, on every rank; or build the model on meta, and give the files to "
                "initialize(model, section, weights=...). engine.load_checkpoint loads what engine saves"
            )


def _save_pretrained(module: nn.Module, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Save whole weights that are given; raise TypeError where the module's own would be saved, which are shards."""
    third = args[2] if len(args) > 2 and isinstance(args[2], Mapping) else {}
    given = (kwargs.get("state_dict") or third).values()
    if _has_shards(module.parameters()) and (not given or _has_shards(given)):
        if has_adapters(module):
            raise TypeError(
                f"{type(module).__name__}.save_pretrained: the parameters are sharded. Call engine.save_adapter(folder)"
                " on every rank, which writes the adapters as PEFT does. engine.export_safetensors(folder, merge=True) "
                "writes the base with the adapters merged into it"
            )
        raise TypeError(
            f"{type(module).__name__}.save_pretrained: the parameters are sharded, and it writes whole ones: give it "
            "state_dict=dict(engine.weights()), and is_main_process=rank == 0, on every rank. "
            "engine.export_safetensors(folder) writes all weights one by one, without one copy of them in memory"
        )
    return save(*args, **kwargs)


def _has_shards(values: Any) -> bool:
    return any(isinstance(value, DTensor) for value in values)
