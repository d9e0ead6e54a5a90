"""From a plain module to an engine: sharding, precision, tiers, and the checks that come before any of it."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from nvme_offload.offload._fsdp_passes import Freezing, begin_at
from nvme_offload.offload._torch_private import has_accumulation_hooks, is_compiled, local_tensor
from nvme_offload.offload.activations.activation_swapper import ActivationSwapper, check_blocks
from nvme_offload.offload.activations.blocks import find_blocks
from nvme_offload.offload.config.honoured import part_for_optimizer
from nvme_offload.offload.config.optimizer import OPTIMIZERS, OptimizerConfig
from nvme_offload.offload.config.section import OffloadConfig, SectionLike
from nvme_offload.offload.devices.device import HOST, KINDS, current_of, default_device_type, is_device, is_host
from nvme_offload.offload.errors import ConfigError
from nvme_offload.offload.user_path import user_path
from nvme_offload.offload.warn import door
from ..birth.birth import Birth, is_on_meta
from ..birth.in_place import KEY as IN_PLACE
from ..birth.in_place import BasePlaces
from ..layout.blocks import check_own_parameters, find_units, match_blocks
from ..layout.flat import check_is_no_wrapper, storage_of
from ..layout.master import FORM_OF_DTYPE
from ..named_optimizers import optimizer_class
from ..optimizer import OffloadOptimizer
from ..precision.parameter import SIXTEEN_BITS
from ..precision.plan import PrecisionPlan
from ..ranks.collective import gather, is_alone, on_every_rank
from ..rules.registry import rule_of
from ..rules.rule import UpdateRule
from ..state.choice import CANDIDATES, Candidate, Keeping, chosen_before
from . import meshes
from .block_checks import BlockChecks
from .engine import OffloadEngine
from .keeping import KeepingChoice, Room
from .param_groups import groups_of, log_groups
from .schedulers import scheduler_of
from .sharding import shard_with_precision

SchedulerFactory = Callable[[Optimizer], LRScheduler]
OptimizerFactory = Callable[..., OffloadOptimizer]


@door
def initialize(
    model: nn.Module,
    config: SectionLike | None = None,
    *,
    mesh: DeviceMesh | None = None,
    lr_scheduler: SchedulerFactory | None = None,
    blocks: Iterable[str] | None = None,
    weights: str | os.PathLike[str] | None = None,
    init: Callable[[nn.Module], object] | None = None,
    optimizer: OptimizerFactory | None = None,
    param_groups: Iterable[Mapping[str, Any]] | None = None,
    sync_module_states: bool = False,
    **of_deepspeed: Any,
) -> OffloadEngine:
    """Shard a plain module with FSDP2, give it its precision and tiers, and return the engine around it.

    Train through the engine::

        with initialize(model, section) as engine:
            for batch in batches:
                engine.backward(engine(batch).square().mean())
                engine.step()

    An error on one rank is raised on all, with a note that names that rank and its host.

    Args:
        model: a plain module, the same on every rank of a pipeline stage, on the device it trains on, or on meta: then
            it gets its values block by block and is never whole in memory. It is changed in place. What is trained in
            bf16 or fp16 becomes fp32 first; fp32 weights reach their masters without passing through 16 bits. Frozen
            parameters in other dtypes than fp32, and buffers, stay as they came.
        config: the configuration section: an `OffloadConfig`, a dict, a file, or a folder on a drive.
        mesh: 1-D, or 2-D (replicate, shard) for hybrid sharding; by default all ranks, without a launcher this process
            alone, on the model's device (of one on meta: the accelerator that torch sees, or the CPU). Or named as
            torchtitan names dimensions: ``pp`` (`model` is a stage), ``dp_replicate``, ``dp_shard``, ``dp``, ``tp``.
        lr_scheduler: makes one from the optimizer, in place of the section's; not ReduceLROnPlateau: it needs a metric.
        blocks: class names or qualified names of parts to gather one by one; by default layers and large ends.
        weights: for a model on meta: a ``.safetensors`` file, a folder or an index in the Hugging Face layout. Without
            it, the model's own initialisers give the values, from rank 0's random numbers.
        init: for a model on meta: called with each module after its own initialiser.
        optimizer: a subclass of `OffloadOptimizer`, or a ``partial`` of one, in place of the ``optimizer`` section.
        param_groups: groups with hyperparameters of their own, in place of ``optimizer.groups`` of the section, as
            ``[{"params": ["*.bias", "*norm*"], "weight_decay": 0.0}]``. ``params`` are names or shell patterns, of
            parameters, modules or their classes, or parameters of `model` as it is handed in. Parameters
            in no group come first, as group 0. With Muon, AdamW has embeddings, heads and all that is no matrix.
        sync_module_states: take the first data-parallel rank's parameters and buffers, as DDP does, on all; else ranks
            that differ are refused.
        of_deepspeed: refused by a TypeError that says what to write.

    Raises:
        ConfigError: the section is wrong, or asks for what this model or this many ranks cannot have.
        WeightsError: weight files are damaged or do not fit.
        ValueError: the model, its device, a block, a parameter, a group or the scheduler cannot be used.
        OutOfSpaceError, SwapIOError: see `OffloadOptimizer`.
    """
    given = _section(config, model, of_deepspeed)
    device_type = _device_type(model, mesh)
    read = partial(_Making, model, given, mesh, blocks, weights, init, optimizer, param_groups)
    # Nobody waits for a process alone, which is left without a process group then.
    making = read() if mesh is None and is_alone() and not meshes.is_launched() else None
    mesh = mesh if mesh is not None else meshes.default_mesh(device_type, given)
    groups = mesh.get_all_groups()
    making = making or on_every_rank(read, *groups)
    on_every_rank(partial(meshes.check_same_on_ranks, mesh, meshes.MeshRoles.of(mesh), making.config, model), *groups)
    mesh = meshes.replicated(mesh) if making.config.zero_optimization.stage == 0 else mesh
    roles = meshes.MeshRoles.of(mesh)
    plan = making.choose_and_plan(roles, groups)
    on_every_rank(partial(meshes.check_same_values, roles, model, take_first=sync_module_states), *groups)
    return making.make(mesh, roles, plan, lr_scheduler)


class _Making:
    """An engine is made of these. Each method is a stage that ends alike on all ranks: where one fails, all do."""

    def __init__(
        self,
        model: nn.Module,
        config: SectionLike,
        mesh: DeviceMesh | None,
        blocks: Iterable[str] | None,
        weights: str | os.PathLike[str] | None,
        init: Callable[[nn.Module], object] | None,
        optimizer: OptimizerFactory | None,
        param_groups: Iterable[Mapping[str, Any]] | None,
    ) -> None:
        """Look at what this rank was given; changes nothing."""
        self.model = model
        self.config = section = OffloadConfig.of(config)
        self.device_type = _device_type(model, mesh)
        _check_parameters(model)
        self.blocks = find_units(model) if blocks is None else match_blocks(model, blocks)
        self.layers = find_blocks(model) if blocks is None else self.blocks  # no large ends: those are cheap to keep
        check_own_parameters(model, self.blocks)
        check_blocks(model, self.layers, section.activations)
        self.birth = _birth_of(model, section, weights, init, on_device=is_device(self.device_type))
        self.make_optimizer, self.rule = _optimizer_of(section, optimizer)
        given = section.optimizer if optimizer is None else OptimizerConfig()
        self.groups = groups_of(model, given, self.rule, param_groups)
        self.chosen: Candidate | None = None
        self.room: Room | None = None
        """Room for what forwards save, where the section leaves open what is kept of it."""
        self.keeping: Keeping | None = None
        """A durable run began with this of it."""

    def choose_and_plan(self, roles: meshes.MeshRoles, groups: Sequence[ProcessGroup]) -> PrecisionPlan:
        """Choose what leaves memory, then look whether all of it goes together, on all ranks alike."""
        stages = meshes.dtypes_of_stages(self.model, roles)
        self._choose(roles, stages, groups)
        return on_every_rank(partial(self._plan, roles, stages), *groups)

    def _choose(self, roles: meshes.MeshRoles, stages: set[torch.dtype] | None, groups: Sequence[ProcessGroup]) -> None:
        """Choose on all ranks alike what leaves memory: what durable runs began with, else what fits on each rank."""
        if self.config.offload is None:
            return
        offers = gather(on_every_rank(partial(self._offer, roles, stages), *groups), *groups).values()
        begun = [number for number, _, _ in offers if number is not None]
        self.chosen = CANDIDATES[max(begun or [number for _, number, _ in offers])]
        config, self.config = self.config, self.chosen.applied(self.config)
        if self.layers and not is_compiled(self.model) and roles.pipeline is None and Keeping.is_open(config):
            self.room = self._checks(roles, stages).room(self.config)
            self.keeping = next((keeping for _, _, keeping in offers if keeping is not None), None)

    def _offer(
        self, roles: meshes.MeshRoles, stages: set[torch.dtype] | None
    ) -> tuple[int | None, int, Keeping | None]:
        """Return the `CANDIDATES` with which this rank's durable run began, if any, and that fits here first.

        The last is its `Keeping`.
        """
        config = self.config = self.config.completed_for(roles.num_data_parallel_ranks)
        return chosen_before(config), self._checks(roles, stages).first_that_fits(config), Keeping.begun(config)

    def _plan(self, roles: meshes.MeshRoles, stages: set[torch.dtype] | None) -> PrecisionPlan:
        if is_device(self.device_type):  # after the mesh, with which a rank gets its device
            _check_is_on(self.model, current_of(self.device_type))
        meshes.check_not_sharded(self.model, roles)
        self.config = self.config.completed_for(roles.num_data_parallel_ranks)
        checks = self._checks(roles, stages)
        self.config = checks.check(self.config)
        return checks.precision

    def _checks(self, roles: meshes.MeshRoles, stages: set[torch.dtype] | None) -> BlockChecks:
        on_device = is_device(self.device_type)
        plan = PrecisionPlan.of(self.config, self.model, stages, self.rule, on_device=on_device)
        if not on_device:
            _check_batch_norms(self.model, plan)
        rules = {name: group.rule for group in self.groups for name in group.names}
        return BlockChecks(self.model, self.blocks, roles.data_parallel, plan, self.rule, rules)

    def make(
        self, mesh: DeviceMesh, roles: meshes.MeshRoles, plan: PrecisionPlan, lr_scheduler: SchedulerFactory | None
    ) -> OffloadEngine:
        """Change the model, and make the engine around it."""
        groups = mesh.get_all_groups()
        with ExitStack() as undo:
            made = on_every_rank(partial(self.shard, roles, plan, undo), *groups)
            scheduler = on_every_rank(partial(self.fill, roles, made, lr_scheduler), *groups)
            keeping = self.choose_late(made, groups)
            activations = on_every_rank(partial(self.keep_activations, made, keeping, undo), *groups)
            parts = self.config, mesh, plan, self.blocks, activations, keeping
            engine = OffloadEngine(self.model, made, scheduler, *parts)
            undo.pop_all()
        return engine

    def shard(self, roles: meshes.MeshRoles, plan: PrecisionPlan, undo: ExitStack) -> OffloadOptimizer:
        """Shard the model, and make the optimizer with all of its space; `undo` closes it."""
        shard_with_precision(
            self.model,
            self.blocks,
            roles.data_parallel,
            plan,
            reshard_after_forward=self.config.zero_optimization.stage == 3,
            give_shards=self.birth.give_shards if self.birth is not None else None,
        )
        section, group = part_for_optimizer(self.config), roles.pipeline_group
        found = _params_of(self.model)
        groups = [{"params": [found[n] for n in each.names if n in found], **each.options} for each in self.groups]
        made = self.make_optimizer(groups, offload=section, norm_group=group)
        undo.callback(made.close)
        made.store.blocks.beside = [param for name, param in self.model.named_parameters() if name not in found]
        made.place()
        begin_at(self.model)
        Freezing(self.model)
        log_groups(self.groups, made)
        if self.chosen is not None:
            self.chosen.tell(made.tier_plan)
        return made

    def fill(
        self, roles: meshes.MeshRoles, made: OffloadOptimizer, lr_scheduler: SchedulerFactory | None
    ) -> LRScheduler | None:
        """Give a model that is on meta its values, and make the scheduler."""
        if self.birth is not None:
            self.birth.fill(made.store, self.blocks, roles.data_parallel)
            made.store.blocks.note_bases(self.birth.bases)
        if lr_scheduler is None:
            return scheduler_of(self.config, made)
        self.config = self.config.model_copy(update={"scheduler": None})  # nobody follows it
        return _checked(lr_scheduler(made))

    def choose_late(self, made: OffloadOptimizer, groups: Sequence[ProcessGroup]) -> KeepingChoice | None:
        """Take what the durable run began with; else return what chooses in the first forward, if that is open."""
        if self.room is None:
            return None
        plan = made.tier_plan
        host = int(_SAVED_SHARE * max(0, self.room.host - plan.bytes_on("host")))
        computing = max(0, self.room.computing - plan.bytes_on("device")) if is_device(self.device_type) else host
        if self.keeping is not None:
            self.config = self.keeping.applied(self.config, host)
            return None
        return KeepingChoice(self.config, made, Room(computing, host), len(self.layers), groups)

    def keep_activations(
        self, made: OffloadOptimizer, keeping: KeepingChoice | None, undo: ExitStack
    ) -> ActivationSwapper | None:
        """Have forwards of the model keep what they save where the section says; `undo` closes it."""
        if self.config.activations.device == "none" and keeping is None:
            return None
        choose = keeping.choose if keeping is not None else None
        activations = ActivationSwapper(self.config, model=self.model, blocks=self.layers, choose=choose)
        undo.callback(activations.close)
        made.count_activations(activations)
        return activations.attach()


_SAVED_SHARE = 0.5
"""Share of the memory that is left beside all that training takes which a forward may save: the other half is for data
loaders, the page cache, and what a loss takes."""


def _check_batch_norms(model: nn.Module, plan: PrecisionPlan) -> None:
    """Raise ValueError for weights in 16 bits beside statistics in fp32, which no operator of torch takes on a CPU."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.affine and module.running_mean is not None:
            compute = plan[f"{name}.weight".lstrip(".")].compute
            if compute in SIXTEEN_BITS and module.running_mean.dtype is torch.float32:
                kind = type(module).__name__
                what = f"weights in {compute} and statistics in fp32, which torch's operators do not take on a CPU"
                raise ValueError(f'initialize: {name}: a {kind} with {what}: write "fp32_modules": ["{kind}"]')


