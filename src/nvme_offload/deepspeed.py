"""DeepSpeed's calls, for its scripts with their import line changed and ``torchrun`` in place of its launcher.

The line that is changed, and one that follows it as it was::

    import nvme_offload.deepspeed as deepspeed

    engine, optimizer, loader, scheduler = deepspeed.initialize(args=args, model=model, model_parameters=parameters)

What a script asks for and is not done here is refused by name: see ``docs/from_deepspeed.md``.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from nvme_offload.offload._torch_private import own_initializer, version_of
from nvme_offload.offload.config.optimizer import OPTIMIZERS
from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.devices.device import default_device_type
from nvme_offload.offload.warn import warn_user
from nvme_offload.optim.access.full_values import set_full_param
from nvme_offload.optim.birth.birth import is_on_meta
from nvme_offload.optim.optimizer import OffloadOptimizer
from nvme_offload.optim.optimizers.registry import optimizer_class
from nvme_offload.optim.zero.engine import OffloadEngine
from nvme_offload.optim.zero.initialize import initialize as initialize_engine
from nvme_offload.optim.zero.meshes import default_mesh, is_launched

PAGE = "docs/from_deepspeed.md says what to write instead"


class DeepSpeedEngine:
    """An `OffloadEngine` under the names of DeepSpeed's. What neither has is looked for in the model."""

    def __init__(self, engine: OffloadEngine) -> None:
        self.engine = engine
        """The engine itself, with all that is not DeepSpeed's."""
        self._awaits_backward = False
        engine.module.register_state_dict_post_hook(_say_that_it_is_sharded)  # type: ignore[no-untyped-call]  # of torch
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.global_rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = next(engine.module.parameters()).device
        self.tput_timer = SimpleNamespace(update_epoch_count=lambda: None)
        """It counts epochs for what DeepSpeed prints; nothing is printed here."""

    @property
    def module(self) -> nn.Module:
        """The model. After an evaluation it has its own parameters again, so that what changes them is kept."""
        if not self._awaits_backward:
            for module in self.engine.module.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return self.engine.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; see `OffloadEngine`."""
        self._awaits_backward = torch.is_grad_enabled()
        return self.engine(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "engine":  # before there is one
            raise AttributeError(name)
        found = getattr(self.engine, name, self)
        return getattr(self.module, name) if found is self else found

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        """Set the module's training mode."""
        self.engine.module.train(mode)
        return self

    def eval(self) -> DeepSpeedEngine:
        """Set the module's evaluation mode."""
        return self.train(False)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End the micro-batch; see `OffloadEngine.step`. Raises ValueError for arguments of a scheduler."""
        if lr_kwargs:
            raise ValueError(f"engine.step: lr_kwargs = {lr_kwargs!r}: call the scheduler's step with them yourself")
        self.engine.step()

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.engine.optimizer.param_groups]

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches of one step."""
        return self.engine.gradient_accumulation_steps

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Return the samples of one micro-batch on one rank, where the section says."""
        return self.engine.config.batch_sizes(self.world_size).train_micro_batch_size_per_gpu

    def train_batch_size(self) -> int | None:
        """Return the samples of one step over all ranks, where the section says."""
        return self.engine.config.batch_sizes(self.world_size).train_batch_size

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage."""
        return self.engine.config.zero_optimization.stage

    def bfloat16_enabled(self) -> bool:
        """Whether the model computes in bf16."""
        return self.engine.config.bf16.enabled

    def fp16_enabled(self) -> bool:
        """Whether the model computes in fp16."""
        return self.engine.config.fp16.enabled

    def save_checkpoint(
        self, save_dir: str | Path, tag: object = None, client_state: Mapping[str, Any] | None = None, **more: Any
    ) -> bool:
        """Write a checkpoint; see `OffloadEngine.save_checkpoint`. Raises TypeError for what is not done here."""
        _refuse("engine.save_checkpoint", more, save_latest=True, exclude_frozen_parameters=False)
        return self.engine.save_checkpoint(save_dir, None if tag is None else str(tag), client_state)

    def load_checkpoint(
        self, load_dir: str | Path, tag: object = None, **more: Any
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Resume from a checkpoint; see `OffloadEngine.load_checkpoint`. Raises TypeError for what is not done here."""
        whole = {"load_module_strict": True, "load_optimizer_states": True, "load_lr_scheduler_states": True}
        _refuse("engine.load_checkpoint", more, **whole, load_module_only=False, custom_load_fn=None)
        return self.engine.load_checkpoint(load_dir, None if tag is None else str(tag))

    def save_16bit_model(self, save_dir: str | Path, save_filename: str = "model.safetensors", **more: Any) -> bool:
        """Write the weights as safetensors into a folder, whatever `save_filename`; see `OffloadEngine`."""
        _refuse("engine.save_16bit_model", more, exclude_frozen_parameters=False)
        if save_filename not in ("model.safetensors", "pytorch_model.bin"):
            warn_user(f"engine.save_16bit_model: {save_filename!r} is not used: files are called model*.safetensors")
        return self.engine.save_16bit_model(save_dir)

    def destroy(self) -> None:
        """Free the optimizer's memory and files."""
        self.engine.close()


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
        dist_init_required: not used: a process group is made where there is none.
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
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            raise ValueError(f"deepspeed.initialize: {name} is not taken: give nvme_offload.initialize(mesh=) a mesh")
    section = OffloadConfig.of(_section_of(args, config if config is not None else config_params))
    if callable(optimizer):
        given = list(model_parameters) if model_parameters is not None else list(model.parameters())
        optimizer = optimizer(given)
    groups = optimizer.param_groups if optimizer is not None else model_parameters
    has_optimizer = optimizer is not None or "optimizer" in section.model_fields_set
    if not has_optimizer:
        warn_user("deepspeed.initialize: there is no optimizer, so the model is frozen and the engine only runs it")
        model.requires_grad_(False)
    engine = initialize_engine(
        model,
        section,
        lr_scheduler=_factory_of(lr_scheduler),
        init=_initializer_of(model) if is_on_meta(model) else None,
        optimizer=_ours(optimizer) if optimizer is not None else None,
        param_groups=_groups_of(model, groups, optimizer) if groups is not None and has_optimizer else None,
    )
    loader = _loader_of(training_data, section, collate_fn) if training_data is not None else None
    return DeepSpeedEngine(engine), engine.optimizer if has_optimizer else None, loader, engine.lr_scheduler


def init_distributed(dist_backend: str | None = None, *unused: Any, timeout: Any = None, **also_unused: Any) -> None:
    """Make a process group of the ranks that torchrun started, or of this process alone; nothing where there is one."""
    if dist.is_initialized():
        return
    if is_launched() and (dist_backend or timeout):
        dist.init_process_group(dist_backend, timeout=timeout)
    else:
        default_mesh(default_device_type())


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config``; ``--local_rank`` gets the rank that torchrun gives."""
    group = parser.add_argument_group("DeepSpeed", "as DeepSpeed has them")
    group.add_argument("--deepspeed", action="store_true", help="train with the section of --deepspeed_config")
    group.add_argument("--deepspeed_config", help="path of the configuration section")
    if "LOCAL_RANK" in os.environ:
        parser.set_defaults(local_rank=int(os.environ["LOCAL_RANK"]))
    return parser


class Init(AbstractContextManager[None]):
    """Build a model on the meta device: `initialize` gives it its values block by block, from its own initialisers.

    Args:
        enabled: False does nothing.
        unused: what else DeepSpeed's takes: where and how parameters are kept is up to the section.
    """

    def __init__(self, *unused: Any, enabled: bool = True, **also_unused: Any) -> None:
        self._device = torch.device("meta") if enabled else nullcontext()

    def __enter__(self) -> None:
        self._device.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._device.__exit__(*exception)


class GatheredParameters(TorchFunctionMode):
    """Have whole values in the place of an engine's parameters; every rank must enter it, and leave it.

    Args:
        params: one, or several. What else torch's functions are called with is as it is.
        modifier_rank: every rank takes the values that they have on this one at the end; None changes nothing.
        fwd_module: not used.
        enabled: False does nothing.

    Raises:
        ValueError: parameters have no values yet; or, at the end, no optimizer of this package knows one.
    """

    def __init__(
        self, params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True
    ) -> None:
        super().__init__()
        listed = [params] if isinstance(params, torch.Tensor) else list(params)
        if enabled and any(param.is_meta for param in listed):
            raise ValueError("GatheredParameters: parameters made within zero.Init have values after initialize alone")
        self._sharded = [param for param in listed if enabled and isinstance(param, DTensor)]
        self._modifier_rank = modifier_rank
        self._whole: dict[int, torch.Tensor] = {}

    def __enter__(self) -> GatheredParameters:
        self._whole = {id(param): param.full_tensor().detach().clone() for param in self._sharded}
        super().__enter__()  # type: ignore[no-untyped-call]  # of torch, as below
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map(lambda value: self._whole.get(id(value), value), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        for param in self._sharded:
            whole = self._whole.pop(id(param))
            if self._modifier_rank is not None and kind is None:
                dist.broadcast(whole, self._modifier_rank)
                set_full_param(param, whole)


def fused_adam(
    params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    **unused: Any,
) -> Optimizer:
    """Return torch's AdamW, or Adam, with DeepSpeed's arguments: `initialize` takes its hyperparameters.

    Raises:
        ValueError: `bias_correction` is off, or `amsgrad` on.
    """
    if amsgrad or not bias_correction:
        what = f"Adam: amsgrad = {amsgrad}, bias_correction = {bias_correction}: only False, True are here"
        raise ValueError(f"{what}; the section's optimizer takes bias_correction = false")
    kind = torch.optim.AdamW if unused.get("adamw_mode", adam_w_mode) else torch.optim.Adam
    return kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class Accelerator:
    """The device that torch sees, or the CPU; what is not here is torch's own, as of ``torch.cuda``."""

    def __init__(self) -> None:
        self.kind = default_device_type()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.get_device_module(self.__dict__["kind"]), name)

    def device_name(self, index: int | None = None) -> str:
        """Return the name of a device, or of their type."""
        return self.kind if index is None or self.kind == "cpu" else f"{self.kind}:{index}"

    def current_device_name(self) -> str:
        """Return the name of this process's device."""
        return self.device_name(None if self.kind == "cpu" else torch.get_device_module(self.kind).current_device())

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch's generators of all devices."""
        torch.manual_seed(seed)

    def communication_backend_name(self) -> str:
        """Return torch's backend for collectives between such devices."""
        return dist.get_default_backend_for_device(self.kind)

    def is_bf16_supported(self) -> bool:
        """Whether it computes in bf16."""
        return bool(getattr(torch.get_device_module(self.kind), "is_bf16_supported", lambda: True)())

    def is_fp16_supported(self) -> bool:
        """Whether it computes in fp16."""
        return True


