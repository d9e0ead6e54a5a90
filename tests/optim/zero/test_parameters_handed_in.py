"""Hooks, attributes and data of parameters go on with the shards in their place, or are refused."""

import copy
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from nvme_offload import OffloadSGD, StateError, deepspeed, get_full_param, initialize, set_full_param
from tests.support.pairs import pairwise_cases
from tests.support.ranks import be_alone, run_ranks
from tests.support.sharded_model import GOES_ON
from tests.support.tiers import VOCABULARY, Model, loss_of, section

MASK = torch.zeros(VOCABULARY, 1)
MASK[5:9] = 1.0


def masked(calls, grad):
    calls.append(grad.shape)
    return grad * MASK.to(grad.dtype)


def model_of():
    torch.manual_seed(0)
    return Model(num_layers=2)


@contextmanager
def engine_of(model, path, *, door=False, order="horizontal", **tiers):
    config = (
        section(path, accumulation=1, **tiers)
        | {"micro_batch_order": order}
        | {"gradient_clipping": 0.0, "bf16": {"enabled": False}}
    )
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    engine = deepspeed.initialize(model=model, config=config)[0] if door else initialize(model, config)
    yield engine
    (engine.destroy if door else engine.close)()


def train(engine, rank, step, order="horizontal"):
    if order == "vertical":
        engine.accumulate(lambda rank: loss_of(engine, step, rank=rank), [rank])
    else:
        engine.backward(loss_of(engine, step, rank=rank))
    engine.step()


def check_hooks(rank, world_size, path, case):
    """As the hooks of a plain model, whose loss is the mean over all ranks; without them after two steps."""
    when, calls = case.pop("when"), []
    plain, model = model_of(), model_of()
    of_plain = plain.embedding.weight.register_hook(partial(masked, []))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    handle = model.embedding.weight.register_hook(partial(masked, calls)) if when == "before" else None
    with engine_of(model, path, **case) as engine:
        handle = handle or engine.module.embedding.weight.register_hook(partial(masked, calls))
        for step in range(3):
            if step == 2:
                handle.remove()
                of_plain.remove()
            optimizer.zero_grad()
            (sum(loss_of(plain, step, rank=each) for each in range(world_size)) / world_size).backward()
            optimizer.step()
            train(engine, rank, step, case.get("order"))
            for name, value in plain.named_parameters():
                found = get_full_param(engine.module.get_parameter(name))
                torch.testing.assert_close(found, value.detach(), rtol=0.0, atol=1e-6)
    assert calls == [(VOCABULARY, 33)] * (4 if case.get("order") == "vertical" else 2)  # of head and embedding


CASES = {
    "when": ["before", "after"],
    "order": ["horizontal", "vertical"],
    "door": [True, False],
    "stage": [1, 2, 3],
    "param": ["none", "nvme"],
    "grads": ["none", "nvme"],
    "world_size": [1, 2],
}


def is_possible(case):
    return (case["stage"] == 3 or {case["param"], case["grads"]} == {"none"}) and (case["door"], case["order"]) != (
        True,
        "vertical",
    )


@pytest.mark.parametrize(
    "case",
    pairwise_cases(CASES, is_possible),
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_a_hook_gets_the_whole_gradient(tmp_path, case):
    run_ranks(check_hooks, case["world_size"], tmp_path, {key: case[key] for key in case.keys() - {"world_size"}})


@GOES_ON
@pytest.mark.parametrize(("stage", "dtype"), [*((stage, torch.float32) for stage in range(4)), (3, torch.bfloat16)])
def test_attributes_go_along_and_the_parameter_that_had_them_trains_nothing(alone, tmp_path, stage, dtype):
    model = model_of().to(dtype)
    before = dict(model.named_parameters())
    for name, param in before.items():
        param.is_called = name
    with engine_of(model, tmp_path, stage=stage) as engine:
        found = dict(engine.module.named_parameters())
        assert {name: param.is_called for name, param in found.items()} == dict(zip(before, before, strict=True))
        assert copy.deepcopy(found["head.weight"]).is_called == "head.weight" if "head.weight" in found else True
        penalty = sum(param.abs().sum() for param in before.values())
        with pytest.raises(StateError, match=r"as it was before initialize: .*get_parameter\('"):
            engine.backward(loss_of(engine, 0) + penalty)
        train(engine, 0, 0)


def test_a_hook_behind_accumulation_is_refused_by_the_name_of_its_parameter(alone, tmp_path):
    model = model_of()
    model.layers[1].up.bias.register_post_accumulate_grad_hook(print)
    with (
        pytest.raises(ValueError, match=r"'layers\.1\.up\.bias' has a hook behind .* register_hook"),
        engine_of(model, tmp_path),
    ):
        pass


@pytest.mark.parametrize("param", ["none", "nvme"])
def test_data_is_not_assigned_to_a_shard_unnoticed(alone, tmp_path, param):
    with engine_of(model_of(), tmp_path, param=param) as engine:
        weight = engine.module.embedding.weight
        wanted = torch.full(weight.shape, 3.0)
        with pytest.raises(ValueError, match="set_full_param"):
            weight.data = wanted
        set_full_param(weight, wanted)
        assert torch.equal(get_full_param(weight), wanted)
        assert weight.data.shape == wanted.shape
        weight.data += 1  # changes it, and then assigns what it is
        assert torch.equal(get_full_param(weight), wanted + 1)
        copied = weight.detach().clone()
        copied.data = torch.zeros_like(copied)  # of any other tensor it is torch's affair


@pytest.mark.parametrize("reshards", [True, False])
def test_an_optimizer_that_is_made_after_a_forward_trains_the_shards(alone, tmp_path, reshards):
    be_alone()
    ends = []
    for is_late in (False, True):
        model = model_of()
        for part in (*model.layers, model):
            fully_shard(part, reshard_after_forward=reshards)
        if is_late:
            with torch.no_grad():
                loss_of(model, 0)
        with OffloadSGD(model.parameters(), lr=0.1, offload=str(tmp_path)) as optimizer:
            loss_of(model, 1).backward()
            optimizer.step()
            ends.append([value.full_tensor().clone() for value in model.state_dict().values()])
    assert all(map(torch.equal, *ends))
