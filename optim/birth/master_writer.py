"""First values on their way to the tier: a stream of whole parameters, each subgroup written once."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nvme_offload.offload.storage.tier import Memory
from nvme_offload.optim.layout.master import TILE_NUMEL
from nvme_offload.optim.state.body import StateBody
from nvme_offload.optim.state.masters import write_master
from nvme_offload.optim.state.slots import SlotRecord

_PIECE_NUMEL = 64 * TILE_NUMEL


class MasterWriter:
    """Sets master weights parameter by parameter.

    A subgroup stays in its staging buffer until a parameter of another one comes, and is then written behind. So
    parameters that come in the order of the optimizer cost one write of each subgroup, and no read.

    Args:
        body: the optimizer's state.
    """

    def __init__(self, body: StateBody) -> None:
        self._body = body
        self._slots: dict[int, list[SlotRecord]] = {}
        for slot in body.slots:
            for run in slot.subgroup.runs:
                self._slots.setdefault(run.param, []).append(slot)
        self._held: tuple[SlotRecord, Memory] | None = None

    def write(self, param: torch.Tensor, values: Callable[[int, int], torch.Tensor]) -> None:
        """Set the master weights of one parameter.

        Args:
            param: as the optimizer knows it.
            values: elements from one index to another of this rank's shard, flat, on the CPU. Asked for in order, for
                a few million at a time.

        Raises:
            SwapIOError: the tier could not be written.
        """
        body = self._body
        index = body.table.of(param).index
        for slot in self._slots.get(index, ()):
            memory = self._hold(slot)
            for run in slot.subgroup.runs:
                if run.param != index:
                    continue
                for start in range(run.start, run.stop, _PIECE_NUMEL):
                    stop = min(start + _PIECE_NUMEL, run.stop)
                    piece = run._replace(start=start, stop=stop, at=run.at + start - run.start)
                    masters = values(start, stop).float().contiguous()
                    write_master(piece, masters, slot, memory, body.table, body.kernels)

    def __enter__(self) -> MasterWriter:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None:
            self._let_go()
            self._body.pipeline.synchronize()
            self._body.blocks.synchronize()

    def _hold(self, slot: SlotRecord) -> Memory:
        if self._held is not None and self._held[0] is slot:
            return self._held[1]
        self._let_go()
        memory = self._body.pipeline.acquire([slot], 0)
        self._body.pipeline.will_change(slot)
        self._held = slot, memory
        return memory

    def _let_go(self) -> None:
        if self._held is not None:
            slot, _ = self._held
            self._held = None
            self._body.pipeline.release(slot)