class ZeroParamStatus(Enum):
    """DeepSpeed's states of a parameter; those of an engine here have no ``ds_status``, as whole ones have none."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def _refuse(call: str, given: Mapping[str, Any], **only: Any) -> None:
    for name, value in given.items():
        if name not in only:
            raise TypeError(f"{call} has no argument {name!r}")
        if value != only[name]:
            raise TypeError(f"{call}: {name} = {value!r} is not done here; leave it out. {PAGE}")


def _section_of(args: Any, config: Any) -> Any:
    """Return the section of a script, and tell its arguments the rank that torchrun gave."""
    if "LOCAL_RANK" in os.environ and getattr(args, "local_rank", None) in (None, -1) and args is not None:
        args.local_rank = int(os.environ["LOCAL_RANK"])
    if config is None:
        config = getattr(args, "deepspeed_config", None)
    if config is None:
        raise ValueError("deepspeed.initialize: no section: pass config=, or --deepspeed_config in args")
    return config


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


def _groups_of(model: nn.Module, given: Iterable[Any], optimizer: Optimizer | None) -> list[dict[str, Any]]:
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
        groups.append({**kept, "params": [each[1] if isinstance(each, tuple) else each for each in listed]})
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
    given: LRScheduler | Callable[[Optimizer], LRScheduler] | None,
) -> Callable[[Optimizer], LRScheduler] | None:
    if not isinstance(given, LRScheduler):
        return given

    def moved(optimizer: Optimizer) -> LRScheduler:
        """Have a schedule of the client's optimizer go on with ours."""
        LambdaLR(optimizer, lambda step: 1.0)  # torch counts the steps of an optimizer that a schedule was made with
        for group, before in zip(optimizer.param_groups, given.optimizer.param_groups, strict=True):
            group.update({key: before[key] for key in ("lr", "initial_lr") if key in before})
        given.optimizer = optimizer
        return given

    return moved


