"""TRL: fine-tuning on text, whole and with adapters, with its own classes."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

from nvme_offload import OffloadAdamW
from nvme_offload.adapters import OffloadTrainerCallback
from tests.support.clients import client
from tests.support.small_llama import VOCABULARY, llama, rows
from tests.support.training import assert_same_bits, section

trl = pytest.importorskip("trl", reason="make clients installs it")
datasets = pytest.importorskip("datasets", reason="make clients installs it")
peft = pytest.importorskip("peft", reason="make clients installs it")
SyncRefModelCallback = pytest.importorskip("trl.trainer.callbacks").SyncRefModelCallback

STEPS = 3


def tokenizer():
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{number}": number for number in range(3, VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def words(start, number=8):
    return " ".join(f"w{3 + (start + step) % (VOCABULARY - 3)}" for step in range(number))


def options(folder):
    return {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }


def finished(trainer):
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert optimizer.stats().steps == STEPS
    assert [entry["offload/steps"] for entry in trainer.state.log_history if "loss" in entry] == [1, 2, 3]
    optimizer.close()


@client("TRL", "`SFTTrainer`, whole and with LoRA")
@pytest.mark.parametrize("adapters", [False, True])
def test_supervised_fine_tuning(tmp_path, adapters):
    trainer = trl.SFTTrainer(
        model=llama(),
        args=trl.SFTConfig(**options(tmp_path), max_length=16),
        train_dataset=datasets.Dataset.from_list([{"text": words(start)} for start in range(16)]),
        processing_class=tokenizer(),
        optimizer_cls_and_kwargs=(OffloadAdamW, {"lr": 1e-3, "offload": section(tmp_path)}),
        callbacks=[OffloadTrainerCallback()],
        peft_config=peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM") if adapters else None,
    )
    finished(trainer)


@client("TRL", "`DPOTrainer`")
def test_preferences(tmp_path):
    pairs = [
        {"prompt": words(start, 3), "chosen": words(start, 4), "rejected": words(start + 9, 4)} for start in range(16)
    ]
    model = llama()
    trainer = trl.DPOTrainer(
        model=model,
        ref_model=llama(),
        args=trl.DPOConfig(**options(tmp_path), max_length=16),
        train_dataset=datasets.Dataset.from_list(pairs),
        processing_class=tokenizer(),
        optimizers=(OffloadAdamW(model.parameters(), lr=1e-3, offload=section(tmp_path)), None),
        callbacks=[OffloadTrainerCallback()],
    )
    finished(trainer)


class Averages:
    """TRL's own callbacks that read all weights after each step, and what they have made of them."""

    @staticmethod
    def bema():
        callback = trl.BEMACallback(update_freq=1, lag=1)
        callback.on_train_end = lambda *given, **more: None  # which would save a model
        return callback, lambda: callback.running_model

    @staticmethod
    def reference():
        reference = llama()
        return SyncRefModelCallback(reference, None), lambda: reference


@client("TRL", "`BEMACallback`, `SyncRefModelCallback` and a fused head, beside figures and hidden steps")
@pytest.mark.parametrize("trainer", ["Trainer", "SFTTrainer"])
@pytest.mark.parametrize("average", ["bema", "reference"])
def test_callbacks_that_average_weights(tmp_path, trainer, average):
    """Each callback with each trainer: the losses, evaluations and averages of updates inside the step."""
    ends = []
    for how in ("alone", "figures", "hidden"):
        model, (callback, averaged) = llama(), getattr(Averages, average)()
        optimizer = OffloadAdamW(model.parameters(), lr=1e-2, offload=section(tmp_path))
        if how == "hidden":
            optimizer.overlap_with(model)
        more = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "no", "seed": 1}
        if trainer == "SFTTrainer":
            texts = datasets.Dataset.from_list([{"text": words(start)} for start in range(16)])
            made = trl.SFTTrainer(
                model=model,
                args=trl.SFTConfig(**options(tmp_path), **more, max_length=16),
                train_dataset=texts,
                eval_dataset=texts.select(range(2)),
                processing_class=tokenizer(),
                optimizers=(optimizer, None),
                callbacks=[callback],
            )
        else:
            args = TrainingArguments(**{**options(tmp_path), **more})
            made = Trainer(
                model=model,
                args=args,
                train_dataset=rows(),
                eval_dataset=rows(),
                optimizers=(optimizer, None),
                callbacks=[callback],
            )
        made.args.ref_model_sync_steps, made.args.ref_model_mixup_alpha = 1, 0.6
        if how != "alone":
            OffloadTrainerCallback().add_to(made)
        made.train()
        assert (optimizer.stats().updates_behind > 0) == (how == "hidden")
        log = [entry[name] for entry in made.state.log_history for name in ("loss", "eval_loss") if name in entry]
        ends.append([log, *(dict(one.state_dict()) for one in (model, averaged()))])
        optimizer.close()
    assert_same_bits(ends[1], ends[0])
    assert_same_bits(ends[2], ends[0])
