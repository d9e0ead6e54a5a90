"""PEFT: adapters are trained, their base is frozen and has no state; what is saved of them PEFT loads."""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from nvme_offload import initialize
from tests.support.clients import SETTINGS, WITH_A_LINE, client
from tests.support.ranks import on_ranks
from tests.support.sharded_model import assert_same
from tests.support.small_llama import VOCABULARY, llama, rows

peft = pytest.importorskip("peft", reason="make clients installs it")

COUNT, BF16 = 2, {"bf16": {"enabled": True}}
TIERS = ("memory", "nvme")
IDS = torch.stack([row["input_ids"] for row in rows(2)])
SAVES, MERGES = "`engine.save_adapter(folder)`", "`engine.export_safetensors(folder, merge=True)`"


def lora(**more):
    """A configuration whose adapters are no zeros."""
    given = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}
    return peft.LoraConfig(**(given | more))


def adapted(*configs, base=None, seed=1, cast=True):
    """Adapters `default` and `second` of these configurations, around a Llama or another base."""
    base = base or llama(use_cache=False)
    torch.manual_seed(seed)
    model = peft.get_peft_model(base, configs[0] if configs else lora(), autocast_adapter_dtype=cast)
    for config in configs[1:]:
        model.add_adapter("second", config, autocast_adapter_dtype=cast)
    return model


def section(path, tier="nvme", **more):
    """State on NVMe, and parameters where `tier` says."""
    nvme = {"device": "nvme", "nvme_path": str(path)}
    zero = {"stage": 3, "offload_optimizer": nvme, **({"offload_param": nvme} if tier == "nvme" else {})}
    return {"zero_optimization": zero, "optimizer": {"type": "AdamW", "params": SETTINGS}} | more


def train(engine, steps=2, order="horizontal"):
    for step in range(steps):
        batches = [IDS.roll(COUNT * step + number, 0) for number in range(engine.gradient_accumulation_steps)]
        if order == "loop":
            for batch in batches:
                engine.backward(engine(input_ids=batch, labels=batch).loss)
                engine.step()
        else:
            engine.accumulate(lambda batch: engine(input_ids=batch, labels=batch).loss, batches)
            engine.step()
    return engine


@torch.no_grad()
def logits_of(model):
    model.eval()
    return model(input_ids=IDS).logits


@client("PEFT", "LoRA through `initialize`: a frozen base, sharded, its parameters on NVMe")
def test_adapters_through_initialize(alone, tmp_path):
    with initialize(adapted(lora(init_lora_weights=True)), section(tmp_path) | BF16) as engine:
        trained = sum(param.numel() for param in engine.module.parameters() if param.requires_grad)
        before = {name: param.full_tensor().clone() for name, param in engine.module.named_parameters()}
        train(engine, 4)
        assert 10 * trained <= engine.optimizer.stats().state_bytes < 10 * 32 * 1000
        for name, param in engine.module.named_parameters():
            assert torch.equal(param.full_tensor(), before[name]) != ("lora_" in name), name


PRECISIONS = {
    "fp32": (torch.float32, True, {}, "fp32"),
    "fp32 adapters over bf16": (torch.bfloat16, True, BF16, "fp32"),
    "bf16": (torch.bfloat16, False, BF16, "own"),
}
"""The dtype of the base, whether PEFT casts adapters to fp32, what the section says, and how adapters are saved."""


def pair(kind, cast, seed=1):
    """A LoRA and, beside it, a DoRA of another module."""
    configs = lora(), lora(r=3, use_dora=True, target_modules=["o_proj"])
    return adapted(*configs, base=llama(kind, use_cache=False), seed=seed, cast=cast)


@client("PEFT", "adapters saved in its own format, and loaded: several, on ranks, on NVMe", WITH_A_LINE, SAVES)
@pytest.mark.parametrize("size", [1, 2])
@on_ranks("size")
def test_peft_loads_what_is_saved_and_has_the_same_logits(rank, world_size, tmp_path):
    for tier, order, precision in itertools.product(TIERS, ("loop", "vertical"), PRECISIONS):
        kind, cast, keys, dtype = PRECISIONS[precision]
        folder = tmp_path / f"{tier} {order} {precision}"
        config = section(tmp_path, tier, gradient_accumulation_steps=COUNT) | keys
        config |= {} if order == "loop" else {"micro_batch_order": order}
        logits, made = {}, {}
        with initialize(pair(kind, cast), config) as engine:
            for name in ("default", "second"):
                engine.module.set_adapter(name)
                logits[name] = logits_of(train(engine, order=order).module)
            made = dict(engine.weights(dtype))
            with pytest.raises(TypeError, match=r"save_pretrained: the parameters are sharded.*engine\.save_adapter"):
                engine.module.save_pretrained(folder)
            engine.save_adapter(folder, dtype=dtype)
        theirs = pair(kind, cast, seed=7)
        theirs.load_state_dict(made)
        if rank == 0:
            theirs.save_pretrained(folder / "theirs")
            assert_same_files(folder, folder / "theirs")
        loaded = peft.PeftModel.from_pretrained(llama(kind, use_cache=False), folder, autocast_adapter_dtype=cast)
        loaded.load_adapter(folder / "second", "second", autocast_adapter_dtype=cast)
        with initialize(pair(kind, cast, seed=7), config) as engine:
            train(engine, 1, order)
            engine.module.load_adapter(folder, "default")
            engine.module.load_adapter(folder / "second", "second")
            for name, (model, expected) in itertools.product(logits, ((engine.module, logits), (loaded, logits))):
                model.set_adapter(name)
                assert torch.equal(logits_of(model), expected[name]), (tier, order, precision, name, model is loaded)