def _initializer_of(model: nn.Module) -> Callable[[nn.Module], None] | None:
    """Return what calls each ``_init_weights`` of a model that was made on meta.

    Raises ValueError where a parameter was initialised by other code, which had nothing to work on.
    """
    if any(base.__name__ == "PreTrainedModel" for base in type(model).__mro__):
        return None  # whose own is called in any case
    owners = [(module, set(module.modules())) for module in model.modules() if hasattr(module, "_init_weights")]

    def init(module: nn.Module) -> None:
        for owner, inside in owners:
            if module in inside:
                owner._init_weights(module)  # type: ignore[operator]  # a method of the model's

    written = {param: version_of(param) for param in model.parameters()}
    with torch.no_grad():
        for module in model.modules():
            (own_initializer(module) or (lambda: None))()
            init(module)
    for name, param in model.named_parameters():
        if written[param] > version_of(param) - written[param]:
            raise ValueError(
                f"zero.Init: {name} was initialised by code of the model that is neither reset_parameters nor "
                "_init_weights, and within zero.Init that wrote to nothing: put it into a method _init_weights(module) "
                "of the model, or build the model without zero.Init"
            )
    return init if owners else None


def _loader_of(data: Dataset[Any], section: OffloadConfig, collate_fn: Callable[[Any], Any] | None) -> DataLoader[Any]:
    size = section.batch_sizes(dist.get_world_size()).train_micro_batch_size_per_gpu
    if size is None:
        raise ValueError("deepspeed.initialize: training_data needs train_micro_batch_size_per_gpu in the section")
    return DataLoader(data, size, sampler=DistributedSampler(data), collate_fn=collate_fn)


