"""The store keeps some tensors and leaves others; they come back in an order, and into memory that is used again."""

import gc
import threading

import pytest
import torch
from torch import nn

from nvme_offload import ActivationSwapper, ConfigError
from tests.support.activations import ROWS, WIDTH, Layers, batch, section, train_once
from tests.support.swapper_tools import DTYPES, random_bits, same_bits
from tests.support.threads import at_once

SIZE = ROWS * WIDTH * 4


@pytest.fixture
def swapper(tmp_path):
    with ActivationSwapper(section(tmp_path), model=Layers()) as opened:
        yield opened


def tensors(number):
    return [torch.full((ROWS, WIDTH), float(index)) for index in range(number)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_with_its_bits(tmp_path, dtype):
    with ActivationSwapper(section(tmp_path, host_budget=4096), model=Layers()) as swapper:
        value = random_bits((8192, 3), dtype)
        handle = swapper.keep(value)
        expected = value.clone()
        del value
        assert swapper.stats().written_bytes
        assert same_bits(handle.take(), expected)
        assert same_bits(handle.take(), expected)


@pytest.mark.parametrize("way", ["newest first", "announced"])
def test_what_comes_next_is_read_before_it_is_asked_for(swapper, way):
    """Without a word newest first; in another order, as block by block, if that is said."""
    handles = [swapper.keep(tensor) for tensor in tensors(20)]
    order = list(range(20))[::-1]
    if way == "announced":
        order = [block * 4 + micro for block in reversed(range(5)) for micro in range(4)]
        swapper.announce(handles[number] for number in order)
    taken = []
    for number in order:
        taken.append(handles[number].take()[0, 0].item())
        handles[number] = None
    stats = swapper.stats()
    assert taken == order
    assert stats.num_reads == stats.num_reads_foreseen > 10
    assert stats.num_kept == 0


def test_a_copy_that_ends_in_backward_is_read_before_it_is_asked_for(tmp_path, monkeypatch):
    """It begins early, while the budget has room for all, so that no forward waits for it."""
    may_end, has_ended = threading.Event(), threading.Event()
    with ActivationSwapper(section(tmp_path, host_budget=5 * SIZE + 1024), model=Layers()) as swapper:
        end = swapper._store._end_copy

        def end_late(number):
            assert number == 0 or may_end.wait(60)
            end(number)
            if number == 1:
                has_ended.set()

        monkeypatch.setattr(swapper._store, "_end_copy", end_late)
        handles = [swapper.keep(tensor) for tensor in tensors(6)]
        for number in (5, 4, 3, 2):
            assert (handles[number].take() == number).all()
            handles[number] = None
        may_end.set()
        assert has_ended.wait(60)
        for number in (1, 0):
            assert (handles[number].take() == number).all()
        stats = swapper.stats()
    assert stats.written_bytes == stats.read_bytes == 2 * SIZE
    assert stats.num_reads_foreseen == 2


def test_handles_that_die_while_they_are_written_and_read_leave_nothing(swapper, tmp_path):
    for _ in range(20):
        handles = [swapper.keep(tensor) for tensor in tensors(12)]
        handles[-1].take()
        handles[6].take()
        del handles
    stats = swapper.stats()
    assert stats.num_kept == stats.held_bytes == 0
    swapper.close()
    assert list(tmp_path.iterdir()) == []


def test_handles_die_in_garbage_collections_of_any_thread(swapper):
    class Cycle:
        def __init__(self):
            self.me, self.handles = self, [swapper.keep(tensor) for tensor in tensors(6)]

    def churn():
        for _ in range(10):
            Cycle()
            gc.collect(0)

    at_once([churn] * 3)
    gc.collect()
    assert swapper.stats().num_kept == 0


def test_weights_buffers_and_what_is_small_stay(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.register_buffer("scale", torch.randn(ROWS, WIDTH))

        def forward(self, x):
            first = (x * self.scale) @ self.weight  # saves scale, x * scale and the weight
            return first.mean() * first[:2, :2].exp().sum()  # saves numbers, and 16 bytes

    model = Model()
    with ActivationSwapper(section(tmp_path, host_budget="1GiB"), model=model) as swapper:
        x = batch().requires_grad_()
        with swapper.saving():
            loss = model(x)
        assert swapper.stats().saved_bytes == SIZE
        loss.backward()


@pytest.mark.parametrize("rows", [ROWS, WIDTH])
def test_casts_of_weights_stay_and_what_only_has_their_shape_does_not(tmp_path, rows):
    """As many rows as columns: the activations of a layer have the shape of its weight."""
    model = Layers(4)
    with ActivationSwapper(section(tmp_path, host_budget="1GiB"), model=model) as swapper:
        x = torch.randn(rows, WIDTH).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16), swapper.saving():
            loss = model(x).float().square().mean()
        # For each layer the stream in fp32 is not saved, but its cast, and the result of the activation.
        half = rows * WIDTH * 2
        assert swapper.stats().saved_bytes == 4 * 2 * half + 2 * half
        loss.backward()


@pytest.mark.parametrize(
    ("storage", "size", "moved"), [(4096, 4096, True), (4092, 4092, False), (65_536, 256, True), (65_536, 252, False)]
)
def test_the_choice_by_size(swapper, storage, size, moved):
    swapper.keep(torch.zeros(storage // 4)[: size // 4])
    assert swapper.stats().num_saved == moved


def test_what_its_bytes_do_not_tell_all_of_stays(swapper):
    plain = torch.ones(8192, dtype=torch.complex64)
    others = [plain.conj(), torch.ones(8192, device="meta"), torch.eye(128).to_sparse()]
    others.append(torch.nested.nested_tensor([torch.ones(4096), torch.ones(8192)], layout=torch.jagged))
    for tensor in others:
        taken = swapper.keep(tensor).take()
        assert (taken.layout, taken.device, taken.is_conj()) == (tensor.layout, tensor.device, tensor.is_conj())
    assert swapper.stats().num_saved == 0
    assert torch.equal(swapper.keep(plain).take(), plain)
    assert swapper.stats().num_saved == 1


def test_attached_forwards_save_until_it_is_closed(tmp_path):
    """Loops of others call the model, and know of nothing."""
    model = Layers()
    swapper = ActivationSwapper(section(tmp_path, "boundaries"), model=model).attach()
    model(batch()).square().mean().backward()
    saved = swapper.stats().saved_bytes
    assert saved >= 8 * SIZE
    swapper.close()
    model(batch()).square().mean().backward()
    assert swapper.stats().saved_bytes == saved
    assert not any("_compiled_call_impl" in vars(module) for module in model.modules())


def test_a_device_of_none_is_refused():
    with pytest.raises(ConfigError, match=r'activations.device = "none"'):
        ActivationSwapper({}, model=Layers())


def test_a_model_that_is_compiled_as_a_whole_is_refused(tmp_path):
    model = Layers()
    model.compile(backend="eager")
    with pytest.raises(ValueError, match="compiled as a whole"):
        ActivationSwapper(section(tmp_path, "boundaries"), model=model)


def test_automatic_budget(tmp_path):
    model = Layers()
    with ActivationSwapper(section(tmp_path, host_budget="auto"), model=model) as swapper:
        train_once(model, swapper.saving)
        assert swapper.stats().written_bytes == 0
        assert swapper.stats().host_budget > 1 << 20


def test_memory_that_was_read_into_is_read_into_again(tmp_path):
    """As soon as the last view of it is gone, and not before."""
    with ActivationSwapper(section(tmp_path, host_budget=4096), model=Layers()) as swapper:
        handles = [swapper.keep(tensor) for tensor in tensors(3)]
        first = handles[0].take()
        address, view = first.data_ptr(), first[10:20]
        del first
        handles[0] = None
        second = handles[1].take()
        assert second.data_ptr() != address
        assert (view == 0).all()
        del view
        third = handles[2].take()
        assert third.data_ptr() == address
        assert (second == 1).all()
        assert (third == 2).all()
