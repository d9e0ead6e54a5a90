"""A `TensorSwapper` beside a dict: calls for one name pile up without waiting, those for several run side by side."""

import asyncio
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from nvme_offload import StateError, TensorSwapper, Transfer
from tests.support.failing_drive import Op
from tests.support.simulator.case import Strike
from tests.support.simulator.loop import stepped_loop
from tests.support.simulator.run import Player
from tests.support.simulator.subjects.base import Subject, aio_options
from tests.support.swapper_tools import random_bits, same_bits

UNIT = 4096
NAMES = "abc"
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)


class Pending(NamedTuple):
    op: Op
    tensor: torch.Tensor | None
    transfer: Transfer[Any]


class SwapperSubject(Subject):
    """Every value that is read is one that may be there; what a call that was struck left behind is looked up."""

    weight = 4
    calls = {  # noqa: RUF012
        "swap_out": 8, "swap_in": 6, "prefetch": 3, "evict": 1, "delete": 1, "settle": 3, "synchronize": 1, "stats": 1,
    }  # fmt: skip
    most_calls = 14

    @staticmethod
    def draw_options(draw: random.Random) -> dict[str, Any]:
        buffers = draw.randint(2, 4)
        return {**aio_options(draw), "buffers": buffers, "budget": buffers * draw.choice((1, 1, 2, 4)) * UNIT}

    def __init__(self, player: Player) -> None:
        super().__init__(player)
        offload = {"device": "nvme", "nvme_path": str(player.folder)}
        offload |= {"staging_budget": self.options["budget"], "buffer_count": self.options["buffers"]}
        self.swapper = TensorSwapper({"zero_optimization": {"offload_optimizer": offload}, "aio": self.aio})
        self.stored: dict[str, torch.Tensor] = {}
        self.pending: dict[str, list[Pending]] = {name: [] for name in NAMES}

    def do_swap_out(self, draw: random.Random, strike: Strike | None) -> None:
        name, shape = draw.choice(NAMES), (draw.randrange(1, 4), draw.randrange(2500))
        tensor = random_bits(shape, draw.choice(DTYPES), draw.randrange(1 << 30))
        tensor = tensor.t() if draw.random() < 0.3 else tensor
        transfer, cut = self.player.struck(strike, lambda: self.swapper.swap_out(name, tensor))
        if cut is None:
            self.pending[name].append(Pending(Op.WRITE, tensor, transfer))
        else:
            self._look(name, tensor)

    def do_swap_in(self, draw: random.Random, strike: Strike | None) -> None:
        name = draw.choice(NAMES)
        if name not in self.stored and not self.pending[name]:
            assert name not in self.swapper
            return
        settled = not self.pending[name]
        out = torch.empty_like(self.stored[name]) if settled and draw.random() < 0.4 else None
        try:
            transfer, cut = self.player.struck(strike, lambda: self.swapper.swap_in(name, out=out))
        except StateError:
            assert name not in self.stored  # the only swap_out has failed already
            return
        if cut is None:
            self.pending[name].append(Pending(Op.READ, None, transfer))
        else:
            self._settle(name)

    def do_prefetch(self, draw: random.Random, strike: Strike | None) -> None:
        self._by_name(draw, strike, self.swapper.prefetch)

    def do_evict(self, draw: random.Random, strike: Strike | None) -> None:
        self._by_name(draw, strike, self.swapper.evict)

    def do_delete(self, draw: random.Random, strike: Strike | None) -> None:
        name = draw.choice(NAMES)
        self._settle(name)
        if name not in self.stored:
            return
        _, cut = self.player.struck(strike, lambda: self.swapper.delete(name))
        if cut is None or name not in self.swapper:
            del self.stored[name]

    def do_settle(self, draw: random.Random, strike: Strike | None) -> None:
        self._settle(draw.choice(NAMES), strike, asynchronous=strike is None and draw.random() < 0.5)

    def do_synchronize(self, draw: random.Random, strike: Strike | None) -> None:
        _, cut = self.player.struck(strike, self.swapper.synchronize)
        if cut is None:
            pool = self.swapper.pool
            assert pool.num_free == pool.num_buffers, "a buffer is held: something is under way"
            assert all(each.transfer.done() for waiting in self.pending.values() for each in waiting)

    def do_stats(self, draw: random.Random, strike: Strike | None) -> None:
        self.player.struck(strike, self.swapper.stats)

    def finish(self) -> None:
        for name in NAMES:
            self._settle(name)
        swapper = self.swapper
        swapper.synchronize()
        assert swapper.pool.num_free == swapper.pool.num_buffers, "a buffer leaked"
        assert set(swapper.names()) == set(self.stored)
        for name, tensor in self.stored.items():
            assert same_bits(swapper.swap_in(name).wait(), tensor), f"wrong bytes in {name!r} at the end"
            swapper.delete(name)
        swapper.synchronize()
        assert swapper.stats().prefetched_bytes == 0
        assert [file.end for file in swapper.tier.space._files] == [0], "an extent leaked"
        assert swapper.pool.num_free == swapper.pool.num_buffers, "a buffer leaked at the end"
        swapper.close()

    def _by_name(self, draw: random.Random, strike: Strike | None, call: Callable[[str], Any]) -> None:
        name = draw.choice(NAMES)
        try:
            self.player.struck(strike, lambda: call(name))
        except KeyError:
            assert name not in self.stored, f"{name!r} was lost"
        except StateError:
            assert name not in self.stored

    def _look(self, name: str, tensor: torch.Tensor) -> None:
        """What a swap_out that was struck left: the tensor, or what was there."""
        self._settle(name)
        self.swapper.synchronize()
        while name in self.swapper:
            found, error = self.attempt(lambda: self.swapper.swap_in(name).wait())
            if error is None:
                old = name in self.stored and same_bits(found, self.stored[name])
                assert old or same_bits(found, tensor), f"neither the old nor the new value of {name!r}"
                self.stored[name] = found
                return
        assert name not in self.stored, f"{name!r} was lost"

    def _settle(self, name: str, strike: Strike | None = None, *, asynchronous: bool = False) -> None:
        """Wait for all calls made for a name; each must have seen what the calls before it left."""
        failed = None
        for op, tensor, transfer in self.pending[name]:
            found, error = self._outcome(transfer, strike, asynchronous=asynchronous)
            strike = None
            if error is not None:
                failed = error if op is Op.WRITE else failed
                assert error is failed or getattr(error, "direction", "read") == "read", repr(error)
            elif op is Op.WRITE:
                failed, self.stored[name] = None, tensor
            else:
                assert name in self.stored, f"{name!r} was read and never stored"
                assert same_bits(found, self.stored[name]), f"wrong bytes in {name!r}"
        self.pending[name].clear()

    def _outcome(
        self, transfer: Transfer[Any], strike: Strike | None, *, asynchronous: bool
    ) -> tuple[Any, BaseException | None]:
        if asynchronous:
            with stepped_loop() as loop:
                return self.attempt(lambda: loop.run_until_complete(_awaited(transfer)))
        outcome, cut = self.player.struck(strike, lambda: self.attempt(transfer.wait))
        return self.attempt(transfer.wait) if cut is not None else outcome


async def _awaited(transfer: Transfer[Any]) -> Any:
    return await asyncio.shield(asyncio.ensure_future(_result(transfer)))


async def _result(transfer: Transfer[Any]) -> Any:
    return await transfer
