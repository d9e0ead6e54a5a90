"""A failure is an error in words; what was stored before is kept; no buffer is lost."""

import errno
import os
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from nvme_offload import CorruptionError, EngineUnavailable, FaultSpec, OutOfSpaceError, StateError, SwapIOError
from tests.support.own_resources import Resources
from tests.support.swapper_tools import DTYPES, PATIENCE, KiB, random_bits, same_bits, swap_file


def test_a_thread_that_cannot_be_started_leaves_nothing(open_swapper, tmp_path, monkeypatch):
    open_swapper()  # what a first swapper makes for the whole process is no leak
    folder = tmp_path / "second"
    folder.mkdir()
    start = threading.Thread.start

    def refuse_the_second(thread):
        if thread.name == "swap-in":
            raise RuntimeError("can't start new thread")
        start(thread)

    before = Resources.steady()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_the_second)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            open_swapper(folder)
    assert not Resources.settled(before).beyond(before)
    assert list(folder.iterdir()) == []


def test_a_failed_first_swap_out_leaves_nothing_and_says_why(open_swapper):
    swapper = open_swapper(faults=FaultSpec(seed=1, eio=1.0))
    tensor = random_bits((100_000,))
    transfer = swapper.swap_out("weights", tensor)
    queued = swapper.swap_in("weights")
    for failed in (transfer, queued, transfer):
        with pytest.raises(
            SwapIOError, match=r"write of \d+ bytes at offset \d+ of .*tensor 'weights', bytes"
        ) as caught:
            failed.wait(PATIENCE)
        assert caught.value.errno == errno.EIO
        assert caught.value.path == swap_file(swapper)
    assert swapper.names() == []
    assert swapper.residency("weights").name == "ABSENT"
    with pytest.raises(
        StateError, match="'weights': expected stored, actual absent, because its swap_out failed: write"
    ):
        swapper.swap_in("weights")
    assert swapper.stats().stored_bytes == 0
    swapper.delete("weights")
    with pytest.raises(KeyError):
        swapper.residency("weights")


def test_a_failed_overwrite_keeps_the_older_value(swapper):
    old, new = torch.zeros(50_000), torch.ones(200_000)
    swapper.swap_out("x", old).wait(PATIENCE)
    swapper.prefetch("x")
    reserve, called = swapper.tier.reserve, threading.Event()

    def full(sizes):
        called.wait(PATIENCE)  # not before the swap_in behind it was called
        raise OutOfSpaceError(path="/swap", needed_bytes=sum(sizes), free_bytes=0)

    swapper.tier.reserve = full
    transfer = swapper.swap_out("x", new)
    promised = swapper.swap_in("x")
    called.set()
    with pytest.raises(OutOfSpaceError) as caught:
        transfer.wait(PATIENCE)
    assert caught.value.__notes__ == ["tensor 'x' needs 800000 bytes in all"]
    with pytest.raises(OutOfSpaceError):  # it was called for the bytes that were not stored
        promised.wait(PATIENCE)
    swapper.tier.reserve = reserve
    assert torch.equal(swapper.swap_in("x").wait(PATIENCE), old)
    assert swapper.nbytes("x") == old.nbytes
    assert swapper.stats().stored_bytes < old.nbytes + 4096
    swapper.swap_out("x", new)
    assert torch.equal(swapper.swap_in("x").wait(PATIENCE), new)


def test_a_failed_prefetch_is_repeated_by_swap_in(swapper, caplog):
    tensor = random_bits((1000,))
    swapper.swap_out("x", tensor).wait(PATIENCE)
    path = swap_file(swapper)
    content = path.read_bytes()
    os.truncate(path, 0)
    assert swapper.prefetch("x")
    swapper.synchronize()
    assert "prefetch of tensor 'x' failed" in caplog.text
    assert swapper.stats().prefetched_bytes == 0
    path.write_bytes(content)
    assert same_bits(swapper.swap_in("x").wait(PATIENCE), tensor)


def test_a_prefetch_without_memory_takes_nothing_from_the_budget(swapper, monkeypatch):
    tensor = random_bits((1000,))
    swapper.swap_out("x", tensor).wait(PATIENCE)

    def refuse(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        with pytest.raises(RuntimeError, match="can't allocate"):
            swapper.prefetch("x")
    assert swapper.stats().prefetched_bytes == 0
    assert swapper.prefetch("x")
    assert same_bits(swapper.swap_in("x").wait(PATIENCE), tensor)


def test_a_truncated_swap_file_is_an_error_and_not_zeros(swapper):
    swapper.swap_out("x", random_bits((200_000,))).wait(PATIENCE)
    os.truncate(swap_file(swapper), 128 * KiB)
    with pytest.raises(SwapIOError, match=r"ENODATA.*leave the files below nvme_path alone") as caught:
        swapper.swap_in("x").wait(PATIENCE)
    assert caught.value.path == swap_file(swapper)
    assert caught.value.offset >= 128 * KiB
    assert "tensor 'x', bytes" in str(caught.value)


@pytest.mark.parametrize("position", [0, 65_535, 70_000, 399_999])
def test_a_flipped_byte_is_found_where_checksums_are_on(open_swapper, position):
    swapper = open_swapper(checksums=True)
    tensor = random_bits((400_000,), torch.uint8)
    swapper.swap_out("x", tensor).wait(PATIENCE)
    assert same_bits(swapper.swap_in("x").wait(PATIENCE), tensor)
    path = swap_file(swapper)
    with open(path, "r+b") as file:  # the only tensor begins at offset 0
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0x10]))
        file.flush()
        os.fsync(file.fileno())
    with pytest.raises(CorruptionError, match=r"tensor 'x', bytes (\d+)\.\.(\d+)") as caught:
        swapper.swap_in("x").wait(PATIENCE)
    assert str(path) in str(caught.value)
    assert f"at offset {position // 65_536 * 65_536} of" in caught.value.extent


