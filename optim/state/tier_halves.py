"""Split parameters whose lower half is in the optimizer's state."""

from __future__ import annotations

import torch

from nvme_offload.offload._torch_private import local_tensor
from nvme_offload.optim.state.body import StateBody
from nvme_offload.optim.state.entries import read_entries, set_entries
from nvme_offload.optim.tiers.halves import Halves


class TierHalves(Halves):
    """The lower half in the optimizer's state, on whatever tier that is.

    Args:
        body: the optimizer's state.
        index: of the parameter in it.
        before: where the halves were; the upper one stays where it is.
    """

    def __init__(self, body: StateBody, index: int, before: Halves) -> None:
        super().__init__(before.owner, before.group, before.upper)
        self.accumulation_dtype = before.accumulation_dtype
        self.body = body
        self._index = index

    def read(self) -> torch.Tensor:
        """Both halves joined, fp32, in the shape of this rank's shard.

        Raises:
            SwapIOError: the tier cannot be read.
        """
        master = read_entries(self.body, {self._index: ("master",)})[self._index]["master"]
        return local_tensor(master).to(self.device)

    def write(self, values: torch.Tensor) -> None:
        """Split fp32 values, in the shape of this rank's shard, into the halves.

        Raises:
            SwapIOError: the tier cannot be written.
        """
        set_entries(self.body, {self._index: {"master": values}})
