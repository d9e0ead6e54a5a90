"""Every schedule, wherever the state is and whatever the precision: the bits of a run in memory in the plain order."""

import zlib

import pytest
import torch

from tests.support.pairs import pairwise_cases
from tests.support.ranks import run_ranks
from tests.support.sharded_model import assert_same, full_state
from tests.support.tiers import PRECISIONS, loss_of, make, section
from tests.support.training import noted

LAYERS = 4
STEPS = 20
PLACES = {  # where the state is, and what else is on NVMe
    "host": {"state": "cpu"},
    "nvme": {"state": "nvme"},
    "some in memory": {"state": "nvme"},
    "with parameters": {"state": "nvme", "param": "nvme"},
    "with gradients": {"state": "nvme", "grads": "nvme"},
    "all": {"state": "nvme", "param": "nvme", "grads": "nvme"},
}
BUDGETS = {"some in memory": "5MiB"}
COLUMNS = {
    "schedule": [None, "forward", "backward", "speculate"],
    "place": list(PLACES),
    "precision": list(PRECISIONS),
    "stage": [1, 2, 3],
    "accumulation": [1, 2],
    "checkpointing": [False, True],
    "clip": [0.0, 0.05, 1e9],
    "overflows": [False, True],
    "uses": [None, ((0, 1, 2, 3), (2, 0), (3, 3, 1), ())],
    "tied": [False, True],
}


def allowed(case):
    """What the section refuses, or FSDP2 cannot do, is in tests of its own."""
    exact = case["clip"] == 0.0 and not case["overflows"] and case["precision"] != "fp16"
    on_tiers = "with" in case["place"] or case["place"] == "all"
    has_way = case["schedule"] != "speculate" or case["place"] != "host"
    return (case["schedule"] != "backward" or exact) and has_way and (not on_tiers or case["stage"] == 3)


CASES = pairwise_cases(COLUMNS, allowed)
FEW = CASES[:9]  # in `make test`: they have every value of every column between them


def config_of(path, case, schedule, place):
    config = section(path, **PLACES[place], accumulation=case["accumulation"], stage=case["stage"])
    exact = {"skip_non_finite": False} if case["schedule"] == "backward" else {}
    config["zero_optimization"]["offload_optimizer"]["durable"] = (
        schedule == "speculate" and f"case-{zlib.crc32(str(case).encode())}"
    )
    return {
        **config,
        **PRECISIONS[case["precision"]],
        **exact,
        "gradient_clipping": case["clip"],
        "overlap_step": schedule,
        "host_budget": BUDGETS.get(place),
    }


def trained(path, case, schedule, place, steps, rank=0):
    """Losses, norms, skipped steps and the whole state; and the statistics."""
    seen = []
    shape = {"num_layers": LAYERS, "width": 129, "checkpointing": case["checkpointing"], "tied": case["tied"]}
    with make(config_of(path, case, schedule, place), **shape) as engine:
        for step in range(steps):
            engine.module.uses = list(case["uses"][step % len(case["uses"])] if case["uses"] else range(LAYERS))
            for micro in range(engine.gradient_accumulation_steps):
                loss = loss_of(engine, step, micro, rank)
                engine.backward(loss * torch.inf if case["overflows"] and step % 5 == 2 else loss)
                engine.step()
                seen.append(loss.item())
            seen += [engine.get_global_grad_norm(), engine.optimizer.num_skipped_steps]
        stats = engine.optimizer.stats()
        return {**full_state(engine.module, engine.optimizer), "seen": torch.tensor(seen).nan_to_num(-1.0)}, stats


def check(rank, world_size, path, cases, steps):
    """Each case against the plain order with everything in memory; returns how many updates each of them hid."""
    hidden = []
    for case in cases:
        with noted(str(case)):
            reference, _ = trained(path, case, "off", "host", steps, rank)
            ours, stats = trained(path, case, case["schedule"], case["place"], steps, rank)
            assert_same(ours, reference)
        hidden.append(stats.updates_behind + stats.updates_in_backward)
    return hidden


def assert_hidden(cases, hidden):
    for case, updates in zip(cases, hidden, strict=True):
        assert (updates > 0) == (case["place"] != "host" or case["schedule"] is not None), case


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", FEW, ids=lambda case: f"{case['schedule']}-{case['place']}-{case['precision']}")
def test_a_few_cases(alone, tmp_path, case):
    assert_hidden([case], check(0, 1, tmp_path, [case], 4))  # the third overflows, where one does


def test_the_few_have_every_value():
    assert all({case[name] for case in FEW} == set(values) for name, values in COLUMNS.items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())))
def test_every_pair_of_values(alone, tmp_path, case):
    assert_hidden([case], check(0, 1, tmp_path, [case], STEPS))


@pytest.mark.slow  # tiers/test_block_tiers.py hides steps of two ranks with everything on NVMe
@pytest.mark.parametrize("first", range(0, len(CASES), 5))
def test_every_pair_of_values_on_two_ranks(tmp_path, first):
    cases = CASES[first : first + 5]
    for hidden in run_ranks(check, 2, tmp_path, cases, STEPS):
        assert_hidden(cases, hidden)
