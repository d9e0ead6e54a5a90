"""Host copies of a device's parameters and gradients: on a CPU stand-in everywhere, on CUDA where there is one."""

import pytest
import torch

from optim.device_mirror import DeviceMirror
from tests.support.training import AWKWARD_SHAPES, assert_same_bits, params_of, set_grads

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STEPS = 4


def trained(make_adamw, device, *, mirrored=False):
    params = [torch.nn.Parameter(p.detach().to(device)) for p in params_of(AWKWARD_SHAPES, *DTYPES)]
    optimizer = make_adamw(params, clip=1.0, sub_group_size=65536)
    if mirrored:
        largest = max(slot.subgroup.padded_numel for slot in optimizer._store.slots)
        optimizer._store.mirror = DeviceMirror(torch.device("cpu"), largest, pinned=False)
    for step in range(STEPS):
        host = params_of(AWKWARD_SHAPES, *DTYPES)
        set_grads(host, step, without=(step,))
        for parameter, twin in zip(params, host, strict=True):
            parameter.grad = None if twin.grad is None else twin.grad.to(device)
        optimizer.step()
    return [p.detach().cpu() for p in params], optimizer.state_dict()["state"], optimizer.stats()


def test_a_mirrored_step_gives_the_same_bits(make_adamw):
    params, state, _ = trained(make_adamw, "cpu")
    mirrored_params, mirrored_state, stats = trained(make_adamw, "cpu", mirrored=True)
    assert_same_bits(mirrored_params, params)
    assert_same_bits(mirrored_state, state)
    assert stats.steps == STEPS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_parameters_follow_the_same_kernel(make_adamw):
    """Without clipping the update itself is the CPU's, bit for bit; the norm is summed on the device."""
    params, _, stats = trained(make_adamw, "cuda")
    host_params, _, host_stats = trained(make_adamw, "cpu")
    assert stats.total_norm == pytest.approx(host_stats.total_norm, rel=1e-9)
    for ours, host in zip(params, host_params, strict=True):
        torch.testing.assert_close(ours, host, rtol=1e-2, atol=1e-5)
