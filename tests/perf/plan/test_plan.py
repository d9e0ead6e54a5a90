"""`offload plan`: bytes against the counters of real runs, what fits, and bad values in words."""

import json
import random
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
)
from typer.testing import CliRunner

from nvme_offload import ConfigError, OffloadConfig, initialize
from nvme_offload.aio_native.engine import Op
from nvme_offload.offload.storage.tier_plan import TIERS
from nvme_offload.offload.units import GiB
from nvme_offload.optim.step.hiding import schedule_in
from nvme_offload.perf.cli import app, load
from nvme_offload.perf.experiments.training import SleepingModel, Training
from nvme_offload.perf.plan import catalog, command
from nvme_offload.perf.plan.lora import Lora
from nvme_offload.perf.plan.machine import Drives, Machine
from nvme_offload.perf.plan.placing import LIBRARIES_BYTES, Job
from nvme_offload.perf.plan.prediction import predict
from nvme_offload.perf.plan.shape import ModelShape
from scripts import plan_machines
from tests.perf.documents import write_bench
from tests.support.pairs import each_value_once

TOKENS, WARM_UP_STEPS, COUNTED_STEPS = 16, 1, 1
MACHINE = Machine(host_memory=16 * GiB, drives=Drives.of_rates(2e9, 1e9), capacity=100 * GiB, flops=1e11)


def llama(**changes):
    shape = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 40}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True, "use_cache": False}
    return LlamaConfig(**{**shape, **heads, **changes})


def section(folder, *, params=None, grads=None, accumulation=1, **more):
    """A configuration with the state on NVMe; `params` and `grads` are buffer counts of their tiers."""
    drive = {"device": "nvme", "nvme_path": str(folder)}
    zero = {"stage": 3, "offload_optimizer": {**drive, "buffer_count": 3}}
    config = {"zero_optimization": zero, "bf16": {"enabled": True}, "gradient_accumulation_steps": accumulation}
    more = {"micro_batch_order": "horizontal", **more}
    if params:
        zero["offload_param"] = {**drive, "buffer_count": params}
    if grads:
        config["offload_gradients"] = {**drive, "buffer_count": grads}
    return config | more


KINDS = ("optimizer state", "parameters", "gradients", "activations")
NO_BF16 = {"bf16": {"enabled": False}}
CASES = {
    "state": {},
    "state in small subgroups": {"staging_budget": "3MiB"},
    "parameters": {"params": 4},
    "gradients": {"params": 3, "grads": 2, "accumulation": 2},
    "block by block": {"params": 3, "grads": 2, "accumulation": 2, "micro_batch_order": "vertical"},
    "many buffers": {"params": 8, "grads": 6},
    "fp16": {"params": 3, "grads": 2, **NO_BF16, "fp16": {"enabled": True, "loss_scale": 64}},
    "autocast": {"params": 3, "grads": 2, **NO_BF16, "torch_autocast": {"enabled": True, "dtype": "bf16"}},
    "stage 2": {"params": 2, "grads": 4, "stage": 2},
    "parameters partly in memory": {"params": 4, "host_budget": "5MiB", "staging_budget": "3MiB"},
    "half in memory": {"params": 4, "host_budget": "18MiB", "staging_budget": "3MiB"},
}


def moved_by(engine, shape):
    """Bytes of an average step, by direction and kind."""
    store = engine.optimizer.store
    tiers = [store.tier, *(part.cache.tier for part in (store.blocks.params, store.blocks.grads) if part)]

    counted = []

    def loss_of(tokens):
        loss = engine(tokens, labels=tokens).loss
        engine.optimizer.synchronize()  # no update is left now, which would read what a forward has at hand
        each = ((op, kind, tier.bytes_of_kind(op, kind)) for op in Op for tier in tiers if tier for kind in KINDS)
        counted.append({(op, kind): count for op, kind, count in each if count})
        return loss

    micro_batches = engine.gradient_accumulation_steps
    for _ in range(WARM_UP_STEPS + COUNTED_STEPS + 1):
        engine.accumulate(loss_of, torch.randint(shape.vocab_size, (micro_batches, 1, TOKENS)))
        engine.step()
    before, after = counted[WARM_UP_STEPS * micro_batches], counted[-micro_batches]
    return {key: (after[key] - before.get(key, 0)) / COUNTED_STEPS for key in after}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] * (name != "block by block"), id=name)
        for name, case in CASES.items()
    ],
)
def test_bytes_of_a_step_are_predicted_within_2_percent(case, tmp_path, alone):
    case = dict(case)
    budget, stage = case.pop("staging_budget", "512MiB"), case.pop("stage", 3)
    config = section(tmp_path, **case)
    if config["micro_batch_order"] == "vertical":
        place = {"device": "nvme", "nvme_path": str(tmp_path), "host_budget": "4KiB", "min_bytes": "8KiB"}
        config["activations"] = place
    config["zero_optimization"]["stage"] = stage
    config["zero_optimization"]["offload_optimizer"]["staging_budget"] = budget
    shape = llama()
    job = job_of(shape, config)
    predicted = predict(job, MACHINE).traffic
    torch.manual_seed(0)
    with initialize(LlamaForCausalLM(shape), config) as engine:
        actual = moved_by(engine, shape)
        if engine.activations:  # of each micro-batch the gradient of the tied head; what enters layers is too small
            moved = engine.activations.stats().written_bytes / (WARM_UP_STEPS + COUNTED_STEPS + 1)
            assert predicted.pop("kept activations").total.written > moved >= 2 * 2 * 1000 * 64
    assert predicted.keys() == {kind for _, kind in actual}
    for kind, moved in predicted.items():
        assert moved.total.written == pytest.approx(actual[Op.WRITE, kind], rel=0.005), kind
    # A buffer is not free while it is written, so a block more may be read now and then: of 40 it does not matter.
    total = sum(moved.total.read + moved.total.written for moved in predicted.values())
    assert total == pytest.approx(sum(actual.values()), rel=0.02)
    if case.get("host_budget") == "5MiB":
        assert 0 < predicted["parameters"].total.written < 0.9 * 2 * job.shape.numel
    if case.get("host_budget") == "18MiB":
        assert predicted["optimizer state"].total.written < 0.7 * 10 * job.shape.numel


