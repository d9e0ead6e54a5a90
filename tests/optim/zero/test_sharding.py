import ctypes

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from nvme_offload import OffloadConfig, initialize
from nvme_offload.offload.host.region import KeptMemory
from nvme_offload.optim.layout.blocks import find_blocks, find_ends, find_units, match_blocks
from nvme_offload.optim.precision.plan import PrecisionPlan
from nvme_offload.optim.zero import host_collectives
from nvme_offload.optim.zero.host_collectives import KeptReduction, RingGather
from nvme_offload.optim.zero.sharding import _Grouping
from tests.support import build
from tests.support.ranks import on_ranks
from tests.support.sharded_model import assert_same, full_state
from tests.support.tiers import Model as LanguageModel
from tests.support.tiers import section, train_step

MiB = 1 << 20


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))


class Model(nn.Module):
    def __init__(self, num_layers=3):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.head = nn.Linear(4, 8)


def test_blocks_are_what_repeats_with_a_forward_and_parameters():
    model, one = Model(), Model(num_layers=1)
    assert find_blocks(model) == list(model.layers), "not what is inside them"
    assert find_blocks(one) == list(one.layers[0].experts), "a single layer is no repetition"
    one._no_split_modules = ["Layer"]  # as Hugging Face says it
    assert find_blocks(one) == list(one.layers)
    lists = [nn.ModuleList(nn.Linear(2, 2) for _ in range(2)) for _ in range(2)]
    assert find_blocks(nn.ModuleList(lists)) == [*lists[0], *lists[1]], "lists are not called, what is in them is"
    assert find_blocks(nn.Sequential(nn.ReLU(), nn.ReLU(), nn.Linear(2, 2))) == []


def test_a_large_embedding_and_a_large_head_are_units_of_their_own():
    model = Model()
    model.embedding, model.head = nn.Embedding(64, 4), nn.Linear(4, 64)
    assert find_units(model) == [*model.layers, model.embedding, model.head]
    model.head.weight = model.embedding.weight
    assert find_units(model) == [*model.layers], "tied weights are gathered once"
    small = Model()
    small.embedding = nn.Embedding(4, 4)
    assert small.embedding not in find_units(small)
    assert find_ends(model, []) == [], "nothing repeats: all is gathered at once"


def test_blocks_by_class_and_by_name():
    model = Model()
    assert match_blocks(model, ["Layer", "head"]) == [*model.layers, model.head]
    with pytest.raises(ValueError, match=r"'Lair' names no module.*Layer"):
        match_blocks(model, ["Lair"])


def groups_of(model, blocks, **keys):
    """Names of the modules of each group, with the dtype they are gathered in."""
    names = {module: name for name, module in model.named_modules()}
    grouping = _Grouping(model, blocks, PrecisionPlan.of(OffloadConfig.from_dict(keys), model))
    return [([names[module] for module in modules], policy.param_dtype) for modules, policy in grouping.groups]


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))


FP32, LOW = torch.float32, torch.bfloat16
BF16, AUTOCAST = {"bf16": {"enabled": True}}, {"torch_autocast": {"enabled": True, "dtype": "bf16"}}


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.big = nn.Linear(64, 64)
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(2))


KEPT = {"fp32_modules": ["*.linear", "*.experts.1", "embedding"]}
IN_PARTS = [(["layers.0.experts.0"], LOW), (["layers.0"], FP32), (["embedding"], FP32), ([""], LOW)]
GROUPS = {
    "one dtype": (Model(), BF16, [*(([f"layers.{number}"], LOW) for number in range(3)), ([""], LOW)]),
    "two dtypes": (Model(num_layers=1), BF16 | KEPT, IN_PARTS),
    "mixed by its own": (
        nn.Sequential(nn.Linear(64, 64), Gated()),
        AUTOCAST,
        [(["1.inner.0"], LOW), (["1"], FP32), ([""], LOW)],
    ),
    "lists are not called": (Lists(), AUTOCAST, [(["norms.0", "norms.1"], FP32), ([""], LOW)]),
}


@pytest.mark.parametrize("case", GROUPS)
def test_modules_of_one_precision_in_a_block_are_one_group(case):
    model, keys, groups = GROUPS[case]
    assert groups_of(model, getattr(model, "layers", []), **keys) == groups


def test_a_tied_weight_is_in_the_first_group():
    tied = Model()
    tied.head.weight = tied.embedding.weight
    assert groups_of(tied, [], **AUTOCAST)[0][0][-1] == "head"


