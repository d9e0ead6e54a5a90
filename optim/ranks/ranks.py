"""Say which ranks take steps together, and have them agree before one of them writes."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nvme_offload.optim.ranks.collective import gather, largest, on_every_rank

T = TypeVar("T")


class Ranks:
    """All ranks whose parameters are updated in the same steps as this one's.

    They are those of the meshes that parameters are sharded over, and of `group`, as the stages of a pipeline. Where
    nothing is sharded and there is a process group all the same, all of that: the parameters are copies, as with
    DistributedDataParallel.
    """

    def __init__(self, leaves: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> None:
        self._groups: list[dist.ProcessGroup] = []
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        found: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for mesh in {id(leaf.device_mesh): leaf.device_mesh for leaf in leaves if isinstance(leaf, DTensor)}.values():
            for of_dim in mesh.get_all_groups():
                found[tuple(dist.get_process_group_ranks(of_dim))] = of_dim
        if not found and dist.group.WORLD is not None:
            found[()] = dist.group.WORLD
        if group is not None:
            found[tuple(dist.get_process_group_ranks(group))] = group
        self._groups = [of_ranks for of_ranks in found.values() if dist.get_world_size(of_ranks) > 1]

    @property
    def several(self) -> bool:
        """Whether there is any other."""
        return bool(self._groups)

    def all(self, value: bool) -> bool:
        """Return whether `value` is true on every rank. Collective: no rank returns before all have called."""
        return not largest([not value], *self._groups)[0]

    def gather(self, value: T) -> dict[int, T]:
        """See `collective.gather`."""
        return gather(value, *self._groups)

    def together(self, action: Callable[[], T]) -> T:
        """See `collective.on_every_rank`."""
        return on_every_rank(action, *self._groups) if self.several else action()
