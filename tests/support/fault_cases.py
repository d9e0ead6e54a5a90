"""Cases of the fault campaign: a seed becomes a drive that misbehaves, and whatever happens is checked and counted."""

from __future__ import annotations

import dataclasses
import errno
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from nvme_offload import EngineUnavailable, FaultSpec, SwapIOError
from nvme_offload.aio_native import EngineOptions, open_engine
from nvme_offload.aio_native.registry import ENGINES
from nvme_offload.offload.host.buffer_pool import BufferPool
from nvme_offload.offload.storage.nvme_tier import NvmeTier

PATIENCE = 30.0
"""Seconds after which a transfer counts as lost."""
PATIENCE_PER_CASE = 60.0
"""Seconds after which a case counts as hung. The slowest takes half a second on a busy machine."""
KINDS = ("short", "eintr", "eagain", "eio", "enospc", "delay", "reorder")
REPEATED = ("short", "eintr", "eagain")
"""What the engines get over by trying again."""
MANY_REPEATS = 0.5
"""Below this share of EINTR and EAGAIN, the 64 attempts of an engine in a row do not all meet one (0.5**64)."""


def available_engines() -> list[str]:
    """The engines that can run here, fastest first."""
    options = EngineOptions(queue_depth=1, block_size=4096, rings=1, alignment=4096, max_operations=1)
    available = []
    for name in ENGINES:
        try:
            open_engine(name, options).engine.close()
        except EngineUnavailable:
            continue
        available.append(name)
    return available


def draw_faults(draw: random.Random, seed: int) -> FaultSpec:
    """One kind alone, what can be repeated, any mixture; each rare, frequent or, for one kind alone, nearly always."""
    style = draw.choice(("one kind", "one kind", "repeated", "mixture", "mixture"))
    kinds: Sequence[str] = KINDS if style == "mixture" else ("short", "eintr", "eagain", "delay", "reorder")
    if style == "one kind":
        kind = draw.choice(KINDS)
        rates = {kind: draw.choice((0.05, 0.3, 0.95 if kind in REPEATED else 1.0))}
    else:
        final = draw.choice((0.01, 0.05, 0.2))
        rates = {
            kind: final if kind in ("eio", "enospc") else draw.choice((0.05, 0.2))
            for kind in kinds
            if draw.random() < 0.7
        }
    return FaultSpec(seed=seed, max_delay_us=draw.choice((50, 200, 500)), **rates)


@dataclasses.dataclass
class Tally:
    """What a campaign met, by engine."""

    cases: Counter[str] = dataclasses.field(default_factory=Counter)
    requests: Counter[str] = dataclasses.field(default_factory=Counter)
    retries: Counter[str] = dataclasses.field(default_factory=Counter)
    errors: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    """By engine and name of the errno."""
    struck: Counter[str] = dataclasses.field(default_factory=Counter)
    """By kind: repeats in the cases where nothing else causes any."""

    def __str__(self) -> str:
        columns = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        lines = (f"{name}: {_shown(counts)}" for name, counts in columns.items())
        return "\n".join(lines)


def _shown(counts: Counter[Any]) -> str:
    names = {" ".join(key) if isinstance(key, tuple) else key: count for key, count in counts.items()}
    return ", ".join(f"{name} {names[name]}" for name in sorted(names))


