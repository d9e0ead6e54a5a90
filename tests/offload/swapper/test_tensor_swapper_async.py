"""Many tasks of an event loop on one swapper: nothing blocks the loop, and nobody who gives up costs a buffer."""

import asyncio
import random
import time

import pytest
import torch

from nvme_offload import FaultSpec
from tests.support.swapper_tools import KiB, MiB, random_bits, same_bits


def test_await_gives_the_tensor(swapper):
    async def main():
        tensor = random_bits((1000, 300)).t()
        await swapper.swap_out("x", tensor)
        assert same_bits(await swapper.swap_in("x"), tensor)
        out = torch.empty_like(tensor)
        assert await swapper.swap_in("x", out=out) is out
        assert same_bits(out, tensor)

    asyncio.run(main())


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_200_tasks_with_random_cancellation_lose_no_buffer_and_no_bytes(open_swapper, seed):
    delays = FaultSpec(seed=seed, delay=0.3, reorder=0.1, short=0.1, max_delay_us=500)
    swapper = open_swapper(faults=delays, staging_budget=64 * KiB, buffer_count=3)
    rng = random.Random(seed)
    tensors = {str(number): random_bits((rng.randrange(40_000),), seed=number) for number in range(200)}

    async def work(name):
        await swapper.swap_out(name, tensors[name])
        if rng.random() < 0.3:
            swapper.prefetch(name)
        assert same_bits(await swapper.swap_in(name), tensors[name]), f"seed {seed}"

    async def cancel_some(tasks):
        cancelled = set()
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.002)
            if len(cancelled) < 100:
                cancelled.update(task for task in rng.sample(tasks, 3) if task.cancel())
        return cancelled

    async def main():
        tasks = [asyncio.create_task(work(name)) for name in tensors]
        cancelled = await cancel_some(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()
        return len(cancelled)

    assert asyncio.run(main()) > 20, f"seed {seed}"
    swapper.synchronize()
    assert swapper.pool.num_free == swapper.pool.num_buffers, f"seed {seed}"
    for name in swapper.names():  # a swap_out that nobody waited for has stored its bytes all the same
        assert same_bits(swapper.swap_in(name).wait(), tensors[name]), f"seed {seed}, tensor {name}"


@pytest.mark.quiet
def test_the_loop_keeps_turning_while_a_large_tensor_moves(open_swapper):
    swapper = open_swapper(staging_budget=4 * MiB)
    tensor = random_bits((64 * MiB,), torch.uint8)

    async def main():
        longest = turns = 0.0
        swapper.swap_out("x", tensor)
        transfer = swapper.swap_in("x")
        while not transfer.done():
            began = time.monotonic()
            await asyncio.sleep(0)
            longest = max(longest, time.monotonic() - began)
            turns += 1
        assert same_bits(await transfer, tensor)
        return longest, turns, (transfer.operation.completed_ns - transfer.operation.submitted_ns) / 1e9

    longest, turns, whole = asyncio.run(main())
    assert turns > 20
    assert longest < whole / 2
