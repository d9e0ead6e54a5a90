"""A long time without growth: descriptors, threads, memory and registrations are the same at the end as early on."""

import threading
from collections import deque
from itertools import pairwise

import pytest
import torch

from nvme_offload import OffloadConfig, TensorSwapper
from nvme_offload.aio_native import Op
from nvme_offload.offload.host.buffer_pool import BufferPool
from nvme_offload.offload.storage.nvme_tier import NvmeTier
from tests.support.engine_tools import PATIENCE, available_engines
from tests.support.own_resources import Resources, resident_bytes
from tests.support.swapper_tools import KiB, MiB, config_for, random_bits, same_bits

NUM_TRANSFERS = 8_000
NUM_OF_OTHER_ENGINES = 2_500
NUM_OF_TENSORS = 2_500
SAMPLE_EVERY = 100
RUN_IN = 500  # transfers after which all lazily started threads are there
UNIT = 4 * KiB
MEMORY_SLACK = 4 * MiB  # what the allocator may come to hold between the first and the last thousand transfers


class Samples:
    """What the process holds, every hundred transfers."""

    def __init__(self, num_transfers):
        self.num_transfers = num_transfers
        self.held, self.resident = {}, {}

    def look(self, number):
        if number % SAMPLE_EVERY:
            return
        held = Resources.now()
        if number > RUN_IN:
            # A descriptor that the engine is about to close when it has woken its waiter is no leak.
            held = Resources.settled(self.held[number - SAMPLE_EVERY], held)
        self.held[number], self.resident[number] = held, resident_bytes()

    def check(self):
        settled = {number: held for number, held in self.held.items() if number >= RUN_IN}
        for earlier, later in pairwise(settled):
            assert not settled[later].beyond(settled[earlier]), f"between transfers {earlier} and {later}"
        early = max(size for number, size in self.resident.items() if number <= 1000)
        late = max(size for number, size in self.resident.items() if number >= self.num_transfers - 1000)
        grown = late - early
        assert grown <= MEMORY_SLACK, f"resident memory grew by {grown} bytes in {self.num_transfers} transfers"


class Traffic:
    """Extents that are written and read in turn, several at a time, and compared."""

    def __init__(self, tier, num_extents=12, num_under_way=8):
        self.tier, self.num_under_way = tier, num_under_way
        self.pool = BufferPool(num_under_way, 64 * KiB)
        self.registration = tier.register([self.pool])
        self.extents = [tier.space.allocate(UNIT * (1 + 5 * number % 16)) for number in range(num_extents)]
        self.stamps = [0] * num_extents
        self.under_way = deque()

    def start(self, number):
        """The transfer with this number: even rounds over all extents write, odd ones read."""
        round_number, place = divmod(number, len(self.extents))
        buffer, extent = self.pool.acquire(PATIENCE), self.extents[place]
        words = buffer.view(torch.int64, 0, extent.size_bytes // 8)  # 1D int64 [numel]
        op = Op.READ if round_number % 2 else Op.WRITE
        if op is Op.WRITE:
            self.stamps[place] = number + 1
        words.fill_(number + 1 if op is Op.WRITE else -1)
        call = self.tier.write if op is Op.WRITE else self.tier.read
        transfer = call(extent, buffer, what=f"extent {place}", kind="test")
        self.under_way.append((transfer, words, self.stamps[place], buffer))
        return transfer

    def finish(self):
        """The oldest transfer."""
        transfer, words, stamp, buffer = self.under_way.popleft()
        assert transfer.wait(PATIENCE) is buffer
        assert bool((words == stamp).all()), f"wrong bytes: {words} and not {stamp}"
        buffer.release()

    def run(self, num_transfers, samples):
        for number in range(num_transfers):
            if len(self.under_way) == self.num_under_way:
                self.finish()
            self.start(number)
            samples.look(number)
        self.end(samples)

    def end(self, samples):
        while self.under_way:
            self.finish()
        samples.check()
        assert self.tier.registration is self.registration
        assert self.pool.num_free == self.pool.num_buffers


@pytest.fixture
def open_tier(tmp_path):
    tiers = []

    def open_one(engine="auto", num_paths=1, **options):
        paths = [tmp_path / str(number) for number in range(num_paths)]
        for path in paths:
            path.mkdir()
        options = {"engine": engine, "direct": "optional", "block_size": 16 * KiB, "queue_depth": 4, **options}
        tiers.append(NvmeTier(OffloadConfig.of(config_for(*paths, **options))))
        return tiers[-1]

    yield open_one
    for tier in tiers:
        tier.close()


@pytest.mark.parametrize(
    ("engine", "num_transfers"),
    [("auto", NUM_TRANSFERS), ("pyuring", NUM_OF_OTHER_ENGINES), ("aiofiles", NUM_OF_OTHER_ENGINES)],
)
def test_transfers_take_nothing_with_them(open_tier, engine, num_transfers):
    if engine not in ("auto", *available_engines()):
        pytest.skip(f"the engine {engine} cannot run here")
    Traffic(open_tier(engine)).run(num_transfers, Samples(num_transfers))


def test_tensors_take_nothing_with_them(tmp_path):
    """New names, old names, prefetched copies and deletions, so that extents and records come and go."""
    config = config_for(tmp_path, direct="optional", staging_budget=128 * KiB, buffer_count=4)
    samples = Samples(NUM_OF_TENSORS)
    tensors = [random_bits((1 + number * 1777 % 16_000,), seed=number) for number in range(9)]
    with TensorSwapper(config) as swapper:
        for number in range(0, NUM_OF_TENSORS, 2):
            name, tensor = f"tensor {number % 600}", tensors[number % len(tensors)]
            swapper.swap_out(name, tensor)
            if number % 3 == 0:
                swapper.prefetch(name)
            assert same_bits(swapper.swap_in(name).wait(PATIENCE), tensor)
            if number >= 60:
                swapper.delete(f"tensor {(number - 60) % 600}")
            samples.look(number)
        swapper.synchronize()
        samples.check()
        assert swapper.pool.num_free == swapper.pool.num_buffers
        assert len(swapper.names()) == 30
        # 30 tensors of at most 64 KiB, one more while it is overwritten, and holes that are too small to be used.
        assert swapper.tier.space._files[0].end <= 4 * MiB


@pytest.mark.parametrize("num_paths", [1, 2])
def test_space_comes_and_goes_while_transfers_run(open_tier, num_paths):
    """One thread makes the file grow and shrink, the other looks before each transfer whether it is whole."""
    tier = open_tier(num_paths=num_paths)
    free = tier.space.allocate(UNIT)
    tier.space.free(free)
    system_bytes = 1 << 60
    stop, failures = threading.Event(), []

    def grow_and_give_back():
        sizes = (n * 64 * KiB for n in range(1, 10**6))
        while not stop.is_set():
            try:
                extents = tier.space.allocate_all([next(sizes) % MiB + UNIT, UNIT])
                tier.space.allocate_all([system_bytes])
            except OSError:
                pass
            except BaseException as error:
                failures.append(error)
                return
            for extent in extents:
                tier.space.free(extent)

    thread = threading.Thread(target=grow_and_give_back, daemon=True)
    thread.start()
    try:
        Traffic(tier).run(2500, Samples(2500))
    finally:
        stop.set()
        thread.join(PATIENCE)
    assert failures == []
