"""Faults of every kind through the whole stack: the right bytes or an OSError in words, never anything else.

A seed names a case: an engine as it is in use, a mixture of faults, sizes, buffers, and extents of an NvmeTier that are
written and read. Every case ends on a drive that is well again, where all bytes are compared, with all buffers free.
What swapper and optimizer make of faults is the simulator's (tests/test_simulator.py).

To run some seeds alone: ``FAULT_SEEDS=17`` or ``FAULT_SEEDS=1000:2000``.
"""

import asyncio
import contextlib
import dataclasses
import errno
import logging
import os
import random
from collections import Counter

import pytest
import torch

from nvme_offload import FaultSpec, OffloadConfig, SwapIOError
from nvme_offload.aio_native import Op, open_engine
from nvme_offload.offload.host.buffer_pool import BufferPool
from nvme_offload.offload.storage.nvme_tier import NvmeTier
from tests.support.engine_tools import available_engines
from tests.support.own_resources import Resources
from tests.support.swapper_tools import config_for
from tests.support.training import noted

NUM_CASES = 10_000  # of the long run
NUM_CASES_PER_TEST = 250
NUM_CASES_BY_DEFAULT = 100
FIRST_SEED_BY_DEFAULT = 1_000_000  # seeds that the long run does not have
UNIT = 4096
PATIENCE = 30.0  # seconds after which a transfer counts as lost
KINDS = ("short", "eintr", "eagain", "eio", "enospc", "delay", "reorder")
REPEATED = ("short", "eintr", "eagain")  # what the engines get over by trying again
MANY_REPEATS = 0.5
"""Below this share of EINTR and EAGAIN, the 64 attempts of an engine in a row do not all meet one (0.5**64)."""


def draw_faults(draw, seed):
    """One kind alone, what can be repeated, any mixture; each rare, frequent or, for one kind alone, nearly always."""
    style = draw.choice(("one kind", "one kind", "repeated", "mixture", "mixture"))
    kinds = KINDS if style == "mixture" else ("short", "eintr", "eagain", "delay", "reorder")
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


class Tally:
    """What a campaign met, by engine."""

    def __init__(self):
        self.retries, self.errors = Counter(), Counter()
        self.struck = Counter()  # by kind: repeats in the cases where nothing else causes any


class Case:
    """What a seed decides: the engine, the faults, and through `draw` everything else."""

    def __init__(self, seed, engines, folder, tally):
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

    def check_error(self, error, tier):
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

    def possible_errors(self, direction):
        """Names of the errors that these faults can end in."""
        faults = self.faults
        possible = {"EIO"} if faults.eio else set()
        if faults.enospc and direction == "write":
            possible.add("ENOSPC")
        if faults.eintr + faults.eagain > MANY_REPEATS:  # the drive never answers: given up after 64 attempts
            possible |= {name for name in ("EINTR", "EAGAIN") if getattr(faults, name.lower())}
        return possible

    def heal(self, tier, pools):
        """From here on the drive is well: an engine without faults takes the place of the one that injected them."""
        sick = tier.engine
        sick.close()
        self._count(sick.stats())
        tier._engines.opened[:] = [open_engine(sick.name, dataclasses.replace(sick.options, faults=None))]
        tier.register(pools)

    def _count(self, stats):
        self.tally.retries[self.engine] += stats.retries
        causes = [kind for kind in REPEATED if getattr(self.faults, kind)]
        if len(causes) == 1:
            self.tally.struck[causes[0]] += stats.retries


