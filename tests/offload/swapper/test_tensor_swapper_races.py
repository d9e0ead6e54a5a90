"""Huge and tiny tensors side by side, and many threads on one name."""

import threading

import torch

from nvme_offload import FaultSpec
from tests.support.swapper_tools import PATIENCE, KiB, MiB, random_bits, same_bits


def test_a_tiny_tensor_does_not_wait_for_a_huge_one(open_swapper):
    delays = FaultSpec(seed=3, delay=1.0, max_delay_us=4000)
    swapper = open_swapper(faults=delays, staging_budget=64 * KiB)
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


def test_huge_and_tiny_in_both_directions_with_two_buffers(open_swapper):
    swapper = open_swapper(staging_budget=16 * KiB, buffer_count=2)
    huge = random_bits((2 * MiB,), torch.uint8)
    swapper.swap_out("huge", huge).wait(PATIENCE)
    reads = []
    for number in range(40):
        swapper.swap_out(f"tiny {number}", torch.full((number,), number))
        if number % 10 == 0:
            reads.append(swapper.swap_in("huge"))
            swapper.swap_out(f"huge {number}", huge)
    for number in range(40):
        tiny = swapper.swap_in(f"tiny {number}").wait(PATIENCE)
        assert tiny.shape == (number,)
        assert (tiny == number).all()
    for read in reads:
        assert same_bits(read.wait(PATIENCE), huge)
    assert same_bits(swapper.swap_in("huge 30").wait(PATIENCE), huge)


def test_threads_that_write_and_read_one_name_see_whole_values(swapper):
    swapper.swap_out("x", torch.full((100_000,), 0, dtype=torch.int16))
    torn = []

    def work(seed):
        for number in range(25):
            value = seed * 100 + number
            swapper.swap_out("x", torch.full((100_000,), value, dtype=torch.int16))
            result = swapper.swap_in("x").wait(PATIENCE)
            if (result != result[0]).any():
                torn.append(value)
            if number % 5 == 0:
                swapper.prefetch("x")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert not torn
