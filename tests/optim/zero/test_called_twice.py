"""Blocks that are called twice before one backward, which computes both calls again: both gradients count."""

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from nvme_offload import OffloadSGD, initialize, split_parameters
from tests.optim.zero import test_block_by_block as by_block
from tests.support.pairs import each_value_once, pairwise_cases
from tests.support.ranks import be_alone, run_ranks
from tests.support.sharded_model import assert_same, full_state
from tests.support.tiers import Model

CALLS = ["in one forward", "in two forwards"]


def model_of(checkpointing, calls):
    torch.manual_seed(0)
    model = Model(num_layers=3, checkpointing=checkpointing)
    model.uses *= 2 if calls == CALLS[0] else 1
    return model


def loss_of(model, tokens, calls):
    second = by_block.loss_of(model, tokens.flip(0)) if calls == CALLS[1] else 0.0
    return by_block.loss_of(model, tokens) + second


def by_engine(rank, path, checkpointing, *, calls, **more):
    config = by_block.config_of(path, "horizontal", 1, gradient_clipping=0.0, skip_non_finite=False, **more)
    if more["precision"] == "fp16":
        del config["skip_non_finite"]
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}  # which any other gradient moves by another way
    with initialize(model_of(checkpointing, calls), config) as engine:
        for step in range(2):
            by_block.step_of(engine, step, rank, lambda *given: loss_of(*given, calls))
        return full_state(engine.module, engine.optimizer)


def check(rank, world_size, path, case):
    plain, *others = (by_engine(rank, path, checkpointing, **case) for checkpointing in (False, True, "reentrant"))
    for state in others:
        if world_size == 1:
            assert_same(state, plain)
        for name, value in state.items():  # ranks add up what one of them has of both calls, or of each
            torch.testing.assert_close(value, plain[name], rtol=0.0, atol=1e-6)


CASES = {
    "calls": CALLS,
    "stage": [1, 2, 3],
    "param": ["none", "nvme"],
    "precision": ["bf16", "fp32", "fp16", "mixed"],
    "overlap_step": ["off", "forward", "backward"],
    "world_size": [1, 2],
}


def in_words(case):
    return "-".join(map(str, case.values()))


def is_possible(case):
    exact = case["world_size"] == 1 or case["precision"] == "fp32"
    return (
        exact
        and (case["stage"], case["param"]) != (1, "nvme")
        and (case["precision"], case["overlap_step"]) != ("fp16", "backward")
    )


PAIRWISE = pairwise_cases(CASES, is_possible)


@pytest.mark.parametrize(
    "case", [*PAIRWISE[:4], *(pytest.param(case, marks=pytest.mark.slow) for case in PAIRWISE[4:])], ids=in_words
)
def test_each_call_counts_in_an_engine(tmp_path, case):
    run_ranks(check, case["world_size"], tmp_path, {key: value for key, value in case.items() if key != "world_size"})


@pytest.mark.parametrize(("shards", "calls"), each_value_once([True, False], CALLS))
def test_each_call_counts_in_a_loop(alone, tmp_path, shards, calls):
    """Over modules that the user has sharded, and over plain ones, where that is torch's own doing."""
    ends = []
    for checkpointing in (False, "reentrant"):
        model = model_of(checkpointing, calls)
        if shards:
            be_alone()
            for part in (*model.layers, model):
                fully_shard(part, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
            split_parameters(model)
        with OffloadSGD(model.parameters(), lr=0.1, offload=str(tmp_path)) as optimizer:
            for tokens in by_block.micro_batches(0, 2):
                loss_of(model, tokens, calls).backward()
                optimizer.step()
                optimizer.zero_grad()
            ends.append(full_state(model, optimizer))
    assert_same(*ends)