class Case:
    """What a seed decides: the engine, the faults, and through `draw` everything else.

    Args:
        seed: names the case.
        engines: those to choose from.
        folder: for the swap files.
        tally: where it is counted.
    """

    def __init__(self, seed: int, engines: Sequence[str], folder: Path, tally: Tally) -> None:
        self.seed = seed
        self.draw = random.Random(seed)
        self.engine = self.draw.choice(engines)
        self.faults = draw_faults(self.draw, seed)
        self.aio = {
            "engine": self.engine,
            "rings": self.draw.choice((1, 1, 2)),
            "queue_depth": self.draw.choice((1, 2, 4, 8)),
            "block_size": 4096 * self.draw.choice((1, 4, 16, 16)),
            "direct": self.draw.choice(("optional", "optional", "disabled")),
            "checksums": self.draw.random() < 0.3,
        }
        self.name = f"seed {seed}: {self.aio}, {self.faults}"
        self.folder = folder
        self.tally = tally
        tally.cases[self.engine] += 1

    def check_error(self, error: OSError, tier: NvmeTier) -> None:
        """It names what failed, lies on the file, and has an errno that was injected."""
        assert isinstance(error, SwapIOError), repr(error)
        code = errno.errorcode[error.errno or 0]
        self.tally.errors[self.engine, code] += 1
        assert code in self.possible_errors(error.direction), f"not injected: {error}"
        paths = [tier.space.path_of(fd) for fd in tier.space.fds]
        assert error.path in paths, f"not a swap file: {error}"
        assert error.filename == str(error.path), f"another file name: {error}"
        assert error.offset % 4096 == 0, f"not aligned: {error}"
        assert 0 < error.size_bytes <= tier.engine.options.block_size, f"not one request: {error}"
        assert error.offset + error.size_bytes <= error.path.stat().st_size, f"behind the end of the file: {error}"
        for part in (f"{error.size_bytes} bytes at offset {error.offset} of {error.path}", code, error.remedy):
            assert part in str(error), f"{part!r} is missing: {error}"

    def possible_errors(self, direction: str) -> set[str]:
        """Names of the errors that these faults can end in."""
        faults = self.faults
        possible = {"EIO"} if faults.eio else set()
        if faults.enospc and direction == "write":
            possible.add("ENOSPC")
        if faults.eintr + faults.eagain > MANY_REPEATS:  # the drive never answers: given up after 64 attempts
            possible |= {name for name in ("EINTR", "EAGAIN") if getattr(faults, name.lower())}
        return possible

    def heal(self, tier: NvmeTier, pools: Sequence[BufferPool]) -> None:
        """From here on the drive is well: an engine without faults takes the place of the one that injected them."""
        sick = tier.engine
        sick.close()
        self._count(sick.stats())
        tier._engines.opened[:] = [open_engine(sick.name, dataclasses.replace(sick.options, faults=None))]
        tier.register(pools)

    def _count(self, stats: Any) -> None:
        self.tally.requests[self.engine] += stats.requests
        self.tally.retries[self.engine] += stats.retries
        causes = [kind for kind in REPEATED if getattr(self.faults, kind)]
        if len(causes) == 1:
            self.tally.struck[causes[0]] += stats.retries


def run_cases(seeds: Iterable[int], run_case: Callable[[int], None], again: str) -> None:
    """Run a case for each seed, one after the other, in a thread that is watched.

    Args:
        seeds: one for each case.
        run_case: the case; raises if it does not end as it should.
        again: how to run one seed alone, with a place for it.

    Raises:
        Exception: what a case raised, with a note that names its seed.
        pytest.fail.Exception: a case hung; names its seed, and where its thread stands.
    """
    current: list[tuple[int, float]] = []
    caught: list[BaseException] = []

    def run_all() -> None:
        for seed in seeds:
            current[:] = [(seed, time.monotonic())]
            try:
                run_case(seed)
            except BaseException as error:
                error.add_note(f"seed {seed}; alone: {again.format(seed)}")
                caught.append(error)
                return

    # A thread, because a native call that hangs cannot be interrupted; a daemon, because it will not be joined then.
    worker = threading.Thread(target=run_all, name="fault-campaign", daemon=True)
    worker.start()
    while worker.is_alive():
        worker.join(0.5)
        if current and time.monotonic() - current[0][1] > PATIENCE_PER_CASE and worker.is_alive():
            frame = sys._current_frames().get(worker.ident or 0)
            where = "".join(traceback.format_stack(frame)) if frame else "it has ended meanwhile"
            seed = current[0][0]
            pytest.fail(f"seed {seed} hangs; alone: {again.format(seed)}\n{where}")
    if caught:
        raise caught[0]
