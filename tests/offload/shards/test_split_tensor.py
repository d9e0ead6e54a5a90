"""A read-through, write-through fp32 tensor, over parts kept by the test."""

import copy
import io

import numpy
import pytest
import torch
from accelerate.utils.modeling import find_tied_parameters
from safetensors.torch import save

from nvme_offload import StateError
from nvme_offload.offload._torch_private import Offered
from nvme_offload.offload.shards.split_tensor import SplitTensor
from nvme_offload.offload.shards.stand_in import StandIn


class PlainParts:
    """Parts that are simply kept joined, and count how often they are read and written."""

    def __init__(self, values):
        self.values = values.clone()
        self.stored = values.bfloat16()
        self.device = values.device
        self.num_reads = self.num_writes = 0

    def gathered(self, dtype):
        return self.stored.to(dtype)

    def offered(self, gathered):
        return Offered(stays=True)

    def end_gather(self):
        pass

    def declared(self, shape):
        return self.stored.view(shape)

    def read(self):
        self.num_reads += 1
        return self.values.clone()

    def write(self, values):
        assert values.shape == self.values.shape
        self.num_writes += 1
        self.values = values.clone()


@pytest.fixture
def values():
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def parts(values):
    return PlainParts(values)


@pytest.fixture
def split(parts, values):
    return SplitTensor(parts, values)


def test_reads_are_of_the_joined_value(split, values):
    assert torch.equal(split + 1, values + 1)
    assert torch.equal(torch.stack([split, split * 2]), torch.stack([values, values * 2]))
    assert split.sum().item() == values.sum().item()
    assert type(split + 1) is torch.Tensor
    assert split.dtype == torch.float32


@pytest.mark.parametrize("change", [
    lambda t: t.add_(1), lambda t: t.copy_(torch.arange(24.0).view(6, 4)), lambda t: t.view(-1)[3:7].mul_(5),
    lambda t: t[2].zero_(), lambda t: t.t()[1, 2].fill_(9), lambda t: t.narrow(0, 1, 2).narrow(1, 1, 2).neg_(),
    lambda t: t.chunk(2)[1].add_(3), lambda t: t.unbind(0)[4].mul_(2), lambda t: t.detach().sub_(1),
    lambda t: t.masked_fill_(torch.eye(6, 4, dtype=torch.bool), 7.0), lambda t: torch._foreach_mul_([t], 3.0),
    lambda t: torch.add(t.clone(), 1, out=t), lambda t: t.__setitem__((slice(None), 0), 4.0),
    lambda t: t.clamp_(min=0).view(4, 6)[1].add_(1),
])  # fmt: skip
def test_a_change_in_place_reaches_the_parts(change, split, parts, values):
    change(split)
    expected = values.clone()
    change(expected)
    assert torch.equal(parts.values, expected)
    assert torch.equal(split.plain(), expected)
    assert not torch.equal(expected, values), "the change was none"


def test_in_place_operators_return_the_tensor_itself(split):
    assert split.add_(1) is split
    assert isinstance(split.view(-1).mul_(2), SplitTensor)


def test_views_are_lazy_and_copies_are_plain(split, parts, values):
    view = split.view(-1)[2:5]
    assert isinstance(view, SplitTensor)
    assert parts.num_reads == 0
    assert view.shape == (3,)
    assert torch.equal(view.plain(), values.view(-1)[2:5])
    for copied in (split.clone(), copy.deepcopy(split), split.to(torch.float64), split.plain()):
        assert not isinstance(copied, SplitTensor)
    split.clone().zero_()
    assert torch.equal(split.plain(), values)


def test_factories_read_nothing(split, parts):
    assert torch.equal(torch.zeros_like(split), torch.zeros(6, 4))
    assert split.new_ones(2).tolist() == [1, 1]
    assert torch.empty_like(split, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert parts.num_reads == 0


def test_it_is_saved_as_a_plain_tensor(split, values):
    file = io.BytesIO()
    torch.save({"weight": split}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["weight"]
    assert type(loaded) is torch.Tensor
    assert torch.equal(loaded, values)


def test_one_operator_reads_the_parts_once(split, parts):
    torch.add(split, split)
    assert parts.num_reads == 1
    torch.dot(split.view(-1), split.view(-1))
    assert parts.num_reads == 2


def test_the_parts_alone_are_not_copied(split):
    with pytest.raises(TypeError, match="copy the parameter"):
        copy.deepcopy(split.__dict__)


@pytest.mark.parametrize("take", [torch.from_dlpack, numpy.from_dlpack, lambda t: torch.from_dlpack(t[2:])])
def test_dlpack_gives_a_copy_of_the_joined_value(take, split, values):
    taken = torch.as_tensor(take(split))
    assert torch.equal(taken, values[-len(taken) :])
    taken.zero_()
    assert torch.equal(split.plain(), values)


@pytest.mark.parametrize("use", [
    lambda t: torch.from_dlpack(t, copy=False), lambda t: torch.from_dlpack(torch.nn.Parameter(t)),
    torch.utils.dlpack.to_dlpack, lambda t: t.share_memory_(), lambda t: t.__cuda_array_interface__,
    lambda t: t.numpy(), numpy.asarray, memoryview, lambda t: t.untyped_storage().data_ptr(),
    lambda t: t.untyped_storage().copy_(torch.zeros(t.shape).untyped_storage()), lambda t: save({"weight": t}),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["split", "stand-in"])
def test_what_needs_an_address_raises_and_nobody_is_killed(kind, use, split, parts):
    tensor = split if kind == "split" else StandIn(split, torch.float32, name="weight", remedy="use x")
    with pytest.raises((RuntimeError, BufferError, AttributeError, TypeError)):
        use(tensor)
    assert parts.num_reads <= 1


def test_what_needs_an_address_says_what_to_use_instead(split):
    with pytest.raises(StateError, match=r"parts live apart.*\.clone\(\)"):
        split.share_memory_()
    with pytest.raises(StateError, match=r"weight: .*use x, actual DLPack"):
        torch.from_dlpack(StandIn(split, torch.float32, name="weight", remedy="use x"))


def test_scans_for_tied_weights_find_it_nowhere_in_memory(split, parts):
    assert (split.data_ptr(), split[1:].data_ptr(), split.is_pinned(), split.is_shared()) == (0, 0, False, False)
    model = torch.nn.Module()
    model.a, model.b = torch.nn.Parameter(split), torch.nn.Parameter(SplitTensor(parts, split))
    assert find_tied_parameters(model) == []
    model.c = model.a
    assert find_tied_parameters(model) == [["a", "c"]]
    assert parts.num_reads == 0


def test_a_stand_in_raises_or_asks_its_handler():
    seen = []
    handlers = {torch.ops.aten.mul_: lambda factor: seen.append(factor), torch.ops.aten.zero_: lambda: seen.append(0)}
    like = torch.empty(3, 5, device="meta")
    tensor = StandIn(like, torch.bfloat16, name="gradients of x", remedy="use y", handlers=handlers)
    assert (tensor.shape, tensor.stride(), tensor.dtype) == ((3, 5), (5, 1), torch.bfloat16)
    assert tensor.device.type == "cpu"
    assert tensor.mul_(3) is tensor
    torch._foreach_zero_([tensor, tensor])
    assert seen == [3, 0, 0]
    assert "gradients of x is on a tier" in repr(tensor)
    copied = torch.ones(3, 5).copy_
    for touch in (lambda: tensor + 1, tensor.sum, lambda: tensor[0], lambda: copied(tensor), tensor.clone):
        with pytest.raises(StateError, match=r"gradients of x: expected .*use y"):
            touch()
