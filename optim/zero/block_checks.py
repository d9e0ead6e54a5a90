"""Whether blocks and budgets go together, before anything is sharded."""

import mmap
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nvme_offload.offload._torch_private import local_tensor
from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.devices.device import current_of, free_bytes, is_device
from nvme_offload.offload.errors import ConfigError, ConfigWarning
from nvme_offload.offload.host.available_memory import auto_budget, auto_host_budget, share_of_available
from nvme_offload.offload.shards.stored import Padded
from nvme_offload.offload.units import round_up
from nvme_offload.offload.warn import warn_user
from ..birth.birth import is_on_meta
from ..layout.subgroup import plan_subgroups
from ..precision.plan import PrecisionPlan
from ..rules.rule import UpdateRule
from ..state.account import Account, GroupSize, ShardSize
from ..state.choice import CANDIDATES
from ..state.placement import LEAST_BUDGET, StatePlacement
from ..tiers.parts import FROZEN, ROOT
from .keeping import Room


@dataclass(frozen=True)
class BlockChecks:
    """The blocks of a model on one rank of a mesh, which nobody has sharded yet."""

    model: nn.Module
    blocks: Sequence[nn.Module]
    mesh: DeviceMesh
    precision: PrecisionPlan
    rule: UpdateRule
    rules: Mapping[str, UpdateRule]

    def check(self, config: OffloadConfig) -> OffloadConfig:
        """Check that staging buffers, each of which holds any block, fit into the host budget; else ConfigError.

        All ranks come to the same answer, so that none is left waiting. `StateStore` looks again, at what there really
        is. Return the section, with a host budget of "auto" in bytes: what this host has left beside the model.
        """
        account, section = self._account(config), config.zero_optimization.offload_param
        if config.host_budget is None:
            return config
        placement = StatePlacement(config, self.rule)
        placement.fix_budget(lambda: self._left(account))
        if placement.scarcity:
            warn_user(placement.scarcity, ConfigWarning)
        stays = "none" in (section.device, config.offload_gradients.device)
        _plan(config, placement, account, with_mirrors=account.on_device and stays)
        return config.model_copy(update={"host_budget": placement.host_budget})

    def first_that_fits(self, config: OffloadConfig) -> int:
        """Return the number of the first of `CANDIDATES` that fits into this rank's memory, else that of the last."""
        numbered = enumerate(each.applied(config) for each in CANDIDATES[:-1])
        return next((number for number, section in numbered if self._has_room(section)), len(CANDIDATES) - 1)

    def room(self, config: OffloadConfig) -> Room:
        """Return what this rank will have left beside all that training takes but the state: before there is any."""
        account, on_meta = self._account(config), is_on_meta(self.model)
        host = share_of_available() - account.to_come(on_meta=on_meta)
        if not account.on_device:
            return Room(host, host)
        free = auto_budget(free_bytes(current_of(self.mesh.device_type)), 1)
        return Room(free - account.to_come("device", on_meta=on_meta), host)

    def _has_room(self, config: OffloadConfig) -> bool:
        account = self._account(config)
        if account.on_device:
            free = auto_budget(free_bytes(current_of(self.mesh.device_type)), 1)
            if account.to_come("device", on_meta=is_on_meta(self.model)) > free:
                return False
        try:
            return self._left(account) >= LEAST_BUDGET and self.check(config) is not None
        except ConfigError:
            return False

    def _account(self, config: OffloadConfig) -> Account:
        return Account(config, list(self._groups()), self._num_shards, is_device(self.mesh.device_type))

    def _left(self, account: Account) -> int:
        return auto_host_budget() - account.to_come(on_meta=is_on_meta(self.model))

    @property
    def _num_shards(self) -> int:
        return self.mesh.size(self.mesh.ndim - 1)

    def _groups(self) -> Iterator[GroupSize]:
        """Yield the parameters of each block, and of the rest: of one policy, and all of them trainable or frozen."""
        module_names = {module: name for name, module in self.model.named_modules()}
        param_names = {param: name for name, param in self.model.named_parameters()}
        taken: set[nn.Parameter] = set()
        for block in (*self.blocks, self.model):
            params = [param for param in dict.fromkeys(block.parameters()) if param not in taken and param.ndim]
            taken.update(params)
            alike: dict[Hashable, list[ShardSize]] = {}
            for param in params:
                name = param_names[param]
                precision = self.precision[name]
                shape = local_tensor(param).shape
                gathered = torch.Size([-(-shape[0] // self._num_shards), *shape[1:]])
                form = Padded(gathered, precision.storage)
                key = self.precision.policy_of(name), param.requires_grad
                shard = ShardSize(form, param.numel(), precision, self.rules[name], param.requires_grad)
                alike.setdefault(key, []).append(shard)
            for shards in alike.values():
                name = (module_names[block] or ROOT) + ("" if shards[0].trainable else FROZEN)
                yield GroupSize(name, shards, None if block is self.model else block)


def _plan(config: OffloadConfig, placement: StatePlacement, account: Account, *, with_mirrors: bool) -> None:
    units, page = account.blocks(), mmap.PAGESIZE
    in_memory = sum(unit.size_bytes for unit in units if unit.tiers == ("host",))
    max_bytes = placement.max_subgroup_bytes(in_memory, with_mirrors)
    places = account.places()
    numel = sum(place.numel for place in places)
    max_numel = config.zero_optimization.max_subgroup_numel(numel, on_device=account.on_device)
    subgroups = plan_subgroups(places, max_bytes, max_numel)
    largest = max((subgroup.size_bytes for subgroup in subgroups), default=0)
    is_staged = config.zero_optimization.offload_optimizer.device == "nvme"
    num_buffers = placement.num_buffers(subgroups, may_stay=True) if is_staged else 0
    placement.plan([], subgroups, num_buffers * round_up(largest, page), page, units)
