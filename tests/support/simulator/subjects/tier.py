"""Extents of an `NvmeTier`, and the engine below it, at whose interface operations are under way side by side."""

import random
from typing import Any, NamedTuple

import torch

from nvme_offload import OffloadConfig, Transfer
from nvme_offload.aio_native.engine import Op
from nvme_offload.offload.host.buffer_pool import BufferPool, StagingBuffer
from nvme_offload.offload.storage.extent import Extent
from nvme_offload.offload.storage.nvme_tier import NvmeTier
from tests.support.simulator.case import Strike
from tests.support.simulator.run import Player
from tests.support.simulator.subjects.base import Subject, aio_options

UNIT = 4096


class Stored:
    """What the units of an extent may hold: one value each, and after a write that may not have happened the older.

    A short transfer may end within a unit: when the write then fails, the unit may hold a part of each.
    """

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        self.units: list[set[int] | None] = [None] * (extent.size_bytes // UNIT)  # None: anything

    def wrote(self, values: list[int], *, surely: bool, torn: bool = False) -> None:
        for place, value in enumerate(values):
            before = self.units[place]
            self.units[place] = {value} if surely else None if torn or before is None else before | {value}

    def read(self, found: torch.Tensor) -> None:
        """Take note of what was read: uint8 [units, UNIT]."""
        for place, unit in enumerate(found):
            possible, value = self.units[place], int(unit[0])
            if possible is not None:
                assert bool((unit == value).all()), f"unit {place} is torn"
                assert value in possible, f"unit {place} holds {value}, not one of {possible}"
                self.units[place] = {value}


class UnderWay(NamedTuple):
    op: Op
    stored: Stored
    values: list[int]
    buffer: StagingBuffer
    transfer: Transfer[StagingBuffer]


class TierSubject(Subject):
    """Reads and writes of several extents at the same time, of one extent in turn."""

    weight = 3
    calls = {"write": 8, "read": 6, "finish": 8, "reserve": 2, "free": 1, "drain": 1, "stats": 1}  # noqa: RUF012
    most_calls = 24

    @staticmethod
    def draw_options(draw: random.Random) -> dict[str, Any]:
        return {**aio_options(draw), "checksums": False, "buffers": draw.randint(1, 4), "units": draw.randint(1, 6)}

    def __init__(self, player: Player) -> None:
        super().__init__(player)
        offload = {"device": "nvme", "nvme_path": str(player.folder)}
        config = OffloadConfig.of({"zero_optimization": {"offload_optimizer": offload}, "aio": self.aio})
        self.tier = NvmeTier(config)
        self.pool = BufferPool(self.options["buffers"], self.options["units"] * UNIT)
        self.tier.register([self.pool])
        self.stored: list[Stored] = []
        self.under_way: list[UnderWay] = []
        self.count = 0

    def do_reserve(self, draw: random.Random, strike: Strike | None) -> None:
        sizes = [draw.randint(1, self.options["units"]) * UNIT for _ in range(draw.randint(1, 3))]
        outcome, cut = self.player.struck(strike, lambda: self.attempt(lambda: self.tier.reserve(sizes)))
        if cut is None and outcome[1] is None:
            self.stored += [Stored(extent) for extent in outcome[0]]

    def do_free(self, draw: random.Random, strike: Strike | None) -> None:
        if idle := self._idle():
            stored = draw.choice(idle)
            self.stored.remove(stored)
            self.player.struck(strike, lambda: self.tier.free(stored.extent))

    def do_write(self, draw: random.Random, strike: Strike | None) -> None:
        self._start(Op.WRITE, draw, strike)

    def do_read(self, draw: random.Random, strike: Strike | None) -> None:
        self._start(Op.READ, draw, strike)

    def do_drain(self, draw: random.Random, strike: Strike | None) -> None:
        self.player.struck(strike, self.tier.engine.drain)
        if strike is None:
            assert self.drive.idle, "it was not waited for"

    def do_stats(self, draw: random.Random, strike: Strike | None) -> None:
        self.player.struck(strike, self.tier.stats)

    def do_finish(self, draw: random.Random, strike: Strike | None) -> None:
        if self.under_way:
            self._finish(self.under_way[draw.randrange(len(self.under_way))], strike)

    def finish(self) -> None:
        while self.under_way:
            self._finish(self.under_way[0], None)
        for stored in self.stored:
            self._transfer(Op.READ, stored, len(stored.units), None)
            assert self._finish(self.under_way[0], None) is None, "the drive was well"
        assert self.pool.num_free == self.pool.num_buffers, "a buffer leaked"
        for stored in self.stored:
            self.tier.free(stored.extent)
        self.tier.close()
        self.pool.close()

    def _idle(self) -> list[Stored]:
        busy = [each.stored for each in self.under_way]
        return [stored for stored in self.stored if stored not in busy]

    def _start(self, op: Op, draw: random.Random, strike: Strike | None) -> None:
        if not self.stored:
            extents, error = self.attempt(lambda: self.tier.reserve([self.options["units"] * UNIT] * 2))
            if error is not None:
                return
            self.stored += [Stored(extent) for extent in extents]
        idle = self._idle()
        if not idle or len(self.under_way) == self.pool.num_buffers:
            self._finish(self.under_way[0], None)
            idle = self._idle()
        stored = draw.choice(idle)
        self._transfer(op, stored, draw.randint(1, len(stored.units)), strike)

    def _transfer(self, op: Op, stored: Stored, num_units: int, strike: Strike | None) -> None:
        buffer = self.pool.acquire(1.0)
        self.count += 1
        values = [(self.count * 7 + place) % 251 for place in range(num_units)]
        memory = buffer.view(torch.uint8, 0, num_units * UNIT).view(num_units, UNIT)
        memory.copy_(torch.tensor(values, dtype=torch.uint8).view(-1, 1).expand(num_units, UNIT))
        call = self.tier.write if op is Op.WRITE else self.tier.read
        about = {"what": "an extent", "kind": "case", "size_bytes": num_units * UNIT}
        transfer, cut = self.player.struck(strike, lambda: call(stored.extent, buffer, **about))
        if cut is None:
            self.under_way.append(UnderWay(op, stored, values, buffer, transfer))
            return
        self.tier.quiesce(buffer)
        buffer.release()
        if op is Op.WRITE:
            stored.wrote(values, surely=False, torn="short" in self.drive.struck)

    def _finish(self, each: UnderWay, strike: Strike | None) -> BaseException | None:
        outcome, cut = self.player.struck(strike, lambda: self.attempt(each.transfer.wait))
        _, error = self.attempt(each.transfer.wait) if cut is not None else outcome
        self.under_way.remove(each)
        num_units = len(each.values)
        found = each.buffer.view(torch.uint8, 0, num_units * UNIT).view(num_units, UNIT)
        if each.op is Op.WRITE:
            each.stored.wrote(each.values, surely=error is None, torn="short" in self.drive.struck)
            assert found[:, 0].tolist() == each.values, "a write changed memory"
        elif error is None:
            each.stored.read(found)
        each.buffer.release()
        return error
