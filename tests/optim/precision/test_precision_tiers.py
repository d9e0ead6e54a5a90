"""Every precision on every tier, on one and two ranks, with and without accumulation: the bits of a run in memory."""

import pytest
import torch
from torch import nn

from nvme_offload import initialize
from scripts.precision_tables import MODES, Combination
from tests.support.precision import HYPERPARAMETERS, SCALE, WIDTH, batch, fresh_model, loss_of, reference_of
from tests.support.ranks import run_ranks
from tests.support.sharded_model import assert_same, full_state
from tests.support.tiers import section as tiers_section

PRECISIONS = (*MODES, "by hand")
TIERS = {  # what is on NVMe
    "state": {"state"},
    "parameters": {"state", "param"},
    "gradients": {"state", "grads"},
    "all": {"state", "param", "grads"},
}
NEXT = dict(zip(TIERS, [*list(TIERS)[1:], "memory"], strict=True))  # where a run on a tier goes on after its checkpoint
ACCUMULATIONS = (1, 4)
RANKS = (1, 2)
STEPS = 2  # half of them before the checkpoint
CASES = [
    (precision, list(TIERS)[(i + i // 2) % 4], RANKS[(i // 2) % 2], ACCUMULATIONS[(i // 4) % 2])
    for i, precision in enumerate(PRECISIONS)
]
"""Each precision, on some tier; all tiers, and both of the others. More: durable/test_drawn_runs.py."""


class ByHand(nn.Module):
    """A block that its author built in two dtypes, one module even of both, and casts between them itself."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 9, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(9)
        self.down = nn.Linear(9, WIDTH, dtype=torch.bfloat16)
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH).bfloat16())
        self.gain = nn.Parameter(torch.randn(WIDTH))

    def forward(self, hidden):
        inner = nn.functional.gelu(self.norm(self.up(hidden.bfloat16()).float())).bfloat16()
        return hidden + self.down(inner).float() + (hidden.bfloat16() @ self.mix).float() * self.gain


def model_of(precision):
    if precision != "by hand":
        return fresh_model()
    torch.manual_seed(0)
    return nn.Sequential(ByHand(), ByHand())


def section(precision, tier, accumulation, path):
    places = dict.fromkeys(TIERS.get(tier, ()), "nvme")
    keys = MODES["bf16" if precision == "by hand" else precision]
    config = tiers_section(path, **places, accumulation=accumulation) | {"gradient_clipping": 0.0, "bf16": {}} | keys
    config["optimizer"] = {"type": "AdamW", "params": HYPERPARAMETERS}
    return config | {"fp16": {"loss_scale": SCALE, **keys.get("fp16", {})}}


def train(rank, engine, steps):
    for step in steps:
        for micro in range(engine.gradient_accumulation_steps):
            inputs, target = batch(step, micro, rank)
            engine.backward(loss_of(engine(inputs), target))
            engine.step()


def train_cases(rank, world_size, cases, path):
    """The end of a run in memory by precision and accumulation. Each run on tiers, resumed on others, has its bits."""
    ends = {}
    for precision, tier, _, accumulation in cases:
        if (precision, accumulation) not in ends:
            with initialize(model_of(precision), section(precision, "memory", accumulation, path)) as engine:
                train(rank, engine, range(STEPS))
                ends[precision, accumulation] = full_state(engine.module, engine.optimizer)
        saved = path / f"{precision} {tier} {world_size} {accumulation}"
        with initialize(model_of(precision), section(precision, tier, accumulation, path)) as engine:
            train(rank, engine, range(STEPS // 2))
            engine.save_checkpoint(saved)
        with initialize(model_of(precision), section(precision, NEXT[tier], accumulation, path)) as engine:
            engine.load_checkpoint(saved)
            train(rank, engine, range(STEPS // 2, STEPS))
            assert_same(full_state(engine.module, engine.optimizer), ends[precision, accumulation])
    return ends


def check(path):
    for ranks in RANKS:
        chosen = [case for case in CASES if case[2] == ranks]
        ends = run_ranks(train_cases, ranks, chosen, path)[0]
        for (precision, accumulation), end in ends.items():
            if precision == "by hand":  # its casts have tests of their own
                continue
            combination, shape = Combination(precision, None, None), {"steps": STEPS, "micro_batches": accumulation}
            reference = reference_of(combination, waits=False, world_size=ranks, exact=True, **shape)
            for name, value in reference.train()[-1].items():
                assert torch.equal(end[name], value), (precision, ranks, accumulation, name)


pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_value_has_the_bits_of_plain_pytorch_and_of_a_run_in_memory(tmp_path):
    assert [{case[i] for case in CASES} for i in range(1, 4)] == [{*TIERS}, {*RANKS}, {*ACCUMULATIONS}]
    check(tmp_path)
