"""Whether blocks and budgets go together, before anything is sharded."""

from __future__ import annotations

import mmap
from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nvme_offload.offload._torch_private import local_tensor
from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.devices.device import is_device
from nvme_offload.offload.host.available_memory import auto_host_budget
from nvme_offload.offload.shards.param_tier import BUFFER_SIZE_KEY, check_block_sizes
from nvme_offload.offload.shards.stored import Padded
from nvme_offload.offload.units import round_up
from nvme_offload.optim.birth.birth import is_on_meta
from nvme_offload.optim.layout.subgroup import plan_subgroups
from nvme_offload.optim.precision.plan import PrecisionPlan
from nvme_offload.optim.rules.rule import UpdateRule
from nvme_offload.optim.state.account import Account, GroupSize, ShardSize
from nvme_offload.optim.state.placement import StatePlacement
from nvme_offload.optim.tiers.parts import FROZEN, ROOT


def check_blocks_fit(
    config: OffloadConfig,
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    precision: PrecisionPlan,
    rule: UpdateRule,
    rules: Mapping[str, UpdateRule],
) -> OffloadConfig:
    """Check that each block fits into a staging buffer, and the staging buffers into the host budget; else ConfigError.

    All ranks come to the same answer, so that none is left waiting. `StateStore` looks again, at what there really is.
    Return the section, with a host budget of "auto" in bytes: what this host has left beside the model.
    """
    on_device = is_device(mesh.device_type)
    account = Account(config, list(_groups(model, blocks, mesh, precision, rules)), _num_shards(mesh), on_device)
    section = config.zero_optimization.offload_param
    if section.device == "nvme":
        forms = [(group.name, [shard.form for shard in group.shards]) for group in account.groups]
        check_block_sizes(forms, section.buffer_size, BUFFER_SIZE_KEY)
    if config.host_budget is None:
        return config
    placement = StatePlacement(config, rule)
    placement.fix_budget(lambda: auto_host_budget() - account.to_come(on_meta=is_on_meta(model)))
    stays = "none" in (section.device, config.offload_gradients.device)
    _plan(config, placement, account, with_mirrors=on_device and stays)
    return config.model_copy(update={"host_budget": placement.host_budget})


def _plan(config: OffloadConfig, placement: StatePlacement, account: Account, *, with_mirrors: bool) -> None:
    """Plan as `StateStore` will, which raises where the host budget is too small."""
    units, page = account.blocks(), mmap.PAGESIZE
    in_memory = sum(unit.size_bytes for unit in units if unit.tiers == ("host",))
    max_bytes = placement.max_subgroup_bytes(in_memory, with_mirrors)
    subgroups = plan_subgroups(account.places(), max_bytes, config.zero_optimization.sub_group_size)
    largest = max((subgroup.size_bytes for subgroup in subgroups), default=0)
    is_staged = config.zero_optimization.offload_optimizer.device == "nvme"
    num_buffers = placement.num_buffers(subgroups, may_stay=True) if is_staged else 0
    placement.plan([], subgroups, num_buffers * round_up(largest, page), page, units)


def _num_shards(mesh: DeviceMesh) -> int:
    return mesh.size(mesh.ndim - 1)


def _groups(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    precision: PrecisionPlan,
    rules: Mapping[str, UpdateRule],
) -> Iterator[GroupSize]:
    """Yield the parameters of each block, and of the rest: of one policy, and all of them trainable or frozen."""
    module_names = {module: name for name, module in model.named_modules()}
    param_names = {param: name for name, param in model.named_parameters()}
    taken: set[nn.Parameter] = set()
    for block in (*blocks, model):
        params = [param for param in dict.fromkeys(block.parameters()) if param not in taken]
        taken.update(params)
        alike: dict[Hashable, list[ShardSize]] = {}
        for param in params:
            name = param_names[param]
            form = Padded(_padded(local_tensor(param).shape, _num_shards(mesh)), precision[name].storage)
            key = precision.policy_of(name), param.requires_grad
            shard = ShardSize(form, param.numel(), precision[name], rules[name], param.requires_grad)
            alike.setdefault(key, []).append(shard)
        for shards in alike.values():
            name = (module_names[block] or ROOT) + ("" if shards[0].trainable else FROZEN)
            yield GroupSize(name, shards, None if block is model else block)


def _padded(shape: torch.Size, num_shards: int) -> torch.Size:
    """Return the shape of a shard of a parameter of this shape, as FSDP2 gathers it."""
    return torch.Size([-(-shape[0] // num_shards), *shape[1:]]) if shape else shape