def drawn(seed, folder):
    """A random section of those that `initialize` takes."""
    draw = random.Random(seed).choice
    rule = draw(["AdamW", "AdamW", "Muon"])
    overlap = draw([None, "off", "forward", "backward"])
    if rule == "Muon":
        params = grads = None
    else:
        params, grads = draw([None, None, 2]), draw([None, None, 2])
    config = section(folder, params=params, grads=grads, accumulation=draw([1, 2]), optimizer={"type": rule})
    config["zero_optimization"]["stage"] = draw([1, 2, 3]) if params is None else draw([2, 3])
    config["zero_optimization"]["offload_optimizer"] |= draw([{}, {"device": "cpu"}])
    if (budget := draw([None, None, "4MiB", "64MiB"])) is not None:
        config["host_budget"] = budget
    config |= {"overlap_step": overlap, "skip_non_finite": overlap != "backward"} if overlap else {}
    rank = draw([0, 0, 4]) if rule == "AdamW" else 0
    if rank and params:
        config["zero_optimization"]["offload_param"]["frozen"] = "copy"  # the model has values, which are in no files
    return config, rank


class Adapted(torch.nn.Module):
    """A linear layer with an adapter beside it."""

    def __init__(self, base, rank):
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.up = torch.nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def model_of(shape, rank):
    """A model, with adapters of that rank beside all linear layers and the rest frozen; rank 0: without."""
    model = LlamaForCausalLM(shape)
    if rank:
        model.to(torch.bfloat16).requires_grad_(False)
        for layer in model.model.layers:
            for part in (layer.self_attn, layer.mlp):
                for name, linear in list(part.named_children()):
                    if isinstance(linear, torch.nn.Linear):
                        setattr(part, name, Adapted(linear, rank))
    return model


QUICK = [*range(7), 13, 246]
SLOW = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(300) if seed not in QUICK]


@pytest.mark.parametrize("seed", [*QUICK, *SLOW])
@pytest.mark.filterwarnings("ignore")
def test_a_run_has_the_schedule_the_tiers_and_the_bytes_of_its_plan(seed, tmp_path, alone):
    (config, rank), shape = drawn(seed, tmp_path), llama(num_hidden_layers=4)
    try:
        found = predict(job_of(shape, config, rank), MACHINE)
    except ConfigError:
        with pytest.raises(ConfigError):
            initialize(model_of(shape, rank), config)
        return
    with initialize(model_of(shape, rank), config) as engine:
        store = engine.optimizer.store
        assert {
            schedule_in(store, record).name
            for record in store.table
            if record.rule.whole
            or config["optimizer"]["type"] != "Muon"  # the rest of a model may do it in another way
        } == {found.overlap_step}
        plan = store.plan
        on_drive = {unit.kind for unit in plan.units_on("nvme")}
        assert {kind for kind, moved in found.traffic.items() if moved.total.written} == on_drive
        for kind, tier in product({unit.kind for unit in plan.units}, TIERS):
            assert found.tiers.bytes_on(tier, kind) == pytest.approx(plan.bytes_on(tier, kind), rel=0.02), (kind, tier)
        actual = moved_by(engine, shape) if found.traffic else {}
        for kind, moved in found.traffic.items():
            assert moved.total.written == pytest.approx(actual.get((Op.WRITE, kind), 0), rel=0.02), kind
            # A buffer is not free while it is written, so a block or two more may be read.
            block = max((unit.bytes_read for unit in plan.units_on("nvme", kind)), default=0)
            # Of adapters all blocks may be: they are so small that a busy machine updates faster than it writes.
            most = max(moved.total.read, moved.total.written if rank and kind != "parameters" else 0)
            assert moved.total.read - 2 * block <= actual.get((Op.READ, kind), 0) <= most + 2 * block, kind


HAVE = [("4090", 64), ("4090", 128), ("h100", 256)]
TRAIN = ["llama-3.1-8b", "qwen3-30b-a3b", "llama-3.1-70b", "gpt-oss-120b --lora r=16"]
PLANNED = [(model, card, host) for model in TRAIN for card, host in HAVE]
IN_EVERY_RUN = PLANNED[2::3][1::2]  # experts, and a base with an adapter


