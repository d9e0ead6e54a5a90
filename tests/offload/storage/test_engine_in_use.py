"""An engine that breaks: the next does what it lost, or an error says what is dead. No buffer is touched twice."""

import asyncio
import logging

import pytest
import torch

from nvme_offload import EngineLostError, OffloadConfig, TensorSwapper
from nvme_offload.aio_native import registry
from nvme_offload.offload.host.buffer_pool import BufferPool
from nvme_offload.offload.storage.nvme_tier import NvmeTier
from tests.support.fragile_engine import FragileThread, choose_fragile
from tests.support.small_training import train
from tests.support.threads import at_once

PATIENCE = 60.0
SIZE = 1 << 20
NUM_BUFFERS = 3


@pytest.fixture(autouse=True)
def _forget_what_was_said(monkeypatch):
    monkeypatch.setattr(registry, "_said", set())


def section(path, **aio):
    offload = {"device": "nvme", "nvme_path": str(path), "staging_budget": "1MiB"}
    return {"zero_optimization": {"offload_optimizer": offload}, "aio": {"block_size": "256KiB", **aio}}


@pytest.fixture
def tier(tmp_path):
    """Buffers full of 0, 1 and 2, and their extents; the engine breaks at the first request of the second."""

    class Tier:
        def __init__(self):
            self.tier = NvmeTier(OffloadConfig.from_dict(section(tmp_path)))
            self.pool = BufferPool(NUM_BUFFERS, SIZE)
            self.tier.register([self.pool])
            self.buffers = [self.pool.acquire() for _ in range(NUM_BUFFERS)]
            self.extents = self.tier.reserve([SIZE] * NUM_BUFFERS)
            for number, buffer in enumerate(self.buffers):
                self.bytes_of(buffer).fill_(number)

        def bytes_of(self, buffer):
            return buffer.view(torch.uint8, 0, SIZE)

        def write_all(self):
            pairs = zip(self.extents, self.buffers, strict=True)
            return [self.tier.write(extent, buffer, what="a number", kind="test") for extent, buffer in pairs]

        def read(self, number):
            buffer = self.buffers[number]
            self.bytes_of(buffer).fill_(77)
            return self.tier.read(self.extents[number], buffer, what="a number", kind="test")

        def holds(self, number):
            self.read(number).wait(PATIENCE)
            return bool((self.bytes_of(self.buffers[number]) == number).all())

    opened = []

    def make():
        opened.append(Tier())
        return opened[-1]

    yield make
    for each in opened:
        each.tier.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("break_at", range(1, 13))
def test_whatever_it_lost_is_done_by_the_next(tier, monkeypatch, caplog, break_at):
    choose_fragile(monkeypatch, break_at)
    with caplog.at_level(logging.WARNING):
        subject = tier()
        for transfer in subject.write_all():
            transfer.wait(PATIENCE)
        assert all(subject.holds(number) for number in range(NUM_BUFFERS))
    (said,) = [record.message for record in caplog.records]
    assert said.startswith(f"engine {subject.tier.name} does the I/O from now on (fragile has stopped working: ")
    assert subject.tier.stats().bytes_read == NUM_BUFFERS * SIZE
    assert subject.tier.name != "fragile"


def test_all_who_wait_get_it_and_it_is_done_once(tier, monkeypatch):
    choose_fragile(monkeypatch, 1)
    subject = tier()
    transfer, *_ = subject.write_all()
    at_once([transfer.wait] * 4)
    assert subject.tier.stats().bytes_written == SIZE


def test_who_awaits_it_gets_it_too(tier, monkeypatch):
    choose_fragile(monkeypatch, 1)
    subject = tier()

    async def all_written():
        return await asyncio.gather(*subject.write_all())

    assert asyncio.run(all_written()) == subject.buffers
    assert all(subject.holds(number) for number in range(NUM_BUFFERS))


def test_it_never_touches_a_buffer_that_was_given_up(tier, monkeypatch):
    choose_fragile(monkeypatch, NUM_BUFFERS * 4 + 1)
    subject = tier()
    for transfer in subject.write_all():
        transfer.wait(PATIENCE)
    transfer, buffer = subject.read(1), subject.buffers[1]
    subject.tier.quiesce(buffer)
    subject.bytes_of(buffer).fill_(99)  # somebody else's now
    with pytest.raises(EngineLostError):
        transfer.wait(PATIENCE)
    assert bool((subject.bytes_of(buffer) == 99).all())
    assert subject.holds(2)


@pytest.mark.parametrize("why", ["in doubt", "no other"])
def test_where_no_other_may_take_its_place_that_is_said(tier, monkeypatch, why):
    """Above all where the kernel may still be using the memory: a second transfer there could meet the first."""
    choose_fragile(monkeypatch, 1, ended=why != "in doubt")
    subject = tier()
    if why == "no other":
        monkeypatch.setattr(registry, "ENGINES", ("fragile",))
    for transfer in subject.write_all():
        for _ in range(2):
            with pytest.raises(EngineLostError, match=r"EPERM.*not the drive.*seccomp filter") as caught:
                transfer.wait(PATIENCE)
            reason = "the kernel did not say when it stopped" if why == "in doubt" else "fragile has stopped working"
            assert f"the fragile engine is dead, and no other takes its place: {reason}" in str(caught.value)
    assert subject.tier.name == "fragile"
    assert not subject.tier._under_way


def test_training_goes_on_with_the_same_bits(tmp_path, monkeypatch):
    """Wherever it breaks: in the first write, in the middle of a step, in the last read."""
    expected = train(tmp_path, "auto", num_steps=3)["digest"]
    for break_at in (2, 20, 90):
        with monkeypatch.context() as patch:
            choose_fragile(patch, break_at)
            outcome = train(tmp_path, "auto", num_steps=3)
            assert FragileThread.break_at == break_at
        assert outcome["digest"] == expected, break_at
        assert outcome["engine"] != "fragile", f"{break_at}: it did not break"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("break_at", [1, 2, 4, 6, 9])
def test_a_swapper_goes_on(tmp_path, monkeypatch, break_at):
    choose_fragile(monkeypatch, break_at)
    with TensorSwapper(section(tmp_path)) as swapper:
        tensors = {name: torch.arange(100_000) + number for number, name in enumerate("ab")}
        for name, tensor in tensors.items():
            swapper.swap_out(name, tensor)
        swapper.prefetch("a")
        for name, tensor in tensors.items():
            assert torch.equal(swapper.swap_in(name).wait(PATIENCE), tensor)
        assert swapper.stats().engine != "fragile"
        assert swapper.pool.num_free == swapper.pool.num_buffers
