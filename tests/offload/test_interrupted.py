"""An exception between any two instructions of a swapper or a block cache: nothing hangs, leaks or is wrong."""

import sys
import threading

import pytest
import torch
from torch import nn

from nvme_offload import ActivationSwapper, TensorSwapper
from nvme_offload.offload.staging.block_cache import BlockCache
from tests.support.interrupts import STRIKES, every, strided, struck
from tests.support.pairs import each_value_once
from tests.support.swapper_tools import config_for
from tests.support.training import nvme_tier

PATIENCE = 30.0
SIZE = 8192

OLD = torch.arange(70_000, dtype=torch.int32)
NEW = OLD + 1

CALLS = {
    "swap_out": lambda swapper: swapper.swap_out("stored", NEW).wait(),
    "swap_out_anew": lambda swapper: swapper.swap_out("other", NEW).wait(),
    "swap_in": lambda swapper: swapper.swap_in("stored").wait(),
    "swap_in_prefetched": lambda swapper: swapper.swap_in("prefetched").wait(),
    "prefetch": lambda swapper: swapper.prefetch("stored"),
    "evict": lambda swapper: swapper.evict("prefetched"),
    "delete": lambda swapper: swapper.delete("stored"),
    "synchronize": lambda swapper: (swapper.swap_out("stored", NEW), swapper.synchronize()),
    "close": lambda swapper: swapper.close(),
}


def in_time(call):
    """In a thread, so that what never ends fails here."""
    errors = []

    def run():
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it never ends"
    if errors:
        raise errors[0]


@STRIKES
@strided(61)
@pytest.mark.parametrize(("name", "engine"), each_value_once([*CALLS], ["auto", "aiofiles"]))
def test_a_swapper_goes_on(tmp_path, name, engine, strike, stride):
    for interrupt in every(stride, strike):
        swapper = TensorSwapper(config_for(tmp_path, staging_budget="1MiB", engine=engine))
        swapper.swap_out("stored", OLD)
        swapper.swap_out("prefetched", OLD).wait()
        swapper.prefetch("prefetched")
        swapper.synchronize()
        struck(interrupt, lambda swapper=swapper: CALLS[name](swapper))
        if name != "close":
            in_time(swapper.synchronize)
            check(swapper, interrupt.place)
        in_time(swapper.close)
        assert not list(tmp_path.iterdir()), interrupt.place


def check(swapper, place):
    for tensor in swapper.names():
        value = swapper.swap_in(tensor).wait(PATIENCE)
        assert torch.equal(value, OLD) or torch.equal(value, NEW), place
    assert swapper.stats().prefetched_bytes == 0, place
    assert swapper.pool.num_free == swapper.pool.num_buffers, place
    for tensor in swapper.names():
        swapper.delete(tensor)
    swapper.synchronize()
    assert [file.end for file in swapper.tier.space._files] == [0], f"space leaked: {place}"


class Cache:
    """A cache of five blocks in two buffers, and what is in them."""

    def __init__(self, folder, **arguments):
        self.cache = BlockCache(nvme_tier(folder), "numbers", 2, **arguments)
        self.values = dict(enumerate(range(5)))
        self.cache.add([(f"numbers {number}", SIZE) for number in range(5)])
        for number in range(5):
            self.fill(number, number)
        for _ in range(2):
            self.use_all()

    def fill(self, number, value):
        with self.cache.holding(self.cache.blocks[number], change=True, load=False) as buffer:
            buffer.view(torch.uint8, 0, SIZE).fill_(value)

    def content(self, number):
        self.cache.order.note(number)
        with self.cache.holding(self.cache.blocks[number]) as buffer:
            return buffer.view(torch.uint8, 0, SIZE).unique().tolist()

    def use_all(self):
        """As a forward, a backward and a step do."""
        for number in (0, 1, 2, 3, 4, 4, 3, 2, 1, 0):
            self.content(number)
        self.cache.order.begin_step([])
        self.cache.order.end_step([])

    def check_content(self, place):
        assert [self.content(number) for number in range(5)] == [[self.values[n]] for n in range(5)], place

    def check(self, place):
        self.check_content(place)
        self.cache.synchronize()
        assert not any(block.holds for block in self.cache.blocks), place
        held = len({block.buffer.place for block in self.cache.residents})
        assert self.cache.pool.num_free + held == 2, place


