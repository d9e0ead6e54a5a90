"""As ``deepspeed.utils``: whole values of parameters, leaf modules, and what scripts print with."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from nvme_offload.deepspeed.engine import save_torch_file
from nvme_offload.deepspeed.loaders import RepeatingLoader
from nvme_offload.deepspeed.own_parts import get_own_part, set_own_part
from nvme_offload.deepspeed.refusal import refused_names
from nvme_offload.offload.host.available_memory import available_bytes
from nvme_offload.offload.units import format_bytes, parse_bytes
from nvme_offload.offload.user_path import user_path
from nvme_offload.optim.access.full_values import (
    get_full_grad,
    get_full_optimizer_state,
    get_full_param,
    set_full_grad,
    set_full_optimizer_state,
    set_full_param,
)
from nvme_offload.optim.checkpoint.export import read_weights, write_weights

__all__ = [
    "RepeatingLoader",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_z3_leaf_modules",
    "instrument_w_nvtx",
    "load_state_dict_from_zero_checkpoint",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "see_memory_usage",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]

F = TypeVar("F", bound=Callable[..., Any])
logger = logging.getLogger("nvme_offload.deepspeed")

safe_get_full_grad = get_full_grad
safe_get_local_fp32_param = partial(get_own_part, optim_state_key="master")
safe_get_local_grad = partial(get_own_part, optim_state_key="grad")
safe_get_local_optimizer_state = get_own_part
safe_set_local_fp32_param = partial(set_own_part, optim_state_key="master")
safe_set_local_grad = partial(set_own_part, optim_state_key="grad")
safe_set_local_optimizer_state = set_own_part


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """Return the whole value of a parameter, as `get_full_param`; None where it is frozen, as in DeepSpeed."""
    return get_full_param(param) if param.requires_grad else None


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """Return the whole of a state, as `get_full_optimizer_state`; None where the parameter is frozen."""
    return get_full_optimizer_state(param, optim_state_key) if param.requires_grad else None


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set the whole value of a parameter; see `set_full_param`. What is sharded is gathered first."""
    set_full_param(param, _whole(value))


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set the whole gradient of a parameter; see `set_full_grad`. What is sharded is gathered first."""
    set_full_grad(param, _whole(value))


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Set the whole of a state of a parameter; see `set_full_optimizer_state`. What is sharded is gathered first."""
    set_full_optimizer_state(param, optim_state_key, _whole(value))


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def safe_update_full_grad_vectorized(
    param_list: Iterable[torch.Tensor], update_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """Give each parameter that has a gradient what `update_func` makes of the whole of it; every rank must call it."""
    for param in param_list:
        if param.requires_grad and (old := get_full_grad(param)) is not None:
            safe_set_full_grad(param, update_func(old, param))


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark a module as a leaf, or as none. Nothing else depends on it: blocks are gathered as a whole in any case."""
    model._z3_leaf = flag  # type: ignore[assignment]  # DeepSpeed's name


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of some classes as leaves; return them. ValueError: there is none of such a class."""
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take `set_z3_leaf_modules` back; return the modules. ValueError: there is none of such a class."""
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their whole names; return them, and the names that there are not. ValueError: there are some."""
    return _mark_named(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by the ends of their names; as `set_z3_leaf_modules_by_name`."""
    return _mark_named(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether a module is marked as a leaf."""
    return bool(getattr(model, "_z3_leaf", False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are marked as leaves."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def _is_of_class(module: nn.Module, kind: type | str) -> bool:
    own = type(module)
    names = (own.__name__, f"{own.__module__}.{own.__qualname__}")
    return kind in names if isinstance(kind, str) else isinstance(module, kind)


def _mark_classes(model: nn.Module, kinds: Sequence[type | str], flag: bool, raises: bool) -> list[nn.Module]:
    found = [module for module in model.modules() if any(_is_of_class(module, kind) for kind in kinds)]
    if not found and raises:
        raise ValueError(f"No modules of type {kinds} found in model {model}")
    return _mark(found, flag)


def _mark_named(
    model: nn.Module, given: Sequence[str], fits: Callable[[str, str], bool], flag: bool, raises: bool
) -> tuple[list[nn.Module], list[str]]:
    there = dict(model.named_modules())
    missing = [each for each in given if not any(fits(name, each) for name in there)]
    if missing and raises:
        raise ValueError(f"No modules named {missing} found in model {model}")
    return _mark([module for name, module in there.items() if any(fits(name, each) for each in given)], flag), missing


def _mark(modules: list[nn.Module], flag: bool) -> list[nn.Module]:
    for module in modules:
        set_z3_leaf_module(module, flag)
    return modules


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on some ranks; on all where there is none named, or -1 is."""
    own, wanted = dist.get_rank() if dist.is_initialized() else -1, list(ranks or ())
    if not wanted or -1 in wanted or own in (*wanted, -1):
        logger.log(level, "[Rank %d] %s", own, message)


def instrument_w_nvtx(func: F) -> F:
    """Return the function: ``torch.profiler`` shows it."""
    return func


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log on rank 0 what the process's GPU holds, and what the host has left; only with `force`."""
    if force and (not dist.is_initialized() or dist.get_rank() == 0):
        used = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        most = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        said = f"{message}: {format_bytes(used)} of the GPU, at most {format_bytes(most)}"
        logger.info("%s; %s of the host are free", said, format_bytes(available_bytes()))


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False, **unused: Any
) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint of this package, in host memory, by one process alone.

    Raises:
        TypeError: frozen parameters are to be left out, which a checkpoint does not tell from buffers.
        CheckpointError: there is none, or a file of it is damaged.
    """
    if exclude_frozen_parameters:
        raise TypeError("exclude_frozen_parameters = True: save with exclude_frozen_parameters=True in its place")
    return read_weights(Path(checkpoint_dir), tag)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Load the weights of a checkpoint of this package into a model, plain or an engine's, and return it; see above.

    Of an engine's model, whose masters are set, too, every rank must call it.
    """
    weights = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    for name, param in list(model.named_parameters()):
        if isinstance(param, DTensor) and name in weights:
            set_full_param(param, weights.pop(name))
    model.load_state_dict(weights, strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights of a checkpoint of this package in fp32, by one process alone.

    With `safe_serialization` into ``model*.safetensors`` of at most `max_shard_size`; else ``pytorch_model.bin``, which
    is one file. Raises as `get_fp32_state_dict_from_zero_checkpoint`.
    """
    weights = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    if safe_serialization:
        most = parse_bytes(max_shard_size) if max_shard_size is not None else sys.maxsize
        kinds = {name: (value.shape, value.dtype) for name, value in weights.items()}
        write_weights(user_path(output_dir), kinds, weights.__getitem__, most, writes=True)
    else:
        save_torch_file(weights, user_path(output_dir) / "pytorch_model.bin")


__getattr__ = refused_names(__name__)
