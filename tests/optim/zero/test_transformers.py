"""A small Llama of Hugging Face's through `initialize`, and what accelerate does with an optimizer's state."""

from functools import partial

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from nvme_offload import OffloadAdamW, initialize
from tests.support import build, small_llama
from tests.support.ranks import on_ranks
from tests.support.sharded_model import assert_same

BATCH = 4
LR = 1e-2
BF16 = {"bf16": {"enabled": True}}

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")


llama = partial(
    small_llama.llama, num_hidden_layers=3, num_key_value_heads=2, tie_word_embeddings=True, use_cache=False
)


def texts(number):
    return torch.stack([row["input_ids"] for row in small_llama.rows(number)])


section = partial(build.section, staging_budget="8MiB")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@on_ranks("ranks")
def test_a_llama_is_sharded_by_its_layers_and_saves_what_it_holds(rank, world_size, tmp_path):
    """By `save_pretrained`, as docs/hugging_face.md has it, and back. That it trains as it should: clients/."""
    model, batch, mlp_calls = llama(), texts(BATCH), []
    model.gradient_checkpointing_enable()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: mlp_calls.append(torch.is_grad_enabled()))
    with initialize(model, section(**BF16, adamw={"lr": LR})) as engine:
        engine.train()
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
        assert [type(part).__name__ for part in model.modules() if isinstance(part, FSDPModule)] == [
            "FSDPLlamaForCausalLM",
            *["FSDPLlamaDecoderLayer"] * 3,
        ]
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert len(mlp_calls) == 2, "activation checkpointing runs each layer's forward once more"
        assert {name: buffer.dtype for name, buffer in model.named_buffers()} == dict.fromkeys(buffers, torch.float32)
        assert_same(dict(model.named_buffers()), buffers)
        assert "model.rotary_emb.inv_freq" in buffers
        state = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
        if rank == 0:
            model.save_pretrained(tmp_path, state_dict=dict(state))
            assert_same(LlamaForCausalLM.from_pretrained(tmp_path).state_dict(), state)
            assert not torch.equal(state["lm_head.weight"], llama().lm_head.weight)


class Watch(TrainerCallback):
    """Bytes that the optimizer had written when training began."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def on_train_begin(self, args, state, control, **unused):
        self.written = self.optimizer.stats().bytes_written


@pytest.mark.parametrize("placement", [True, False])
def test_accelerate_passes_over_the_state_unless_told_otherwise(placement, tmp_path):
    model = llama()
    with OffloadAdamW(model.parameters(), lr=LR, offload=section(tmp_path)) as optimizer:
        watch = Watch(optimizer)
        how = {"max_steps": 2, "save_strategy": "no", "use_cpu": True, "report_to": []}
        args, given = TrainingArguments(tmp_path / "out", **how), {"train_dataset": small_llama.rows(8)}
        trainer = Trainer(model, args, **given, optimizers=(optimizer, None), callbacks=[watch])
        trainer.accelerator.device_placement = placement
        trainer.train()
        assert (watch.written > 0) is placement
        assert optimizer.stats().steps == 2
