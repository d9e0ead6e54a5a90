"""The memory that a training takes; and with little of it left, or of what else a host limits, its bits or words."""

import gc
import os
import re
import resource
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from nvme_offload import initialize
from nvme_offload.perf.measure.machine import peak_resident_bytes, reset_peak_resident_bytes, settled_resident_bytes
from nvme_offload.perf.measure.sections import layered_model
from tests.support import cgroups
from tests.support.durable_engine import assert_goes_on_to, durable
from tests.support.file_systems import live, trained
from tests.support.killed_steps import be_ready_to_fork
from tests.support.ranks import on_ranks
from tests.support.resuming import steps_of
from tests.support.training import returned_in_child

SLACK = 24 << 20


def measured(function, *arguments, threads=2):
    """What a function of this file returns in a fresh process, which gives back what it frees of a layer's size."""
    prefix = ("env", "MALLOC_MMAP_THRESHOLD_=65536", f"OMP_NUM_THREADS={threads}")
    return returned_in_child(function, *arguments, timeout=900, prefix=prefix)


def section(path, *, staging="64MiB", blocks=True, **more):
    nvme = {"device": "nvme", "nvme_path": path, "buffer_count": 2 if blocks else 3}
    zero = {"stage": 3, "offload_optimizer": {**nvme, "staging_budget": staging}}
    if blocks:
        zero["offload_param"] = more["offload_gradients"] = nvme
        more["gradient_accumulation_steps"] = 2
    return {"zero_optimization": zero, "bf16": {"enabled": True}, **more}


def train(engine, num_calls, width):
    for _ in range(num_calls):
        engine.backward(engine(torch.randn(8, width)).float().square().mean())
        engine.step()


def blocks_of(num_layers, width, config, num_calls):
    """What is taken at first and at the peak, beside what torch takes once and for all; and what is counted."""
    with initialize(layered_model(2, 16), config) as engine:
        train(engine, 2, 16)
    before = settled_resident_bytes()
    model = layered_model(num_layers, width)
    numel = sum(parameter.numel() for parameter in model.parameters())
    with initialize(model, config) as engine:
        del model
        taken = settled_resident_bytes() - before
        reset_peak_resident_bytes()
        train(engine, num_calls, width)
        peak, staging = peak_resident_bytes() - before, engine.optimizer.stats().staging_bytes
        counted = engine.optimizer.tier_plan.bytes_on("host")
    layer = numel // num_layers
    return {"numel": numel, "layer": layer, "staging": staging, "taken": taken, "peak": peak, "counted": counted}


def everything_on_nvme(path):
    return blocks_of(10, 1024, section(path, staging="32MiB"), 6)


@pytest.mark.slow
def test_memory_is_the_staging_buffers_and_the_group_at_work(tmp_path):
    seen = measured(everything_on_nvme, tmp_path)
    assert seen["taken"] <= seen["staging"] + SLACK, seen
    assert seen["peak"] <= seen["staging"] + 14 * seen["layer"] + SLACK, seen
    assert 2 * seen["numel"] > 14 * seen["layer"] + SLACK, "the upper halves alone would show"


BUDGET = 80 << 20


def within_a_budget(path):
    config = section(path, staging="20MiB", host_budget=BUDGET)
    config["zero_optimization"]["sub_group_size"] = 1000000
    return blocks_of(8, 512, config, 4)


@pytest.mark.slow
def test_the_process_stays_within_the_budget(tmp_path):
    seen = measured(within_a_budget, tmp_path, threads=1)
    assert BUDGET - (12 << 20) < seen["counted"] <= BUDGET, "no whole block or subgroup more would fit"
    assert seen["peak"] <= BUDGET + 14 * seen["layer"] + SLACK, seen  # and what FSDP2 takes for the group at work
    assert 14 * seen["numel"] > BUDGET + 14 * seen["layer"] + SLACK, "all of it would show"


def peak_in_backward(path, overlap):
    exact = {"skip_non_finite": False} if overlap == "backward" else {}
    model = layered_model(12, 512)
    numel = sum(parameter.numel() for parameter in model.parameters())
    with initialize(model, section(path, blocks=False, overlap_step=overlap, **exact)) as engine:
        del model
        for _ in range(5):
            loss = engine(torch.randn(8, 512)).float().square().mean()
            gc.collect()
            reset_peak_resident_bytes()
            engine.backward(loss)
            peak = peak_resident_bytes()
            del loss
            engine.step()
        engine.optimizer.synchronize()
        return {"peak": peak, "staging": engine.optimizer.stats().staging_bytes, "numel": numel}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_the_peak_in_backward_is_that_of_the_plain_order(tmp_path, mode):
    plain, ours = (measured(peak_in_backward, tmp_path, name, threads=1) for name in ("off", mode))
    assert ours["staging"] == plain["staging"]
    assert 2 * ours["numel"] > 40 << 20, "the gradients of the step before would show"
    assert ours["peak"] <= plain["peak"] + (12 << 20), (ours, plain)


MIB = 1 << 20


def address_space(more):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return resource.RLIMIT_AS, pages * resource.getpagesize() + more * MIB


def descriptors(more):
    return resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")) - 1 + more