def ends_of(path, **chosen):
    """The whole state after some steps in which updates begin in backward, and whether the embedding is a unit."""
    config = {**section(path, state="nvme", accumulation=1), "gradient_clipping": 0.0, "skip_non_finite": False}
    torch.manual_seed(0)
    model = LanguageModel(num_layers=3, width=17, tied=False)
    with initialize(model, {**config, "overlap_step": "backward"}, **chosen) as engine:
        for step in range(4):
            train_step(engine, step)
        return full_state(engine.module, engine.optimizer), isinstance(model.embedding, FSDPModule)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@on_ranks("num_ranks")
def test_ends_of_their_own_change_no_bits(rank, world_size, tmp_path):
    (alone, is_unit), (together, is_unit_too) = ends_of(tmp_path), ends_of(tmp_path, blocks=["Layer"])
    assert is_unit
    assert not is_unit_too
    assert_same(alone, together)


def test_memory_is_borrowed_again_when_no_view_of_it_is_left():
    memory = KeptMemory()
    first = memory.borrow(3 * MiB, torch.uint8)
    view = first[7:9]
    second = memory.borrow(MiB, torch.float32)
    assert memory.size_bytes == 7 * MiB
    address = first.data_ptr()
    del first
    third = memory.borrow(MiB, torch.uint8)
    assert third.data_ptr() != address  # the view is still there
    del view
    assert memory.borrow(MiB, torch.bfloat16).data_ptr() == address
    del second, third
    memory.borrow(2 * MiB, torch.uint8)
    assert memory.size_bytes == 8 * MiB


def test_a_region_that_is_too_small_makes_room_for_a_larger_one():
    memory = KeptMemory()
    memory.borrow(MiB, torch.uint8)
    larger = memory.borrow(2 * MiB, torch.uint8)
    assert memory.size_bytes == 2 * MiB
    assert larger.fill_(3).sum() == 6 * MiB
    assert memory.borrow(0, torch.float32).numel() == 0


@pytest.mark.parametrize("num_ranks", [2, 3])
@on_ranks("num_ranks")
def test_they_give_what_torch_gives(rank, world_size):
    group, memory = dist.group.WORLD, KeptMemory()
    gather, reduction = RingGather(memory), KeptReduction(memory)
    for numel in (1, 5, 70_001):
        torch.manual_seed(rank)
        own = torch.randn(numel)
        output, expected = (
            gather.allocate((numel * world_size,), dtype=own.dtype, device=own.device),
            torch.empty(numel * world_size),
        )
        dist.all_gather_into_tensor(expected, own)
        gather(output, own, group)
        assert torch.equal(output, expected)
        gather(output.zero_(), own, group, async_op=True).wait()
        assert torch.equal(output, expected)
        whole, part, torch_part = torch.randn(numel * world_size), torch.empty(numel), torch.empty(numel)
        dist.reduce_scatter_tensor(torch_part, whole.clone())
        reduction(part, whole, group, dist.ReduceOp.SUM)
        assert torch.equal(part, torch_part)


class Mallinfo(ctypes.Structure):
    """What mallinfo2(3) gives: ten numbers, of which the fifth is of bytes in mappings of their own."""

    _fields_ = [(f"number_{place}", ctypes.c_size_t) for place in range(10)]


def mapped_bytes():
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo
    return mallinfo2().number_4


@on_ranks(2)
def test_an_engine_keeps_what_it_gathers_in_and_leaves_malloc_as_it_is(rank, world_size, tmp_path):
    made = []

    class Watched(KeptMemory):
        def __init__(self):
            super().__init__()
            made.append(self)

    host_collectives.KeptMemory = Watched
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512, bias=False), nn.GELU()) for _ in range(5)))
    engine = initialize(model, build.section(tmp_path, stage=3))
    kept = []
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 512)).float().square().mean())
        engine.step()
        kept.append(made[0].size_bytes)
    engine.close()
    assert 0 < kept[0] < 5 * 512 * 512 * 4  # less than what is gathered and reduced of all layers
    assert kept == kept[:1] * 3
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        return
    torch.ones(24 * MiB, dtype=torch.uint8)  # from here on glibc takes what is smaller from its heap
    before = mapped_bytes()
    tensor = torch.ones(8 * MiB, dtype=torch.uint8)
    assert mapped_bytes() == before, tensor.numel()
