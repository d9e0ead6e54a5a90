"""Keep split parameters of an optimizer: the rest of their masters is in its state."""

from contextlib import AbstractContextManager, nullcontext

import torch

from nvme_offload.offload._torch_private import local_tensor
from nvme_offload.offload.shards.stored import ResidentShard, TieredShard
from ..layout.master import MasterForm
from ..state.body import StateBody
from ..state.condition import Need
from ..tiers.parts import ShardParts, parts_of
from .entries import read_entries, set_entries


class StateParts(ShardParts):
    """The rest is in the optimizer's state, on whatever tier that is; of an fp32 parameter there is none."""

    is_in_state = True

    def __init__(self, body: StateBody, index: int, before: ShardParts) -> None:
        super().__init__(before.owner, before.group, before.stored, before.accumulate)
        self.body = body
        self._index = index

    def gathered(self, dtype: torch.dtype) -> torch.Tensor:
        """Return what FSDP2 gathers, as the latest step leaves it; wait for its update."""
        self.body.wait_for_updates_of((self._index,))
        return super().gathered(dtype)

    def held(self, *, change: bool) -> AbstractContextManager[torch.Tensor]:
        """Hold what is stored as the latest step leaves it, 1D with padding. Call it `between_steps`, in no gather.

        It raises StateError where a step stopped halfway: other parameters may be of another step than this one.
        """
        if not (change or self.body.is_closed):
            self.body.check(Need.PARAMS)
        return super().held(change=change)

    def read(self) -> torch.Tensor:
        """Return the parts joined, fp32, in the shape of this rank's shard. StateError: a step stopped halfway."""
        if self._is_all_stored:
            shape = self.body.table[self._index].param.shape
            with self.between_steps(), self.held(change=False) as flat:
                return flat[: shape.numel()].view(shape).to(self.device, copy=True)
        master = read_entries(self.body, {self._index: ("master",)})[self._index]["master"]
        return local_tensor(master).to(self.device)

    def write(self, values: torch.Tensor) -> None:
        """Divide fp32 values, in the shape of this rank's shard, among the parts."""
        if not self._is_all_stored:
            set_entries(self.body, {self._index: {"master": values}})
            return
        self.num_writes += 1
        with self.between_steps(), self.held(change=True) as flat:
            flat[: values.numel()].copy_(values.reshape(-1))
        self.owner.reshard()

    def between_steps(self) -> AbstractContextManager[None]:
        """Hold the state `at_rest`, unless the parameter is whole in memory and has outlived its optimizer."""
        stays = self._is_all_stored and isinstance(self.stored, ResidentShard)
        return nullcontext() if stays and self.body.is_closed else self.body.at_rest()

    @property
    def _is_all_stored(self) -> bool:
        return self.body.table[self._index].form is MasterForm.ITSELF


def check_not_elsewhere(body: StateBody, leaf: torch.Tensor, name: str) -> None:
    """Raise ValueError if another optimizer has or had half of a split parameter: each would undo the other's work."""
    parts = parts_of(leaf)
    if parts is not None and not parts.is_in_state and isinstance(parts.stored, TieredShard):  # frozen
        raise ValueError(
            f"{name} is on the parameter tier of another optimizer, which goes when that is closed: load a "
            "checkpoint, or model.state_dict(), into a new model"
        )
    if not isinstance(parts, StateParts) or parts.body is body:
        return
    if parts.body.is_closed:
        raise ValueError(
            f"{name} belonged to an {parts.body.owner} that is closed, and part of its weights went with that: "
            "load a checkpoint into a new model, and make the optimizer for that one"
        )
    raise ValueError(
        f"{name} belongs to another {parts.body.owner}, which holds part of its weights: go on "
        "with that one (load_state_dict gives it another state), or load model.state_dict() into a new model"
    )
