"""Models that arrive in mixed dtypes, with their casts in their code: every block as plain PyTorch computes it."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # its usual name

from nvme_offload import OffloadConfig, initialize
from nvme_offload.optim.precision.casts import cast_where_needed
from nvme_offload.optim.precision.plan import PrecisionPlan
from tests.support.ranks import on_ranks

WIDTH, VOCABULARY, SCALE = 32, 50, 256.0
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class NormInFp32(nn.Module):
    """An fp32 stream; the branch is normalised in fp32 and computed in 16 bits."""

    def __init__(self, half):
        super().__init__()
        self.half = half
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH).to(half), nn.Linear(2 * WIDTH, WIDTH).to(half)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x).to(self.half)))).float()


class DecayInFp32(nn.Module):
    """An fp32 parameter of its own beside 16-bit projections, as in RWKV; its input has no name in common with it."""

    def __init__(self, half):
        super().__init__()
        self.half = half
        self.decay = nn.Parameter(torch.randn(WIDTH) * 1e-3 + 1)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False).to(half)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False).to(half)

    def forward(self, x):
        key = self.key(x.to(self.half)).float() * torch.exp(-torch.exp(self.decay))
        return x + self.out(key.to(self.half)).to(x.dtype)


class GateIn16Bits(nn.Module):
    """A 16-bit parameter that multiplies the fp32 stream, which stays fp32; and a norm of 16 bits, in fp32."""

    def __init__(self, half):
        super().__init__()
        self.half = half
        self.gate = nn.Parameter(torch.rand(WIDTH).to(half))
        self.mix = nn.Linear(WIDTH, WIDTH).to(half)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x * self.gate + self.norm(self.mix(x.to(self.half)))


class Net(nn.Module):
    def __init__(self, block, half):
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block(half) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def fresh_model(block, half):
    torch.manual_seed(0)
    return Net(block, half)


def look(model, backward, params):
    """What each block gives and the gradient of that, the logits, and the gradients of all parameters."""
    seen, streams = {}, []
    for name, block in model.named_modules():
        if name.startswith("blocks.") or not name:
            block.register_forward_hook(lambda _, __, output, name=name: streams.append((name, output)))
    logits = model(torch.randint(0, VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(1)))
    for name, output in streams:
        seen[name] = output.detach().clone()
        output.register_hook(lambda grad, name=name: seen.__setitem__(f"{name} backward", grad.clone()))
    backward(logits.float().square().mean())
    seen |= {f"{name}.grad": whole(param.grad).clone() for name, param in params()}
    return seen


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def look_at_engine(mode, block, stage):
    config = {
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
        mode: {"enabled": True, **({"loss_scale": SCALE} if mode == "fp16" else {})},
    }
    with initialize(fresh_model(block, HALVES[mode]), config) as engine:
        return look(engine.module, engine.backward, engine.module.named_parameters)


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
@on_ranks("ranks")
def test_every_block_is_computed_as_in_plain_pytorch(rank, world_size):
    """The same batch on each rank: the mean of their gradients is that of one."""
    found = {}  # the largest difference from plain PyTorch, in units of scale, by what was compared
    for mode, block in itertools.product(HALVES, (NormInFp32, DecayInFp32, GateIn16Bits)):
        model, scale = fresh_model(block, HALVES[mode]), SCALE if mode == "fp16" else 1.0
        expected = look(model, lambda loss, scale=scale: (loss * scale).backward(), model.named_parameters)
        for stage in (1, 2, 3) if mode == "bf16" else (3,):
            seen = look_at_engine(mode, block, stage)
            assert seen.keys() == expected.keys()
            for name, value in expected.items():
                assert seen[name].dtype is value.dtype, name
                scale = value.float().abs().max().item() or 1.0
                distance = (seen[name].float() - value.float()).abs().max().item() / scale
                found[mode, block.__name__, stage, name] = distance
    assert len(found) > (3 + 1) * 3 * 12
    assert {key: distance for key, distance in found.items() if distance > 1e-6} == {}


class Middle(nn.Module):
    """The norm is called in the middle."""

    def __init__(self, half):
        super().__init__()
        self.down, self.out, self.norm = (
            nn.Linear(WIDTH, WIDTH).to(half),
            nn.Linear(WIDTH, 8).to(half),
            nn.LayerNorm(WIDTH),
        )

    def forward(self, x):
        return self.out(self.norm(self.down(x)))


class Head(nn.Module):
    """The head is called last."""

    def __init__(self, half):
        super().__init__()
        self.down, self.head = nn.Linear(WIDTH, WIDTH).to(half), nn.Linear(WIDTH, 8)

    def forward(self, x):
        return self.head(self.down(x))


class Gate(nn.Module):
    """The fp32 gate multiplies what is 16-bit."""

    def __init__(self, half):
        super().__init__()
        self.down, self.gate = nn.Linear(WIDTH, WIDTH).to(half), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        hidden = self.down(x)
        return hidden * self.gate(hidden)


def by_hand(model, half, x):
    """What the model computes, with the casts written where plain PyTorch would raise."""
    hidden = model.down(x.to(half))
    if isinstance(model, Middle):
        return model.out(model.norm(hidden))
    return model.head(hidden.float()) if isinstance(model, Head) else hidden * model.gate(hidden.float())


def registered(make, half, order):
    """A model whose modules are registered in another order, with the same values."""
    torch.manual_seed(0)
    model = make(half)
    model._modules = dict(sorted(model._modules.items(), reverse=order == "backwards"))
    return model


@pytest.mark.parametrize("make", [Middle, Head, Gate])
@pytest.mark.parametrize("mode", HALVES)
def test_the_order_of_registration_says_nothing(alone, make, mode):
    half, x = HALVES[mode], torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    expected = by_hand(registered(make, half, "forwards"), half, x)
    for order in ("forwards", "backwards"):
        with initialize(registered(make, half, order), {mode: {"enabled": True}}) as engine:
            assert torch.equal(engine(x), expected), order


@pytest.mark.parametrize("mode", HALVES)
def test_a_head_that_the_section_names_gives_fp32_wherever_it_is_registered(alone, mode):
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    outputs = []
    for order, (make, name) in itertools.product(("forwards", "backwards"), ((Head, "head"), (Middle, "norm"))):
        keys = {mode: {"enabled": True}, "fp32_modules": [name]}
        with initialize(registered(make, torch.float32, order), keys) as engine:
            outputs.append(engine(x))
    head, middle, head_again, middle_again = outputs
    assert head.dtype is torch.float32
    assert middle.dtype is HALVES[mode]
    assert torch.equal(head, head_again)
    assert torch.equal(middle, middle_again)


def test_an_fp32_norm_gives_16_bits_on_every_device(monkeypatch):
    """On CUDA PyTorch has no kernel for it, so it computes in fp32; the meta device stands for CUDA here."""
    seen = []
    with torch.device("meta"):
        model = Middle(torch.bfloat16)
    cast_where_needed(model, PrecisionPlan.of(OffloadConfig.from_dict({"bf16": {"enabled": True}}), model))
    monkeypatch.setattr(F, "layer_norm", lambda hidden, *_: seen.append(hidden.dtype) or hidden)
    assert model.norm(torch.empty(2, WIDTH, dtype=torch.bfloat16, device="meta")).dtype is torch.bfloat16
    assert seen == [torch.float32]


class OwnLinear(nn.Linear):
    """Its forward takes any dtype: it casts as it wants."""

    def forward(self, x):
        return F.linear(x.float(), self.weight.float())


def test_a_forward_of_its_own_is_left_alone(alone):
    torch.manual_seed(0)
    model = nn.Sequential(OwnLinear(WIDTH, WIDTH, bias=False).bfloat16(), nn.LayerNorm(WIDTH))
    x = torch.randn(4, WIDTH)
    expected = model(x)
    with initialize(model, {"bf16": {"enabled": True}}) as engine:
        assert torch.equal(engine(x), expected)