def _section(config: Any, model: Any, more: Mapping[str, Any]) -> Any:
    """Return the section, or raise TypeError for a model that is none, and for arguments that are DeepSpeed's."""
    if config is not None and not more:
        if not isinstance(model, nn.Module):
            how = "write initialize(model, section), with a torch.nn.Module as model"
            raise TypeError(f"initialize: model = a {type(model).__name__}: {how}")
        with suppress(Exception):  # raised again on all ranks, when there is a process group
            if isinstance(config, str | Path) and user_path(config).is_dir():  # trained in what it was made in
                is_bf16 = any(param.dtype is torch.bfloat16 for param in model.parameters())
                return OffloadConfig.on_drive(config, bf16={"enabled": is_bf16})
            return OffloadConfig.of(config)
        return config
    what = f"initialize: there is no argument {next(iter(more))!r}" if more else "initialize: config is missing"
    raise TypeError(
        f"{what}: write engine = initialize(model, config), where config is the section. All parameters are trained "
        "that require a gradient, param_groups= says which have other hyperparameters, and loaders are yours. For a "
        "script of DeepSpeed's write import nvme_offload.deepspeed as deepspeed: its initialize takes these arguments"
    )


def _check_is_on(model: nn.Module, current: torch.device) -> None:
    """Raise ValueError for a model on another device than this thread's, to which FSDP2 would move it."""
    device = next(model.parameters()).device
    if device != current and not is_on_meta(model):
        raise ValueError(
            f"initialize: the model is on {device}, and this process computes on {current}: move the model there, or "
            f"call torch.{device.type}.set_device({device.index}) before the process group is made"
        )


