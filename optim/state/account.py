"""Account for the memory that one rank holds in training, beside the state of the optimizer that is placed with it.

`initialize` and the optimizer ask it what a host budget of "auto" may be, `offload plan` and `offload init` what fits.
These are pure functions of sizes and of the section. The state itself is cut and placed by `optim.state.placement`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from nvme_offload.offload._torch_private import is_dtensor
from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.devices.device import is_device
from nvme_offload.offload.shards.param_tier import KIND as PARAMS
from nvme_offload.offload.shards.stored import Padded
from nvme_offload.offload.storage.tier_plan import Tier, Unit
from ..layout.master import FORM_OF_DTYPE, state_itemsize
from ..layout.subgroup import ParamToPlace
from ..precision.parameter import ParameterPrecision
from ..rules.rule import UpdateRule
from ..tiers.grad_tier import KIND as GRADS
from ..tiers.parts import parts_of
from ..tiers.units import grad_unit, keep_first, param_unit, staging_unit
from .table import ParamTable

T = TypeVar("T")

GATHERED = "gathered groups"
"""This is the kind of the unit of gathered parameters, and of gradients before they are reduced."""


class ShardSize(NamedTuple):
    """One rank's part of a parameter, of `whole_numel` elements; `form` is as large as the largest part of any rank."""

    form: Padded
    whole_numel: int
    precision: ParameterPrecision
    rule: UpdateRule
    trainable: bool = True


class GroupSize(NamedTuple):
    """Parameters of one precision, all trained or all frozen, that are gathered together."""

    name: str
    shards: Sequence[ShardSize]
    """Groups that are alike may share one sequence: what follows from it is then counted once."""
    owner: object = None
    """The layer or end that gathers them, perhaps with others; None: they are in no layer, and gathered all along."""
    takes_turns: bool = False
    """Whether they are in a layer through which micro-batches may go by turns."""


