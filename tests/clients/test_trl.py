"""TRL: fine-tuning on text, whole and with adapters, with its own classes."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nvme_offload import OffloadAdamW
from nvme_offload.optim.adapters.trainer import OffloadTrainerCallback
from tests.support.clients import client
from tests.support.small_llama import VOCABULARY, llama
from tests.support.training import section

trl = pytest.importorskip("trl", reason="make clients installs it")
datasets = pytest.importorskip("datasets", reason="make clients installs it")
peft = pytest.importorskip("peft", reason="make clients installs it")

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
