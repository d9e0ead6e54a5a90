"""Tensors on a device through pinned staging buffers: on the stand-in everywhere, on CUDA where there is one."""

import pytest
import torch

from nvme_offload import ConfigError, TensorSwapper
from tests.support.late_device.mutations import OF_SWAPPER
from tests.support.swapper_tools import PATIENCE, MiB, config_for, needs_cuda, random_bits, same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.complex64]


@pytest.fixture(params=["late", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])])
def device(request):
    if request.param == "late":
        request.getfixturevalue("late")
    return request.param


def same_bits_there(one, other):
    return same_bits(one.cpu(), other.cpu())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_come_back_to_their_device(open_swapper, device, dtype):
    swapper = open_swapper(staging_budget=32 * MiB)
    tensor = random_bits((1000, 1500), dtype).to(device)
    for name, variant in {"plain": tensor, "strided": tensor.t()[::3]}.items():
        swapper.swap_out(name, variant)
        result = swapper.swap_in(name).wait(PATIENCE)
        assert result.device == tensor.device
        assert same_bits_there(result, variant)
        assert swapper.prefetch(name)
        assert same_bits_there(swapper.swap_in(name, out=torch.empty_like(variant)).wait(PATIENCE), variant)
        host = torch.empty(variant.shape, dtype=dtype)
        assert same_bits(swapper.swap_in(name, out=host).wait(PATIENCE), variant.cpu())
    assert swapper.stats().num_prefetch_hits == 2
    assert swapper.pool.pinned


def test_work_that_is_queued_on_the_tensor_is_waited_for(open_swapper, device):
    swapper = open_swapper(staging_budget=4 * MiB)
    matrix = torch.randn(256, 256).to(device)
    for value in range(5):
        tensor = torch.zeros(1 << 20, device=device)
        for _ in range(5):
            matrix = matrix @ matrix
        tensor.fill_(value)
        swapper.swap_out("x", tensor).wait(PATIENCE)
        tensor.fill_(-1)
        swapper.swap_in("x", out=tensor).wait(PATIENCE)
        assert bool((tensor == value).all())


def all_come_back(swapper, late):
    """Many at once, so that buffers are used again while copies are under way."""
    values = [random_bits((300, 400 + number), seed=number) for number in range(24)]
    for number, value in enumerate(values):
        there = value.to("late").neg().neg_() if value.is_floating_point() else value.to("late")
        swapper.swap_out(str(number), there)
    for number in range(0, len(values), 3):
        swapper.prefetch(str(number))
    transfers = [swapper.swap_in(str(number)) for number in range(len(values))]
    found = [transfer.wait(PATIENCE).cpu() for transfer in transfers]
    # And alone: a copy that nobody waits for happens with a later one of the same direction, which somebody waits for.
    assert swapper.prefetch("0")
    found.append(swapper.swap_in("0").wait(PATIENCE).cpu())
    return all(same_bits(one, other) for one, other in zip(found, [*values, values[0]], strict=True))


def test_tensors_on_their_way_side_by_side(open_swapper, late):
    assert all_come_back(open_swapper(staging_budget=1 * MiB), late)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", OF_SWAPPER)
def test_a_mistake_of_the_swapper_is_found(open_swapper, late, mutation):
    swapper = open_swapper(staging_budget=1 * MiB)
    with OF_SWAPPER[mutation]():
        assert not all_come_back(swapper, late)


def test_a_copy_of_a_device_keeps_no_other_waiting(open_swapper, late):
    """Its thread looks after all pieces; it waits for none of them alone."""
    swapper = open_swapper(staging_budget=4 * MiB)
    swapper.swap_out("x", random_bits((1000, 1500)).to("late")).wait(PATIENCE)
    swapper.swap_in("x").wait(PATIENCE)
    assert late.waits["Stream.synchronize"] == 0


def test_memory_that_cannot_be_pinned_is_said_once_or_is_an_error(open_swapper, tmp_path, late, caplog):
    late.refusals = 1
    swapper = open_swapper()
    tensor = random_bits((100,)).to("late")
    for name in "ab":
        swapper.swap_out(name, tensor).wait(PATIENCE)
        assert same_bits_there(swapper.swap_in(name).wait(PATIENCE), tensor)
    assert caplog.text.count("cudaHostRegister refused") == 1
    section = config_for(tmp_path)
    section["zero_optimization"]["offload_optimizer"]["pin_memory"] = True
    late.refusals = 1
    with TensorSwapper(section) as asked, pytest.raises(RuntimeError, match=r"lower .*staging_budget, or .*pin_memory"):
        asked.swap_out("x", tensor)


def test_memory_is_not_pinned_for_a_device_that_is_not_there(tmp_path):
    section = config_for(tmp_path)
    section["zero_optimization"]["offload_optimizer"]["pin_memory"] = True
    with pytest.raises(ConfigError, match="pin_memory = true: torch sees no device"):
        TensorSwapper(section)
