"""Ranks begin with the same weights and buffers: refused by name where they do not, or the first rank's on all."""

import pytest
import torch
from torch import nn

import nvme_offload.deepspeed as deepspeed
from nvme_offload import initialize
from tests.support.ranks import on_ranks
from tests.support.small_engine import BF16, section

KINDS = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]


def as_each_rank_has_it(rank, values):
    """The same shape in memory of another layout on each rank; the second lies within something else's."""
    if rank == 0:
        return values.clone(memory_format=torch.channels_last)
    around = torch.zeros(2, *reversed(values.shape), dtype=values.dtype)
    around[1] = values.permute(3, 2, 1, 0) if values.dtype.itemsize > 1 else 0
    return around[0].permute(3, 2, 1, 0)


def of_every_layout(rank):
    tensors = {str(kind): as_each_rank_has_it(rank, torch.arange(120).view(2, 3, 4, 5).to(kind)) for kind in KINDS}
    numbers = torch.arange(12.0)
    tensors |= {
        "transposed": (numbers.view(3, 4) if rank == 0 else (numbers - 5).view(4, 3).t()),
        "scalar": torch.tensor(1.0 - rank),
        "expanded": torch.tensor([[3.0], [4.0]]).mul(rank + 1).expand(2, 3),
        "empty": torch.empty(0, 3),
    }
    return tensors


def engine_with(buffers, **more):
    """A module has these buffers, and they stay the objects that they are."""
    module = nn.Linear(2, 2)
    nn.init.ones_(module.weight)
    nn.init.zeros_(module.bias)
    for name, buffer in buffers.items():
        module.register_buffer(name.replace(".", "_"), buffer)
    return initialize(module, section(), **more)


@on_ranks(2)
def test_values_of_any_layout_and_dtype_become_those_of_the_first_rank(rank, world_size):
    tensors = of_every_layout(rank)
    nearly = torch.zeros(200_000).index_fill_(0, torch.tensor(150_001), -0.0 if rank else 0.0)
    for buffers, match in (
        ({"transposed": tensors["transposed"]}, r"transposed\[0, 0\] is 0\.0 on rank 0 and -5\.0 on rank 1: the model"),
        ({"scalar": tensors["scalar"]}, r"scalar\[\] is 1\.0 on rank 0 and 0\.0 on rank 1: .* seed or file"),
        (
            {"nearly": nearly, "t": tensors["transposed"]},
            r"y\[150001\] is 0\.0 on rank 0 and -0\.0 on rank 1, and 1 more",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            engine_with(buffers)
    strides = {name: tensor.stride() for name, tensor in tensors.items()}
    neighbours = [tensors[str(kind)]._base[1].clone() for kind in KINDS] if rank else []
    with engine_with(tensors, sync_module_states=rank == 1):
        for name, value in of_every_layout(0).items():
            assert tensors[name].reshape(-1).view(torch.uint8).equal(value.reshape(-1).view(torch.uint8)), name
    assert {name: tensor.stride() for name, tensor in tensors.items()} == strides
    for kind, old in zip(KINDS if rank else [], neighbours, strict=True):
        assert tensors[str(kind)]._base[1].reshape(-1).view(torch.uint8).equal(old.reshape(-1).view(torch.uint8))
    with engine_with(tensors):
        pass


class Normed(nn.Module):
    """Weights and buffers from a seed; tied, frozen, and one that is not kept."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.wide = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.out = nn.Linear(7, 5)
        self.out.bias.requires_grad_(False)
        self.register_buffer("mean", torch.randn(5, 3).t(), persistent=False)

    def forward(self, inputs):
        return self.out(self.norm(self.wide(inputs))) + self.mean.sum(0)


def now(engine):
    params = {name: param.full_tensor().clone() for name, param in engine.module.named_parameters()}
    return params | {name: buffer.clone() for name, buffer in engine.module.named_buffers()}


def train(engine, rank):
    for step in range(2):
        inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        engine.backward(engine(inputs).float().square().mean())
        engine.step()
    return now(engine)


@on_ranks(2)
def test_an_engine_of_ranks_that_differ_is_refused_by_name_or_begins_from_the_first(rank, world_size, tmp_path):
    bf16 = {**BF16, "fp32_modules": ["BatchNorm1d"]}
    for stage, more in ((0, {}), (1, {}), (2, bf16), (3, {}), (3, bf16)):
        config = {**section(stage, tmp_path, **more), "gradient_accumulation_steps": 1}
        with pytest.raises(ValueError, match=r"wide\.weight\[0, 0\] is .* on rank 0 and .* on rank 1, and 4 more diff"):
            initialize(Normed(rank), config)
        model = Normed(0)
        model.norm.running_var[3] += rank
        with pytest.raises(
            ValueError, match=r"norm\.running_var\[3\] is 1\.0 on rank 0 and 2\.0 on rank 1: .*sync_mod"
        ):
            initialize(model, config)
        with initialize(Normed(0), config) as engine:
            first, expected = now(engine), train(engine, rank)
        engines = [initialize(Normed(rank), config, sync_module_states=True)]
        engines += [deepspeed.initialize(model=Normed(rank), config=config)[0]]
        for engine in engines:
            for found, wanted in ((now(engine), first), (train(engine, rank), expected)):
                assert all(found[name].equal(value) for name, value in wanted.items()), (stage, more)
        engines[0].close()
        engines[1].destroy()