def _say_that_it_is_sharded(module: nn.Module, found: Mapping[str, Any], *unused: Any) -> None:
    if not any(isinstance(value, nn.Parameter) for value in found.values()):  # which this package asks for
        warn_user(
            "engine.module.state_dict() has the shards of this rank, at every ZeRO stage: a file with them is no whole "
            "model. Call engine.save_16bit_model(folder), or save_checkpoint, on every rank"
        )


def _get_by_path(model: nn.Module, path: str) -> Any:
    return attrgetter(path)(model)


def _set_by_path(model: nn.Module, path: str, module: nn.Module) -> None:
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, module)


def _submodule(name: str, contents: Mapping[str, Any], rest: ModuleType | None = None) -> ModuleType:
    """Make a module that scripts import by its name; what it has not is of `rest`, or refused."""
    made = ModuleType(f"{__name__}.{name}", f"As ``deepspeed.{name}``.")

    def fetched(attribute: str) -> Any:
        if rest is not None and hasattr(rest, attribute):
            return getattr(rest, attribute)
        return _refused(made.__name__, attribute)

    made.__dict__.update(contents, __getattr__=fetched)
    sys.modules[made.__name__] = made
    return made


def _refused(module: str, name: str) -> NoReturn:
    what = "is not there" if name.startswith("__") else f"has no {name}, which DeepSpeed may have"
    raise AttributeError(f"{module} {what}: {PAGE}", name=name, obj=sys.modules.get(module))


def __getattr__(name: str) -> Any:
    _refused(__name__, name)


def _not_done(name: str) -> Callable[..., NoReturn]:
    """Make what scripts import at their top whatever they do, and that is refused when it is called."""

    def refused(*unused: Any, **also_unused: Any) -> NoReturn:
        raise TypeError(f"{name} is not done here: {PAGE}")

    return refused


get_accelerator = Accelerator
zero = _submodule("zero", {"Init": Init, "GatheredParameters": GatheredParameters})
comm = _submodule("comm", {"init_distributed": init_distributed}, rest=dist)
accelerator = _submodule("accelerator", {"get_accelerator": get_accelerator})
_adam = _submodule("ops.adam", {"FusedAdam": fused_adam, "DeepSpeedCPUAdam": fused_adam})
ops = _submodule("ops", {"adam": _adam})
utils = _submodule("utils", {"logger": logging.getLogger(__name__)})
_moe_groups = "split_params_into_different_moe_groups_for_optimizer"
_moe_utils = _submodule("moe.utils", {_moe_groups: _not_done(f"moe.utils.{_moe_groups}")})
moe = _submodule("moe", {"utils": _moe_utils, "layer": _submodule("moe.layer", {"MoE": _not_done("moe.layer.MoE")})})
_helper = _submodule("compression.helper", {"recursive_getattr": _get_by_path, "recursive_setattr": _set_by_path})
compression = _submodule("compression", {"helper": _helper})
_partitions = _submodule("runtime.zero.partition_parameters", {"ZeroParamStatus": ZeroParamStatus})
runtime = _submodule("runtime", {"zero": _submodule("runtime.zero", {"partition_parameters": _partitions})})
