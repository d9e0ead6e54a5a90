"""The demo's model through `nvme_offload.initialize`, on one process: ZeRO-3, bf16, state on NVMe and in memory."""

import torch
from torch.distributed.fsdp import FSDPModule

from nvme_offload import initialize
from nvme_offload.perf.experiments.demo.training import ACCUMULATION, MICRO_BATCH
from nvme_offload.perf.measure.gpt import CONTEXT, ByteGPT, ModelSize, batches
from tests.support.sharded_model import assert_same, full_state

STEPS = 8
TEXT = b"The quick brown fox jumps over the lazy dog. " * 40


def train(offload):
    """Losses, global norms and the whole state after eight steps."""
    torch.manual_seed(0)
    model = ByteGPT(ModelSize(layers=2, width=64), CONTEXT, torch.bfloat16)
    config = {
        "zero_optimization": {"stage": 3, "sub_group_size": 2**20, "offload_optimizer": offload},
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.1}},
    }
    losses, norms = [], []
    stream = batches(TEXT, MICRO_BATCH, 0)
    with initialize(model, config) as engine:
        assert all(isinstance(block, FSDPModule) for block in model.blocks)
        for _ in range(STEPS):
            for _ in range(engine.gradient_accumulation_steps):
                loss = engine(*next(stream))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            norms.append(engine.get_global_grad_norm())
        assert engine.global_steps == STEPS
        return losses, norms, full_state(model, engine.optimizer), engine.optimizer.stats()


def test_the_demo_model_trains_through_initialize(alone, tmp_path):
    losses, norms, state, stats = train({"device": "nvme", "nvme_path": str(tmp_path), "staging_budget": "32MiB"})
    in_memory = train({"device": "cpu"})
    assert losses[-1] < losses[0] - 1
    assert (losses, norms) == in_memory[:2]
    assert_same(state, in_memory[2])
    assert stats.bytes_read > 0
    assert stats.bytes_written > 0
    assert in_memory[3].bytes_written == 0
    assert not list(tmp_path.iterdir())