@STRIKES
@strided(251)
@pytest.mark.parametrize("name", ["read", "change", "synchronize"])
def test_a_block_cache_goes_on(tmp_path, name, strike, stride):
    subject = Cache(tmp_path)
    for turn, interrupt in enumerate(every(stride, strike)):
        value = 10 + turn % 200
        if name == "read":
            struck(interrupt, subject.use_all)
        elif name == "synchronize":
            subject.fill(1, value)
            subject.values[1] = value
            struck(interrupt, subject.cache.synchronize)
        else:
            struck(interrupt, lambda value=value: (subject.fill(2, value), subject.fill(3, value), subject.content(0)))
            for number in (2, 3):  # cut short it may be anything: whoever fills a block gives up what was in it
                subject.values[number] = value
                subject.fill(number, value)
        subject.check_content(interrupt.place)
        interrupt.kept = None  # its frames have what is held
        subject.check(interrupt.place)
    subject.cache.close()
    assert not list(tmp_path.iterdir())


@STRIKES
@strided(37)
def test_what_was_reserved_is_given_back_or_owned(tmp_path, strike, stride):
    """Also where the exception comes before anybody has it: between the tier and the cache that asked it."""
    subject = Cache(tmp_path)
    cache, files = subject.cache, subject.cache.tier.space._files
    taken = files[0].end
    for interrupt in every(stride, strike):
        struck(interrupt, lambda: cache.add([(f"numbers {number}", SIZE) for number in range(5, 8)]))
        interrupt.kept = None  # its frames own what was reserved
        cache.drop(cache.blocks[:4:-1])
        cache.tier.free(*cache.tier.reserve([SIZE]))
        assert files[0].end == taken, interrupt.place
        subject.check(interrupt.place)
    cache.close()


class Saved:
    """Five saved tensors where memory has room for two; the rest are on a drive."""

    def __init__(self, folder):
        section = {"device": "nvme", "nvme_path": str(folder), "host_budget": 2 * SIZE, "keep": "all", "min_bytes": 1}
        self.swapper = ActivationSwapper({"activations": section}, model=nn.Identity())
        self.handles = []

    def save(self):
        for number in range(5):
            self.handles.append(self.swapper.keep(torch.full((SIZE,), number, dtype=torch.uint8)))

    def take(self):
        while self.handles:
            number, handle = len(self.handles) - 1, self.handles[-1]
            assert handle.take().unique().tolist() == [number]
            self.handles.pop()

    def check(self, place):
        """All that was saved before a strike is had back, and what is saved after it; nothing is left of either."""
        for _ in range(2):
            self.take()
            assert self.swapper.stats().num_kept == self.swapper.stats().held_bytes == 0, place
            self.save()
        self.handles.clear()
        self.swapper.stats()
        tensors = self.swapper._store._swapper
        tensors.synchronize()
        assert tensors.pool.num_free == tensors.pool.num_buffers, place
        assert [file.end for file in tensors.tier.space._files] == [0], f"space leaked: {place}"


ACTIVATION_CALLS = {
    "save": lambda saved: saved.save(),
    "take": lambda saved: saved.take(),
    "announce": lambda saved: saved.swapper.announce(saved.handles[::2]),
}


@STRIKES
@strided(61)
@pytest.mark.parametrize("name", [*ACTIVATION_CALLS])
def test_saved_tensors_go_on(tmp_path, monkeypatch, name, strike, stride):
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: None)  # which keeps frames, and so what is saved
    saved = Saved(tmp_path)
    for interrupt in every(stride, strike):
        if name != "save":
            saved.save()
        struck(interrupt, lambda: ACTIVATION_CALLS[name](saved))
        interrupt.kept = None  # its frames have handles
        in_time(lambda place=interrupt.place: saved.check(place))
    in_time(saved.swapper.close)
    assert not list(tmp_path.iterdir())
