"""Whether blocks and budgets go together, before anything is sharded."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nvme_offload.offload._torch_private import local_tensor
from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.shards.param_tier import BUFFER_SIZE_KEY, block_layout, check_block_sizes
from nvme_offload.offload.shards.param_tier import KIND as PARAMS
from nvme_offload.offload.storage.tier_plan import Unit
from nvme_offload.optim.layout.master import MasterForm
from nvme_offload.optim.layout.subgroup import ParamToPlace, plan_subgroups
from nvme_offload.optim.precision.plan import PrecisionPlan
from nvme_offload.optim.rules.rule import UpdateRule
from nvme_offload.optim.state.placement import StatePlacement
from nvme_offload.optim.tiers.grad_tier import KIND as GRADS
from nvme_offload.optim.tiers.halves import ROOT
from nvme_offload.optim.tiers.units import STAGING, grad_unit, param_unit, staging_unit


@dataclass(frozen=True)
class _Shard:
    """This rank's part of a parameter, as large as the largest of any rank."""

    shape: torch.Size
    trainable: bool
    on_tiers: bool
    """Whether the shard is in halves, which the parameter tier and the gradient tier can take."""
    accumulate: torch.dtype


def check_blocks_fit(
    config: OffloadConfig,
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    precision: PrecisionPlan,
    rule: UpdateRule,
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

    Raises:
        ConfigError: names the block, its bytes and the key to raise; or the budget and what is needed.
    """
    groups = list(_groups(model, blocks, mesh.size(mesh.ndim - 1), precision))
    split = [(name, [shard for shard in shards if shard.on_tiers]) for name, shards in groups]
    on_tiers = [(name, shards) for name, shards in split if shards]
    section = config.zero_optimization.offload_param
    if section.device == "nvme":
        shapes = [(name, [(shard.shape.numel(), torch.bfloat16) for shard in shards]) for name, shards in on_tiers]
        sizes = [(f"{PARAMS} of {name}", block_layout(shard_sizes)[1]) for name, shard_sizes in shapes]
        check_block_sizes(sizes, section.buffer_size, BUFFER_SIZE_KEY)
    if config.host_budget is None:
        return
    units: list[Unit] = []
    if section.device == "nvme":
        params = [
            param_unit(
                config, name, [shard.shape for shard in shards], trainable=any(item.trainable for item in shards)
            )
            for name, shards in on_tiers
        ]
        units += [staging_unit(PARAMS, params, section.buffer_count), *params]
    if config.offload_gradients.device == "nvme":
        grads = [
            grad_unit(config, name, [(shard.shape.numel(), shard.accumulate) for shard in shards if shard.trainable])
            for name, shards in on_tiers
        ]
        units += [staging_unit(GRADS, grads, config.offload_gradients.buffer_count), *grads]
    _plan(config, rule, [shards for _, shards in groups], units, with_mirrors=mesh.device_type == "cuda")


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
    dtypes = {True: torch.bfloat16, False: torch.float32}
    places = [
        ParamToPlace(0, 0, shard.shape.numel(), dtypes[shard.on_tiers], rule, number)
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
    model: nn.Module, blocks: Sequence[nn.Module], num_shards: int, precision: PrecisionPlan
) -> Iterator[tuple[str, list[_Shard]]]:
    """The name of each block, and its parameters."""
    module_names = {module: name for name, module in model.named_modules()}
    param_names = {param: name for name, param in model.named_parameters()}
    taken: set[nn.Parameter] = set()
    for block in (*blocks, model):
        params = [param for param in dict.fromkeys(block.parameters()) if param not in taken]
        taken.update(params)
        kinds = [(param, precision[param_names[param]]) for param in params]
        yield (
            module_names[block] or ROOT,
            [
                _Shard(
                    _padded(local_tensor(param).shape, num_shards),
                    param.requires_grad,
                    kind.master is MasterForm.SPLIT,
                    kind.accumulate,
                )
                for param, kind in kinds
            ],
        )


def _padded(shape: torch.Size, num_shards: int) -> torch.Size:
    """Shape of a shard of a parameter of this shape, as FSDP2 gathers it."""
    return torch.Size([-(-shape[0] // num_shards), *shape[1:]]) if shape else shape