@pytest.mark.parametrize(
    ("model", "card", "host"),
    [pytest.param(*each, marks=[pytest.mark.slow] * (each not in IN_EVERY_RUN)) for each in PLANNED],
)
def test_what_people_have_holds_what_they_train(model, card, host):
    with pytest.MonkeyPatch.context() as patch:  # which is the largest model does not matter
        patch.setattr(command, "largest_model", lambda *rest: None)
        result = plan(f"--model {model} --card {card} --host {host}GiB --drive 2xgen4-consumer --micro-batches 32")
    assert result.exit_code == 0, result.output
    assert "tokens/s; a billion tokens take" in result.stdout
    if "As offload init chooses: everything fits into memory" not in result.stdout and "--lora" not in model:
        assert "64 micro-batches of a step write" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(n, id=case.name) for n, case in enumerate(plan_machines.CASES)])
def test_the_section_for_what_people_have_takes_what_its_plan_says(number):
    """A small model of the same shape runs with it, in a process of its own; its budgets are as small beside it."""
    figures = plan_machines.in_child(number, compute=0.0)
    two_blocks = 2 * plan_machines.BLOCK_BYTES + 2**16
    for what in "memory", "bytes":
        planned, measured = figures[what]
        assert measured == pytest.approx(planned, rel=plan_machines.LIMITS[what], abs=two_blocks), what
    for place, planned, found in figures["places"]:
        assert found == pytest.approx(planned, rel=0.1, abs=two_blocks), place


@pytest.mark.parametrize(("said", "tokens"), [
    ("", 65536), ("--ranks 2", 65536), ("--tokens 512", 512), ("--micro-batches 3", 3 * 2048),
    ("--tokens 100000", 100000), ("--ranks 64", 2048 * 64),
])  # fmt: skip
def test_a_step_is_of_65536_tokens_where_nothing_is_said(said, tokens, monkeypatch):
    monkeypatch.setattr(command, "largest_model", lambda *rest: None)
    numbers = "--params 1e8 --layers 4 --host-memory 64GiB --flops 1e12 --read-bw 1GB --write-bw 1GB --json"
    done = json.loads(CliRunner().invoke(app, ["plan", *numbers.split(), *said.split()]).stdout)
    assert done["tokens_per_second"] * done["iteration"]["seconds"] == pytest.approx(tokens)


def test_adapters_are_all_that_is_written_and_the_base_takes_no_space_of_a_drive(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "largest_model", lambda *rest: None)
    asked = "--model gpt-oss-120b --lora r=16 --card 4090 --host 32GiB --drive gen4-consumer --json"
    planned = json.loads(plan(asked).stdout)
    moved = planned["traffic_per_rank_and_step"]["parameters"]
    assert 50e9 < moved["read"] < 2 * 117e9 * 4.4 / 8  # forward and backward; some of it stays in memory
    assert planned["written_per_token"] * 2048 < 14 * 11.95e6
    assert planned["bytes_per_rank"]["optimizer state"]["host"] == pytest.approx(10 * 11.94e6, rel=0.01)
    assert planned["bytes_per_rank"]["parameters"].get("nvme", 0) < 100e6
    planned["section"]["zero_optimization"]["offload_param"]["frozen"] = "copy"
    copied = json.loads(plan(asked, planned["section"], tmp_path).stdout)
    assert copied["bytes_per_rank"]["parameters"]["nvme"] > 30e9


@pytest.mark.parametrize(("arguments", "pattern"), [
    ("--model llama-9", "llama-9: there is no such file; .* llama-3.1-8b"),
    ("--model qwen3-8b --card 9090", "--card 9090: known are 3090"),
    ("--model qwen3-8b --drive 0xgen4-consumer", "--drive 0xgen4-consumer: write a class"),
    ("--model qwen3-8b --drive gen4-consumer --read-bw 1GB --write-bw 1GB", "leave out --bench"),
    ("--model qwen3-8b --lora r=0", "r is 1 or more"), ("--model qwen3-8b --lora 16", "write r=16"),
    ("--model qwen3-8b --lora r=8,alpha=3", "nothing else is known but targets"),
    ("--model gpt-oss-20b --lora r=8,targets=up_proj", "none of these linear layers; it has k_proj, o_proj"),
])  # fmt: skip
def test_names_that_nobody_has_are_refused_in_words(arguments, pattern):
    result = plan(f"{arguments} --host 64GiB")
    assert result.exit_code == 2
    assert re.search(pattern, re.sub(r"[\s│]+", " ", result.stderr))


def test_the_classes_of_drives_are_those_of_the_page():
    page = (Path(__file__).parents[3] / "docs" / "plan.md").read_text()
    for name, found in catalog.DRIVES.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| {name} |"))
        read, write, size, endurance = (float(cell.split()[0]) for cell in row.split("|")[3:7])
        assert found == (read, write, size, endurance)
    assert all(f"`{name}`" in page for name in (*catalog.CARDS, *catalog.MODELS))


