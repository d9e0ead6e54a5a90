"""What all subjects share."""

import random
from collections.abc import Callable
from typing import Any

from nvme_offload import CorruptionError, SwapIOError
from tests.support.simulator.case import Call
from tests.support.simulator.run import Player

NAMED = (SwapIOError, CorruptionError)  # errors that name what failed


def aio_options(draw: random.Random) -> dict[str, Any]:
    """Of the section `aio`."""
    return {
        "queue_depth": draw.choice((1, 2, 4)),
        "block_size": 4096 * draw.choice((1, 2, 4)),
        "checksums": draw.random() < 0.4,
    }


class Subject:
    """Makes the calls of a case, in turn, and checks what comes of them."""

    weight = 1  # how often cases have this subject, beside the others
    calls: dict[str, int]  # names of the calls with their weights; each is a method ``do_NAME(draw, strike)``
    most_calls = 12

    def __init__(self, player: Player) -> None:
        self.player, self.case, self.drive = player, player.case, player.drive
        self.options = dict(player.case.options)

    @property
    def aio(self) -> dict[str, Any]:
        names = ("queue_depth", "block_size", "checksums")
        return {"engine": "aiofiles", "direct": "disabled", **{name: self.options[name] for name in names}}

    def run(self) -> None:
        for call in self.case.calls:
            self.make(call)
        self.drive.well = True
        self.finish()

    def make(self, call: Call) -> None:
        getattr(self, f"do_{call.name}")(random.Random(call.number), call.strike)

    def finish(self) -> None:
        """Compare everything, and close."""
        raise NotImplementedError

    def check_named(self, error: BaseException) -> None:
        """An error of the drive is one that it has answered with."""
        if isinstance(error, CorruptionError):
            assert "flip" in self.drive.struck, f"no byte was changed: {error!r}"
            return
        assert isinstance(error, SwapIOError), repr(error)
        possible = {"eio": 5, "enospc": 28, "eintr": 4, "eagain": 11}
        struck = {*self.drive.struck, *(["enospc"] if self.case.full_at else [])}
        codes = {possible[kind] for kind in struck if kind in possible}
        assert error.errno in codes, f"not injected: {error!r}"

    def attempt(self, call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """What a call returned, or the error of the drive that it raised instead."""
        try:
            return call(), None
        except NAMED as error:
            self.check_named(error)
            return None, error
