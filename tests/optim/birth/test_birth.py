"""Models built on the meta device: the values of an ordinary construction, block by block, onto any tier."""

import copy
import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from nvme_offload import ConfigError, StateError, WeightsError, initialize, weight_items, write_sharded
from tests.support.ranks import run_ranks
from tests.support.sharded_model import VOCABULARY, Model, assert_same, full_state
from tests.support.small_engine import BF16, backward, section
from tests.support.training import run_child

STEPS = 2
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
TOKENS = torch.arange(20).view(2, 10)


def on_meta(build=Model):
    with torch.device("meta"):
        return build()


def seeded(seed, build=Model):
    torch.manual_seed(seed)
    return build()


def trained(rank, model, config, **options):
    """The whole state before and after some steps, and the random numbers' state in between."""
    with initialize(model, config, **options) as engine:
        random = torch.get_rng_state()
        assert {value.dtype for value in engine.module.state_dict().values()} == {torch.float32}
        born = full_state(engine.module, engine.optimizer)
        for step in range(STEPS):
            backward(engine, rank, step)
            engine.step()
        return born, full_state(engine.module, engine.optimizer), random


def assert_trained_the_same(ours, theirs):
    for one, other in zip(ours[:2], theirs[:2], strict=True):
        assert_same(one, other)


EVERY_MODE = ((BF16, (True, False)), ({}, (True,)), (AUTOCAST, (True,)))
"""Sections, and whether the state is on the drive."""


def born_and_built(rank, folder, modes):
    """Meta-born from initialisers and from files, beside models built and loaded on the CPU."""
    source = seeded(7).state_dict()
    save_file({name: value for name, value in source.items() if name != "head.weight"}, folder / f"{rank}.safetensors")
    for mode, on_drive in modes:
        built = trained(rank, seeded(0), section(**mode))
        filled = trained(rank, seeded(7), section(**mode))
        for path in (folder / "drive" if away else None for away in on_drive):
            torch.manual_seed(rank)  # another one on every rank: rank 0 counts
            before = torch.get_rng_state()
            born = trained(rank, on_meta(), section(path=path, **mode))
            assert_trained_the_same(born, built)
            assert torch.equal(born[2], before if rank else built[2])
            loaded = trained(rank, on_meta(), section(path=path, **mode), weights=folder / f"{rank}.safetensors")
            assert_trained_the_same(loaded, filled)


def write_from_every_rank(rank, world_size, folder):
    with initialize(seeded(0), section(**BF16)) as engine:
        files = write_sharded(folder / "out", weight_items(engine.module), dtype=None, max_shard_bytes=20_000)
        assert len(files) > 1
        expected = {name: value.full_tensor() for name, value in weight_items(engine.module)}
        assert_same({name: value for file in files for name, value in load_file(file).items()}, expected)
        (folder / "file").touch()
        with pytest.raises(OSError, match="the weights were not written"):  # rank 0 finds it; all are told
            write_sharded(folder / "file" / "out", weight_items(engine.module))


def on_rank(rank, world_size, folder):
    (folder / "drive").mkdir(exist_ok=True)
    write_from_every_rank(rank, world_size, folder)
    born_and_built(rank, folder, [(BF16, (True,))])
    hybrid = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))  # each rank has all of it
    built = trained(rank, seeded(0), section(**BF16), mesh=hybrid)
    torch.manual_seed(rank)
    assert_trained_the_same(trained(rank, on_meta(), section(**BF16), mesh=hybrid), built)


def test_born_is_built_bit_for_bit_on_two_ranks(tmp_path):
    run_ranks(on_rank, 2, tmp_path)
    assert not list((tmp_path / "drive").iterdir())


def test_born_is_built_bit_for_bit_alone(alone, tmp_path):
    (tmp_path / "drive").mkdir()
    born_and_built(0, tmp_path, EVERY_MODE)
    assert not list((tmp_path / "drive").iterdir())


