"""PEFT: adapters are trained, their base is frozen and has no state."""

import pytest
import torch

from nvme_offload import get_full_param, initialize
from tests.support.clients import SETTINGS, client
from tests.support.small_llama import llama, rows

peft = pytest.importorskip("peft", reason="make clients installs it")

STEPS = 4


def adapted():
    base = llama()
    torch.manual_seed(1)
    return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


@client("PEFT", "LoRA through `initialize`: a frozen base, sharded, its parameters on NVMe")
def test_adapters_through_initialize(alone, tmp_path):
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {
        "zero_optimization": {"stage": 3, "offload_optimizer": nvme, "offload_param": nvme},
        "optimizer": {"type": "AdamW", "params": SETTINGS},
        "bf16": {"enabled": True},
    }
    with initialize(adapted(), config) as engine:
        trained = sum(param.numel() for param in engine.module.parameters() if param.requires_grad)
        before = {name: param.full_tensor().clone() for name, param in engine.module.named_parameters()}
        for row in rows(STEPS):
            engine.backward(engine(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss)
            engine.step()
        with pytest.raises(TypeError, match=r"PeftModelForCausalLM.save_pretrained: the parameters are sharded"):
            engine.module.save_pretrained(tmp_path / "adapter")
        adapter = {name: value for name, value in engine.weights("fp32") if "lora_" in name}
        engine.module.save_pretrained(tmp_path / "adapter", state_dict=adapter)
        loaded = dict(peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter").named_parameters())
        for name, param in engine.module.named_parameters():
            assert "lora_" not in name or torch.equal(loaded[name], get_full_param(param)), name
        assert 10 * trained <= engine.optimizer.stats().state_bytes < 10 * 32 * 1000
        for name, param in engine.module.named_parameters():
            assert torch.equal(param.full_tensor(), before[name]) != ("lora_" in name), name
