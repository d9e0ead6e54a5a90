"""DeepSpeed's calls, for its scripts with their import line changed and ``torchrun`` in place of its launcher.

The line that is changed, and one that follows it as it was::

    import nvme_offload.deepspeed as deepspeed

    engine, optimizer, loader, scheduler = deepspeed.initialize(args=args, model=model, model_parameters=parameters)

What a script asks for and is not done here is refused by name: see ``docs/from_deepspeed.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import nn

from nvme_offload.deepspeed import accelerator, schedules, utils, zero
from nvme_offload.deepspeed.accelerator import get_accelerator
from nvme_offload.deepspeed.adam import fused_adam
from nvme_offload.deepspeed.engine import DeepSpeedEngine
from nvme_offload.deepspeed.launch import add_config_arguments, init_distributed
from nvme_offload.deepspeed.making import initialize
from nvme_offload.deepspeed.optimizer_names import DeepSpeedNames
from nvme_offload.deepspeed.refusal import not_done, refused_names

__all__ = [
    "DeepSpeedEngine",
    "accelerator",
    "add_config_arguments",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "ops",
    "runtime",
    "utils",
    "zero",
]


def _get_by_path(model: nn.Module, path: str) -> Any:
    return attrgetter(path)(model)


def _set_by_path(model: nn.Module, path: str, module: nn.Module) -> None:
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, module)


def _groups_without_moe(param_groups: Any, **unused: Any) -> list[dict[str, Any]]:
    """Return parameter groups as they are: there are no parameters of DeepSpeed's MoE layers here."""
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)


def _submodule(name: str, contents: Mapping[str, Any], rest: ModuleType | None = None) -> ModuleType:
    """Make a module that scripts import by its name; what it has not is of `rest`, or refused."""
    made = ModuleType(f"{__name__}.{name}", f"As ``deepspeed.{name}``.")
    refused = refused_names(made.__name__)

    def fetched(attribute: str) -> Any:
        return getattr(rest, attribute) if rest is not None and hasattr(rest, attribute) else refused(attribute)

    made.__dict__.update(contents, __getattr__=fetched)
    sys.modules[made.__name__] = made
    return made


comm = _submodule("comm", {"init_distributed": init_distributed}, rest=dist)
_adam = _submodule("ops.adam", {"FusedAdam": fused_adam, "DeepSpeedCPUAdam": fused_adam})
ops = _submodule("ops", {"adam": _adam})
_moe_utils = _submodule("moe.utils", {"split_params_into_different_moe_groups_for_optimizer": _groups_without_moe})
moe = _submodule("moe", {"utils": _moe_utils, "layer": _submodule("moe.layer", {"MoE": not_done("moe.layer.MoE")})})
_helper = _submodule("compression.helper", {"recursive_getattr": _get_by_path, "recursive_setattr": _set_by_path})
compression = _submodule("compression", {"helper": _helper})
_zero = _submodule(
    "runtime.zero", {"partition_parameters": _submodule("runtime.zero.partition_parameters", {}, zero)}, zero
)
_of_runtime = {
    "zero": _zero,
    "engine": _submodule("runtime.engine", {"DeepSpeedEngine": DeepSpeedEngine}),
    "base_optimizer": _submodule("runtime.base_optimizer", {"ZeROOptimizer": DeepSpeedNames}),
    "lr_schedules": _submodule("runtime.lr_schedules", schedules.SCHEDULES),
    "utils": _submodule("runtime.utils", {"see_memory_usage": utils.see_memory_usage}),
}
runtime = _submodule("runtime", _of_runtime)
_submodule("utils.zero_to_fp32", {}, utils)
__getattr__ = refused_names(__name__)
