"""Blocks that `torch.compile` has compiled: where anything is kept changes no bit of them, and recompiles nothing."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from nvme_offload import get_full_optimizer_state, get_full_param, initialize
from tests.support import tiers
from tests.support.layered_model import Part, batch, loss_of
from tests.support.training import assert_same_bits

STEPS = 3
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "loss_scale": 128.0}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
SCHEDULE = {"overlap_step": "forward", "gradient_clipping": 0.5}
IN_BACKWARD = {"overlap_step": "backward", "skip_non_finite": False}

pytestmark = [
    pytest.mark.usefixtures("alone"),
    pytest.mark.filterwarnings("ignore:overlap_step = :UserWarning"),  # where parameters have a tier
]


def section(drive, moved, more):
    """State on the drive, or nothing; ``moved``: parameters and gradients, too."""
    away = {"param": "nvme", "grads": "nvme"} if moved else {}
    return (
        tiers.section(drive, state="nvme" if drive else "cpu", **away) | {"bf16": {}, "gradient_clipping": 0.0} | more
    )


def trained(config, backend=None, when="before"):
    """Losses, what was trained; graphs that were compiled until the end of each step; reasons of graph breaks."""
    torch.compiler.reset()
    counters.clear()
    counter, graphs, losses = CompileCounterWithBackend(backend or "eager"), [], []
    model = Part()

    def compile_blocks(blocks):
        for block in blocks.values() if backend else ():
            block.compile(backend=counter)

    if when == "before":
        compile_blocks(model.blocks)
    with initialize(model, config) as engine:
        if when == "after":
            compile_blocks(engine.module.blocks)
        for step in range(STEPS):
            for micro in range(2):
                tokens, targets = batch(step, micro)
                loss = loss_of(engine(tokens), targets)
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach())
            with torch.no_grad():
                losses.append(loss_of(engine(tokens), targets))
            graphs.append(counter.frame_count)
        values = [
            value
            for param in engine.optimizer.param_groups[0]["params"]
            for value in (get_full_param(param), get_full_optimizer_state(param, "exp_avg_sq"))
        ]
    return [torch.stack(losses), *values], graphs, list(counters["graph_break"])


def assert_compiled_once(graphs):
    assert graphs == [2] * STEPS, "one that autograd goes through and one without, in the first step"


def test_compiled_blocks_have_the_bits_of_others(tmp_path):
    expected, _, _ = trained(section(None, False, BF16 | SCHEDULE))
    for when, moved in (("before", True), ("after", False)):
        found, graphs, breaks = trained(section(tmp_path, moved, BF16 | SCHEDULE), "aot_eager", when)
        assert_same_bits(found, expected)
        assert_compiled_once(graphs)
        assert breaks == []


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "more", [BF16 | SCHEDULE, FP16 | SCHEDULE, IN_BACKWARD], ids=["bf16", "fp16", "fp32, backward"]
)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_where_anything_is_kept_changes_nothing_of_what_is_compiled(tmp_path, backend, more, when):
    expected, graphs, _ = trained(section(None, False, more), backend, when)
    assert_compiled_once(graphs)
    for moved in (False, True):
        found, graphs, breaks = trained(section(tmp_path, moved, more), backend, when)
        assert_same_bits(found, expected)
        assert_compiled_once(graphs)
        assert breaks == []


@pytest.mark.slow
@pytest.mark.parametrize("more", [AUTOCAST, BF16 | {"fp32_modules": ["LayerNorm"]}], ids=["autocast", "fp32 modules"])
def test_in_a_block_of_two_dtypes_fsdp2_breaks_the_graph_where_it_gathers_the_second(tmp_path, more):
    expected, _, _ = trained(section(None, False, more | SCHEDULE))
    for moved in (False, True):
        found, graphs, breaks = trained(section(tmp_path, moved, more | SCHEDULE), "aot_eager")
        assert_same_bits(found, expected)
        assert len(set(graphs)) == 1
        assert graphs[0] > 0
        [why] = breaks
        assert "torch/_dynamo/decorators.py" in why, "the hook of FSDP2 before a forward is not traced"