def test_steps_of_a_model_that_was_born_are_hidden(alone):
    """Its shards get their parts after their state has its place."""
    with initialize(on_meta(), {**section(**BF16), "overlap_step": "forward"}) as engine:
        backward(engine, 0, 0)
        engine.step()
        engine.optimizer.synchronize()
        stats = engine.optimizer.stats()
        assert stats.updates_behind == stats.num_subgroups > 0


class Attending(nn.Module):
    """Initialisers that reach into children, running statistics, and 16-bit parameters."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.attention = nn.ModuleList(nn.MultiheadAttention(16, 2) for _ in range(2))
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, VOCABULARY, dtype=torch.bfloat16)


def test_values_and_buffers_of_many_modules_are_those_of_a_construction(alone):
    wanted = seeded(3, Attending)
    torch.manual_seed(3)
    with initialize(on_meta(Attending), section()) as engine:
        found = engine.module.state_dict()
        assert found.keys() == wanted.state_dict().keys()
        for name, value in wanted.state_dict().items():
            ours = found[name].full_tensor() if isinstance(found[name], DTensor) else found[name]
            assert torch.equal(ours, value.float() if value.dtype is torch.bfloat16 else value), name


class Scale(nn.Module):
    """As they are often written: nothing can fill it once it is on meta."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))


class Rotating(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("frequencies", torch.arange(4.0), persistent=False)
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).tril(), persistent=False)


class Meddling(nn.Module):
    """Changes its blocks' parameters, which are elsewhere by the time it is asked."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def reset_parameters(self):
        for parameter in self.parameters():
            parameter.data.mul_(2)


class Idle(nn.Linear):
    def reset_parameters(self):
        nn.init.zeros_(self.bias)


def fill(module):
    if isinstance(module, Scale):
        nn.init.ones_(module.weight)
    if isinstance(module, Rotating):
        module.frequencies.copy_(torch.arange(4.0))
        module.mask = torch.ones(4, 4, dtype=torch.bool).tril()


def scaled():
    return nn.Sequential(nn.Linear(8, 8), Scale())


def test_what_nobody_fills_is_named_before_anything_changes(alone, tmp_path):
    config = section(path=tmp_path, **BF16)
    for build, message in (
        (
            scaled,
            r"no initialiser gives a value to 1\.weight of shape \(8,\) \(in Scale\): .* pass init= to initialize",
        ),
        (Rotating, r"a value to frequencies of shape \(4,\) \(in Rotating\), mask of shape \(4, 4\)"),
    ):
        model = on_meta(build)
        with pytest.raises(ValueError, match=message):
            initialize(model, config)
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert not list(tmp_path.iterdir())
        with initialize(model, config, init=fill) as engine:
            for name, buffer in build().named_buffers():
                assert torch.equal(engine.module.get_buffer(name), buffer)
    assert engine.module.mask.dtype is torch.bool


def test_initialisers_that_fail_to_fill_or_reach_too_far_leave_nothing(alone, tmp_path):
    for build, message in (
        (lambda: Idle(4, 4), r"no initialiser gives a value to weight of shape \(4, 4\) \(in .*Idle\)"),
        (Meddling, r"initialising the model \(.*Meddling\) writes to a parameter that is not in memory"),
    ):
        with pytest.raises(ValueError, match=message):
            initialize(on_meta(build), section(path=tmp_path, **BF16))
        assert not list(tmp_path.iterdir())


def test_buffers_that_no_file_holds_are_filled_beside_loaded_weights(alone, tmp_path):
    wanted = seeded(1, Rotating)
    save_file(wanted.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="a value to frequencies"):
        initialize(on_meta(Rotating), section(), weights=tmp_path)
    with initialize(on_meta(Rotating), section(), weights=tmp_path, init=fill) as engine:
        assert torch.equal(engine.module.frequencies, wanted.frequencies)
        assert torch.equal(engine.module.linear.weight.full_tensor(), wanted.linear.weight)


def frozen(model):
    model.blocks[0].requires_grad_(False)
    return model


def test_frozen_parameters_are_born_too(alone, tmp_path):
    for mode in (BF16, {}):
        built = trained(0, frozen(seeded(0)), section(**mode))
        torch.manual_seed(0)
        assert_trained_the_same(trained(0, frozen(on_meta()), section(path=tmp_path, **mode)), built)


def test_files_that_do_not_fit_are_refused_before_anything_changes(alone, tmp_path):
    good = {name: value for name, value in seeded(0).state_dict().items() if name != "head.weight"}
    drive, file = tmp_path / "drive", tmp_path / "model.safetensors"
    drive.mkdir()
    renamed = {name.replace("blocks.0.0.bias", "blocks.0.0.bais"): value for name, value in good.items()}
    cases = [
        ({**good, "embedding.weight": torch.zeros(3, 37)}, r"embedding\.weight has shape \(3, 37\) in .*\(61, 37\)"),
        ({**good, "extra": torch.zeros(1)}, "extra is in no place of the model"),
        ({**good, "blocks.0.0.bias": torch.zeros(131, dtype=torch.int8)}, "blocks.0.0.bias is torch.int8"),
        (renamed, r"blocks\.0\.0\.bias of shape \(131,\) is missing; the nearest name in the files is blocks.0.0.bais"),
        ({"other": torch.zeros(1)}, r"embedding\.weight \(also called head\.weight\) of shape .* is missing"),
    ]
    model = on_meta()
    for tensors, message in cases:
        save_file(tensors, file)
        with pytest.raises(WeightsError, match=message):
            initialize(model, section(path=drive, **BF16), weights=file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(WeightsError, match="damaged"):
        initialize(model, section(path=drive, **BF16), weights=file)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert not list(drive.iterdir())
    assert not dist.is_initialized()
    save_file(good, file)
    with initialize(model, section(path=drive, **BF16), weights=tmp_path) as engine:  # the same model, now with a fit
        assert torch.equal(engine.module.state_dict()["head.weight"].full_tensor(), good["embedding.weight"])


class Codes(nn.Module):
    """It holds codes and their scale as buffers, and knows what to do with them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("codes", torch.arange(16.0).view(4, 4).to(torch.float8_e4m3fn))
        self.register_buffer("scale", torch.tensor(0.5))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("said", [{"quant_method": "of a library"}, None, "[" * 100_000])
