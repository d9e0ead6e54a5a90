"""CUDA tensors through pinned staging buffers. Needs a device."""

import pytest
import torch

from tests.support.swapper_tools import PATIENCE, MiB, needs_cuda, random_bits, same_bits

pytestmark = [pytest.mark.gpu, needs_cuda]


def keep_busy(matrix):
    for _ in range(20):
        matrix = matrix @ matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64], ids=str)
def test_cuda_tensors_come_back_to_their_device(open_swapper, dtype):
    swapper = open_swapper(staging_budget=4 * MiB)
    tensor = random_bits((1000, 1500), dtype).cuda()
    for name, variant in {"plain": tensor, "strided": tensor.t()[::3]}.items():
        swapper.swap_out(name, variant)
        result = swapper.swap_in(name).wait(PATIENCE)
        assert result.device == tensor.device
        assert same_bits(result.cpu(), variant.cpu())
        swapper.prefetch(name)
        out = torch.empty_like(variant)
        assert same_bits(swapper.swap_in(name, out=out).wait(PATIENCE).cpu(), variant.cpu())
        host = torch.empty(variant.shape, dtype=dtype)
        assert same_bits(swapper.swap_in(name, out=host).wait(PATIENCE), variant.cpu())
    assert swapper.pool.pinned


def test_cuda_work_that_is_queued_on_the_tensor_is_waited_for(open_swapper):
    swapper = open_swapper(staging_budget=4 * MiB)
    matrix = torch.randn(4096, 4096, device="cuda")
    for value in range(20):
        tensor = torch.zeros(1 << 20, device="cuda")
        keep_busy(matrix)
        tensor.fill_(value)
        swapper.swap_out("x", tensor).wait(PATIENCE)
        tensor.fill_(-1)
        keep_busy(matrix)
        swapper.swap_in("x", out=tensor).wait(PATIENCE)
        assert (tensor == value).all()
