"""Parameters and gradients on a device, updated on the host: the same bits, whatever happens as late as it may."""

import contextlib
import random
from unittest.mock import Mock

import pytest
import torch

from nvme_offload import FaultSpec
from nvme_offload.optim.telemetry.stats import Meter
from nvme_offload.optim.updates.mirrored import DeviceMirror, MirroredRuns
from tests.support.late_device.mutations import OF_MIRROR
from tests.support.training import AWKWARD_SHAPES, assert_same_bits, faulty_drive, params_of, set_grads

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STEPS = 4


def trained(make_adamw, device, *, clip=0.0, **section):
    """Parameters as the device sees them after each step, state, stats."""
    params = [torch.nn.Parameter(p.detach().to(device)) for p in params_of(AWKWARD_SHAPES, *DTYPES)]
    optimizer = make_adamw(params, section.pop("state", "nvme"), clip=clip, sub_group_size=65536, **section)
    seen = []
    for step in range(STEPS):
        host = params_of(AWKWARD_SHAPES, *DTYPES)
        set_grads(host, step, without=(step,))
        for parameter, twin in zip(params, host, strict=True):
            # Computed there, so that it is not final before somebody waits.
            parameter.grad = None if twin.grad is None else twin.grad.to(device).neg().neg_()
        take_step(optimizer)
        seen.append([parameter.detach().clone() for parameter in params])  # what the next forward would read
        for parameter in params:
            parameter.grad = None
    return [[p.cpu() for p in each] for each in seen], optimizer.state_dict()["state"], optimizer.stats()


def take_step(optimizer):
    """Take one, however often the drive fails."""
    number = optimizer.stats().steps + 1
    while optimizer.stats().steps < number:
        with contextlib.suppress(OSError):
            if optimizer.has_unfinished_step:
                optimizer.finish_step()
            else:
                optimizer.step()


@pytest.mark.parametrize("buffers", [0, pytest.param(2, marks=pytest.mark.slow), 4])
def test_parameters_on_a_device_follow_the_same_kernel(make_adamw, late, buffers):
    section = {"buffers": buffers} if buffers else {"state": "cpu"}
    expected, state, _ = trained(make_adamw, "cpu", **section)
    seen, late_state, stats = trained(make_adamw, "late", **section)
    assert_same_bits(seen, expected)
    assert_same_bits(late_state, state)
    assert stats.steps == STEPS
    assert late.num_copies > 100


def test_a_device_without_pinned_memory_too(make_adamw, late):
    expected, _, _ = trained(make_adamw, "cpu")
    seen, _, _ = trained(make_adamw, "late", pin_memory=False)
    assert_same_bits(seen, expected)
    assert not late.pinned_on


@pytest.mark.slow
def test_steps_that_stop_halfway_with_copies_under_way(make_adamw, late):
    expected, _, _ = trained(make_adamw, "cpu")
    with faulty_drive(FaultSpec(seed=3, eio=0.04)):
        seen, _, _ = trained(make_adamw, "late")
    assert_same_bits(seen, expected)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", OF_MIRROR)
def test_a_mistake_with_a_mirror_is_found(make_adamw, late, mutation):
    expected, _, _ = trained(make_adamw, "cpu", state="cpu")
    with OF_MIRROR[mutation]():
        seen, _, _ = trained(make_adamw, "late", state="cpu")
    with pytest.raises(AssertionError):
        assert_same_bits(seen, expected)


def test_a_mirror_that_cannot_be_made_leaves_the_one_before(make_adamw, late, monkeypatch):
    """A later group that needs larger mirrors is refused when no memory can be pinned for them."""
    optimizer = make_adamw([torch.nn.Parameter(p.detach().to("late")) for p in params_of([(100,)], *DTYPES)])
    optimizer.place()
    mirror, closed = optimizer.store.mirror, []
    before, close = mirror.size_bytes, MirroredRuns.close
    monkeypatch.setattr(MirroredRuns, "close", lambda runs: (closed.append(runs), close(runs)))
    larger = [torch.nn.Parameter(p.detach().to("late")) for p in params_of([(3 * 65536,)], *DTYPES)]
    late.refusals = 1
    with pytest.raises(RuntimeError, match="cudaHostRegister refused"):
        optimizer.add_param_group({"params": larger})
    assert (mirror.size_bytes, closed) == (before, [])
    optimizer.add_param_group({"params": larger})
    assert len(closed) == 3
    assert mirror.size_bytes > before


def test_of_three_mirrors_none_stays_pinned_when_one_cannot_be(monkeypatch):
    first = Mock()
    monkeypatch.setattr(
        "nvme_offload.optim.updates.mirrored.MirroredRuns", Mock(side_effect=[first, RuntimeError("refused")])
    )
    with pytest.raises(RuntimeError, match="refused"):
        DeviceMirror(Meter(), pinned=True).fit(torch.device("cpu"), 100)
    first.close.assert_called_once()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_parameters_follow_the_same_kernel(make_adamw):
    """Without clipping the update itself is the CPU's, bit for bit."""
    seen, _, stats = trained(make_adamw, "cuda")
    expected, _, host_stats = trained(make_adamw, "cpu")
    assert stats.total_norm == pytest.approx(host_stats.total_norm, rel=1e-9)
    assert_same_bits(seen, expected)


@pytest.fixture
def five(make_adamw, late):
    """The mirror of one parameter in five subgroups in a step, with these, the parameter and its gradient."""
    params = [torch.nn.Parameter(p.detach().to("late")) for p in params_of([(5 * 65536,)], torch.float32)]
    optimizer = make_adamw(params, "cpu", sub_group_size=65536)
    optimizer.place()
    mirror, subgroups = optimizer.store.mirror, [slot.subgroup for slot in optimizer.store.slots]
    grads = {0: torch.arange(5.0 * 65536).to("late")}
    mirror.begin_step()
    return mirror, subgroups, params, grads


def test_what_was_fetched_and_did_not_come_next_is_fetched_again(five):
    """Behind a step whoever waits for a subgroup has it updated first: others were fetched before."""
    mirror, subgroups, params, grads = five
    chosen = random.Random(0)
    orders = [(chosen.randrange(5), chosen.randrange(5)) for _ in range(40)]
    for first, ahead in ((0, 1), (2, 3), (1, 4), *orders):
        for place in (first, ahead):
            mirror.fetch(subgroups[place], params.__getitem__, grads)
        [run] = subgroups[first].runs
        copies = mirror.take(subgroups[first])
        assert torch.equal(copies.grad(run, torch.float32), torch.arange(float(run.start), run.stop))
        mirror.copy_back(subgroups[first], copies, params.__getitem__, grads)


def test_what_comes_down_does_not_wait_for_what_goes_up(five):
    """But for the bytes in the mirror that it is to fill."""
    mirror, subgroups, params, grads = five
    gone = []
    for place in range(4):
        for each in subgroups[place : place + 2]:
            mirror.fetch(each, params.__getitem__, grads)
        copies = mirror.take(subgroups[place])
        gone.append(mirror._up._stream.done)
        mirror.copy_back(subgroups[place], copies, params.__getitem__, grads)
    assert gone == [0, 0, 0, 1]
