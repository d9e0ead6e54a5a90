"""What the stand-in for a GPU does as a GPU does it."""

import _thread
import threading

import pytest
import torch

from tests.support.late_device.module import late_device
from tests.support.late_device.mutations import MUTATIONS
from tests.support.late_device.queues import Work, current_stream
from tests.support.training import assert_same_bits, run_child


def autocast_on(device):
    """Products of weights; with a gradient in the weight's own dtype, and nothing cast where it is switched off."""
    generator = torch.Generator().manual_seed(0)
    weight, values = (torch.randn(8, 8, generator=generator).to(device) for _ in range(2))
    weight.requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        results = [torch.nn.functional.linear(values, weight), values @ weight, values * weight]
        with torch.autocast(device, enabled=False):
            results.append(values @ weight)
    grads = [torch.autograd.grad(result.float().square().mean(), weight)[0] for result in results]
    return [tensor.detach().cpu() for tensor in (*results, *grads)]


def compare_autocast():
    with late_device():
        expected = autocast_on("cpu")
        assert [each.dtype for each in expected[:4]] == [torch.bfloat16] * 2 + [torch.float32] * 2
        assert_same_bits(autocast_on("late"), expected)


def test_autocast_casts_what_it_casts_on_the_cpu():
    """In a process of its own: after a backward on the CPU torch takes no further type of device."""
    run_child("from tests.offload.devices.test_late_device import compare_autocast; compare_autocast()")


def test_each_mistake_changes_what_the_product_has(late):
    """Else a process ends over the change itself, which looks as if the mistake were found."""
    for mistake in MUTATIONS.values():
        with mistake():
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_goes_wrong_in_a_thread_of_autograd_is_said(late, capfd, monkeypatch):
    """Torch ends the process there, without a word of it."""
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: None)
    ended = threading.Event()

    def run():
        try:
            stream = current_stream()
            stream.push(Work(lambda: 1 // 0))
            stream.synchronize()
        finally:
            ended.set()

    _thread.start_new_thread(run, ())
    assert ended.wait(10)
    assert "ZeroDivisionError" in capfd.readouterr().err