@pytest.mark.parametrize(("name", "config"), [
    ("qwen3-30b-a3b", Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
    )),
    ("llama-3.1-8b", LlamaConfig(
        vocab_size=128256, intermediate_size=14336, num_key_value_heads=8, tie_word_embeddings=False,
    )),
], ids=lambda value: str(value)[:12])  # fmt: skip
def test_a_model_by_name_is_what_its_configuration_makes(name, config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    made, named = ModelShape.of_module(model, name=name, config=config), catalog.model_of(name)
    assert (named.numel, named.num_layers) == (made.numel, made.num_layers)
    assert sum(named.work) == sum(made.work)
    lora = Lora(16)
    assert sum(map(sum, named.with_lora(lora).adapters)) == sum(map(sum, made.with_lora(lora).adapters))


FAMILIES = re.findall(
    r"\S+",
    """
    afmoe apertus arcee bamba bart bert bloom codegen cohere cohere2 deepseek_v2 deepseek_v3 ernie4_5 ernie4_5_moe
    exaone4 falcon falcon_h1 falcon_mamba gemma gemma2 gemma3_text gemma3n_text glm glm4 glm4_moe gpt2 gpt_bigcode
    gpt_neo gpt_neox gptj granite granitemoe granitemoehybrid helium internlm3 jamba jetmoe lfm2 llama4_text mamba
    mamba2 mbart minimax_m2 ministral3 mistral mixtral mpt nemotron_h olmo olmo2 olmo3 olmoe opt persimmon phi phi3
    phimoe qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next recurrent_gemma roberta rwkv seed_oss smollm3 stablelm
    starcoder2 whisper xglm t5 qwen2_5_vl qwen3_vl idefics3 modernbert-decoder
    """,
)
OTHER_CLASSES = {
    "t5": AutoModelForSeq2SeqLM,
    **dict.fromkeys(("llava", "qwen2_5_vl", "qwen3_vl", "idefics3"), AutoModelForImageTextToText),
}


@pytest.mark.parametrize("family", [
    "gemma4_text", "gpt_oss", "llava", "zamba2", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_a_family_has_the_parameters_that_transformers_counts(family, tmp_path):
    config = AutoConfig.for_model(family)
    with torch.device("meta"):
        model = OTHER_CLASSES.get(family, AutoModelForCausalLM).from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(tmp_path)
    assert ModelShape.of_config_file(tmp_path).numel == model.num_parameters()


@pytest.mark.parametrize(("section", "bits"), [
    ({}, 16), ({"quant_method": "mxfp4"}, 4.25), ({"quant_method": "fp8"}, 8), ({"load_in_4bit": True}, 4.5),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4.15625),
])  # fmt: skip
def test_bits_of_a_packed_base_are_those_of_its_configuration_or_its_files(section, bits, tmp_path):
    llama(num_hidden_layers=4).save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": section}
    (tmp_path / "config.json").write_text(json.dumps(said))
    shape = ModelShape.of_config_file(tmp_path)
    assert shape.base_bits == bits
    layers = sum(map(sum, shape.layers))
    (tmp_path / "model.safetensors").write_bytes(bytes(layers * 6 // 8 + 2 * (shape.numel - layers)))
    assert ModelShape.of_config_file(tmp_path).base_bits == pytest.approx(6)


LARGE = "--params 1e12 --layers 128 --hidden 25600 --vocab 128000 --ranks 4096 --host-memory 1TiB --capacity 30TB"
RATES = "--read-bw 25GB --write-bw 12GB --flops 3e14 --tbw 14000"


def plan(arguments, config=None, folder=None):
    """The command, of a section if there is one, which is written into that folder."""
    if config is not None:
        file = folder / "offload.json"
        file.write_text(json.dumps(config))
        arguments += f" --config {file}"
    elif "--micro-batches" not in arguments and "--tokens" not in arguments:
        arguments += " --micro-batches 1"
    return CliRunner().invoke(app, ["plan", *arguments.split()])


def planned(arguments, config, tmp_path):
    return plan(f"--params 1e6 --layers 4 --host-memory 16GiB {arguments}", config, tmp_path)


def test_a_trillion_parameters_on_thousands_of_ranks(tmp_path):
    document = json.loads(plan(f"{LARGE} {RATES} --json", section(tmp_path, params=2, grads=2), tmp_path).stdout)
    assert document["model"]["parameters"] == 10**12
    assert document["bytes_per_rank"]["optimizer state"]["nvme"] == pytest.approx(10 * 10**12 / 4096, rel=0.01)
    assert document["iteration"]["seconds"] > 0
    assert document["days_of_life"] > 0


def test_what_does_not_fit_has_status_1_and_the_largest_model_fits():
    numbers = "--layers 24 --hidden 2560 --host-memory 8GiB --tokens 256"
    result = plan(f"--params 2e9 {numbers} --capacity 10GB --json")
    document = json.loads(result.stdout)
    assert result.exit_code == 1
    assert document["missing_per_rank"]["nvme"] > 0
    largest = document["largest_model"]["layers"]
    layer = 2_000_000_000 // 24
    assert plan(f"--params {largest * layer} {numbers} --layers {largest} --capacity 10GB").exit_code == 0
    assert plan(f"--params {(largest + 1) * layer} {numbers} --layers {largest + 1} --capacity 10GB").exit_code == 1


def test_the_search_for_the_largest_model_ends():
    layer_numel = 10_000
    small = f"--params {layer_numel * 12} --layers 12 --tokens 16 --host-memory 1TB --capacity 900TB"
    assert "fits: more than 2048 layers" in plan(small).output
    largest = json.loads(plan(f"{small} --json").stdout)["largest_model"]
    assert largest == {"parameters": 2049 * layer_numel, "layers": 2049, "deepest": False}


def test_a_host_budget_limits_the_largest_model(tmp_path):
    config = section(tmp_path) | {"host_budget": "64MiB"}
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    largest = json.loads(planned("--json", config, tmp_path).stdout)["largest_model"]
    assert largest == {"parameters": 26 * 250_000, "layers": 26, "deepest": True}


DRIVES = "--read-bw 48GB --write-bw 27.2GB"
H100 = f"--gpu-memory 80GiB --pcie 55GB/s --flops 4e14 --update-rate 8e9 --host-memory 256GiB {DRIVES}"
LLAMA_8B = "--params 8e9 --layers 32 --hidden 4096 --vocab 128256"
LLAMA_70B = "--params 70e9 --layers 80 --hidden 8192 --vocab 128256"


@pytest.mark.parametrize(("model", "ranks", "kept"), [
    (LLAMA_8B, 1, "device"), pytest.param(LLAMA_8B, 8, "device", marks=pytest.mark.slow), (LLAMA_70B, 1, "nvme"),
    pytest.param(LLAMA_70B, 8, "nvme", marks=pytest.mark.slow),
])  # fmt: skip
def test_models_on_gpus(model, ranks, kept, tmp_path):
    """70 B fit one GPU of 80 GiB with all of it off the GPU."""
    blocks = 2 if kept == "nvme" else None
    config = section(tmp_path, params=blocks, grads=blocks)
    result = plan(f"{model} {H100} --ranks {ranks} --tokens 16384 --json", config, tmp_path)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    numel, held = document["model"]["parameters"], document["bytes_per_rank"]
    assert held["parameters"].keys() == held["gradients"].keys() == {kept}
    assert held["optimizer state"].keys() == {"nvme"}
    assert held["optimizer state"]["nvme"] == pytest.approx(10 * numel / ranks, rel=0.01)
    assert sum(sizes.get("device", 0) for sizes in held.values()) < 80 * GiB
    iteration = document["iteration"]
    assert iteration["compute"] == pytest.approx(8 * numel * 16384 / 4e14)
    assert iteration["update"] == pytest.approx(numel / ranks / 8e9, rel=0.001)
    # Kept on the GPU, parameters and gradients go down and parameters up; otherwise they are gathered twice, and
    # gradients come back beside the second.
    assert iteration["pcie"] == pytest.approx(4 * numel / ranks / 55e9, rel=0.001)
    moved = sum(sum(kind.values()) for kind in document["traffic_per_rank_and_step"].values()) * ranks
    assert iteration["nvme"] == pytest.approx(moved / 38e9, rel=0.15)
    longest = max(iteration[part] for part in ("compute", "nvme", "update", "pcie"))
    assert iteration["seconds"] >= longest * 0.99


@pytest.mark.parametrize(
    ("read", "write", "drive_seconds"), [(6.8e9, 4e9, 27.8), (48e9, 36e9, 3.4), (None, None, 0.0)], ids=str
)
def test_a_step_of_7_b_is_what_it_is_by_hand(read, write, drive_seconds, tmp_path):
    """On a GPU of 141 GB: one drive, four newer ones, and none, where 70 GB of state fit host memory."""
    rates = f"--read-bw {read} --write-bw {write}" if read else "--read-bw 7.45GB --write-bw 1.5GB"
    gpu = "--gpu-memory 141GB --pcie 55GB/s --flops 4.2e14 --update-rate 4.7e9 --host-memory 256GB --tokens 16384"
    config = section(tmp_path) if read else None
    result = plan(f"--params 7e9 --layers 32 --hidden 4096 {gpu} {rates} --json", config, tmp_path)
    found = json.loads(result.stdout)["iteration"]
    by_hand = {
        "compute": 8 * 7e9 * 16384 / 4.2e14,  # forward, forward again and backward: 2, 2 and 4 for each number
        "pcie": 4 * 7e9 / 55e9,  # parameters and gradients come down, two bytes each, while parameters go up
        "update": 7e9 / 4.7e9,
        "nvme": 10 * 7e9 / read + 10 * 7e9 / write if read else 0.0,
    }
    assert {part: found[part] for part in by_hand} == pytest.approx(by_hand, rel=0.01)
    assert [round(by_hand[part], 1) for part in by_hand] == [2.2, 0.5, 1.5, drive_seconds]
    assert max(by_hand.values()) <= found["seconds"] <= 1.6 * max(by_hand.values())


@pytest.mark.parametrize(
    ("params", "grads", "asked", "expected"),
    [
        ("none", "cpu", "backward", "forward"),  # a gradient is on its way when backward might use it
        pytest.param("none", "none", "backward", "backward", marks=pytest.mark.slow),
        pytest.param("none", "cpu", None, "forward", marks=pytest.mark.slow),
        pytest.param("cpu", "cpu", None, "forward", marks=pytest.mark.slow),
        pytest.param("none", "nvme", "backward", "forward", marks=pytest.mark.slow),
    ],
)
def test_the_schedule_of_what_leaves_a_gpu(tmp_path, params, grads, asked, expected):
    drive = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {
        "zero_optimization": {"stage": 3, "offload_optimizer": drive, "offload_param": {"device": params}},
        "offload_gradients": drive if grads == "nvme" else {"device": grads},
        "skip_non_finite": asked != "backward",
        **({"overlap_step": asked} if asked else {}),
    }
    result = plan(f"--params 1e8 --layers 4 --hidden 1024 {H100} --tokens 16384 --json", config, tmp_path)
    assert json.loads(result.stdout)["iteration"]["overlap_step"] == expected


def test_a_slow_pcie_is_what_limits():
    said = " ".join(plan(f"{LLAMA_8B} {H100}".replace("55GB/s", "2GB/s")).stdout.split())
    assert "limited by: PCIe" in said
    assert "PCIe 16 s" in said


def test_a_network_is_what_limits_many_nodes():
    """Each node of 8 gathers 7/8 of 140 GB in forward and in backward, and reduces as much."""
    many = f"{LLAMA_70B} {H100} --tokens 16384 --ranks 64"
    in_bits = plan(f"{many} --network 100Gb/s")
    assert "limited by: network" in in_bits.stdout
    seconds = json.loads(plan(f"{many} --network 12.5GB/s --json").stdout)["iteration"]["network"]
    assert seconds == pytest.approx(3 * 140e9 * 7 / 8 / 12.5e9, rel=0.001)
    assert f"network {seconds:.3g} s" in " ".join(in_bits.stdout.split())
    assert "between nodes are not counted: they need --network" in plan(many).stdout


def test_what_no_number_of_ranks_makes_smaller_is_said_with_what_does():
    """Gathered layers and activations are as large on 64 ranks as on 8."""
    said = plan(f"{LLAMA_70B} {H100} --tokens 16384 --ranks 64".replace("80GiB", "20GiB")).stdout
    assert re.search(r"No number of ranks makes it fit: .* gathered groups and .* activations; the largest", said)
    assert "fewer --tokens" in said
    assert "No number of ranks" not in plan(f"{LLAMA_70B} {H100} --tokens 16384 --ranks 64").stdout


def test_copies_of_a_gpu_that_is_not_known_are_not_counted():
    without = plan(f"{LLAMA_8B} {H100}".replace("--pcie 55GB/s", ""))
    assert "Copies between GPU and host are not counted" in without.stdout
    alone = plan(f"{LLAMA_8B} --pcie 55GB/s")
    assert alone.exit_code == 2
    assert "give --gpu-memory, too" in alone.output


def test_a_gpu_that_is_here_is_planned_for(monkeypatch):
    """Its memory is that of the machine, unless somebody says otherwise."""
    monkeypatch.setattr(command, "device_here", lambda: "a GPU")
    monkeypatch.setattr(command, "facts_of", lambda device: {"memory_bytes": 80 * GiB})
    rates = f"--host-memory 64GiB {DRIVES} --flops 4e14 --json"
    here = json.loads(plan(f"{LLAMA_8B} {rates}").stdout)
    assert here["available_per_rank"]["device"] == 80 * GiB
    other = json.loads(plan(f"{LLAMA_8B} {rates} --gpu-memory 40GiB --pcie 10GB/s").stdout)
    assert other["available_per_rank"]["device"] == 40 * GiB
    assert other["iteration"]["pcie"] == pytest.approx(4 * 8e9 / 10e9, rel=0.001)
    assert "device" not in json.loads(plan(f"{LLAMA_8B} {rates} --gpu-memory 0").stdout)["available_per_rank"]


@pytest.mark.parametrize(("where", "tier"), [("none", "device"), ("cpu", "host"), ("nvme", "nvme")])
def test_gradients_leave_a_gpu_where_the_section_says_so(where, tier, tmp_path):
    there = {} if where == "nvme" else {"offload_gradients": {"device": where}}
    kept = section(tmp_path, grads=2) | there
    document = json.loads(planned("--device-memory 80GB --json", kept, tmp_path).stdout)
    assert document["bytes_per_rank"]["gradients"].keys() == {tier}


def test_state_stays_on_a_gpu_within_its_budget(tmp_path):
    """A subgroup for each 65536 parameters; what stays there takes neither kernel nor PCIe nor NVMe."""
    config = section(tmp_path)
    config["zero_optimization"]["sub_group_size"] = 65536
    rates = "--gpu-memory 80GB --pcie 10GB/s --flops 1e12 --read-bw 2GB --write-bw 2GB --json"
    found = [json.loads(planned(rates, config | more, tmp_path).stdout) for more in ({}, {"device_budget": "5.5MB"})]
    held = [document["bytes_per_rank"]["optimizer state"] for document in found]
    assert held[0].keys() == {"nvme"}
    assert 5e6 < held[1]["device"] <= 5.5e6
    assert sum(held[1].values()) == held[0]["nvme"]
    share = held[1]["nvme"] / held[0]["nvme"]
    for part in ("nvme", "update", "pcie"):
        assert found[1]["iteration"][part] == pytest.approx(share * found[0]["iteration"][part], rel=0.1)


def test_micro_batches_follow_from_the_batch_keys(tmp_path):
    def traffic(ranks, **batch_keys):
        document = json.loads(planned(f"--ranks {ranks} --json", {**derived, **batch_keys}, tmp_path).stdout)
        return document["traffic_per_rank_and_step"]

    derived = section(tmp_path, params=2, grads=2)
    del derived["gradient_accumulation_steps"]
    for ranks, steps in ((1, 8), (2, 4)):
        batch = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1}
        assert traffic(ranks, **batch) == traffic(ranks, gradient_accumulation_steps=steps)


@pytest.mark.parametrize(("ranks", "changes", "words"), [
    (3, {"train_batch_size": 8}, "train_batch_size = 8: is no multiple"),
    (1, {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}, "write 2"),
], ids=["ranks", "batch keys"])  # fmt: skip
def test_a_section_that_initialize_refuses_is_refused(ranks, changes, words, tmp_path):
    result = planned(f"--ranks {ranks}", section(tmp_path, params=2) | changes, tmp_path)
    assert result.exit_code == 2
    assert words in result.output


def test_with_stage_0_every_rank_has_all_parameters(tmp_path):
    def moved(ranks, stage):
        config = section(tmp_path)
        config["zero_optimization"]["stage"] = stage
        document = json.loads(planned(f"--ranks {ranks} --json", config, tmp_path).stdout)
        return sum(kind["read"] + kind["written"] for kind in document["traffic_per_rank_and_step"].values())

    assert moved(2, stage=0) == moved(1, stage=3)
    assert moved(2, stage=3) < 0.6 * moved(1, stage=3)


def test_a_bench_that_did_not_measure_the_drives_is_refused(tmp_path):
    for changes, words in (
        ({}, ""),
        ({"verified": False}, "the null engine moves no bytes"),
        ({"engine": {"direct": False}}, "--direct required"),
        ({"of_write": {"summary": {"total_bytes": 0, "total_seconds": 1.0}}}, "is no result"),
    ):
        file = write_bench(tmp_path / "bench.json", **changes)
        result = plan(f"--params 1e6 --layers 2 --host-memory 16GiB --bench {file}")
        assert result.exit_code == (2 if words else 0)
        assert words in " ".join(result.output.split())


BAD = {
    "--flops 0": "--flops 0.0: must be more than 0", "--update-rate inf": "--update-rate inf", "--tbw -5": "--tbw -5.0",
    "--tbw nan": "--tbw nan", "--mixed-bw 0": "--mixed-bw 0", "--capacity 0": "--capacity 0",
    "--vocab -100": "no whole number", "--hidden -64": "no whole number", "--layers 2.9": "no whole number",
    "--params nan": "no whole number", "--params 1e30": "no whole number from 1 to 1e+15",
    "--bench bench.json": "rates of drives come from --bench, or",
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), [
    ("", "which model"), ("--params 1e6 --layers 0", "--layers"),
    ("--params 1e6 --layers 2 --ranks 3 --ranks-per-node 2", "no multiple"),
    ("--params 1e6 --layers 2 --read-bw 1GB", "--write-bw"),
    *((f"--params 1e6 --layers 2 --read-bw 1GB --write-bw 1GB {option}", words) for option, words in BAD.items()),
    ("--model /nowhere/config.json", "there is no such file"),
    ("--params 1e6 --layers 2 --bench /nowhere/bench.json", "No such file"),
])  # fmt: skip
def test_bad_values_are_told_in_words(arguments, words):
    result = plan(arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_the_page_has_every_option():
    page = (Path(__file__).parents[3] / "docs" / "plan.md").read_text()
    names = {(option.secondary_opts or option.opts)[0] for option in load("plan").params}
    assert {"--params", "--no-checkpointing"} <= names
    assert not [name for name in sorted(names) if f"`{name}`" not in page]


LOADED = """
import nvme_offload
nvme_offload.initialize
from transformers import LlamaForCausalLM
from nvme_offload.offload.host.proc import status_field
print(int(status_field("VmHWM").split()[0]) * 1024)
"""


@pytest.mark.slow  # only another torch has another weight, or one with more beside it
def test_the_libraries_weigh_what_is_planned_for_them():
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    # A torch for CUDA loads more, which is not counted: see docs/plan.md.
    assert torch.version.cuda or 0.75 * LIBRARIES_BYTES < int(done.stdout) < 1.05 * LIBRARIES_BYTES


def job_of(shape, config, rank=0):
    with torch.device("meta"):
        model = LlamaForCausalLM(shape)
    described = ModelShape.of_module(model, name="llama", config=shape)
    if rank:
        described = described.with_lora(Lora(rank))
    given = {"tokens": TOKENS, "checkpointing": False, "baseline_bytes": 0}
    return Job(shape=described, config=OffloadConfig.from_dict(config), **given)


@pytest.mark.parametrize(("name", "itemsize"), [("AdamW", 10), ("Adam", 10), ("Lion", 6), ("Adagrad", 6), ("SGD", 2)])
def test_it_asks_the_rule_of_the_section(tmp_path, name, itemsize):
    params = {"adam_w_mode": False} if name == "Adam" else {}
    job = job_of(llama(), section(tmp_path, optimizer={"type": name, "params": params}))
    written = predict(job, MACHINE).traffic["optimizer state"].total.written
    assert written == pytest.approx(itemsize * job.shape.numel, rel=0.01)


def test_a_matrix_that_its_rule_needs_whole_and_no_staging_buffer_holds_is_named(tmp_path):
    config = section(tmp_path, optimizer={"type": "Muon"})
    config["zero_optimization"]["offload_optimizer"]["staging_budget"] = "3MiB"
    with pytest.raises(ConfigError, match=r"Muon needs matrices whole.* parameter of \d+ elements"):
        predict(job_of(llama(intermediate_size=10_000), config), MACHINE)


AUTOCAST = {**NO_BF16, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


SIZES_IN = [({}, 2, 34), (NO_BF16, 4, 66), (AUTOCAST, 4, 34)]


@pytest.mark.parametrize(
    ("keep", "budget", "sizes"), each_value_once(["boundaries", "attention", "all"], [1 * GiB, "auto"], SIZES_IN)
)
def test_activations_on_the_drive_are_counted(keep, budget, sizes):
    """What is kept of a forward is in memory within the budget, and beyond it moves once each way."""
    shape, (dtype, between, inside) = ModelShape.of_numbers(int(1e9), 20, 2048), sizes
    per_token = {"boundaries": between * 2048, "attention": 2 * between * 2048, "all": inside * 2048}[keep]
    machine = Machine(host_memory=16 * GiB, drives=Drives.of_rates(2e9, 1e9), capacity=500 * GiB, flops=1e12)
    predictions = []
    for device in ("none", "nvme"):
        place = {"keep": keep, "device": device, "host_budget": budget}
        place |= {"nvme_path": "/mnt"} if device == "nvme" else {}
        config = OffloadConfig.from_dict(section("/mnt", accumulation=2, activations=place, **dtype))
        job = Job(shape=shape, config=config, tokens=100_000, checkpointing=keep != "all")
        predictions.append(predict(job, machine))
    plain, moved = predictions
    kept = 20 * 100_000 * per_token
    in_memory = moved.tiers.bytes_on("host", "kept activations")
    assert in_memory + moved.tiers.bytes_on("nvme", "kept activations") == kept
    assert in_memory == min(kept, GiB) if budget == GiB else in_memory <= 12 * GiB
    traffic = moved.traffic.get("kept activations")
    beyond = kept - in_memory
    assert (traffic.total.read, traffic.total.written) == (2 * beyond, 2 * beyond) if beyond else traffic is None
    # Without the section a layer that is not computed again is kept once, and results of attention are not.
    more = {"boundaries": 0, "attention": kept // 2, "all": 100_000 * per_token}[keep]
    assert plain.tiers.bytes_on("host") - moved.tiers.bytes_on("host") == beyond - more
    assert moved.time.seconds >= plain.time.seconds
    # Copies to staging buffers and back take the processors that compute.
    assert moved.time.work.compute - plain.time.work.compute == pytest.approx(4 * beyond / machine.copy_rate)


@pytest.mark.parametrize("blocks", [8, *(pytest.param(few, marks=pytest.mark.slow) for few in (1, 4))])
def test_bytes_of_activations_block_by_block_are_predicted(blocks, tmp_path, alone):
    """Gradients of what enters a block stay in memory where there is room, and nothing is read that takes it."""
    layers, width, tokens = 16, 64, 64
    entering = 2 * 2 * width * tokens  # a block in two micro-batches
    place = {"device": "nvme", "nvme_path": str(tmp_path), "host_budget": blocks * entering, "min_bytes": 0}
    config = section(tmp_path, grads=2, accumulation=2, micro_batch_order="vertical", activations=place)
    shape = ModelShape.of_numbers(layers * width**2, layers, width)
    job = Job(shape=shape, config=OffloadConfig.of(config), tokens=tokens, checkpointing=False)
    planned = predict(job, MACHINE).traffic["kept activations"].total
    with Training(SleepingModel(width, layers), torch.randn(tokens, width), config, births=2) as training:
        before = training.moved()
        training.seconds(2)
        after = training.moved()
    for way, expected in ("read", planned.read), ("written", planned.written):
        name = f"kept_bytes_{way}"
        # On a busy machine what is read before its write has ended is taken from the buffer, and is not read.
        assert (after[name] - before[name]) / 3 == pytest.approx(expected, abs=6 * entering)


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_activations_leave_a_gpu(device):
    """To the host as far as the budget goes, which takes copies; the rest to the drive, or it stays."""
    place = {"keep": "boundaries", "device": device, "host_budget": 1 * GiB}
    place |= {"nvme_path": "/mnt"} if device == "nvme" else {}
    shape = ModelShape.of_numbers(int(1e9), 20, 2048)
    found = []
    for activations in ({}, {"activations": place}):
        config = OffloadConfig.from_dict(section("/mnt", **activations))
        rates = {"drives": Drives.of_rates(2e9, 1e9), "flops": 1e14, "pcie": 1e9}
        machine = Machine(host_memory=64 * GiB, device_memory=80 * GiB, **rates)
        found.append(predict(Job(shape=shape, config=config, tokens=100_000, checkpointing=True), machine))
    plain, moved = found
    kept = 20 * 100_000 * 2048 * 2
    on = {tier: moved.tiers.bytes_on(tier, "kept activations") for tier in ("device", "host", "nvme")}
    assert on == {"device": 0, "host": 1 * GiB, "nvme": 0} | {"nvme" if device == "nvme" else "device": kept - 1 * GiB}
    assert plain.tiers.bytes_on("device") - moved.tiers.bytes_on("device") == kept - on["device"]
    copied = 2 * (on["host"] + on["nvme"]) / 1e9
    assert moved.time.work.pcie - plain.time.work.pcie == pytest.approx(copied)


def test_the_plan_says_how_activations_are_kept_fastest(tmp_path):
    place = {"device": "nvme", "nvme_path": "/mnt", "host_budget": "1GiB"}
    moments = {"type": "AdamW", "params": {"state_dtype": "bf16"}}
    config = section("/mnt", activations=place, optimizer=moments)
    model = "--params 1e9 --layers 20 --hidden 2048 --tokens 65536"
    rates = "--read-bw 2GB --write-bw 1GB --host-memory 64GiB"
    short, long = "--sequence 1024", "--sequence 65536"
    for flops, fastest, more in ((1e10, "all", ""), (1e14, "boundaries", short), (1e13, "attention", long)):
        done = plan(f"{model} {rates} --flops {flops} {more}", config, tmp_path)
        words = " ".join(done.output.split())
        assert ("attention" in words.split("activations.keep:")[1]) == bool(more)
        assert "Activations: boundaries, 4,096 bytes for each token and layer" in words
        assert f"fastest: {fastest}" in words
        assert "AdamW keeps exp_avg (bfloat16), exp_avg_sq (bfloat16)" in words
