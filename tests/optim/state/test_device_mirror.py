"""Host copies of a device's parameters and gradients: on a CPU stand-in everywhere, on CUDA where there is one."""

from unittest.mock import Mock

import pytest
import torch

from nvme_offload.optim.state.device_mirror import DeviceMirror
from nvme_offload.optim.state.store import StateStore
from tests.support.training import AWKWARD_SHAPES, assert_same_bits, params_of, set_grads

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STEPS = 4


def trained(make_adamw, device, *, mirrored=False):
    params = [torch.nn.Parameter(p.detach().to(device)) for p in params_of(AWKWARD_SHAPES, *DTYPES)]
    optimizer = make_adamw(params, clip=1.0, sub_group_size=65536)
    if mirrored:
        optimizer.place()
        largest = max(slot.subgroup.padded_numel for slot in optimizer.store.slots)
        optimizer.store.mirror = DeviceMirror(torch.device("cpu"), largest, pinned=False)
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


def test_a_mirror_that_cannot_be_made_leaves_the_one_before(make_adamw, monkeypatch):
    """A later group that needs larger mirrors is refused when no memory can be pinned for them."""
    monkeypatch.setattr(StateStore, "_cuda_devices", property(lambda store: {torch.device("cpu")}))
    params = params_of([(100,)], *DTYPES)
    optimizer = make_adamw(params)
    optimizer.place()
    before, closed = optimizer.store.mirror, []
    monkeypatch.setattr(DeviceMirror, "close", lambda mirror: closed.append(mirror))
    with monkeypatch.context() as patch:
        patch.setattr("nvme_offload.optim.state.store.DeviceMirror.__init__", lambda *arguments, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.add_param_group({"params": params_of([(3 * 65536,)], *DTYPES)})
    assert optimizer.store.mirror is before
    assert closed == []
    optimizer.add_param_group({"params": params_of([(3 * 65536,)], *DTYPES)})
    assert closed == [before]
    assert optimizer.store.mirror.size_bytes > before.size_bytes


def test_of_two_mirrors_none_stays_pinned_when_one_cannot_be(monkeypatch):
    first = Mock()
    monkeypatch.setattr(
        "nvme_offload.optim.state.device_mirror._Mirror", Mock(side_effect=[first, RuntimeError("refused")])
    )
    with pytest.raises(RuntimeError, match="refused"):
        DeviceMirror(torch.device("cpu"), 100, pinned=True)
    first.close.assert_called_once()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_parameters_follow_the_same_kernel(make_adamw):
    """Without clipping the update itself is the CPU's, bit for bit; the norm is summed on the device."""
    params, _, stats = trained(make_adamw, "cuda")
    host_params, _, host_stats = trained(make_adamw, "cpu")
    assert stats.total_norm == pytest.approx(host_stats.total_norm, rel=1e-9)
    for ours, host in zip(params, host_params, strict=True):
        torch.testing.assert_close(ours, host, rtol=1e-2, atol=1e-5)