def assert_same_files(ours, theirs):
    for part in (".", "second"):
        assert_same(
            load_file(ours / part / "adapter_model.safetensors"), load_file(theirs / part / "adapter_model.safetensors")
        )
        said = [json.loads((folder / part / "adapter_config.json").read_text()) for folder in (ours, theirs)]
        assert said[0] | {"target_modules": 0} == said[1] | {"target_modules": 0}
        assert set(said[0]["target_modules"]) == set(said[1]["target_modules"])


def mixtral(dtype):
    """Its experts are fused in the model, and apart in the files."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "use_cache": False}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads)).to(dtype)


def small_llama(dtype):
    return llama(dtype, use_cache=False)


MERGED = {
    "LoRA and DoRA": (small_llama, [lora(), lora(r=3, use_dora=True, target_modules=["q_proj", "o_proj"])]),
    "a whole head": (small_llama, [lora(modules_to_save=["lm_head"])]),
    "embedding": (small_llama, [lora(target_modules=["embed_tokens", "v_proj"])]),
    "tokens": (small_llama, [lora(trainable_token_indices={"embed_tokens": [1, 5]})]),
    "IA3": (small_llama, [peft.IA3Config(target_modules=["k_proj", "up_proj"], feedforward_modules=["up_proj"])]),
    "experts": (mixtral, [lora(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])]),
}


@client("PEFT", "adapters merged into the weights of their base, a layer at a time, as files", WITH_A_LINE, MERGES)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", MERGED)
@on_ranks("size")
def test_a_merged_export_has_the_bits_of_peft(rank, world_size, kind, tmp_path):
    make, configs = MERGED[kind]
    for tier, dtype in itertools.product(TIERS, (torch.float32, torch.bfloat16)):
        folder, keys = tmp_path / f"{tier} {dtype}", {} if dtype.itemsize == 4 else BF16
        names = ["second", "default"][: len(configs)] if len(configs) > 1 else ["default"]
        with initialize(adapted(*configs, base=make(dtype)), section(tmp_path, tier) | keys) as engine:
            train(engine)
            made = dict(engine.weights("fp32"))
            for to in ("fp32", "bf16"):
                engine.export_safetensors(folder / to, to, max_shard_bytes="64MiB", merge=names)
            assert_same(dict(engine.weights("fp32")), made)
        theirs = adapted(*configs, base=make(dtype))
        theirs.load_state_dict(made, strict=False, assign=True)
        merged = theirs.merge_and_unload(adapter_names=names)
        if rank == 0:
            for to, cast in (("fp32", dict), ("bf16", merged.bfloat16)):
                cast()
                merged.save_pretrained(folder / "theirs")
                files = (folder / part / "model.safetensors" for part in (to, "theirs"))
                assert_same(*map(load_file, files))


@pytest.mark.parametrize("name", ["fp32", None])
def test_fp32_adapters_that_nobody_calls_and_a_trained_norm_are_reduced_in_one_dtype(alone, tmp_path, name):
    """IA3's are in a container in a 16-bit layer, gathered and reduced with the layer's own."""
    model = adapted(*MERGED["IA3"][1], base=small_llama(torch.bfloat16))
    model.get_parameter("base_model.model.model.layers.0.input_layernorm.weight").requires_grad_(True)
    config = section(tmp_path) | BF16 | ({"communication_data_type": name} if name else {})
    if name is None:
        with pytest.raises(
            ValueError, match=r'ia3_l.* and of .*layernorm.weight are reduced.*"communication_data_type": "fp32"'
        ):
            initialize(model, config)
        return
    before = {name: param.detach().clone() for name, param in model.named_parameters() if param.requires_grad}
    with initialize(model, config) as engine:
        train(engine)
        for name, value in engine.weights("own"):
            assert name not in before or (value.dtype is before[name].dtype and not torch.equal(value, before[name]))


@client("PEFT", "DPO whose reference is the base, adapters switched off, block by block; `generate`")
def test_adapters_switched_off_are_the_reference_of_dpo(alone, tmp_path):
    def made():
        return adapted(lora(target_modules=["q_proj", "lm_head"]))

    def loss_of(call, module, ids):
        with torch.no_grad(), module.disable_adapter():
            reference = call(input_ids=ids, labels=ids).loss
        return nn.functional.softplus(call(input_ids=ids, labels=ids).loss - reference)

    ends, plain = [], made()
    for tier, order in itertools.product(TIERS, ("loop", "horizontal", "vertical")):
        config = section(tmp_path, tier, gradient_accumulation_steps=COUNT)
        config |= {} if order == "loop" else {"micro_batch_order": order}
        losses = []
        with initialize(made(), config) as engine:
            for step in range(3):
                batches = [IDS.roll(COUNT * step + number, 1) for number in range(COUNT)]
                if order == "loop":
                    for batch in batches:
                        losses.append(loss_of(engine, engine.module, batch))
                        engine.backward(losses[-1])
                        engine.step()
                else:
                    losses += engine.accumulate(lambda batch: loss_of(engine, engine.module, batch), batches)
                    engine.step()
            ends.append(([loss.item() for loss in losses], dict(engine.weights("fp32"))))
            plain.load_state_dict(ends[-1][1])
            given = {"input_ids": IDS[:, :4], "max_new_tokens": 6, "do_sample": False}
            assert torch.equal(engine.module.generate(**given), plain.generate(**given))
            assert losses[0].item() == loss_of(start := made(), start, IDS).item()
    for losses, weights in ends[1:]:
        assert losses == ends[0][0]
        assert_same(weights, ends[0][1])


def test_what_cannot_be_saved_or_merged_is_refused_in_words(alone, tmp_path):
    with initialize(nn.Linear(3, 2), section(tmp_path, "memory")) as engine:
        with pytest.raises(
            TypeError, match=r"engine\.save_adapter: \w*Linear has no adapters of PEFT: call peft\.get_"
        ):
            engine.save_adapter(tmp_path / "a")
        with pytest.raises(TypeError, match=r"merge=\.\.\.\): \w*Linear has no adapters of PEFT"):
            engine.export_safetensors(tmp_path / "a", merge=True)
    tied = adapted(lora(target_modules=["lm_head"]), base=llama(tie_word_embeddings=True, use_cache=False))
    with initialize(tied, section(tmp_path, "memory")) as engine:
        with pytest.raises(ValueError, match=r"no adapter is called 'other'; there are default"):
            engine.save_adapter(tmp_path / "a", "other")
        with pytest.raises(ValueError, match=r"frozen=False leaves out the base"):
            engine.export_safetensors(tmp_path / "a", merge=True, frozen=False)
        with pytest.raises(ValueError, match=r"are one weight, and only one of them has adapters.*tie_word_embeddings"):
            engine.export_safetensors(tmp_path / "a", merge=True)
    prompts = peft.get_peft_model(llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    refused = pytest.raises(ValueError, match=r"'default' is PROMPT_TUNING, whose tensors PEFT does not take from")
    with initialize(prompts, section(tmp_path, "memory")) as engine, refused:
        engine.save_adapter(tmp_path / "a")
    base = small_llama(torch.float32)
    packed = adapted(base=base)
    for layer in base.model.layers:
        codes = torch.zeros(32, 32, dtype=torch.uint8)
        layer.self_attn.q_proj.base_layer.weight = nn.Parameter(codes, requires_grad=False)
    refused = pytest.raises(ValueError, match=r"PEFT cannot merge the adapters of .*q_proj.*Codes of a quantized base")
    with initialize(packed, section(tmp_path)) as engine, refused:
        engine.export_safetensors(tmp_path / "a", merge=True)
    assert not (tmp_path / "a").exists()


@client("PEFT", "LoRA around a base on meta, which is read in place from its files")
def test_adapters_around_a_base_on_meta_begin_as_peft_has_them(alone, tmp_path):
    """The base has experts that are published one by one; logits are those of PEFT around the base in memory."""
    base = mixtral(torch.float32)
    base.save_pretrained(tmp_path / "base")
    without = logits_of(base)
    with torch.device("meta"):
        model = adapted(lora(init_lora_weights=True), base=mixtral(torch.float32))
    assert {param.device.type for param in model.parameters()} == {"meta"}
    config = section(tmp_path)
    config["zero_optimization"]["offload_param"] = {"device": "nvme", "nvme_path": tmp_path, "frozen": "in_place"}
    with initialize(model, config, weights=tmp_path / "base") as engine:
        born = {name: value.clone() for name, value in engine.weights("own")}
        for name, value in born.items():
            assert "lora_B" not in name or not value.any()
            assert "lora_A" not in name or (value.any() and value.abs().max() <= 1 / value.shape[1] ** 0.5)
        assert list(engine.optimizer.store.blocks.bases) == ["model.safetensors"]
        train(engine)
        engine.save_adapter(tmp_path / "adapter")
        engine.module.eval()
        with torch.no_grad():
            ours = engine(input_ids=IDS).logits.clone()
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.equal(ours, logits_of(loaded))
    assert not torch.equal(ours, without)