def test_codes_are_no_weights_whatever_is_said_of_them(alone, tmp_path, dtype, said):
    weight = torch.randn(4, 4).mul(9).to(dtype)
    save_file({"weight": weight, "bias": torch.zeros(4)}, tmp_path / "model.safetensors")
    if said is not None:
        text = said if isinstance(said, str) else json.dumps({"quantization_config": said})
        (tmp_path / "config.json").write_text(text)
    for weights in (tmp_path, tmp_path / "model.safetensors"):
        model = on_meta(lambda: nn.Linear(4, 4))
        with pytest.raises(WeightsError, match=rf"weight is {dtype} in model.safetensors; the model has") as refused:
            initialize(model, section(**BF16), weights=weights)
        assert ("quant_method = 'of a library'), and the model has no" in str(refused.value)) is isinstance(said, dict)
        assert ("let the library that reads them" in str(refused.value)) is (
            isinstance(said, dict) or dtype is not torch.int8
        )


def test_a_model_with_places_for_codes_and_scales_gets_both(alone, tmp_path):
    wanted = seeded(1, Codes)
    save_file(wanted.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    with initialize(on_meta(Codes), section(), weights=tmp_path) as engine:
        assert torch.equal(engine.module.codes.view(torch.uint8), wanted.codes.view(torch.uint8))
        assert torch.equal(engine.module.scale, wanted.scale)


def llama(tied):
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    return lambda: LlamaForCausalLM(config)


def initialised_again(model, seed):
    """What Hugging Face's own initialisers give a model that is complete."""
    for module in model.modules():
        module._is_hf_initialized = False
    torch.manual_seed(seed)
    model.initialize_weights()
    return model


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_llama_from_its_own_initialisers_and_from_saved_folders(alone, tmp_path, tied):
    wanted = initialised_again(llama(tied=False)(), 5)
    if tied:
        wanted.lm_head.weight = wanted.model.embed_tokens.weight
        wanted.config.tie_word_embeddings = True
    wanted.save_pretrained(tmp_path / "single")
    wanted.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    expected = {mode: trained_llama(copy.deepcopy(wanted), mode) for mode in ("fp32", "bf16")}
    with torch.no_grad():
        assert torch.equal(expected["fp32"]["before"], wanted(TOKENS).logits)
    for weights, modes in (
        (None, expected),
        (tmp_path / "single", ["fp32"]),
        (tmp_path / "sharded", ["bf16"]),
        (tmp_path / "sharded" / "model.safetensors.index.json", ["fp32"]),
    ):
        for mode in modes:
            torch.manual_seed(5)
            assert_same(trained_llama(on_meta(llama(tied)), mode, weights=weights), expected[mode])


def trained_llama(model, mode, **options):
    """Logits before and after a step, and all buffers."""
    with initialize(model, section(**(BF16 if mode == "bf16" else {})), **options) as engine:
        with torch.no_grad():
            before = engine(TOKENS).logits
        for _ in range(2):
            engine.backward(engine(TOKENS, labels=TOKENS).loss)
            engine.step()
        with torch.no_grad():
            after = engine(TOKENS).logits
        return {"before": before, "after": after, **dict(engine.module.named_buffers())}


PEAK_MEMORY = """
import gc, json, sys
from pathlib import Path
import torch
from torch import nn
from nvme_offload.offload.weights.writer import weight_items, write_sharded
from nvme_offload import initialize
from nvme_offload.perf.measure.machine import peak_resident_bytes as peak

folder, num_blocks, width = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
offload = {"device": "nvme", "nvme_path": str(folder / "drive"), "buffer_count": 2, "staging_budget": "16MiB"}
config = {"zero_optimization": {"stage": 3, "offload_optimizer": offload}, "bf16": {"enabled": True}}

def made(width, weights=None):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(num_blocks)))
    return initialize(model, config, weights=weights)

made(64).close()
before = peak()
with made(width) as engine:
    born, staging = peak() - before, engine.optimizer.stats().staging_bytes
    written = engine.optimizer.stats().bytes_written
    read = engine.optimizer.stats().bytes_read
    write_sharded(folder / "out", weight_items(engine.module), max_shard_bytes=50_000_000)
    exported = peak() - before
del engine
gc.collect()
made(width, weights=folder / "out").close()
print(json.dumps({"born": born, "exported": exported, "loaded": peak() - before, "staging": staging,
                  "written": written, "read": read}))
"""


def test_peak_memory_is_the_upper_halves_one_block_and_staging_buffers(tmp_path):
    """Also of writing the weights and of loading them. All of the fp32 weights would be twice the upper halves."""
    (tmp_path / "drive").mkdir()
    num_blocks, width = 10, 2400
    numel, block = num_blocks * width * (width + 1), width * (width + 1)
    measured = json.loads(run_child(PEAK_MEMORY, tmp_path, num_blocks, width))
    slack = 64 << 20  # of the allocator; still far from holding all of the fp32 weights
    assert measured["staging"] <= 16 << 20
    assert measured["born"] <= 2 * numel + 4 * block + measured["staging"] + slack < 4 * numel
    assert max(measured["exported"], measured["loaded"]) <= 2 * numel + 2 * 4 * block + measured["staging"] + slack
    assert 10 * numel <= measured["written"] <= 10.1 * numel, "every subgroup is written once"
    assert measured["read"] == 0


def test_a_birth_that_ends_before_the_optimizer_is_made_leaves_shards_that_say_so(alone, tmp_path):
    model, config = on_meta(), section(path=tmp_path, **BF16)
    config["zero_optimization"]["offload_optimizer"]["staging_budget"] = "64KiB"
    with pytest.raises(ConfigError, match="staging_budget = 64 KiB: each of the"):
        initialize(model, config)
    for use in (lambda weight: weight.full_tensor().clone(), lambda weight: weight.detach().zero_()):
        with pytest.raises(StateError, match=r"a model that was on meta: .*initialize\(\)"):
            use(model.embedding.weight)
