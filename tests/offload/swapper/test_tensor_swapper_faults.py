"""A failure is an error in words; what was stored before is kept; no buffer is lost."""

import errno
import os
import threading
from functools import partial
from unittest.mock import Mock

import pytest
import torch

from nvme_offload import CorruptionError, FaultSpec, OutOfSpaceError, StateError, SwapIOError
from nvme_offload.offload.swapper.pieces import MAX_PIECE_BYTES, MIN_PIECE_BYTES, piece_starts, spans
from tests.support.failing_drive import flip_bit
from tests.support.forked import printed
from tests.support.own_resources import Resources
from tests.support.sandbox import run_python
from tests.support.swapper_tools import PATIENCE, KiB, MiB, random_bits, same_bits, swap_file
from tests.support.threads import at_once


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
    reserve, called = swapper.tier.reserve, threading.Event()

    def later(sizes):
        called.wait(PATIENCE)  # not before the swap_in behind it was called
        return reserve(sizes)

    swapper.tier.reserve = later
    transfer = swapper.swap_out("weights", random_bits((100_000,)))
    queued = swapper.swap_in("weights")
    called.set()
    for failed in (transfer, queued, transfer):
        with pytest.raises(SwapIOError, match=r"write of \d+ bytes at offset \d+ of .*tensor 'weights'") as caught:
            failed.wait(PATIENCE)
        assert caught.value.errno == errno.EIO
        assert caught.value.path == swap_file(swapper)
    assert swapper.names() == []
    assert swapper.residency("weights").name == "ABSENT"
    with pytest.raises(StateError, match="'weights': expected stored, actual absent, because its swap_out failed"):
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
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", Mock(side_effect=RuntimeError("DefaultCPUAllocator: can't allocate memory")))
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
    flip_bit(path, position)  # the only tensor begins at offset 0
    with pytest.raises(CorruptionError, match=r"tensor 'x', bytes (\d+)\.\.(\d+)") as caught:
        swapper.swap_in("x").wait(PATIENCE)
    assert str(path) in str(caught.value)
    assert f"at offset {position // 65_536 * 65_536} of" in caught.value.extent


@pytest.mark.parametrize("shape", [(7, 5, 3), (1, 1, 4), (4, 1, 1), (2, 3, 1, 5)])
def test_spans_are_the_run_in_order(shape):
    numel = torch.Size(shape).numel()
    dense = torch.arange(numel).view(shape)
    for order in (tuple(range(len(shape))), tuple(reversed(range(len(shape))))):
        tensor = dense.permute(order)
        expected = tensor.flatten()
        for start in range(numel):
            for stop in range(start + 1, numel + 1):
                parts = list(spans(tensor, start, stop))
                assert torch.equal(torch.cat([part.flatten() for part in parts]), expected[start:stop])
                assert len(parts) <= 2 * tensor.dim() + 1
                assert all(part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for part in parts)


def test_pieces_overlap_copies_and_fit_into_buffers():
    assert len(piece_starts(0, 4, 64 * MiB, 4096)) == 0
    assert len(piece_starts(1, 4, 64 * MiB, 4096)) == 1
    assert piece_starts(1 << 30, 4, 64 * KiB, 4096).step == 64 * KiB
    assert piece_starts(1 << 30, 4, 128 * MiB, 4096).step == MAX_PIECE_BYTES
    assert piece_starts(10 * MiB, 4, 128 * MiB, 4096).step == MIN_PIECE_BYTES
    assert len(piece_starts(100 * MiB + 1, 4, 128 * MiB, 4096)) == 4


MEMORY = """
import sys, torch
from nvme_offload.offload.swapper.tensor_swapper import TensorSwapper
from nvme_offload.perf.measure.machine import peak_resident_bytes, reset_peak_resident_bytes

MiB = 1 << 20
budget = 32 * MiB
offload = {"device": "nvme", "nvme_path": sys.argv[1], "staging_budget": budget}
with TensorSwapper({"zero_optimization": {"offload_optimizer": offload}}) as swapper:
    for number in range(4):  # the pool is resident from the first use on, and torch has its threads
        swapper.swap_out("warm", torch.ones(budget // 4))
    swapper.synchronize()
    tensor = torch.arange(4 * budget // 8).view(1024, -1).t()
    out = torch.zeros_like(tensor)
    assert tensor.nbytes == 4 * budget and not tensor.is_contiguous()
    reset_peak_resident_bytes()
    before = peak_resident_bytes()
    swapper.swap_out("x", tensor)
    swapper.swap_in("x", out=out).wait()
    grown = peak_resident_bytes() - before
    assert torch.equal(out, tensor)
    print(grown)
"""


def test_a_tensor_of_four_budgets_takes_no_more_memory_than_the_budget(tmp_path):
    """Everything is allocated before: neither strides nor size take more than slack for the interpreter."""
    assert int(printed(run_python(MEMORY, tmp_path))) < 8 * MiB


def test_a_tiny_tensor_does_not_wait_for_a_huge_one(open_swapper):
    swapper = open_swapper(faults=FaultSpec(seed=3, delay=1.0, max_delay_us=4000), staging_budget=64 * KiB)
    huge = random_bits((16 * MiB,), torch.uint8)
    swapper.swap_out("tiny", torch.ones(1)).wait(PATIENCE)
    out = swapper.swap_out("huge", huge)
    tiny = swapper.swap_in("tiny")
    assert tiny.wait(PATIENCE) == 1
    read = swapper.swap_in("huge")
    again = swapper.swap_in("tiny")
    assert same_bits(read.wait(PATIENCE), huge)
    again.wait(PATIENCE)
    assert tiny.operation.completed_ns < out.operation.completed_ns
    assert again.operation.completed_ns < read.operation.completed_ns


def test_threads_that_write_and_read_one_name_see_whole_values(swapper):
    swapper.swap_out("x", torch.full((100_000,), 0, dtype=torch.int16))

    def work(seed):
        for number in range(25):
            value = seed * 100 + number
            swapper.swap_out("x", torch.full((100_000,), value, dtype=torch.int16))
            result = swapper.swap_in("x").wait(PATIENCE)
            assert (result == result[0]).all(), value
            if number % 5 == 0:
                swapper.prefetch("x")

    at_once([partial(work, seed) for seed in range(4)])
