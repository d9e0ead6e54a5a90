"""Whether blocks and budgets go together, before anything is sharded."""

from __future__ import annotations

import mmap
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nvme_offload.offload._torch_private import local_tensor
from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.devices.device import is_device
from nvme_offload.offload.shards.param_tier import BUFFER_SIZE_KEY, Padded, check_block_sizes
from nvme_offload.offload.shards.param_tier import KIND as PARAMS
from nvme_offload.offload.storage.tier_plan import Unit
from nvme_offload.optim.layout.subgroup import ParamToPlace, plan_subgroups
from nvme_offload.optim.precision.plan import PrecisionPlan
from nvme_offload.optim.rules.rule import UpdateRule
from nvme_offload.optim.state.placement import StatePlacement
from nvme_offload.optim.tiers.grad_tier import KIND as GRADS
from nvme_offload.optim.tiers.parts import FROZEN, ROOT
from nvme_offload.optim.tiers.units import STAGING, grad_unit, param_unit, staging_unit


@dataclass(frozen=True)
class _Shard:
    """This rank's part of a parameter, as large as the largest of any rank."""

    form: Padded
    trainable: bool
    accumulate: torch.dtype
    rule: UpdateRule


def check_blocks_fit(
    config: OffloadConfig,
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    precision: PrecisionPlan,
    rule: UpdateRule,
    rules: Mapping[str, UpdateRule],
) -> None:
    """Look whether every block will fit into a staging buffer, and the staging buffers into the host budget.

    All ranks come to the same answer, so that none is left waiting. `StateStore` looks again, at what there really is.

    Args:
        config: the whole section.
        model: still whole.
        blocks: what will be gathered together; the rest of the model is one more block.
        mesh: its last dimension shards.
        precision: of this model.
        rule: of the optimizer.
        rules: of each parameter, by name.

    Raises:
        ConfigError: names the block, its bytes and the key to raise; or the budget and what is needed.
    """
    groups = list(_groups(model, blocks, mesh.size(mesh.ndim - 1), precision, rules))
    forms = [(name, [shard.form for shard in shards]) for name, shards in groups]
    section = config.zero_optimization.offload_param
    if section.device == "nvme":
        check_block_sizes(forms, section.buffer_size, BUFFER_SIZE_KEY)
    if config.host_budget is None:
        return
    moved = ("nvme", "cpu") if is_device(mesh.device_type) else ("nvme",)
    units: list[Unit] = []
    if section.device in moved:
        params = [
            param_unit(config, name, [shard.form for shard in shards], trainable=shards[0].trainable)
            for name, shards in groups
        ]
        units += [staging_unit(PARAMS, params, section.buffer_count), *params]
    if config.offload_gradients.device in moved:
        grads = [
            grad_unit(config, name, [(shard.form.numel, shard.accumulate) for shard in shards])
            for name, shards in groups
            if shards[0].trainable
        ]
        units += [staging_unit(GRADS, grads, config.offload_gradients.buffer_count), *grads]
    stays = "none" in (section.device, config.offload_gradients.device)
    with_mirrors = is_device(mesh.device_type) and stays
    _plan(config, rule, [shards for _, shards in groups], units, with_mirrors=with_mirrors)


def _plan(
    config: OffloadConfig,
    rule: UpdateRule,
    groups: Sequence[Sequence[_Shard]],
    units: Sequence[Unit],
    *,
    with_mirrors: bool,
) -> None:
    """Plan as `StateStore` will, which raises where the host budget is too small."""
    placement, section = StatePlacement(config, rule), config.zero_optimization.offload_optimizer
    staging_bytes = sum(unit.size_bytes for unit in units if unit.kind == STAGING)
    places = [
        ParamToPlace(0, 0, shard.form.numel, shard.form.dtype, shard.rule, number)
        for number, shards in enumerate(groups)
        for shard in shards
        if shard.trainable
    ]
    max_bytes = placement.max_subgroup_bytes(staging_bytes, with_mirrors)
    subgroups = plan_subgroups(places, max_bytes, config.zero_optimization.sub_group_size)
    largest = max((subgroup.size_bytes for subgroup in subgroups), default=0)
    own = section.buffer_count * -(-largest // mmap.PAGESIZE) * mmap.PAGESIZE if section.device == "nvme" else 0
    placement.plan([], subgroups, own, mmap.PAGESIZE, units)


def _groups(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    num_shards: int,
    precision: PrecisionPlan,
    rules: Mapping[str, UpdateRule],
) -> Iterator[tuple[str, list[_Shard]]]:
    """The name of each block, and its parameters: of one policy, and all of them trainable or frozen."""
    module_names = {module: name for name, module in model.named_modules()}
    param_names = {param: name for name, param in model.named_parameters()}
    taken = {param for param, name in param_names.items() if precision[name].kept_as}
    for block in (*blocks, model):
        params = [param for param in dict.fromkeys(block.parameters()) if param not in taken]
        taken.update(params)
        alike: dict[Hashable, list[_Shard]] = {}
        for param in params:
            name = param_names[param]
            form = Padded(_padded(local_tensor(param).shape, num_shards), precision[name].storage)
            key = precision.policy_of(name), param.requires_grad
            shard = _Shard(form, param.requires_grad, precision[name].accumulate, rules[name])
            alike.setdefault(key, []).append(shard)
        for shards in alike.values():
            yield (module_names[block] or ROOT) + ("" if shards[0].trainable else FROZEN), shards


def _padded(shape: torch.Size, num_shards: int) -> torch.Size:
    """Shape of a shard of a parameter of this shape, as FSDP2 gathers it."""
    return torch.Size([-(-shape[0] // num_shards), *shape[1:]]) if shape else shape
