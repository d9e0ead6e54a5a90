"""Same shape, dtype and bits come back, in the order of the calls, from every engine; misuse is said in words."""

import copy
import gc
import pickle
import time
import weakref

import numpy
import pytest
import torch

from nvme_offload import ClosedError, ConfigError, EngineUnavailable, FaultSpec, OffloadConfig, TensorSwapper
from tests.support.own_resources import Resources
from tests.support.swapper_tools import DTYPES, PATIENCE, KiB, config_for, random_bits, same_bits, swap_file


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_with_and_without_strides(swapper, dtype):
    tensor = random_bits((300, 250), dtype)
    for name, variant in {"plain": tensor, "strided": tensor.t()[::2, 1::3]}.items():
        swapper.swap_out(name, variant)
        result = swapper.swap_in(name).wait(PATIENCE)
        assert same_bits(result, variant)
        assert result.is_contiguous()
        out = random_bits((250, 300), dtype, seed=1).t()[: variant.shape[0], : variant.shape[1]]
        if out.shape == variant.shape:
            assert swapper.swap_in(name, out=out).wait(PATIENCE) is out
            assert same_bits(out, variant)


LAYOUTS = {
    "scalar": lambda base: base[0, 0, 0], "one": lambda base: base[:1, :1, 0], "empty": lambda base: base[:0],
    "empty in the middle": lambda base: base[:, :0], "offset": lambda base: base.view(-1)[3:-5],
    "permuted": lambda base: base.permute(2, 0, 1), "stepped": lambda base: base[::2, 1::3, ::4],
    "expanded": lambda base: base[:, :1].expand(-1, 50, -1),
    "channels last": lambda base: base[None].contiguous(memory_format=torch.channels_last),
    "unfolded": lambda base: base[0].unfold(0, 5, 1),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(swapper, layout):
    tensor = LAYOUTS[layout](random_bits((20, 30, 40), torch.int32))
    swapper.swap_out(layout, tensor)
    assert same_bits(swapper.swap_in(layout).wait(PATIENCE), tensor)
    assert swapper.nbytes(layout) == tensor.numel() * 4


@pytest.mark.parametrize("numel", [1, 1023, 1024, 1025, 16 * KiB, 16 * KiB + 1, 64 * KiB - 1, 200_001])
def test_sizes_around_blocks_and_buffers(swapper, numel):
    tensor = random_bits((numel,))
    swapper.swap_out("x", tensor)
    assert same_bits(swapper.swap_in("x").wait(PATIENCE), tensor)


def test_lazily_conjugated_and_negated_tensors_are_stored_resolved(swapper):
    tensor = torch.randn(100, 70, dtype=torch.complex64).t().conj()
    assert tensor.is_conj()
    assert tensor.imag.is_neg()
    for name, value in {"conj": tensor, "neg": tensor.imag}.items():
        swapper.swap_out(name, value)
        assert torch.equal(swapper.swap_in(name).wait(PATIENCE), value)


def test_parameters_and_their_gradients_are_left_alone(swapper):
    parameter = torch.nn.Parameter(torch.randn(50, 50))
    swapper.swap_out("p", parameter).wait(PATIENCE)
    before = parameter.detach().clone()
    with torch.no_grad():
        parameter.zero_()
    assert swapper.swap_in("p", out=parameter).wait(PATIENCE) is parameter
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert torch.equal(parameter, before)
    assert not swapper.swap_in("p").wait(PATIENCE).requires_grad


def test_inference_tensors(swapper):
    with torch.inference_mode():
        tensor = torch.randn(1000)
        swapper.swap_out("x", tensor)
        out = torch.zeros(1000)
        swapper.swap_in("x", out=out).wait(PATIENCE)
        assert torch.equal(out, tensor)
    result = swapper.swap_in("x").wait(PATIENCE)
    assert not result.is_inference()
    result.add_(1)


@pytest.mark.parametrize("engine", ["io_uring", "pyuring", "aiofiles"])
def test_every_engine(open_swapper, engine):

    try:
        swapper = open_swapper(engine=engine)
    except EngineUnavailable as error:
        pytest.skip(str(error))
    tensors = {str(number): random_bits((number * 37, 501), seed=number) for number in range(12)}
    for name, tensor in tensors.items():
        swapper.swap_out(name, tensor)
    for name, tensor in tensors.items():
        assert same_bits(swapper.swap_in(name).wait(PATIENCE), tensor)
    assert swapper.stats().engine == engine


def test_names_and_their_bytes(swapper):
    swapper.swap_out("a", torch.zeros(10))
    swapper.swap_out("b", torch.zeros(3, dtype=torch.int8))
    assert swapper.names() == ["a", "b"]
    assert "a" in swapper
    assert "c" not in swapper
    assert 7 not in swapper
    assert (swapper.nbytes("a"), swapper.nbytes("b")) == (40, 3)
    swapper.delete("a")
    assert swapper.names() == ["b"]
    assert "a" not in swapper


def test_unknown_names_name_the_nearest(swapper):
    swapper.swap_out("layers.0.weight", torch.zeros(1))
    for call in (swapper.swap_in, swapper.prefetch, swapper.evict, swapper.delete, swapper.nbytes, swapper.residency):
        with pytest.raises(KeyError, match=r"layer\.0\.weight.*nearest names are 'layers\.0\.weight'"):
            call("layer.0.weight")
    with pytest.raises(KeyError, match="no name is similar"):
        swapper.swap_in("entirely different")


def test_calls_for_one_name_take_effect_in_order(swapper):
    reads = []
    for value in range(30):
        swapper.swap_out("x", torch.full((value * 1000 + 1,), value))
        if value % 3 == 0:
            swapper.prefetch("x")
        if value % 4 == 0:
            swapper.evict("x")
        reads.append(swapper.swap_in("x"))
    for value, read in enumerate(reads):
        result = read.wait(PATIENCE)
        assert result.shape == (value * 1000 + 1,)
        assert (result == value).all()


def test_a_name_can_be_deleted_and_used_again_without_waiting(swapper):
    for value in range(10):
        swapper.swap_out("x", torch.full((50_000,), value))
        read = swapper.swap_in("x")
        swapper.delete("x")
        assert "x" not in swapper
        assert (read.wait(PATIENCE) == value).all()
    swapper.synchronize()
    assert swapper.stats().stored_bytes == 0


def test_space_is_used_again(swapper):
    for _ in range(20):
        swapper.swap_out("x", torch.zeros(100_000)).wait(PATIENCE)
        swapper.swap_in("x").wait(PATIENCE)
    assert swap_file(swapper).stat().st_size <= 2 * (400_000 + 4 * 4096)
    assert swapper.stats().stored_bytes < 400_000 + 4096


def watched_tensor():
    """A tensor, and a reference that dies with its memory."""
    array = numpy.ones(100_000, dtype=numpy.float32)
    return torch.from_numpy(array), weakref.ref(array)


@pytest.mark.parametrize("eio", [0.0, 1.0])
def test_the_source_is_let_go_well_or_not(open_swapper, eio):
    swapper = open_swapper(faults=FaultSpec(seed=1, eio=eio))
    tensor, memory = watched_tensor()
    swapper.swap_out("x", tensor)
    del tensor
    swapper.synchronize()
    time.sleep(0.1)  # the thread is on its way to sleep
    gc.collect()
    assert memory() is None


def test_the_target_is_let_go(swapper):
    out, memory = watched_tensor()
    swapper.swap_out("x", out).wait(PATIENCE)
    swapper.prefetch("x")
    for _ in range(2):  # from host memory, then from the file
        assert swapper.swap_in("x", out=out).wait(PATIENCE) is out
    del out
    time.sleep(0.1)
    gc.collect()
    assert memory() is None


def test_a_prefetched_tensor_is_read_once_and_handed_over(swapper):
    tensor = random_bits((30_000,))
    swapper.swap_out("x", tensor).wait(PATIENCE)
    assert swapper.residency("x").name == "STORED"
    assert swapper.prefetch("x")
    assert swapper.prefetch("x")
    swapper.synchronize()
    assert swapper.residency("x").name == "PREFETCHED"
    before = swapper.stats()
    assert before.prefetched_bytes == tensor.nbytes
    assert same_bits(swapper.swap_in("x").wait(0), tensor)  # done at once
    after = swapper.stats()
    assert after.bytes_read == before.bytes_read
    assert (after.prefetched_bytes, after.num_prefetch_hits) == (0, 1)
    assert swapper.residency("x").name == "STORED"
    assert same_bits(swapper.swap_in("x").wait(PATIENCE), tensor)
    assert swapper.stats().bytes_read > after.bytes_read


def test_what_the_caller_does_to_a_result_does_not_reach_the_next_one(swapper):
    tensor = random_bits((10_000,), torch.int32)
    swapper.swap_out("x", tensor)
    for _ in range(3):
        swapper.prefetch("x")
        result = swapper.swap_in("x").wait(PATIENCE)
        assert same_bits(result, tensor)
        result.zero_()


def test_prefetch_is_bounded_and_says_so(open_swapper):
    swapper = open_swapper(staging_budget=64 * KiB)
    for name in "abcde":
        swapper.swap_out(name, random_bits((16 * KiB,), torch.uint8, ord(name)))
    assert swapper.prefetch_budget == 64 * KiB
    assert [swapper.prefetch(name) for name in "abcde"] == [True, True, True, True, False]
    swapper.synchronize()
    assert swapper.stats().prefetched_bytes == 64 * KiB
    swapper.evict("b")
    assert swapper.stats().prefetched_bytes == 48 * KiB
    assert swapper.prefetch("e")
    for name in "abcde":
        assert same_bits(swapper.swap_in(name).wait(PATIENCE), random_bits((16 * KiB,), torch.uint8, ord(name)))
    assert swapper.stats().prefetched_bytes == 0


@pytest.mark.parametrize("drop", ["swap_out", "evict", "delete"])
def test_a_stale_copy_is_dropped(swapper, drop):
    swapper.swap_out("x", torch.zeros(1000))
    swapper.prefetch("x")
    if drop == "swap_out":
        swapper.swap_out("x", torch.ones(1000))
    else:
        getattr(swapper, drop)("x")
    swapper.synchronize()
    assert swapper.stats().prefetched_bytes == 0
    if drop != "delete":
        expected = 1 if drop == "swap_out" else 0
        assert (swapper.swap_in("x").wait(PATIENCE) == expected).all()


def test_swap_in_checks_out(swapper):
    swapper.swap_out("x", torch.zeros(3, 4))
    for out in (torch.zeros(4, 3), torch.zeros(3, 4, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"'x' is stored as torch\.float32 \[3, 4\], but `out` is"):
            swapper.swap_in("x", out=out)
    with pytest.raises(ValueError, match="share memory"):
        swapper.swap_in("x", out=torch.zeros(3, 1).expand(3, 4))


def test_tensors_without_dense_data_are_refused(swapper):
    for tensor in (torch.zeros(2, 2).to_sparse(), torch.zeros(2, device="meta")):
        with pytest.raises(TypeError, match="must be dense"):
            swapper.swap_out("x", tensor)
    with pytest.raises(TypeError, match="name of a tensor is a string"):
        swapper.swap_out(3, torch.zeros(1))
    with pytest.raises(TypeError, match="'x': a TensorSwapper keeps tensors, not a list"):
        swapper.swap_out("x", [1.0])
    assert swapper.names() == []


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_copying_is_refused_in_words(swapper, duplicate):
    with pytest.raises(TypeError, match=r"its tensors are on a drive\. Make another one"):
        duplicate(swapper)


def test_the_device_must_be_nvme():
    for config in ({}, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, OffloadConfig()):
        with pytest.raises(ConfigError, match='a TensorSwapper needs "nvme" and an nvme_path'):
            TensorSwapper(config)


def test_after_close_every_call_says_so(swapper, tmp_path):
    tensor = random_bits((300_000,))
    out = swapper.swap_out("x", tensor)
    read = swapper.swap_in("x")
    swapper.close()  # waits for both
    swapper.close()
    assert out.wait(0) is None
    assert same_bits(read.wait(0), tensor)
    calls = [lambda: swapper.swap_out("x", tensor), lambda: "x" in swapper, swapper.names, swapper.stats]
    calls += [lambda: swapper.swap_in("x"), lambda: swapper.prefetch("x"), lambda: swapper.evict("x")]
    calls += [lambda: swapper.delete("x"), lambda: swapper.nbytes("x"), swapper.synchronize]
    for call in calls:
        with pytest.raises(ClosedError, match="TensorSwapper is closed"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_threads_and_descriptors_are_gone_after_close(tmp_path):
    def use():
        with TensorSwapper(config_for(tmp_path)) as swapper:
            swapper.swap_out("x", torch.zeros(10))
            swapper.swap_in("x").wait(PATIENCE)

    use()
    before = Resources.steady()
    for _ in range(5):
        use()
    assert not Resources.settled(before).beyond(before)
