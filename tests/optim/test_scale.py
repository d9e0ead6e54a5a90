"""Many tensors, far offsets, many commits, many engines: no more of anything than was said."""

import gc
import os
import sys
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from nvme_offload import OffloadAdamW, initialize
from tests.support.build import section as engine_section
from tests.support.killed_steps import durable_section
from tests.support.own_resources import Resources, resident_bytes
from tests.support.training import SETTINGS, assert_same_training, params_of, section, set_grads

TB = 10**12


def num_calls(call):
    """Count the calls of this thread, of functions in Python and in C."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def calls_in_a_life(folder, count):
    """Count calls by what is done with so many tensors."""
    params, found = params_of([(64,)] * count, torch.bfloat16), {}
    set_grads(params, 0)
    where = durable_section(folder, f"of-{count}") | {"overlap_step": "off"}

    def counted(name, call, times=1):
        found[name] = min(num_calls(call) for _ in range(times))

    with OffloadAdamW(params, offload=section(), **SETTINGS) as plain:
        counted("place", plain.place)
        plain.step()
        counted("step", plain.step)
        counted("state_dict", lambda: found.update(given=plain.state_dict()))
        counted("load_state_dict", lambda: plain.load_state_dict(found.pop("given")))
    with OffloadAdamW(params, offload=where, **SETTINGS) as durable:
        durable.step()
        counted("durable step", lambda: (durable.step(), durable.synchronize()), times=5)  # buffers take turns
        counted("commit", durable.commit)
    with OffloadAdamW(params, offload=where, **SETTINGS) as durable:
        counted("resume", durable.resume)
    return found


MOST_CALLS = {
    "place": 80, "step": 72, "state_dict": 168, "load_state_dict": 240, "durable step": 100, "commit": 38,
    "resume": 180,
}  # fmt: skip
"""For each further tensor."""


def test_each_further_tensor_takes_as_many_calls_as_the_one_before(drive):
    counts = [100, 200, 400]
    found = [calls_in_a_life(drive, count) for count in counts]
    for name, most in MOST_CALLS.items():
        slopes = [(b[name] - a[name]) / (n - m) for (a, m), (b, n) in pairwise(zip(found, counts, strict=True))]
        assert max(slopes) <= most, (name, slopes)
        assert max(slopes) <= 1.2 * min(slopes), (name, slopes)


def test_state_behind_two_terabytes_of_a_file_with_holes_goes_on_with_the_same_bits(drive, monkeypatch):
    """The file system promises here what it does not have: the file is long, and few of its bytes are there."""
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, offset, size: os.ftruncate(fd, offset + size))
    monkeypatch.setattr(os, "fstatvfs", lambda fd: SimpleNamespace(f_blocks=1, f_bavail=8 * TB, f_frsize=1))

    def life(steps, where, ballast=0):
        params = params_of([(70_001,), (999,), (65_537,)], torch.bfloat16, torch.float32)
        optimizer = OffloadAdamW(params, offload=where, **SETTINGS)
        kept = optimizer.store.tier.space.allocate(ballast) if ballast else None
        assert kept is not None or not steps.start or optimizer.resume() == (steps.start, {})
        for step in steps:
            set_grads(params, step)
            optimizer.step()
        optimizer.synchronize()
        return optimizer

    far = durable_section(drive, "far", rewrite_every=2)
    life(range(3), far, ballast=2 * TB).close()
    [swap] = drive.rglob("swap*")
    assert swap.stat().st_size > 2 * TB > 2**40 > 512 * swap.stat().st_blocks
    with life(range(3, 6), far) as resumed, life(range(6), section(sub_group_size=65536, clip=1.0)) as plain:
        assert all(stripe.offset >= 2 * TB for slot in resumed.store.slots for stripe in slot.extent.stripes)
        assert_same_training(resumed, plain)


def print_growth(capsys, what, before, seconds):
    """Print what grew, and seconds of the first and the last tenth."""
    tenth = max(1, len(seconds) // 10)
    grown = resident_bytes() - before
    with capsys.disabled():
        first, last = (1e3 * sum(part) / tenth for part in (seconds[:tenth], seconds[-tenth:]))
        each = f"{first:.2f} ms of processor time each at first, {last:.2f} at the end"
        sys.stdout.write(f"\n{what}: {grown / 1e6:+.1f} MB resident, {each}\n")


@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_engines_made_and_closed_leave_no_files_threads_or_memory(alone, drive, capsys, count):
    def life():
        begun = time.process_time()
        with initialize(torch.nn.Linear(64, 64), engine_section(drive, stage=3)) as engine:
            engine.backward(engine(torch.ones(2, 64)).square().mean())
            engine.step()
        return time.process_time() - begun

    for _ in range(5):
        life()
    before, resident = Resources.steady(), resident_bytes()
    seconds = [life() for _ in range(count)]
    assert not Resources.settled(before).beyond(before)
    assert resident_bytes() - resident < (8 << 20) + 10_000 * count
    print_growth(capsys, f"{count:,} engines", resident, seconds)


@pytest.mark.parametrize("count", [200, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])])
def test_many_commits_take_no_more_than_few(drive, capsys, count):
    [param] = params = params_of([(99,)], torch.bfloat16)
    with OffloadAdamW(params, offload=durable_section(drive, "long"), **SETTINGS) as optimizer:

        def commit(step):
            begun = time.process_time()
            param.grad = torch.full_like(param, 0.1)
            optimizer.client_state["position"] = step
            optimizer.step()  # and the commit of the one before
            return time.process_time() - begun

        def sizes():
            optimizer.commit()
            files = (file for file in drive.rglob("*") if file.is_file() and not file.name.startswith("record."))
            return {
                file.name.split(".")[0]: file.stat().st_size // 4096 for file in files
            }  # a record comes now and then

        for step in range(50):
            commit(step)
        before, files, resident = Resources.steady(), sizes(), resident_bytes()
        seconds = [commit(step) for step in range(50, 50 + count)]
        assert not Resources.settled(before).beyond(before)
        assert sizes() == files
        assert resident_bytes() - resident < 8 << 20
        print_growth(capsys, f"{count:,} commits", resident, seconds)
    with OffloadAdamW(params, offload=durable_section(drive, "long"), **SETTINGS) as optimizer:
        assert optimizer.resume() == (50 + count, {"position": 49 + count})
