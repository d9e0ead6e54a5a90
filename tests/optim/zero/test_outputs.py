"""A forward may return its tensors in any object: FSDP2 below the engine finds them, and a step that has no gradient is
an error on all ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.modeling_outputs import CausalLMOutput

from nvme_offload import StateError, get_full_grad, get_full_param, initialize
from tests.support import tiers
from tests.support.ranks import on_ranks
from tests.support.sharded_model import CAN_GO_ON, GOES_ON
from tests.support.small_engine import BF16, section


class Plain:
    def __init__(self, logits):
        self.logits = logits


class Slots:
    __slots__ = ("__hidden", "unset")

    def __init__(self, logits):
        self.__hidden = logits

    @property
    def logits(self):
        return self.__hidden


@dataclass
class Data:
    logits: torch.Tensor


class Lazy(Mapping):
    __slots__ = ("_make",)

    def __init__(self, logits):
        self._make = lambda: {"logits": logits}

    def __getitem__(self, key):
        return self._make()[key]

    def __iter__(self):
        return iter(self._make())

    def __len__(self):
        return len(self._make())


def nested(logits):
    outer = SimpleNamespace(inner=[{"deep": (Plain(Slots({logits})),)}], kind=Plain, module=nn.Linear(1, 1), count=3)
    outer.itself = outer
    return outer


KINDS = {
    "dict": lambda logits: {"logits": logits},
    "namespace": lambda logits: SimpleNamespace(logits=logits),
    "plain": Plain,
    "slots": Slots,
    "dataclass": Data,
    "mapping": Lazy,
    "nested": nested,
    "transformers": lambda logits: CausalLMOutput(logits=logits),
}


def logits_of(output):
    """The one tensor of an output of any kind."""
    if isinstance(output, Mapping):
        return output["logits"]
    return next(iter(output.inner[0]["deep"][0].logits.logits)) if hasattr(output, "inner") else output.logits


class Block(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.linear, self.wrap = nn.Linear(8, 8), wrap

    def forward(self, hidden):
        return self.wrap(torch.tanh(self.linear(hidden)))


class Net(nn.Module):
    def __init__(self, wrap, num_blocks=2):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.wrap = nn.Linear(8, 8), nn.Linear(8, 4), wrap
        self.blocks = nn.ModuleList(Block(wrap) for _ in range(num_blocks))

    def forward(self, hidden):
        hidden = self.embedding(hidden)
        for block in self.blocks:
            hidden = hidden + logits_of(block(hidden))
        return self.wrap(self.head(hidden))


def trained(rank, config, wrap):
    """Norms and weights after two steps of two micro-batches."""
    norms, generator = [], torch.Generator().manual_seed(rank)
    with initialize(Net(wrap), config, blocks=["Block"]) as engine:
        for micro in range(4):
            engine.backward(logits_of(engine(torch.randn(4, 8, generator=generator))).square().mean())
            engine.step()
            norms += [engine.get_global_grad_norm()] * (micro % 2)
        return norms, {name: get_full_param(param).clone() for name, param in engine.named_parameters()}


def same_bits(rank, config, kinds):
    norms, weights = trained(rank, config, KINDS["dict"])
    start = dict(Net(KINDS["dict"]).named_parameters())
    assert not any(torch.equal(value, start[name]) for name, value in weights.items())
    for kind in kinds:
        other_norms, others = trained(rank, config, KINDS[kind])
        assert other_norms == norms, (kind, config)
        assert all(torch.equal(others[name], value) for name, value in weights.items()), (kind, config)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
@on_ranks("world_size")
def test_any_object_trains_with_the_bits_of_a_dict(rank, world_size, tmp_path):
    """Several ranks try each at stage 3, the deepest at every stage; one tries all on NVMe, and updates in backward."""
    if world_size > 1:
        for stage in range(4):
            same_bits(rank, section(stage), KINDS.keys() - {"dict"} if stage == 3 else ["nested"])
        return
    same_bits(rank, section(3), ["nested"])
    same_bits(rank, tiers.section(tmp_path, **tiers.EVERYTHING, accumulation=2), ["namespace"])
    in_backward = {"overlap_step": "backward", "skip_non_finite": False, **BF16}
    same_bits(rank, {**section(3, tmp_path, **in_backward), "gradient_clipping": 0.0}, ["namespace"])


@pytest.mark.usefixtures("alone")
def test_what_cannot_be_looked_into_is_named():
    with initialize(Net(lambda logits: (part for part in (logits,)), 0), section()) as engine:
        with pytest.raises(TypeError, match=r"a forward returned a generator.*return a list"):
            engine(torch.randn(2, 8))
        with torch.no_grad():
            assert next(engine(torch.randn(2, 8))).shape == (2, 4)


def hides_its_tensors(rank, stage):
    """First its tensors are in a closure, then not: what was refused has changed nothing."""
    hide = lambda logits: lambda: logits  # noqa: E731
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    with initialize(Net(hide, 0), section(stage, scheduler={"params": {"warmup_num_steps": 4}})) as engine:
        start, rate = {name: get_full_param(p).clone() for name, p in engine.named_parameters()}, None
        for _ in range(2):
            rate = rate or engine.lr_scheduler.get_last_lr()
            engine.backward(engine(x)().square().mean())
            engine.step()
            engine.backward(engine(x)().square().mean())
            with pytest.raises(StateError, match=r"expected a gradient of some parameter.*depends on no trainable"):
                engine.step()
            assert (engine.global_steps, engine.micro_steps) == (0, 0)
            assert engine.lr_scheduler.get_last_lr() == rate
        assert all(torch.equal(get_full_param(p), start[name]) for name, p in engine.named_parameters())
        engine.module.wrap = KINDS["plain"]
        for _ in range(2):
            engine.backward(engine(x).logits.square().mean())
            engine.step()
        assert engine.global_steps == 1
        weights = {name: get_full_param(p).clone() for name, p in engine.named_parameters()}
    with initialize(Net(KINDS["dict"], 0), section(stage, scheduler={"params": {"warmup_num_steps": 4}})) as engine:
        for _ in range(2):
            engine.backward(engine(x)["logits"].square().mean())
            engine.step()
        assert all(torch.equal(get_full_param(p), weights[name]) for name, p in engine.named_parameters())


@GOES_ON
@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks("world_size")
def test_a_step_without_any_gradient_is_an_error_on_all_ranks(rank, world_size):
    """At stage 3 several ranks have freed, before backward, what is gathered."""
    for stage in range(4 - (world_size > 1)):
        hides_its_tensors(rank, stage)
    hide = lambda logits: lambda: logits  # noqa: E731
    with initialize(
        Net(hide, 0), section(3, bf16=None, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    ) as engine:
        with pytest.raises(TypeError, match=r"Net returned a function, in which no tensor was .* dataclass"):
            engine.backward(engine(torch.ones(4, 8))().square().mean())
        engine.module.wrap = KINDS["plain"]
        for _ in range(2):
            engine.backward(engine(torch.ones(4, 8)).logits.square().mean())
            engine.step()
        assert engine.global_steps == 1


class Experts(nn.Module):
    """A loss of what some of them give: on rank 0 of none in the second micro-batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, rank, micro):
        hidden = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        outputs = [expert(hidden) for expert in self.experts]
        return sum((outputs[busy] for busy in [[[0, 1], []], [[1, 2], [3]]][rank][micro]), hidden).square().mean()


