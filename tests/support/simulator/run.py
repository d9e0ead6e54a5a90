"""One case from its beginning to its end, and what must be gone then."""

import gc
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from nvme_offload.optim.state import body
from tests.support.interrupts import PACKAGES, Interrupt, Struck, raise_struck, send_sigint
from tests.support.simulator import install
from tests.support.simulator.case import Case, Strike
from tests.support.simulator.drive import Drive
from tests.support.simulator.primitives import enter
from tests.support.simulator.world import World


class Player:
    """Makes the calls of a case, with what strikes them."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.world = World(f"{case.seed}/turns", case.restlessness)
        self.drive = Drive(case.faults, random.Random(f"{case.seed}/drive"))
        self.world.drive = self.drive
        self.world.events.append(self.drive.complete_one)
        self.world.trace = self._tracer()
        self.num_allocations = 0
        install.allocations[:] = [self._is_full]

    def _is_full(self) -> bool:
        self.num_allocations += 1
        return not self.drive.well and self.num_allocations in self.case.full_at

    @contextmanager
    def striking(self, strike: Strike | None) -> Iterator[None]:
        """What comes out of the block may be Struck or KeyboardInterrupt."""
        if strike is None:
            sys.settrace(self.world.trace)  # type: ignore[arg-type]
            try:
                yield
            finally:
                sys.settrace(None)
            return
        act = send_sigint if strike.kind.startswith("sigint") else raise_struck
        if "wait" in strike.kind:
            self.world.on_wait = self._counting(strike.number, act)
            try:
                yield
            finally:
                self.world.on_wait = None
        else:
            with Interrupt(strike.number, act):
                yield

    def struck(self, strike: Strike | None, call: Any) -> tuple[Any, BaseException | None]:
        """What a call returned, or what struck it; other exceptions come out."""
        try:
            with self.striking(strike):
                return call(), None
        except (Struck, KeyboardInterrupt) as error:
            assert strike is not None, "nothing was to strike"
            return None, error

    def killed(self, number: int, call: Callable[[], Any]) -> Callable[[], None]:
        """Kill the process that calls, at the `number`-th point: what it does afterwards, nobody sees.

        What is returned is called when all of it is gone: it puts the files back as they were in that moment.
        """
        image = self.folder.with_name(self.folder.name + ".killed")

        def strike() -> None:
            shutil.copytree(self.folder, image)
            raise Struck

        with suppress(Struck), Interrupt(number, strike):
            call()
        if not image.exists():
            shutil.copytree(self.folder, image)

        def put_back() -> None:
            shutil.rmtree(self.folder)
            image.rename(self.folder)

        return put_back

    def _counting(self, number: int, act: Any) -> Any:
        left = [number]

        def on_wait() -> None:
            left[0] -= 1
            if left[0] == 0:
                act()

        return on_wait

    def _tracer(self) -> Any:
        """A trace function with which threads hand over at calls, or between any two opcodes."""
        if self.case.preemption == "none":
            return None
        by_opcode = self.case.preemption == "opcodes"
        draw, left = random.Random(f"{self.case.seed}/preemption"), [1]
        mean = 60 if by_opcode else 8

        def step(frame: FrameType, event: str, argument: Any) -> Any:
            left[0] -= 1
            if left[0] <= 0:
                left[0] = draw.randrange(1, 2 * mean)
                self.world.hand_over()
            return step

        def on_call(frame: FrameType, event: str, argument: Any) -> Any:
            if not frame.f_code.co_filename.startswith(PACKAGES):
                return None
            if not by_opcode:
                step(frame, event, argument)
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return step

        return on_call


def run_case(case: Case, subjects: Mapping[str, Any], folder: Path) -> list[int]:
    """Run a case and say which course it took: numbers that are the same again when it is. Raises what was violated."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    body._bodies.clear()  # to which dead ones belong: a case is the same whatever was before it
    before, mapped = _descriptors(), set(install.regions)
    player = Player(case, folder)
    _play(player, subjects)
    gc.collect()
    left = sorted(path.name for path in folder.iterdir())
    assert not left, f"files were left behind: {left}"
    kept = [region.size_bytes for region in install.regions if region not in mapped]
    assert not kept, f"host memory was left behind: regions of {kept} bytes"
    after = _descriptors()
    new = {fd: what for fd, what in after.items() if before.get(fd) != what}
    assert not new, f"descriptors were left behind: {new}"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "a signal handler was left behind"
    return [player.world.num_steps, player.drive.num_requests, player.world.draw.getrandbits(32)]


def _play(player: Player, subjects: Mapping[str, Any]) -> None:
    enter(player.world)
    subjects[player.case.subject](player).run()
    gc.collect()
    threads = [thread.name for thread in player.world.threads if thread is not player.world.current]
    assert not threads, f"threads were left behind: {threads}"
    assert player.drive.idle, "requests were left behind"
    if player.world.deaths:
        raise player.world.deaths[0]


def _descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # of this very listing
            continue
    return found
