"""Wrapping a plain module with FSDP2: what is gathered together, in which precision, and when it is freed."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils import swap_tensors

from nvme_offload.offload import _fsdp_passes, _torch_private
from nvme_offload.offload.devices.device import is_host
from nvme_offload.offload.errors import BlockOrderError, PeerError, StateError
from ..layout.blocks import params_outside
from ..precision import casts
from ..precision.parameter import stays_as_it_came
from ..precision.plan import PrecisionPlan
from ..precision.watch import say_what_is_lowered
from ..ranks.collective import gather, host_groups, largest
from ..tiers import parts
from .host_collectives import gather_in_kept_memory
from .outputs import train_through_any_output
from .scalars import ScalarGradients, scalars_of
from .whole_weights import refuse_what_needs_whole_weights

PIPELINES_REDUCE_ONCE = hasattr(FSDPModule, "set_manual_backward_finalization")
"""Whether the schedules of this torch (2.15 and newer) put off all that follows a backward to the end of the step."""

REDUCED_ONCE = (
    f"torch {torch.__version__}: its pipelines add up micro-batches in the dtype they reduce in; write the same dtype "
    "for communication_data_type and gradient_accumulation_dtype, or use torch 2.11 to 2.13"
)


def shard_with_precision(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    plan: PrecisionPlan,
    *,
    reshard_after_forward: bool,
    give_shards: Callable[[parts.StorageOf], None] | None = None,
) -> None:
    """Shard a plain module and give it the precision of its plan: all that `initialize` does to it, in place.

    What it trains in 16 bits becomes fp32. For a model on meta, `give_shards` gives its shards their memory.
    """
    before = {name: _torch_private.PutOn.of(param) for name, param in model.named_parameters()}
    casts.cast_where_needed(model, plan)
    for param in model.parameters():
        if not stays_as_it_came(param):
            _make_fp32(param)
        if param.is_meta and param.ndim == 0:  # which nobody replaces by shards
            zero = nn.Parameter(torch.zeros_like(param, device=mesh.device_type), param.requires_grad)
            swap_tensors(param, zero)  # type: ignore[no-untyped-call]
    old = {name: weakref.ref(param) for name, param in model.named_parameters()}  # not before, or none could be swapped
    shard_model(model, blocks, mesh, plan, reshard_after_forward=reshard_after_forward)
    names = {param: name for name, param in model.named_parameters()}

    def storage_of(record: Any) -> parts.Storage | None:
        precision = plan[names[record.sharded_param]]
        is_apart = precision.in_parts and record.sharded_param.dtype in (torch.float32, precision.kept_as)
        return parts.Storage(precision.storage, precision.accumulate) if is_apart else None

    (give_shards or partial(parts.take_apart, model))(storage_of)
    _replace(old, before, model)
    for name, param in model.named_parameters():
        accumulate = plan[name].accumulate
        if param.is_floating_point() and param.dtype != accumulate and parts.split_shard(param) is None:
            parts.keep_grad_in(param, accumulate)
    _reduce_where_accumulation_asks(model, plan)
    if plan.autocast is not None:
        casts.gather_fp32_outside_autocast(model, plan)
        if plan.watches_modules and not any(_torch_private.is_compiled(module) for module in model.modules()):
            say_what_is_lowered(model, _gathered_whole(model, plan), plan.autocast)
    casts.guard_autocast(model, plan)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _torch_private.refuse_conversion(module, parts.CONVERTED)  # hooks of gradients would be lost
    refuse_what_needs_whole_weights(model)


def _replace(
    old: Mapping[str, Callable[[], nn.Parameter | None]], before: Mapping[str, _torch_private.PutOn], model: nn.Module
) -> None:
    """Give shards what was put on the parameters that they replace, to which no gradient may come any more."""
    parts.remember_gatherers(model)
    records = {
        record.sharded_param: record for module in model.modules() for record in _torch_private.fsdp_params(module)
    }
    for name, param in model.named_parameters():
        if param not in records:
            continue  # a scalar, which is no shard: it is what it was

        def refuse(old: torch.Tensor, name: str = name) -> None:
            remedy = (
                f"engine.module.get_parameter({name!r}), the shard in its place: collect parameters after initialize"
            )
            raise StateError(f"{name} as it was before initialize", f"a loss that uses {remedy}", "a gradient of it")

        _torch_private.take_the_place_of(old[name](), before[name], records[param], refuse)


def _gathered_whole(model: nn.Module, plan: PrecisionPlan) -> dict[nn.Module, str]:
    def is_whole(prefix: str, name: str, param: nn.Parameter) -> bool:
        return param.ndim > 1 and plan[f"{prefix}.{name}" if prefix else name].gather is torch.float32

    return {
        module: prefix or type(module).__name__
        for prefix, module in model.named_modules()
        if any(is_whole(prefix, *named) for named in module.named_parameters(recurse=False))
    }


def _make_fp32(param: nn.Parameter) -> None:
    """Convert a parameter to fp32 in place, so that tied weights stay tied."""
    if param.dtype is torch.float32:
        return
    if isinstance(param, DTensor):  # whose data is another tensor's, which `.data` would not change
        wide = nn.Parameter(param.detach().float(), requires_grad=param.requires_grad)
        swap_tensors(param, wide)  # type: ignore[no-untyped-call]
    else:
        param.data = param.data.float()


def shard_model(
    model: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh, plan: PrecisionPlan, *, reshard_after_forward: bool
) -> nn.Module:
    """``fully_shard`` the blocks one by one, then what is left of the model; in place. No block is inside another.

    Within a block, and in what is left, all modules of one gather and one reduce dtype are gathered together.
    """
    grouping, scalars = _Grouping(model, blocks, plan), scalars_of(model)
    for modules, policy in grouping.groups:
        for module in modules:
            if type(module) is nn.Linear and module not in grouping.units:  # FSDP2 warns if its output is changed
                casts.return_no_views(module)
        together = modules if len(modules) > 1 else modules[0]
        # FSDP2 gathers a list again for backward when the gradient of the last module's output comes, which need not
        # be the first gradient, or come at all: the few parameters in lists stay.
        reshard = reshard_after_forward and len(modules) == 1
        ignored = set(scalars) or None  # every rank has them
        fully_shard(together, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, ignored_params=ignored)
    if hasattr(model, "generate"):  # that of a model with encoder and decoder calls the encoder before the model
        register_fsdp_forward_method(model, "generate")
    train_through_any_output(model)  # FSDP2 looks into few kinds of objects for the tensors of an output
    _torch_private.reduce_every_call(model)  # a checkpoint's second call would leave its gradients to the next step
    _gather_in_own_dtypes(model, plan)
    if mesh.size() == 1:  # FSDP2 would copy each shard once, and each gradient four times
        for module in model.modules():
            _fsdp_passes.compute_on_shards(module)
    else:
        on_host = host_groups(mesh)
        # With an expert idle on one rank, ranks would add up gradients of different parameters, or wait for ever.
        _fsdp_passes.reduce_alike(model, partial(_of_any_rank, on_host))
        if scalars:  # FSDP2 was told to ignore them
            _fsdp_passes.after_each_backward(model, ScalarGradients(scalars, mesh.get_all_groups(), on_host).reduce)
        if is_host(torch.device(mesh.device_type)):
            gather_in_kept_memory(model)
    for module in model.modules():  # last: it wraps what `compute_on_shards` replaces
        _fsdp_passes.gather_outside_inference_mode(module)
    return model


def _of_any_rank(
    groups: Sequence[dist.ProcessGroup], names: list[str], number: int, has: list[bool], refusal: str
) -> list[int]:
    """Return what some rank has a gradient of; raise where another refuses, or comes to another module. Collective."""
    latest, first, *of_any = largest([number, -number, *has], *groups)
    if latest == 2 * len(names):
        # Some rank cannot take turns: see `TakingTurns.refuse`. It raises an error of its own, which says more.
        rank, said = next(found for found in gather(refusal, *groups).items() if found[1])
        if not refusal:
            raise BlockOrderError(f"on rank {rank} {said}") from PeerError(f"rank {rank} cannot take turns")
    elif latest != -first:  # the least number: the reduction takes the largest alone
        both = f"those of {names[-first % len(names)]!r} on one, of {names[latest % len(names)]!r} on another"
        remedy = "add 0.0 * output.sum() to a loss that leaves a block out"
        raise StateError("a pass", "tensors of the same blocks on all ranks", f"{both}: {remedy}")
    return of_any


def _gather_in_own_dtypes(model: nn.Module, plan: PrecisionPlan) -> None:
    """Gather each parameter in its own precision where a module has some of two, and reduce them alike."""
    names = {param: name for name, param in model.named_parameters()}
    done: set[int] = set()
    for module in model.modules():
        # Modules that are gathered together have the same records.
        records = [record for record in _torch_private.fsdp_params(module) if id(record) not in done]
        done.update(map(id, records))
        policies = {id(record): plan.policy_of(names[record.sharded_param]) for record in records}
        trained = {
            policies[id(one)].reduce_dtype: one.sharded_param for one in records if one.sharded_param.requires_grad
        }
        if len(trained) > 1:
            why = f'are reduced together in {" and ".join(map(str, trained))}: write "communication_data_type": "fp32"'
            raise ValueError(
                f"initialize: gradients of {' and of '.join(names[one] for one in trained.values())} {why}"
            )
        if len({policy.param_dtype for policy in policies.values()}) > 1:
            for record in records:
                _fsdp_passes.gather_by_itself(record, policies[id(record)])


def _reduce_where_accumulation_asks(model: nn.Module, plan: PrecisionPlan) -> None:
    """Let the model reduce every micro-batch's gradients where the plan says so, whoever asks it to wait.

    Stage 1, and every pipeline schedule of PyTorch, defer reductions to the last micro-batch with
    ``model.set_requires_gradient_sync(False)``. Until then FSDP2 adds up unsharded gradients in the reduce dtype, so
    that groups with another accumulation dtype must not wait.
    """
    names = {param: name for name, param in model.named_parameters()}
    never_wait = {
        module
        for module in model.modules()
        for record in _torch_private.fsdp_params(module)
        if plan[names[record.sharded_param]].reduces_every_micro_batch
    }

    def set_requires_gradient_sync(requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        for module in model.modules() if recurse else (model,):
            if isinstance(module, FSDPModule):
                wanted = requires_gradient_sync or module in never_wait
                # Of the class: that of the model is this function.
                type(module).set_requires_gradient_sync(module, wanted, recurse=False)

    def set_manual_backward_finalization(enabled: bool) -> None:
        if enabled:
            raise RuntimeError(REDUCED_ONCE)

    model.set_requires_gradient_sync = set_requires_gradient_sync  # type: ignore[assignment]
    if never_wait and PIPELINES_REDUCE_ONCE:
        model.set_manual_backward_finalization = set_manual_backward_finalization  # type: ignore[assignment]


class _Grouping:
    """Lists of modules that are gathered together, with their policy: inner ones first, the model last."""

    def __init__(self, model: nn.Module, blocks: Iterable[nn.Module], plan: PrecisionPlan) -> None:
        self.groups: list[tuple[list[nn.Module], MixedPrecisionPolicy]] = []
        self._policies = {param: plan.policy_of(name) for name, param in model.named_parameters() if param.ndim}
        self._blocks = dict.fromkeys(blocks)
        for module in model.modules():
            self._gather_own_together(module)
        self.units = {*self._blocks, model}
        for unit in (*self._blocks, model):
            self._add(unit)

    def _add(self, unit: nn.Module) -> None:
        """A unit has the policy of its own parameters, or of most that is in it, and one list for each other policy."""
        sizes: dict[MixedPrecisionPolicy, int] = {}
        for param in self._sharded(params_outside(unit, self._blocks)):
            sizes[self._policies[param]] = sizes.get(self._policies[param], 0) + param.numel()
        largest = max(sizes, key=sizes.__getitem__, default=MixedPrecisionPolicy())
        own = next(iter(self._policies_of(unit)), largest)
        others: dict[MixedPrecisionPolicy, dict[nn.Module, None]] = {}
        self._sort(unit, own, others)
        self.groups += [(list(modules), policy) for policy, modules in others.items()]
        self.groups.append(([unit], own))

    def _sort(
        self, module: nn.Module, own: MixedPrecisionPolicy, others: dict[MixedPrecisionPolicy, dict[nn.Module, None]]
    ) -> None:
        """Find the largest parts that have one other policy alone; what mixes them by itself is a unit of its own.

        Parameters in a container, which nobody calls, are gathered with the unit, each in its own precision.
        """
        for child in module.children():
            if isinstance(child, (nn.ParameterDict, nn.ParameterList)):
                self._policies.update(dict.fromkeys(self._sharded(child.parameters(recurse=False)), own))
            policies = {self._policies[param] for param in self._sharded(params_outside(child, self._blocks))}
            if child in self._blocks or policies <= {own}:
                continue
            if len(policies) == 1 and not isinstance(child, (*casts.CONTAINERS, nn.Sequential)):
                others.setdefault(policies.pop(), {})[child] = None
            elif self._policies_of(child) - {own}:
                self._add(child)
            else:
                self._sort(child, own, others)

    def _policies_of(self, module: nn.Module) -> set[MixedPrecisionPolicy]:
        return {self._policies[param] for param in self._sharded(module.parameters(recurse=False))}

    def _sharded(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [param for param in dict.fromkeys(params) if param in self._policies]

    def _gather_own_together(self, module: nn.Module) -> None:
        """A module's own parameters are in one group, in the policy of those that are not fp32 beside others."""
        own = self._sharded(module.parameters(recurse=False))
        policies = dict.fromkeys(self._policies[param] for param in own)
        if len(policies) > 1:
            low = next(policy for policy in policies if policy.param_dtype is not torch.float32)
            self._policies.update(dict.fromkeys(own, low))