@dataclass(frozen=True)
class Account:
    """An account of what one rank holds of a model: its methods give units, as they are placed or at their peak.

    Args:
        groups: in the order of the forward.
        num_shards: ranks that share each parameter.
        on_device: forward and backward compute on a device beside the CPU.
    """

    config: OffloadConfig
    groups: Sequence[GroupSize]
    num_shards: int
    on_device: bool

    def places(self, log_itemsize: int = 0) -> list[ParamToPlace]:
        """Return the parameters that have state, for `plan_subgroups`; each has the number of its group."""
        in_blocks = self.config.has_block_tiers
        trained = self._of_each(
            lambda group: [(s.form.numel, s.form.dtype, s.rule) for s in group.shards if s.trainable]
        )
        return [
            ParamToPlace(number, 0, *shard, number if in_blocks else -1, log_itemsize)
            for number, shards in enumerate(trained)
            for shard in shards
        ]

    def blocks(self) -> list[Unit]:
        """Return what is within the host budget beside the state; see `BlockTiers.units`."""
        params, grads, units = self.config.zero_optimization.offload_param, self.config.offload_gradients, list[Unit]()
        if PARAMS in self._in_blocks:
            sized = self._of_each(self._param_block)
            blocks = keep_first(params.max_in_cpu or 0, sized)
            units += [staging_unit(self.config, PARAMS, blocks, params.buffer_count), *blocks]
        if GRADS in self._in_blocks:
            blocks = [unit for unit in self._of_each(self._grad_block) if unit is not None]
            units += [staging_unit(self.config, GRADS, blocks, grads.buffer_count), *blocks]
        return units

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state, without what rounding adds."""
        return sum(self._of_each(_state_bytes))

    def _param_block(self, group: GroupSize) -> tuple[Unit, list[Padded]]:
        forms = [shard.form for shard in group.shards]
        trainable = any(shard.trainable for shard in group.shards)
        return param_unit(self.config, group.name, forms, trainable=trainable), forms

    def _grad_block(self, group: GroupSize) -> Unit | None:
        if not all(shard.trainable for shard in group.shards):
            return None
        return grad_unit(self.config, group.name, [(s.form.numel, s.precision.accumulate) for s in group.shards])

    def _of_each(self, what: Callable[[GroupSize], T]) -> list[T]:
        """Return what a function makes of each group; of those that share their shards, of the first."""
        found = {id(group.shards): group for group in reversed(self.groups)}
        made = {key: what(group) for key, group in found.items()}
        return [made[id(group.shards)] for group in self.groups]

    def residents(self) -> Iterator[Unit]:
        """Yield parameters and gradients that are in no block, and the most that is gathered at once."""
        device: Tier = "device" if self.on_device else "host"
        if PARAMS not in self._in_blocks:
            yield Unit(PARAMS, PARAMS, sum(self._of_each(_stored_bytes)), tiers=(device,))
        if GRADS not in self._in_blocks:
            yield Unit(GRADS, GRADS, sum(self._of_each(_grad_bytes)), tiers=(device,))
        yield Unit(GATHERED, GATHERED, self._gathered_bytes(), tiers=(device,))

    def to_come(self, tier: Tier = "host", *, on_meta: bool = False) -> int:
        """Return the bytes of host or device memory that training will still take beside the budget.

        `on_meta`: the model has no values yet, so that its parameters are to come, too.
        """
        units = [unit for unit in self.residents() if unit.tiers == (tier,)]
        return sum(unit.size_bytes for unit in units if on_meta or unit.kind != PARAMS)

    @property
    def _in_blocks(self) -> set[str]:
        """Return the kinds that leave the memory of whoever computes with them."""
        leave = ("nvme", "cpu") if self.on_device else ("nvme",)
        devices = {
            PARAMS: self.config.zero_optimization.offload_param.device,
            GRADS: self.config.offload_gradients.device,
        }
        return {kind for kind, device in devices.items() if device in leave}

    def _gathered_bytes(self) -> int:
        """Return the peak of backward: two layers gathered, one with its gradients before and after the reduction.

        What is in no layer stays gathered, and its gradients wait unreduced until the end of backward. Below stage 3
        all layers stay gathered. One rank alone computes on its shards; where they are cast, or trained in blocks, on
        one layer's copies at a time. Frozen blocks that take turns are computed with in their buffers.
        """
        alone = self.num_shards == 1
        params, grads, reduced = Counter[object](), Counter[object](), Counter[object]()
        for group, (of_params, of_grads, of_reduced) in zip(self.groups, self._of_each(self._gathered), strict=True):
            params[group.owner] += of_params
            grads[group.owner] += of_grads
            reduced[group.owner] += of_reduced
        root = params.pop(None, 0) + grads.pop(None, 0)
        is_freed = self.config.zero_optimization.stage == 3
        layers = (1 if alone else 2) * _largest(params) if is_freed else sum(params.values())
        return round(root + layers + _largest(grads) + _largest(reduced) * (1 + 1 / self.num_shards))

    def _gathered(self, group: GroupSize) -> tuple[int, int, int]:
        """Return the bytes of a group's gathered parameters, of their gradients, and of these when they are reduced."""
        alone, in_blocks, params, grads, reduced = self.num_shards == 1, self._in_blocks, 0, 0, 0
        lends = group.takes_turns and self.config.goes_by_blocks and not self.on_device
        for shard in group.shards:
            dtypes, computed = shard.precision, shard.whole_numel * shard.precision.gathered.itemsize
            is_copied = PARAMS in in_blocks and (shard.trainable or not lends)
            if not alone or is_copied or dtypes.gathered != dtypes.storage:
                params += computed
            if shard.trainable and (not alone or GRADS in in_blocks or dtypes.accumulate != dtypes.gather):
                grads += computed
            if shard.trainable and not alone:
                reduced += shard.whole_numel * dtypes.reduce.itemsize
        return params, grads, reduced


def account_of(config: OffloadConfig, table: ParamTable) -> Account:
    """Return the account of an optimizer's parameters; gradients that are there already need no more room."""
    groups: dict[object, list[ShardSize]] = {}
    for record in table:
        leaf, parts = record.leaf, parts_of(record.leaf)
        form = parts.stored.form if parts is not None else Padded(record.param.shape, record.param.dtype)
        accumulate = parts.accumulate if parts is not None else form.dtype
        precision = ParameterPrecision(form.dtype, form.dtype, form.dtype, accumulate, FORM_OF_DTYPE[form.dtype])
        awaits_grad = leaf.requires_grad and leaf.grad is None
        shard = ShardSize(form, leaf.numel(), precision, record.rule, awaits_grad)
        groups.setdefault(parts.group if parts is not None else record.index, []).append(shard)
    sizes = [GroupSize("", shards, owner) for owner, shards in groups.items()]
    is_sharded = any(is_dtensor(leaf) for leaf in table.leaves)
    return Account(config, sizes, dist.get_world_size() if is_sharded else 1, is_device(table.device))


def _stored_bytes(group: GroupSize) -> int:
    return sum(shard.form.numel * shard.form.dtype.itemsize for shard in group.shards)


def _state_bytes(group: GroupSize) -> int:
    trained = (shard for shard in group.shards if shard.trainable)
    return sum(int(s.form.numel * state_itemsize(FORM_OF_DTYPE[s.form.dtype], s.rule.states)) for s in trained)


def _grad_bytes(group: GroupSize) -> int:
    return sum(shard.form.numel * shard.precision.accumulate.itemsize for shard in group.shards if shard.trainable)


def _largest(sizes: Counter[object]) -> int:
    return max(sizes.values(), default=0)
