"""PEFT: adapters are trained, their base is frozen and has no state."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from nvme_offload import OffloadAdamW, initialize
from tests.support.clients import client
from tests.support.small_llama import llama, rows
from tests.support.training import section

peft = pytest.importorskip("peft", reason="make clients installs it")

STEPS = 4
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}


def adapted():
    base = llama()
    torch.manual_seed(1)
    return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def losses(model, optimizer, steps=STEPS):
    found = []
    for row in rows(steps):
        loss = model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@client("PEFT", "LoRA in a loop of one's own, `state_dict` of the adapters' optimizer")
def test_adapters_are_trained_as_by_torch_adamw(tmp_path):
    theirs, ours = adapted(), adapted()
    expected = losses(theirs, torch.optim.AdamW(theirs.parameters(), **SETTINGS))
    with OffloadAdamW(ours.parameters(), **SETTINGS, offload=section(tmp_path)) as optimizer:
        assert losses(ours, optimizer) == pytest.approx(expected, abs=1e-6, rel=0)
        trained = [param for param in ours.parameters() if param.requires_grad]
        assert 8 * sum(param.numel() for param in trained) <= optimizer.stats().state_bytes < 8 * 32 * 1000
        assert len(optimizer.state_dict()["state"]) == len(trained)


@client("PEFT", "LoRA in `Trainer`, resume")
def test_adapters_in_trainer_resume(tmp_path):
    def train(resume):
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "out"), max_steps=STEPS, save_steps=2, report_to="none", use_cpu=True
        )
        options = {"train_dataset": rows(), "optimizer_cls_and_kwargs": (OffloadAdamW, {**SETTINGS, "offload": config})}
        trainer = Trainer(model=adapted(), args=arguments, **options)
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2") if resume else None)
        trainer.optimizer.optimizer.close()
        return {name: param.detach().clone() for name, param in trainer.model.named_parameters()}

    config = section(tmp_path)
    whole, resumed = train(False), train(True)
    for name, param in whole.items():
        assert torch.equal(param, resumed[name]), name


@client("PEFT", "LoRA through `initialize`: a frozen base, sharded, its parameters on NVMe")
def test_adapters_through_initialize(alone, tmp_path):
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {
        "zero_optimization": {"stage": 3, "offload_optimizer": nvme, "offload_param": nvme},
        "optimizer": {"type": "AdamW", "params": SETTINGS},
        "bf16": {"enabled": True},
    }
    with initialize(adapted(), config) as engine:
        before = {name: param.full_tensor().clone() for name, param in engine.module.named_parameters()}
        for row in rows(STEPS):
            engine.backward(engine(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss)
            engine.step()
        for name, param in engine.module.named_parameters():
            assert torch.equal(param.full_tensor(), before[name]) != ("lora_" in name), name
