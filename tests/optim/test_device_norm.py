"""The norm of gradients on a device: few operators there, one wait of the host, the same number."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nvme_offload.optim.kernels import KernelPool
from nvme_offload.optim.step.norm import sums_from_device
from tests.support.training import BLOCK, params_of, set_grads

MAX_OPERATORS, FOR_ALL = 12, 3
"""For one gradient of at most 16 Mi elements, and for all of them together."""


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += 1
        return func(*args, **(kwargs or {}))


def operators_of(numels):
    grads = {index: torch.empty(numel, dtype=torch.bfloat16, device="late") for index, numel in enumerate(numels)}
    with Counting() as counting:
        sums_from_device(grads)
    return counting.operators


def test_operators_grow_with_the_number_of_gradients_and_not_with_their_size(late):
    assert operators_of([3 * BLOCK + 7]) == operators_of([30 * BLOCK + 7]) <= MAX_OPERATORS + FOR_ALL
    assert operators_of([BLOCK + 1] * 20) <= 20 * MAX_OPERATORS + FOR_ALL


@pytest.mark.parametrize("numel", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 300 * BLOCK + 5])
def test_the_sums_are_those_of_the_cpu(late, numel):
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).bfloat16()
    found = sums_from_device({4: grad.to("late"), 5: grad})
    torch.testing.assert_close(found.pop(4), KernelPool(1).tile_sq_sums(grad), rtol=1e-13, atol=0)
    assert not found  # those in host memory are not the device's


def test_the_host_waits_once_for_the_norm_and_once_for_each_subgroup(make_adamw, late):
    counted = []
    for num_params in (3, 12):
        params = params_of([(BLOCK,)] * num_params, torch.bfloat16)
        there = [torch.nn.Parameter(p.detach().to("late")) for p in params]
        optimizer = make_adamw(there, "cpu", clip=1.0, sub_group_size=BLOCK)
        for step in range(3):
            set_grads(params, step)
            for parameter, twin in zip(there, params, strict=True):
                parameter.grad = twin.grad.to("late")
            late.waits.clear()
            optimizer.step()
            if step:  # in the first, state is born of what is there
                counted.append(late.waits.total() - num_params)
    assert counted == [1] * 4


def test_waiting_for_a_device_is_not_computing(make_adamw, late):
    [host] = params_of([(4 * BLOCK,)], torch.bfloat16)
    there = torch.nn.Parameter(host.detach().to("late"))
    optimizer = make_adamw([there], "cpu", sub_group_size=BLOCK)
    for step in range(2):
        set_grads([host], step)
        there.grad = host.grad.to("late")
        optimizer.step()
    iteration, timeline = optimizer.stats().iteration, optimizer.timeline()
    assert iteration.wait_seconds["device"] > 0
    waits = [span for span in timeline if span.kind == "wait"]
    computes = [span for span in timeline if span.kind in ("compute", "norm")]
    assert len(waits) == 5
    assert not any(one.start_ns < other.end_ns and other.start_ns < one.end_ns for one in waits for other in computes)