LIMITS = {
    "address space": (
        address_space,
        [1, 8, 16, 24, 40, 64, 96, 128, 192, 512, 2048],
        "MemoryError|SwapIOError|EngineUnavailable|can't start new thread; raise what limits threads",
    ),
    "descriptors": (descriptors, [0, 1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 64], "EMFILE|Too many open files"),
}


def outcomes(name, stride, folder):
    """Return what came of a run with every so many-th limit, and of one in memory without any."""
    be_ready_to_fork()
    limit, values, _ = LIMITS[name]
    values = values[:: int(stride)]

    def limited(more):
        kind, value = limit(more)
        resource.setrlimit(kind, (value, value))
        return trained(Path(folder), f"run-{more}")[0]

    return {"expected": live(partial(trained, None, None))[0]} | {more: live(partial(limited, more)) for more in values}


@pytest.mark.parametrize("stride", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LIMITS)
def test_a_run_with_little_left_has_its_bits_or_says_what_is_missing(name, stride, tmp_path):
    found = returned_in_child(outcomes, name, stride, tmp_path)
    expected = found.pop("expected")
    wrong = {more: said for more, said in found.items() if said != expected and not re.search(LIMITS[name][2], said)}
    assert not wrong
    assert expected in found.values()


def of_device(folder):
    """The drive below a folder, by its numbers: a partition is limited as the disk that it is on."""
    number = folder.stat().st_dev
    disk = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    return ((disk.parent if (disk / "partition").exists() else disk) / "dev").read_text().strip()


GROUPS = {
    "a tenth of a processor": lambda folder: ("cpu", {"cpu.cfs_period_us": 50_000, "cpu.cfs_quota_us": 5_000}),
    "no further thread": lambda folder: ("pids", {"pids.max": 1}),
    "three threads": lambda folder: ("pids", {"pids.max": 3}),
    "a drive of 2 MB a second": lambda folder: (
        "blkio",
        {f"blkio.throttle.{way}_bps_device": f"{of_device(folder)} {2 << 20}" for way in ("read", "write")},
    ),
}
WITNESSES = {"cpu": ("cpu.stat", r"nr_throttled (\d+)"), "pids": ("pids.events", r"max (\d+)")}
WITNESSES["blkio"] = "blkio.throttle.io_service_bytes", r"Total (\d+)"
"""The kernel counts in these files, by these words, what came up against a limit."""
IN_WORDS = "can't start new thread; raise what limits threads|EngineUnavailable|SwapIOError"


def in_group(name, folder):
    """Return what came of a run below a limit, of one in memory, and how often or much the limit was felt."""
    be_ready_to_fork()
    expected = live(partial(trained, None, None))
    kind, limits = GROUPS[name](Path(folder))
    with cgroups.group(kind, limits) as group:

        def limited():
            cgroups.enter(group)
            return trained(Path(folder), "run")

        found = live(limited)
        file, words = WITNESSES[kind]
        return expected, found, int(re.search(words, (group / file).read_text())[1])


SLOW = ("a tenth of a processor", "a drive of 2 MB a second")


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in GROUPS])
def test_a_run_that_its_host_limits_has_its_bits_or_says_what_is_missing(name, drive):
    if not cgroups.available(GROUPS[name](drive)[0]):
        pytest.skip("control groups of version 1, and root, are needed")
    expected, found, felt = returned_in_child(in_group, name, drive, timeout=600)
    assert felt > 0, "the limit was never met"
    assert found == expected or (isinstance(found, str) and re.search(IN_WORDS, found)), found
    assert found == expected or "thread" in name


def killed_for_memory(folder):
    """The digest of a run that the kernel killed for its memory in the midst of a step, and of one that was not."""
    be_ready_to_fork()
    expected, _ = live(partial(trained, None, None))
    with cgroups.group("memory", {}) as group:
        taken = []

        def eat():
            """Take memory until the kernel ends it."""
            taken.append(bytearray(256 * MIB))

        def in_need():
            cgroups.enter(group)
            limit = int((group / "memory.usage_in_bytes").read_text()) + 64 * MIB
            for name in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
                if (group / name).exists():
                    (group / name).write_text(str(limit))
            return trained(Path(folder), "run", 6, lambda: [eat() for _ in range(8)])

        killed = live(in_need)
    return killed, live(partial(trained, Path(folder), "run")), expected


@pytest.mark.skipif(not cgroups.available("memory"), reason="control groups of version 1, and root, are needed")
def test_a_run_that_the_kernel_kills_for_its_memory_goes_on_from_its_latest_step(drive):
    killed, (resumed, step), expected = returned_in_child(killed_for_memory, drive, timeout=600)
    assert killed == "killed"
    assert resumed == expected
    assert step in (5, 6)


def stop_and_be_woken(seconds):
    """Stop this process with all its threads, as a suspended host; a child wakes it."""
    waker = os.fork()
    if not waker:
        time.sleep(seconds)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(waker, 0)


@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.slow)])
@on_ranks(2)
def test_a_rank_that_is_stopped_for_a_while_delays_the_others_and_changes_nothing(rank, world_size, drive, seconds):
    with durable("bf16", drive, "run", "everything") as engine:
        assert engine.resume() is None
        steps_of(engine, rank, range(2))
        if rank == 1:  # the commit of its latest step is under way
            stop_and_be_woken(seconds)
        assert_goes_on_to(engine, "bf16", 2, 5, "everything", rank)
