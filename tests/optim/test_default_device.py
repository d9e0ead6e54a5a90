"""``torch.set_default_device``: tensors that nobody asked for stay in host memory."""

import contextlib

import pytest
import torch

from nvme_offload import OffloadAdamW, get_full_param, initialize
from tests.support import tiers
from tests.support.training import assert_same_bits, params_of, section, set_grads


@contextlib.contextmanager
def default_device(name):
    """``meta`` holds no data: whatever is made there by mistake is missed as soon as somebody reads it."""
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


def trained(path, name):
    """Parameters and state of an optimizer that lives wholly under a default device, its gradients made on the CPU."""
    params = params_of([(70_000,), (5,)], torch.bfloat16, torch.float16, torch.float32)
    with default_device(name), OffloadAdamW(params, lr=1e-3, offload=section(path, clip=1.0)) as optimizer:
        for step in range(2):
            with torch.device("cpu"):
                set_grads(params, step)
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        entries = [dict(optimizer.state[parameter]) for parameter in params]
        return [p.detach().clone() for p in params], optimizer.state_dict()["state"], entries


@pytest.mark.parametrize("on_nvme", [False, True])
def test_an_optimizer_under_a_default_device(drive, on_nvme):
    path = drive if on_nvme else None
    assert_same_bits(trained(path, "meta"), trained(path, "cpu"))


@pytest.mark.usefixtures("alone")
def test_an_engine_under_a_default_device(drive):
    config = tiers.section(drive, **tiers.EVERYTHING, accumulation=1)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
    batch = torch.randn(4, 32)
    with default_device("meta"), initialize(model, config) as engine:
        for _ in range(2):
            engine.backward(engine(batch).float().square().mean())
            engine.step()
        values = [get_full_param(parameter) for parameter in engine.module.parameters()]
    assert all(value.device.type == "cpu" and value.isfinite().all() for value in values)
