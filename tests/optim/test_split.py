"""The number formats of the kernels: fp32 in two halves, and fp16."""

import numpy as np
import pytest
import torch

from nvme_offload.optim.kernels import KernelPool, available_isas
from tests.support.twins import join_reference, split_reference

CHUNK = 2**19
"""Bit patterns at once, few enough for the cache: one sixteenth of a sign and exponent."""

EDGES = [0, 1, 0x7FFF, 0x8000, 0x8001, 0x7FFFFF, 0x800000, 0x3F808000, 0x3F818000, 0x3F7FFFFF, 0x7F7F7FFF, 0x7F7F8000]
EDGES += [0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7F808000, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF]

pools = pytest.mark.parametrize("pool", [KernelPool(2, isa=isa) for isa in available_isas()], ids=lambda pool: pool.isa)


def fp32_from_bits(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32).view(np.float32)


def bits16(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int16).numpy().view(np.uint16)


def edges_and_samples(num_samples: int) -> np.ndarray:
    edges = np.array(EDGES, np.uint32)
    samples = np.random.default_rng(0).integers(0, 2**32, num_samples, np.uint32)
    return fp32_from_bits(np.concatenate([edges, edges | np.uint32(2**31), samples]))


@pools
def test_halves_are_those_of_the_twin(pool):
    values = edges_and_samples(1_000_003)
    hi, lo = pool.split(torch.from_numpy(values))
    expected_hi, expected_lo = split_reference(values)
    np.testing.assert_array_equal(bits16(hi), expected_hi)
    np.testing.assert_array_equal(lo.numpy(), expected_lo)
    joined = pool.join(hi, lo).numpy()
    np.testing.assert_array_equal(joined.view(np.uint32), join_reference(expected_hi, expected_lo).view(np.uint32))


@pytest.mark.parametrize("stride", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_every_fp32_number_comes_back(stride):
    """Exponent 255 of each sign is infinity and then nothing but NaNs, which may come back as other NaNs."""
    pool = KernelPool(2)
    mantissas, bits = torch.arange(CHUNK, dtype=torch.int32), torch.empty(CHUNK, dtype=torch.int32)
    hi, lo = torch.empty(CHUNK, dtype=torch.bfloat16), torch.empty(CHUNK, dtype=torch.uint16)
    joined = torch.empty(CHUNK)
    for start in range(-(2**31), 2**31, stride * CHUNK):  # the negative ones have the sign bit set
        torch.add(mantissas, start, out=bits)
        values = bits.view(torch.float32)
        pool.split(values, out=(hi, lo))
        pool.join(hi, lo, out=joined)
        if start & 0x7F800000 != 0x7F800000:
            assert torch.equal(joined.view(torch.int32), bits), f"from {start:#x}"
            continue
        infinities = int(start & 0x7FFFFF == 0)
        assert torch.equal(joined[:infinities], values[:infinities])
        assert bool(joined[infinities:].isnan().all())
        assert bool(hi[infinities:].isnan().all())
        assert not lo.view(torch.int16).any()


@pools
def test_upper_half_is_the_bf16_of_torch_except_for_ties(pool):
    values = torch.from_numpy(edges_and_samples(1_000_003))
    values = values[~values.isnan()]
    hi, lo = pool.split(values)
    tie = lo.view(torch.int16) == -0x8000
    assert torch.equal(hi[~tie], values.bfloat16()[~tie])
    assert bool((hi[tie].double().abs() > values[tie].double().abs()).all())


@pools
def test_shapes_stay_and_outputs_are_used(pool):
    values = torch.randn(3, 5)
    out = (torch.empty(15, dtype=torch.bfloat16), torch.empty(15, dtype=torch.uint16))
    hi, lo = pool.split(values)
    assert hi.shape == lo.shape == pool.join(hi, lo).shape == values.shape
    assert pool.split(values, out=out)[0] is out[0]
    assert torch.equal(out[0].view(3, 5), hi)
    flat = torch.empty(15)
    assert pool.join(hi, lo, out=flat) is flat
    assert torch.equal(flat.view(3, 5), values)


@pytest.mark.parametrize("numel", [0, 1, 7, 65537])
def test_nothing_is_written_past_the_end(numel):
    values = torch.randn(numel)
    for isa in available_isas():
        hi, lo = torch.full((numel + 64,), 7.0).bfloat16(), torch.full((numel + 64,), 7, dtype=torch.uint16)
        KernelPool(2, isa=isa).split(values, out=(hi[:numel], lo[:numel]))
        assert bool((hi[numel:] == 7).all())
        assert lo[numel:].tolist() == [7] * 64


def test_misfits_are_refused_in_words():
    pool = KernelPool(1)
    values = torch.zeros(4)
    hi, lo = pool.split(values)
    with pytest.raises(ValueError, match=r"src is torch.float64"):
        pool.split(values.double())
    with pytest.raises(ValueError, match=r"lo has 3 elements; it must have 4"):
        pool.join(hi, lo[:3])
    with pytest.raises(ValueError, match=r"lo is torch.bfloat16; it must be torch.uint16"):
        pool.join(hi, hi)
    with pytest.raises(ValueError, match=r"src is not contiguous"):
        pool.split(torch.zeros(4, 4).t())
    with pytest.raises(ValueError, match=r"src is torch.float32; it must be torch.float16"):
        pool.fp16_to_fp32(values)


@pools
@pytest.mark.parametrize("flush", [False, True], ids=["keep", "flush"])
def test_every_fp16_number_widens_as_in_torch(pool, flush):
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    expected = halves.float()
    torch.set_flush_denormal(flush)
    try:
        widened = pool.fp16_to_fp32(halves)
        narrowed = pool.fp32_to_fp16(widened)
    finally:
        torch.set_flush_denormal(False)
    nan = halves.isnan()
    assert torch.equal(widened[~nan].view(torch.int32), expected[~nan].view(torch.int32))
    assert torch.equal(narrowed[~nan].view(torch.int16), halves[~nan].view(torch.int16))
    quiet = 0x00400000
    assert bool((widened[nan].isnan() & (widened[nan].view(torch.int32) & quiet != 0)).all())
    assert bool(narrowed[nan].isnan().all())


@pools
def test_fp32_narrows_as_in_torch_at_every_tie_and_beside_it(pool):
    halves = torch.arange(0x7C00, dtype=torch.int32).to(torch.int16).view(torch.float16).double()
    following = torch.cat([halves[1:], torch.tensor([65536.0], dtype=torch.float64)])
    ties = ((halves + following) / 2).float().view(torch.int32)
    magnitudes = torch.cat([ties - 1, ties, ties + 1]).view(torch.float32)
    samples = torch.from_numpy(edges_and_samples(2**22))
    spread = torch.randn(2**22, generator=torch.Generator().manual_seed(0)) * 1e-5  # normal and denormal halves
    values = torch.cat([magnitudes, -magnitudes, samples, spread])
    narrowed, expected = pool.fp32_to_fp16(values), values.half()
    nan = values.isnan()
    assert torch.equal(narrowed[~nan].view(torch.int16), expected[~nan].view(torch.int16))
    assert bool(narrowed[nan].isnan().all())