def test_checksums_pass_what_is_intact(open_swapper):
    swapper = open_swapper(checksums=True)
    for number, dtype in enumerate(DTYPES):
        tensor = random_bits((number * 11 % 7, 9999), dtype).t()
        swapper.swap_out("x", tensor)
        swapper.prefetch("x")
        assert same_bits(swapper.swap_in("x").wait(PATIENCE), tensor)


class Model:
    """A swapper beside a dict that is always right."""

    def __init__(self, swapper, seed, names="abcdef"):
        self.swapper = swapper
        self.names = names
        self.rng = random.Random(seed)
        self.stored = {}
        self.failures = []

    def step(self, seed):
        name = self.rng.choice(self.names)
        acts = [self.swap_out, self.swap_in, self.prefetch, self.evict, self.delete]
        act = self.rng.choices(acts, weights=[8, 8, 2, 1, 1])[0]
        if act != self.swap_out and name not in self.stored:
            assert name not in self.swapper
            return
        try:
            act(name, seed)
        except SwapIOError as error:
            self.failures.append(error)

    def run(self, num_steps, note):
        for number in range(num_steps):
            try:
                self.step(number)
            except BaseException as error:
                error.add_note(f"{note}, step {number}")
                raise

    def swap_out(self, name, seed):
        shape = (self.rng.randrange(1, 6), self.rng.randrange(12_000))
        tensor = random_bits(shape, self.rng.choice(DTYPES), seed).t()
        transfer = self.swapper.swap_out(name, tensor)
        try:
            behind = self.swapper.swap_in(name) if self.rng.random() < 0.5 else None
        except StateError:  # the swap_out has failed already, and there was nothing before it
            assert name not in self.stored
            behind = None
        transfer.wait(PATIENCE)
        self.stored[name] = tensor
        if behind is not None:
            assert same_bits(behind.wait(PATIENCE), tensor)

    def swap_in(self, name, seed):
        out = torch.empty_like(self.stored[name]) if self.rng.random() < 0.5 else None
        assert same_bits(self.swapper.swap_in(name, out=out).wait(PATIENCE), self.stored[name])

    def prefetch(self, name, seed):
        self.swapper.prefetch(name)

    def evict(self, name, seed):
        self.swapper.evict(name)

    def delete(self, name, seed):
        self.swapper.delete(name)
        del self.stored[name]


def faults_of_all_kinds(seed):
    return FaultSpec(
        seed=seed, short=0.2, eintr=0.05, eagain=0.05, eio=0.01, enospc=0.01, delay=0.05, reorder=0.1, max_delay_us=300
    )


@pytest.mark.parametrize("engine", ["io_uring", "aiofiles"])
@pytest.mark.parametrize("seed", [1, 2])
def test_any_fault_gives_the_right_bytes_or_an_error_in_words(open_swapper, engine, seed):
    faults = faults_of_all_kinds(seed)
    note = f"engine {engine}, seed {seed}"
    try:
        swapper = open_swapper(faults=faults, staging_budget=64 * KiB, buffer_count=3, block_size=4096, engine=engine)
    except EngineUnavailable as error:
        pytest.skip(str(error))
    model = Model(swapper, seed)
    model.run(300, note)
    swapper.synchronize()
    assert swapper.pool.num_free == swapper.pool.num_buffers, note
    assert set(swapper.names()) == set(model.stored), note
    assert len(model.failures) > 10, note
    words = r"(read|write) of \d+ bytes at offset \d+ of " + re.escape(str(swap_file(swapper)))
    for error in model.failures:
        assert error.errno in (errno.EIO, errno.ENOSPC), note
        assert re.match(words, str(error)), note


@pytest.mark.parametrize("seed", [3, 4])
def test_faults_under_several_threads(open_swapper, seed):
    swapper = open_swapper(faults=faults_of_all_kinds(seed), staging_budget=64 * KiB, buffer_count=3, block_size=4096)
    models = [Model(swapper, seed + number, names) for number, names in enumerate(("abc", "def", "ghi", "jkl"))]
    with ThreadPoolExecutor(len(models)) as threads:
        for run in [threads.submit(model.run, 100, f"seed {seed}") for model in models]:
            run.result(PATIENCE)
    swapper.synchronize()
    assert swapper.pool.num_free == swapper.pool.num_buffers, f"seed {seed}"
    assert set(swapper.names()) == {name for model in models for name in model.stored}, f"seed {seed}"
