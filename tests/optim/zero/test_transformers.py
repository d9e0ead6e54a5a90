"""Hugging Face's models and Trainer: a small Llama through `initialize`, and `Trainer` over our optimizer."""

from functools import partial

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from nvme_offload import OffloadAdamW, initialize
from tests.support import build, small_llama
from tests.support.ranks import on_ranks
from tests.support.sharded_model import assert_same, full_state

TRAINER_STEPS, BATCH = 20, 4
LR = 1e-2
CLIP = 1.0
BF16 = {"bf16": {"enabled": True}}

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")


llama = partial(
    small_llama.llama, num_hidden_layers=3, num_key_value_heads=2, tie_word_embeddings=True, use_cache=False
)


def texts(number):
    return torch.stack([row["input_ids"] for row in small_llama.rows(number)])


section = partial(build.section, staging_budget="8MiB")


# Through initialize


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


# Through Trainer


DTYPES = pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, id="fp32", marks=pytest.mark.slow), pytest.param(torch.bfloat16, id="bf16")]
)


class HandClipping(TrainerCallback):
    """Clips where Trainer would have, with torch's own function."""

    def on_pre_optimizer_step(self, args, state, control, *, model, **unused):
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)


def trainer_of(model, optimizer, out, scheduler=None, callbacks=(), **arguments):
    settings = {
        "output_dir": str(out),
        "max_steps": TRAINER_STEPS,
        "per_device_train_batch_size": BATCH,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        **arguments,
    }
    return Trainer(
        model=model,
        args=TrainingArguments(**settings),
        train_dataset=small_llama.rows(2 * BATCH),
        optimizers=(optimizer, scheduler),
        callbacks=list(callbacks),
    )


def logged(trainer, key):
    return [float(entry[key]) for entry in trainer.state.log_history if key in entry]


def train(tmp_path, *, dtype=torch.float32, path=None, **arguments):
    """Losses, norms and parameters of a run of Trainer."""
    model = llama(dtype)
    with OffloadAdamW(model.parameters(), lr=LR, offload=section(path)) as made:
        trainer = trainer_of(model, made, tmp_path / "out", **arguments)
        trainer.train()
        assert trainer.optimizer.optimizer is made
        parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
        return logged(trainer, "loss"), logged(trainer, "grad_norm"), parameters


def distance(parameters, others):
    """Norm of the difference over norm of the weights."""
    apart = sum(float((parameters[name].double() - others[name].double()).square().sum()) for name in parameters)
    return (apart / sum(float(value.double().square().sum()) for value in others.values())) ** 0.5


@DTYPES
def test_trainer_clips_as_by_default(dtype, tmp_path):
    losses, norms, parameters = train(tmp_path, dtype=dtype, path=tmp_path)
    assert len(losses) == TRAINER_STEPS
    assert losses[-1] < 0.8 * losses[0]
    assert norms[0] > CLIP
    by_hand = train(tmp_path, dtype=dtype, max_grad_norm=0.0, callbacks=[HandClipping()])
    assert losses == by_hand[0]
    assert_same(parameters, by_hand[2])  # and the first run's state was on NVMe, this one's in memory
    assert distance(parameters, train(tmp_path, dtype=dtype, max_grad_norm=0.0)[2]) > 1e-3


@DTYPES
def test_trainer_resumes_from_its_checkpoint_bit_for_bit(dtype, tmp_path):
    """Saved with the state on NVMe, in the middle of a schedule; resumed in memory, from other weights."""
    finals, losses = [], []
    for path, seed, resume in ((tmp_path, 0, None), (None, 7, tmp_path / "out" / f"checkpoint-{TRAINER_STEPS // 2}")):
        model = llama(dtype, seed)
        with OffloadAdamW(model.parameters(), lr=LR, offload=section(path)) as optimizer:
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            saving = {"save_strategy": "steps", "save_steps": TRAINER_STEPS // 2}
            trainer = trainer_of(model, optimizer, tmp_path / "out", schedule, **saving)
            trainer.train(resume_from_checkpoint=resume and str(resume))
            finals.append(full_state(model, optimizer))
            losses.append(logged(trainer, "loss"))
            assert optimizer.param_groups[0]["lr"] == LR / (1 + TRAINER_STEPS)
    assert losses[1] == losses[0]
    assert_same(*finals)


# What does not fit, and what it costs


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
        trainer = trainer_of(model, optimizer, tmp_path / "out", callbacks=[watch], max_steps=2)
        trainer.accelerator.device_placement = placement
        trainer.train()
        assert (watch.written > 0) is placement
        assert optimizer.stats().steps == 2
