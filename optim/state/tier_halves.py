"""Split parameters whose lower half is in the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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

    @property
    def gathered(self) -> torch.Tensor:
        """The upper half as the latest step leaves it, padded as FSDP2 gathers it; waits for its update.

        Raises:
            SwapIOError, CorruptionError, StateError: see `StateBody.wait_for_update_of`.
        """
        self.body.wait_for_update_of(self._index)
        return super().gathered

    @contextmanager
    def held(self, *, change: bool) -> Iterator[torch.Tensor]:
        """The upper half as the latest step leaves it, 1D with the padding, outside a gather.

        Raises:
            SwapIOError, CorruptionError, StateError: see `StateBody.at_rest`; or it cannot be read.
        """
        with self.body.at_rest(), super().held(change=change) as upper:
            yield upper

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