@on_ranks(2)
def test_a_rank_has_zeros_of_an_expert_that_is_idle_there_and_none_where_it_is_idle_on_all(rank, world_size):
    """One group has what plain models have, shared out. In a group each, they come in another order, and then alike."""
    plain = [Experts() for _ in range(world_size)]
    for of, model in enumerate(plain):
        for micro in range(2):
            (model(of, micro) / 2).backward()
    of_ranks = [[param.grad for param in model.parameters()] for model in plain]
    for stage in range(4):
        with initialize(Experts(), section(stage), blocks=["Experts"]) as engine:
            engine.backward(engine(rank, 0))
            engine.step()
            engine.backward(engine(rank, 1))
            for param, *grads in zip(engine.parameters(), *of_ranks, strict=True):
                found = [grad for grad in grads if grad is not None]
                assert torch.equal(get_full_grad(param), sum(found) / 2) if found else param.grad is None, stage
    said = pytest.raises(StateError, match=r"same blocks on all ranks.*'experts.[12]' on one, of 'experts.[12]'")
    with initialize(Experts(), section(), blocks=["Linear"]) as engine:
        with said:
            engine.backward(engine(rank, 0))
        if not CAN_GO_ON:
            return
        engine.backward(engine(1, 0))
        engine.step()
        engine.backward(engine(1, 1))
        for param, grad in zip(engine.parameters(), of_ranks[1], strict=True):
            assert torch.equal(get_full_grad(param), grad) if grad is not None else param.grad is None


@on_ranks(2)
def test_one_stage_of_a_pipeline_may_be_without_gradients(rank, world_size):
    """Each rank is a stage; a step needs a gradient on one of them."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp_shard"))
    with initialize(Experts(), section(1, gradient_accumulation_steps=1), mesh=mesh) as engine:
        for step, idle in enumerate([False, rank == 0, rank == 1]):
            engine.module(0, int(idle)).backward()  # which is its loss
            engine.step()
            assert engine.global_steps == step + 1
        engine.module(0, 1).backward()
        with pytest.raises(StateError, match="a gradient of some parameter"):
            engine.step()
        engine.module(0, 0).backward()
        engine.step()
        assert engine.global_steps == 4
