"""A `ParamTier` that is asked as FSDP2 asks on several ranks: for all of a group, which is copied then."""

import random
from collections import deque
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import torch

from nvme_offload import OffloadConfig
from tests.support.simulator.case import Strike
from tests.support.simulator.run import Player
from tests.support.simulator.subjects.base import Subject, aio_options
from tests.support.views_out import watched

ParamTier = resolve_name("nvme_offload.offload.shards.param_tier:ParamTier")
Padded = resolve_name("nvme_offload.offload.shards.stored:Padded")
ResidentShard = resolve_name("nvme_offload.offload.shards.stored:ResidentShard")
NvmeTier = resolve_name("nvme_offload.offload.storage.nvme_tier:NvmeTier")
NUMEL = 2500  # of each of two parameters in a block
FORM = Padded(torch.Size([NUMEL]), torch.float32)


class GatherSubject(Subject):
    """A gather finds its bytes when it copies, whatever is gathered ahead, late, updated or given up."""

    weight = 2
    calls = {"gather": 12, "answer": 5, "change": 3, "keep": 2, "synchronize": 1, "advance": 1}  # noqa: RUF012
    most_calls = 24

    @staticmethod
    def draw_options(draw: random.Random) -> dict[str, Any]:
        sizes = [draw.choice((1, 2, 2, 3)) for _ in range(draw.randint(2, 4))]
        buffers = max(2, *sizes) + draw.choice((0, 0, 1))
        return {**aio_options(draw), "checksums": False, "sizes": sizes, "buffers": buffers}

    def __init__(self, player: Player) -> None:
        super().__init__(player)
        drive = {"device": "nvme", "nvme_path": str(player.folder), "buffer_count": self.options["buffers"]}
        config = OffloadConfig.of({"zero_optimization": {"offload_param": drive}, "aio": self.aio})
        section = config.zero_optimization.offload_param
        self.tier = ParamTier(section, NvmeTier(config, paths=section.nvme_path))
        self.groups: list[list[list[Any]]] = []
        self.values: dict[Any, float] = {}
        self.late: deque[list[Any]] = deque()
        self.count = 0.0

    def run(self) -> None:
        with watched() as self.out:
            self._place()
            super().run()

    def _place(self) -> None:
        sizes = self.options["sizes"]
        together = [number for number, size in enumerate(sizes) for _ in range(size)]
        was_well, self.drive.well = self.drive.well, True
        places = self.tier.reserve([(f"block {at}", [FORM, FORM]) for at in range(sum(sizes))], together=together)
        for pair in places:
            self.tier.put(pair, [ResidentShard(torch.zeros(NUMEL)) for _ in pair])
            self.values |= dict.fromkeys(pair, 0.0)
        self.tier.cache.synchronize()
        self.drive.well = was_well
        self.groups = [
            [pair for pair, of in zip(places, together, strict=True) if of == at] for at in range(len(sizes))
        ]

    def do_gather(self, draw: random.Random, strike: Strike | None) -> None:
        """Ask for all of a group, and copy; updates of its blocks that waited for that come first."""
        blocks = draw.choice(self.groups)
        asked = [shard for pair in blocks for shard in pair]
        updated = draw.choice(blocks)[0] if draw.random() < 0.3 else None
        views = self._made(strike, lambda: [self._ask(shard, shard is updated) for shard in asked])
        if views:
            self.out.check_held()
            found = [[float(view[0]), float(view[-1])] for view in views]
            expected = [[self.values[shard]] * 2 for shard in asked]
            assert found == expected, f"{found} was copied in the place of {expected}"
            self.late.append(asked)
        self.out.copied()
        if not views:  # FSDP2 gathers all anew
            self.late.clear()
            if updated is not None:
                self._refill(updated)
        if draw.random() < 0.5 and self.late:
            self._answer(self.late.pop(), None)

    def do_answer(self, draw: random.Random, strike: Strike | None) -> None:
        if self.late:
            self._answer(self.late.popleft(), strike)

    def do_change(self, draw: random.Random, strike: Strike | None) -> None:
        shard = draw.choice(list(self.values))
        if not self._made(strike, lambda: self._change(shard, in_order=True)):
            self._refill(shard)

    def do_keep(self, draw: random.Random, strike: Strike | None) -> None:
        keeps = draw.random() < 0.5
        self._made(strike, lambda: self.tier.keep_latest(keeps))

    def do_synchronize(self, draw: random.Random, strike: Strike | None) -> None:
        self._made(strike, self.tier.cache.synchronize)

    def do_advance(self, draw: random.Random, strike: Strike | None) -> None:
        self._made(strike, self.tier.cache.advance)

    def finish(self) -> None:
        for blocks in [*self.groups, *self.groups]:
            asked = [shard for pair in blocks for shard in pair]
            found = [float(self._ask(shard)[-1]) for shard in asked]
            assert found == [self.values[shard] for shard in asked], f"{found} is left"
            self.out.copied()
            self._answer(asked, None)
        while self.late:
            self._answer(self.late.popleft(), None)
        self.tier.keep_latest(False)
        self.tier.cache.synchronize()
        self.tier.close()

    def _ask(self, shard: Any, is_updated: bool = False) -> torch.Tensor:
        if is_updated:
            self._change(shard, in_order=False)
        return shard.gather()

    def _answer(self, asked: list[Any], strike: Strike | None) -> None:
        self._made(strike, lambda: [shard.end_gather() for shard in asked])

    def _made(self, strike: Strike | None, call: Callable[[], Any]) -> Any:
        """The value that a call returned; None where something struck it: nobody keeps that, and the frames in it."""
        outcome, cut = self.player.struck(strike, lambda: self.attempt(call))
        return outcome[0] if cut is None and outcome[1] is None else None

    def _change(self, shard: Any, *, in_order: bool) -> bool:
        with self.tier.holding(shard.block, shard.view, change=True, in_order=in_order) as view:
            self.count += 1
            view.fill_(self.count)
            self.values[shard] = self.count
        return True

    def _refill(self, shard: Any) -> None:
        """A block whose change was interrupted may hold anything: it is filled again."""
        assert any(self._made(None, lambda: self._change(shard, in_order=False)) for _ in range(100)), "it stays so"
