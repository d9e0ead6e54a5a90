"""``deepspeed.initialize``: from a script's model, optimizer and section to an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader, Dataset

from nvme_offload.deepspeed.engine import DeepSpeedEngine
from nvme_offload.deepspeed.launch import init_distributed
from nvme_offload.deepspeed.loaders import loader_of
from nvme_offload.deepspeed.schedules import schedule_of
from nvme_offload.deepspeed.section import section_of
from nvme_offload.deepspeed.utils import get_z3_leaf_modules
from nvme_offload.deepspeed.zero import be_all_on_meta, external_parameters, initializer_of, outside_of_init
from nvme_offload.offload.activations.blocks import outermost
from nvme_offload.offload.config.optimizer import OPTIMIZERS
from nvme_offload.offload.warn import warn_user
from nvme_offload.optim.layout.blocks import find_units
from nvme_offload.optim.named_optimizers import optimizer_class
from nvme_offload.optim.optimizer import OffloadOptimizer
from nvme_offload.optim.zero.initialize import initialize as initialize_engine


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[..., Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, OffloadOptimizer | None, DataLoader[Any] | None, LRScheduler | None]:
    """Make an engine of a model, with DeepSpeed's arguments in their order.

    Args:
        args: its ``deepspeed_config`` is the section, unless `config` is; its ``local_rank`` is set from torchrun's.
        model: plain, or made within `zero.Init`.
        optimizer: of torch, of `ops.adam`, or a function of parameters that makes one; not stepped. Its class and
            hyperparameters are taken for one of ours.
        model_parameters: parameters, or groups of them; all that require a gradient.
        training_data: the loader gives micro-batches of it, another part on each rank.
        lr_scheduler: of the optimizer, or a function that makes it.
        distributed_port: not used; torchrun has one.
        mpu: refused: give `nvme_offload.initialize` a mesh.
        dist_init_required: False says that there is a process group; else one is made where there is none.
        collate_fn: of the loader.
        config: the section, as dict or path.
        mesh_param: refused, as `mpu`.
        config_params: another name for `config`.

    Returns:
        The engine, its optimizer, the loader and the schedule; None for what there is not. Without an optimizer, given
        or in the section, the engine only runs the model, which is frozen then.

    Raises:
        ValueError, TypeError: something is asked for that is not done here, by name.
        ConfigError, OutOfSpaceError, SwapIOError: see `nvme_offload.initialize`.
    """
    if model is None:
        raise ValueError("deepspeed.initialize: model = None: pass the module")
    if dist_init_required is False:
        init_distributed(dist_init_required=False)
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            raise ValueError(f"deepspeed.initialize: {name} is not taken: give nvme_offload.initialize(mesh=) a mesh")
    given = section_of(args, config if config is not None else config_params)
    if callable(optimizer):
        optimizer = optimizer(list(model_parameters) if model_parameters is not None else list(model.parameters()))
    groups = optimizer.param_groups if optimizer is not None else model_parameters
    has_optimizer = optimizer is not None or "optimizer" in given.config.model_fields_set
    if not has_optimizer:
        warn_user("deepspeed.initialize: there is no optimizer, so the model is frozen and the engine only runs it")
        model.requires_grad_(False)
    with outside_of_init():
        ours = _ours(optimizer) if optimizer is not None else None
        moved = be_all_on_meta(model)
        groups = _groups_of(model, groups, optimizer, moved) if groups is not None and has_optimizer else None
        engine = initialize_engine(
            model,
            given.config,
            lr_scheduler=_factory_of(lr_scheduler) if lr_scheduler is not None else schedule_of(given.scheduler),
            blocks=_blocks_of(model),
            init=initializer_of(model) if moved else None,
            optimizer=ours,
            param_groups=groups,
            sync_module_states=True,
        )
    size = engine.config.batch_sizes(dist.get_world_size()).train_micro_batch_size_per_gpu
    loader = loader_of(training_data, size, collate_fn) if training_data is not None else None
    made = DeepSpeedEngine(engine, given.raw, loader, has_optimizer=has_optimizer, is_managed=given.is_managed)
    return made, made.optimizer, loader, engine.lr_scheduler


def _blocks_of(model: nn.Module) -> list[str] | None:
    """Return what to gather one by one where a script says more of it; None leaves the choice.

    A leaf module is gathered as a whole, and what has parameters that a forward of another module uses, with the model.
    """
    external, leaves = external_parameters(model), get_z3_leaf_modules(model)
    if not (external or leaves):
        return None
    names = {module: name for name, module in model.named_modules()}
    units = outermost(dict.fromkeys((*find_units(model), *leaves)), model)
    lists = (nn.ModuleList, nn.ModuleDict)  # which have no forward before which they could be gathered
    units = [unit for unit in units if not isinstance(unit, lists) and any(True for _ in unit.parameters())]
    return [names[unit] for unit in units if external.isdisjoint(unit.parameters())]


def _ours(optimizer: Optimizer) -> Callable[..., OffloadOptimizer]:
    """Return what makes the optimizer of ours that a client's stands for; raise TypeError if none does."""
    name = type(optimizer).__name__
    if getattr(torch.optim, name, None) is not type(optimizer) or name not in OPTIMIZERS:
        raise TypeError(
            f"deepspeed.initialize: optimizer = {name}: its state cannot be offloaded; here are torch.optim's "
            f"{', '.join(kind for kind in OPTIMIZERS if hasattr(torch.optim, kind))}, and Lion in the section"
        )
    if any(len(entries) and float(entries.get("step", 1)) for entries in optimizer.state.values()):
        raise ValueError(f"deepspeed.initialize: optimizer = {name} has taken steps, whose state would be lost")
    return partial(optimizer_class(name), **_options_of(name, optimizer.defaults))