class StoredBytes:
    """What the blocks of an extent may hold: one value each, and after a write that failed the older ones, too."""

    def __init__(self, extent):
        self.extent = extent
        self.blocks = [[bytes(UNIT)] for _ in range(extent.size_bytes // UNIT)]  # new files hold zeros

    def wrote(self, data, failed):
        for block, new in zip(self.blocks, cut(data), strict=False):
            block[:] = [*block, new] if failed else [new]

    def read(self, data):
        for number, (block, found) in enumerate(zip(self.blocks, cut(data), strict=False)):
            assert found in block, f"wrong bytes in block {number} of {self.extent}, {len(block)} possible"
            block[:] = [found]


def cut(data):
    return [data[start : start + UNIT] for start in range(0, len(data), UNIT)]


class TierCase:
    """Reads and writes of several extents under way at the same time, of one extent in turn."""

    def __init__(self, case):
        self.case, self.draw = case, case.draw
        paths = [case.folder / str(number) for number in range(self.draw.randint(1, 2))]
        weights = [self.draw.choice((1, 3)) for _ in paths]
        config = config_for(*paths, path_weights=weights, **case.aio)
        self.tier = NvmeTier(OffloadConfig.of(config), faults=case.faults)
        buffer_units = self.draw.randint(1, 12)
        self.pool = BufferPool(self.draw.randint(1, 6), buffer_units * UNIT)
        if self.draw.random() < 0.8:
            self.tier.register([self.pool])
        sizes = [self.draw.randint(1, buffer_units) * UNIT for _ in range(self.draw.randint(1, 6))]
        self.stored = [StoredBytes(self.tier.space.allocate(size)) for size in sizes]
        self.under_way = []

    def run(self):
        for _ in range(self.draw.randint(4, 16)):
            self.start_one()
            while self.under_way and self.draw.random() < 0.5:
                self.finish_one()
        while self.under_way:
            self.finish_one()
        self.case.heal(self.tier, [self.pool])
        for stored in self.stored:
            self.start(Op.READ, stored, stored.extent.size_bytes)
            self.finish_one(well=True)
        assert self.pool.num_free == self.pool.num_buffers, "a buffer leaked"

    def close(self):
        self.tier.close()
        self.pool.close()

    def start_one(self):
        idle = [stored for stored in self.stored if stored not in [other for _, other, *_ in self.under_way]]
        if not idle or len(self.under_way) == self.pool.num_buffers:
            self.finish_one()
            return
        stored = self.draw.choice(idle)
        size = self.draw.randint(1, stored.extent.size_bytes // UNIT) * UNIT
        self.start(self.draw.choice(list(Op)), stored, size)

    def start(self, op, stored, size_bytes):
        buffer = self.pool.acquire(PATIENCE)
        before = self.draw.randbytes(buffer.size_bytes)
        memory = buffer.view(torch.uint8, 0, buffer.size_bytes)
        memory.copy_(torch.frombuffer(bytearray(before), dtype=torch.uint8))
        call = self.tier.write if op is Op.WRITE else self.tier.read
        transfer = call(stored.extent, buffer, what="an extent", kind="case", size_bytes=size_bytes)
        self.under_way.append((op, stored, size_bytes, before, buffer, transfer))

    def finish_one(self, well=False):
        place = self.draw.randrange(len(self.under_way))
        op, stored, size_bytes, before, buffer, transfer = self.under_way.pop(place)
        error = self.wait(transfer)
        assert not (well and error), f"no fault was injected: {error}"
        if error:
            self.check_error(error, op, stored, size_bytes, transfer)
        data = buffer.view(torch.uint8, 0, buffer.size_bytes).numpy().tobytes()
        assert data[size_bytes:] == before[size_bytes:], "memory behind the transfer was changed"
        if op is Op.WRITE:
            assert data == before, "a write changed memory"
            stored.wrote(data[:size_bytes], failed=bool(error))
        elif not error:
            stored.read(data[:size_bytes])
        buffer.release()

    def wait(self, transfer):
        """The OSError that it ends with."""
        try:
            if self.draw.random() < 0.2:
                asyncio.run(asyncio.wait_for(awaited(transfer), PATIENCE))
            else:
                transfer.wait(PATIENCE)
        except OSError as error:
            return error
        return None

    def check_error(self, error, op, stored, size_bytes, transfer):
        self.case.check_error(error, self.tier)
        assert error.direction == ("write" if op is Op.WRITE else "read"), error
        ranges = [(fd, offset, offset + size) for fd, offset, _, size in stored.extent.segments(0, 0, size_bytes)]
        found = error.offset, error.offset + error.size_bytes
        assert any(
            self.tier.space.path_of(fd) == error.path and low <= found[0] and found[1] <= high
            for fd, low, high in ranges
        ), f"{error} lies outside {ranges}"
        with pytest.raises(SwapIOError) as again:
            transfer.wait(PATIENCE)
        assert str(again.value) == str(error)


async def awaited(transfer):
    return await transfer


@pytest.fixture(scope="module")
def engines():
    return available_engines()


@pytest.fixture
def campaign(tmp_path, engines):
    """Runs the cases of some seeds and counts what they met; leaves no file, descriptor or thread behind."""
    for number in range(2):
        (tmp_path / str(number)).mkdir()
    loggers = [logging.getLogger(name) for name in ("nvme_offload.offload", "nvme_offload.aio_native")]
    levels = [noisy.level for noisy in loggers]
    for noisy in loggers:
        noisy.setLevel(logging.CRITICAL)  # every failed swap_out is logged

    def run_one(tally, seed):
        case = Case(seed, engines, tmp_path, tally)
        with noted(f"{case.name}; alone: FAULT_SEEDS={seed} pytest tests/test_fault_campaign.py -k some_cases"):
            with contextlib.closing(TierCase(case)) as running:
                running.run()
            left = [path for number in range(2) for path in (tmp_path / str(number)).iterdir()]
            assert left == [], "files were left behind"

    def run(seeds):
        for seed in range(30):  # what is made once and kept
            run_one(Tally(), seed)
        before, tally = Resources.steady(), Tally()
        for seed in seeds:
            run_one(tally, seed)
        held = Resources.settled(before)
        assert not held.beyond(before), f"seeds {seeds[0]} to {seeds[-1]}"
        return tally

    yield run
    for noisy, level in zip(loggers, levels, strict=True):
        noisy.setLevel(level)


def chosen_seeds():
    """Those that the environment names, or those of the default run."""
    chosen = os.environ.get("FAULT_SEEDS", "")
    if not chosen:
        return range(FIRST_SEED_BY_DEFAULT, FIRST_SEED_BY_DEFAULT + NUM_CASES_BY_DEFAULT)
    first, _, stop = chosen.partition(":")
    return range(int(first), int(stop) if stop else int(first) + 1)


def check_every_kind_struck(tally, engines):
    """Delay and reordering cannot be counted."""
    for kind in REPEATED:
        assert tally.struck[kind] > 0, f"no {kind}"
    for engine in engines:
        assert tally.retries[engine] > 0, f"no retry in {engine}"
        for code in ("EIO", "ENOSPC"):
            assert tally.errors[engine, code] > 0, f"no {code} in {engine}"


def test_some_cases(campaign, engines):
    seeds = chosen_seeds()
    tally = campaign(seeds)
    if len(seeds) >= NUM_CASES_PER_TEST:
        check_every_kind_struck(tally, engines)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds",
    [range(first, first + NUM_CASES_PER_TEST) for first in range(0, NUM_CASES, NUM_CASES_PER_TEST)],
    ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}",
)
def test_10000_cases(campaign, engines, seeds):
    check_every_kind_struck(campaign(seeds), engines)