def _params_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that the optimizer gets: frozen ones too, as in torch, without state before a gradient."""
    return {
        name: param
        for name, param in model.named_parameters()
        if param.requires_grad or storage_of(param).dtype in FORM_OF_DTYPE
    }


def _optimizer_of(config: OffloadConfig, optimizer: OptimizerFactory | None) -> tuple[OptimizerFactory, UpdateRule]:
    """Return what makes the optimizer: the one that was given, else that of the section; and its rule."""
    if optimizer:
        return optimizer, _rule_of(optimizer)
    chosen = config.optimizer
    return partial(optimizer_class(chosen.kind), **chosen.hyperparameters), rule_of(chosen)


def _rule_of(optimizer: OptimizerFactory) -> UpdateRule:
    """Return the rule of the optimizer that will be made; TypeError for one that is none of ours, or made already."""
    if isinstance(optimizer, Optimizer):
        raise TypeError(_made_already(optimizer))
    found = optimizer.func if isinstance(optimizer, partial) else optimizer
    if not (isinstance(found, type) and issubclass(found, OffloadOptimizer)):
        raise TypeError(
            f"initialize: optimizer = {optimizer!r}: pass a subclass of OffloadOptimizer, or functools.partial of one; "
            "an optimizer that keeps its state in memory cannot be offloaded"
        )
    if not isinstance(optimizer, partial) or found.rule.name not in OPTIMIZERS:
        return found.rule
    return found.rule.of({**OPTIMIZERS[found.rule.name], **optimizer.keywords})


def _made_already(optimizer: Optimizer) -> str:
    """Say what to write in the place of an optimizer that has the parameters of a module which is sharded only now."""
    name = type(optimizer).__name__.removeprefix("Offload")
    if name not in OPTIMIZERS:
        return f"initialize: optimizer = {name}: only optimizers of {', '.join(OPTIMIZERS)} are here; pass one's class"
    given = {key: value for key, value in optimizer.defaults.items() if key in OPTIMIZERS[name]}
    arguments = "".join(f", {key}={value!r}" for key, value in given.items())
    return (
        f"initialize: optimizer = {type(optimizer).__name__}: it was made of the parameters that sharding replaces, so "
        "initialize makes it, of all that the model has; param_groups says which have other hyperparameters. Write\n"
        "    from functools import partial\n"
        f"    engine = initialize(model, config, optimizer=partial(Offload{name}{arguments}))"
    )


def _checked(scheduler: LRScheduler) -> LRScheduler:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            "initialize: ReduceLROnPlateau needs a metric in each step, which engine.step() has not; make it with "
            "engine.optimizer and call its step(metric) yourself"
        )
    return scheduler


def _birth_of(
    model: nn.Module,
    config: OffloadConfig,
    weights: str | os.PathLike[str] | None,
    init: Callable[[nn.Module], object] | None,
    *,
    on_device: bool,
) -> Birth | None:
    """Return the birth of a model that is on meta, with its weight files checked; None for a model that has values."""
    if is_on_meta(model):
        # On the CPU host memory is where they are anyway.
        tiers = ("nvme", "cpu") if on_device else ("nvme",)
        section = config.zero_optimization.offload_param
        in_place = BasePlaces(section.frozen) if section.device == "nvme" else None
        if section.frozen == "in_place" and weights is None:
            raise ConfigError(
                [f'{IN_PLACE} = "in_place": there are no files to read from: pass weights= to initialize']
            )
        return Birth(
            model,
            weights,
            init,
            params_on_tier=section.device in tiers,
            in_place=in_place,
            buffer_count=section.buffer_count,
        )
    if config.zero_optimization.offload_param.frozen == "in_place":
        how = 'build it within `with torch.device("meta"):`, and pass weights= to initialize'
        raise ConfigError([f'{IN_PLACE} = "in_place": the model has values already, which are no files: {how}'])
    for name, value in (("weights", weights), ("init", init)):
        if value is not None:
            raise ValueError(
                f"initialize: {name}= is for a model on the meta device, and this one has values already: build it "
                f'within `with torch.device("meta"):`, or leave {name} out'
            )
    return None


def _device_type(model: nn.Module, mesh: DeviceMesh | None) -> str:
    device = next((param.device for param in model.parameters()), HOST)
    if device.type == "meta":
        return mesh.device_type if mesh is not None else default_device_type()
    return device.type if is_device(device) else HOST.type


def _check_parameters(model: nn.Module) -> None:
    """Raise ValueError for a module without parameters, or with some that FSDP2 does not shard."""
    params = list(model.parameters())
    if not params:
        raise ValueError("initialize: the model has no parameters")
    if not any(param.ndim for param in params):
        what = "all parameters are without dimensions, and FSDP2 shards none of these"
        raise ValueError(f"initialize: {what}: train them with OffloadAdamW(model.parameters(), offload=...)")
    for name, param in model.named_parameters():
        check_is_no_wrapper(local_tensor(param), f"initialize: {name!r}")
    if strided := next((name for name, param in model.named_parameters() if not param.is_contiguous()), None):
        remedy = f"write param = model.get_parameter({strided!r}); param.data = param.data.contiguous() before it"
        raise ValueError(f"initialize: {strided!r} is not contiguous, as FSDP2 needs parameters: {remedy}")
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())  # and that is refused elsewhere
    hooked = next((name for name, param in model.named_parameters() if has_accumulation_hooks(param)), None)
    if hooked is not None and not is_sharded:
        remedy = "register_hook takes a whole gradient, also before initialize, and this hook one of a shard, after it"
        raise ValueError(f"initialize: {hooked!r} has a hook behind the accumulation of its gradient: {remedy}")
    devices = sorted({str(param.device) for param in params})
    device = params[0].device
    if len(devices) > 1 or not (is_on_meta(model) or is_host(device) or is_device(device)):
        raise ValueError(f"initialize: the model is on {', '.join(devices)}; move it to one device, {KINDS}")