def _options_of(name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a group is a hyperparameter here; raise ValueError for a switch that changes results."""
    for key in ("amsgrad", "differentiable", "capturable"):
        if group.get(key):
            raise ValueError(f"deepspeed.initialize: optimizer = {name}: {key} = {group[key]!r} is not done here")
    known = {*OPTIMIZERS[name], "maximize"} - ({"betas"} if name == "Muon" else set())
    return {key: value for key, value in group.items() if key in known}


def _groups_of(
    model: nn.Module, given: Iterable[Any], optimizer: Optimizer | None, moved: Mapping[nn.Parameter, nn.Parameter]
) -> list[dict[str, Any]]:
    """Return the groups, with what is frozen in the first; raise ValueError for a trained parameter in none."""
    items = list(given)
    are_groups = bool(items) and isinstance(items[0], Mapping)
    raw: list[dict[str, Any]] = [dict(item) for item in items] if are_groups else [{"params": items}]
    groups: list[dict[str, Any]] = []
    for group in raw:
        params = group.pop("params")
        kept = _options_of(type(optimizer).__name__, group) if optimizer is not None else group
        kept.pop("name", None)
        if isinstance(optimizer, torch.optim.Muon):  # whose groups are taken as they are
            kept["rule"] = "Muon"
        listed = [params] if isinstance(params, torch.Tensor) else list(params)
        plain: list[Any] = [each[1] if isinstance(each, tuple) else each for each in listed]
        groups.append({**kept, "params": [moved.get(param, param) for param in plain]})
    there = {param for group in groups for param in group["params"]}
    for name, param in model.named_parameters():
        if param not in there and param.requires_grad:
            raise ValueError(
                f"deepspeed.initialize: {name} requires a gradient and is in no group of the optimizer, nor among "
                "model_parameters: call requires_grad_(False) on it, or add it"
            )
    groups[0]["params"] += [param for param in model.parameters() if param not in there]
    return [group for group in groups if group["params"]]


def _factory_of(
    given: LRScheduler | Callable[[Optimizer], LRScheduler],
) -> Callable[[Optimizer], LRScheduler]:
    if callable(given):
        return given

    def moved(optimizer: Optimizer) -> LRScheduler:
        """Have a schedule of the client's optimizer go on with ours."""
        LambdaLR(optimizer, lambda step: 1.0)  # torch counts the steps of an optimizer that a schedule was made with
        for group, before in zip(optimizer.param_groups, given.optimizer.param_groups, strict=True):
            group.update({key: before[key] for key in ("lr", "initial_lr") if key in before})
        given.optimizer = optimizer
        return given

    return moved
