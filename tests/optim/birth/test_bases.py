"""Frozen parameters that are read where others wrote them: the bits of a run in memory, and nothing is copied."""

import errno
import hashlib
import math
import os
import subprocess
import warnings
from functools import partial
from itertools import product

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.quantizers import AutoHfQuantizer

from nvme_offload import ConfigError, ResumeError, WeightFileError, WeightsError, get_full_param, initialize
from tests.support.engine_tools import PYTHON_ENGINE
from tests.support.failing_drive import FailingFiles
from tests.support.ranks import on_ranks
from tests.support.sandbox import needs_mounts, run_python
from tests.support.sharded_model import GOES_ON, SHARDS_CODES
from tests.support.tiers import section

ROWS, WIDTH = 13, 19
"""Two ranks have shards of different sizes, and tensors lie at odd places of the file."""

KINDS = (
    torch.bfloat16,
    torch.float16,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
)


class Adapted(nn.Module):
    """Codes of one dtype beside a frozen bias, and a thin adapter. What is computed with lies at multiples of 64."""

    def __init__(self, dtype, rows=ROWS, width=WIDTH):
        super().__init__()
        codes = torch.randint(1, 100, (rows, width * max(dtype.itemsize, 1)), dtype=torch.uint8)
        self.codes = nn.Parameter(codes.view(dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(3).to(torch.bfloat16), requires_grad=False)
        self.down = nn.Parameter(torch.randn(3, 2))
        self.up = nn.Parameter(torch.randn(2, 3))

    def reset_parameters(self):
        """Nothing: its values are in files."""

    def forward(self, hidden):
        for name, param in self.named_parameters(recurse=False):
            assert param.data_ptr() % 64 == 0, (name, param.data_ptr() % 64)
        codes = self.codes.contiguous().view(torch.uint8)
        seen = codes.sum(dim=1)[:3].to(hidden.dtype) / 8192
        return hidden + seen + self.bias.to(hidden.dtype) + hidden @ self.down @ self.up


def build(kinds=KINDS, **sizes):
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted(dtype, **sizes) for dtype in kinds))


def publish(folder, model):
    """Files of two, in the layout of the Hugging Face hub's cache: links, in a folder that is read only."""
    (folder / "blobs").mkdir(parents=True)
    save_file(model.state_dict(), folder / "blobs" / "0123")
    (folder / "snapshot").mkdir()
    (folder / "snapshot" / "model.safetensors").symlink_to("../blobs/0123")
    (folder / "blobs" / "0123").chmod(0o444)
    return folder / "snapshot"


def born(folder, config, build=build, **options):
    with torch.device("meta"):
        model = build()
    return initialize(model, config, weights=folder, blocks=["Adapted"], **options)


def train(engine, step, rank=0, *, block_by_block=True):
    """A step of several micro-batches; returns their losses."""

    def loss_of(hidden):
        return engine(hidden).float().square().mean()

    batches = [
        torch.randn(2, 3, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
        for micro in range(engine.gradient_accumulation_steps)
    ]
    if block_by_block:
        losses = engine.accumulate(loss_of, batches)
        engine.step()
        return losses
    losses = []
    for hidden in batches:
        losses.append(loss_of(hidden))
        engine.backward(losses[-1])
        engine.step()
    return losses


def values(engine):
    return {name: value.clone() for name, value in engine.weights("own")}


def assert_same_bytes(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype is value.dtype
        assert torch.equal(*(each[name].reshape(-1).view(torch.uint8) for each in (ours, theirs))), name


def digest(folder):
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def files_of(engine):
    return list(engine.optimizer.store.blocks.bases)


TIERS = {"param": "nvme", "grads": "nvme", "state": "nvme"}


EVERY_WAY = [
    {"frozen": frozen, "block_by_block": block_by_block, "durable": durable}
    for frozen, block_by_block, durable in product((None, "copy"), (True, False), (True, False))
]
SOME_WAYS = [{"frozen": "copy"}, {"block_by_block": False}, {"durable": True}]


@SHARDS_CODES
@pytest.mark.parametrize(
    ("ranks", "precision", "steps"),
    [
        (1, "bf16", 3),
        (2, "bf16", 3),
        *(pytest.param(*one, 20, marks=pytest.mark.slow) for one in ((1, "bf16"), (2, "bf16"), (1, "fp32"))),
    ],
)
@on_ranks("ranks")
def test_adapters_have_the_bits_of_a_run_in_memory(rank, world_size, tmp_path, precision, steps):
    """Every dtype has them, block by block and in a loop, in place and copied, and where a durable run goes on."""
    folder, keys = tmp_path / "base", {"bf16": {"enabled": precision == "bf16"}}
    if rank == 0:
        publish(folder, build())
    torch.distributed.barrier()
    folder /= "snapshot"
    before = digest(folder)

    def run(frozen=None, *, tiers=TIERS, block_by_block=True, durable=False):
        """Losses and weights of all steps, the last of them perhaps in an engine that resumes."""
        config = section(tmp_path, **tiers, **({"frozen": frozen} if frozen else {})) | keys
        if durable:
            config["zero_optimization"]["offload_optimizer"]["durable"] = f"run{frozen}{block_by_block}"
        losses = []
        for some in (range(steps - 1), range(steps - 1, steps)) if durable else (range(steps),):
            with born(folder, config) as engine:
                assert not some[0] or engine.resume() is not None
                losses += [train(engine, step, rank, block_by_block=block_by_block) for step in some]
                assert files_of(engine) == (["model.safetensors"] if tiers and frozen is None else [])
                if files_of(engine):
                    cache = engine.optimizer.store.blocks.params.cache
                    trained = sum(block.size_bytes for block in cache.blocks if not block.name.endswith("(frozen)"))
                    assert sum(cache.tier.space.file_sizes) == trained, "there is not even room for the base"
                weights = values(engine)
        return losses, weights

    losses, weights = run(tiers={})
    for way in EVERY_WAY if steps > 3 else SOME_WAYS if world_size == 1 else SOME_WAYS[-1:]:
        ours = run(**way)
        assert ours[0] == losses, way
        assert_same_bytes(ours[1], weights)
    assert digest(folder) == before


def forward_of_a_base(tmp_path, **offload_param):
    """The folder of a published base of two layers, and a section that reads it in place."""
    folder = publish(tmp_path / "base", build(KINDS[:2], rows=2000))
    return folder, section(tmp_path, **TIERS, **offload_param)


def zero(engine, param):
    with torch.no_grad():
        param.zero_()
    engine.optimizer.synchronize()


def rewrite(file, content):
    """Somebody writes other bytes of the same size."""
    file.write_bytes(content[:-50] + bytes(50))


HARMS = {
    "its mtime_ns was .* leave it alone": rewrite,
    "its size_bytes was": lambda file, content: os.truncate(file, len(content) // 2),
    "": lambda file, content: (file.rename(f"{file}.old"), file.write_bytes(bytes(len(content)))),
}
"""Somebody does this to a file of a base, by what is said; a run goes on with the bytes of one that was replaced."""


@pytest.mark.parametrize("said", HARMS)
def test_a_base_that_changes_is_one_error_that_names_it(alone, tmp_path, said):
    folder, config = forward_of_a_base(tmp_path, buffer_count=2)
    file = (folder / "model.safetensors").resolve()
    with born(folder, config, partial(build, KINDS[:2], rows=2000)) as engine:
        train(engine, 0)
        expected = values(engine)
        file.chmod(0o644)
        HARMS[said](file, file.read_bytes())
        if said:
            with pytest.raises(WeightFileError, match=rf"model.safetensors: {said}"):
                train(engine, 1)
        else:
            assert_same_bytes(values(engine), expected)


@GOES_ON
@pytest.mark.parametrize("first", [0, 2])
def test_a_base_that_cannot_be_read_is_one_error_that_names_it_and_the_step_is_done_again(
    alone, tmp_path, monkeypatch, first
):
    """Its sectors are unreadable in the middle of a run, and then the drive is well again."""
    folder, config = forward_of_a_base(tmp_path, buffer_count=2)
    small = partial(build, KINDS[:2], rows=2000)
    with born(folder, config, small) as engine:
        expected = [train(engine, step) for step in range(2)], values(engine)

    failing = FailingFiles(monkeypatch)
    with born(folder, config | {"aio": {"engine": PYTHON_ENGINE}}, small) as engine:
        extents = [block.extent for block in engine.optimizer.store.blocks.params.cache.blocks]
        failing.fds = [file.fd for extent in extents if extent.is_of_others for file in extent.files]
        losses = [train(engine, 0)]
        failing.left = first
        with pytest.raises(WeightFileError, match=r"model.safetensors.* at offset \d+ .* cannot be read") as found:
            train(engine, 1)
        assert found.value.errno == errno.EIO
        failing.left = math.inf
        losses.append(train(engine, 1))
        assert losses == expected[0]
        assert_same_bytes(values(engine), expected[1])


def on_a_read_only_mount(place):
    """In a child with mounts of its own: nobody can write to the base, and a run has the bits of one before."""
    folder, config = forward_of_a_base(place)
    ends = []
    for is_read_only in (False, True):
        if is_read_only:
            for options in (["--bind", place / "base", place / "base"], ["-o", "remount,ro,bind", place / "base"]):
                subprocess.run(["mount", *map(str, options)], check=True)
            with pytest.raises(OSError, match="Read-only"):
                (folder / "more").touch()
        with born(folder, config, partial(build, KINDS[:2], rows=2000)) as engine:
            ends.append(([train(engine, step) for step in range(2)], values(engine)))
            assert files_of(engine) == ["model.safetensors"]
    assert ends[0][0] == ends[1][0]
    assert_same_bytes(ends[0][1], ends[1][1])


@needs_mounts
def test_a_base_on_a_read_only_mount_is_read_in_place(tmp_path):
    (tmp_path / "own").mkdir()
    code = "import sys, pathlib\nfrom tests.optim.birth import test_bases\nif __name__ == '__main__':\n"
    code += "    test_bases.on_a_read_only_mount(pathlib.Path(sys.argv[1]))\n"
    child = run_python(code, tmp_path, mounts={tmp_path / "own": "tmpfs"})
    assert child.returncode == 0, child.stderr


KEPT = []


class Meddling(Adapted):
    """Does something with its frozen codes each time that it is computed; see `MEDDLES`."""

    def forward(self, hidden):
        result = super().forward(hidden)
        SEEN.append(self.codes.data_ptr())
        MEDDLES[HOW[0]](self.codes)
        return result


def keep_in_a_cycle(codes):
    cycle = [codes[:1]]
    cycle.append(cycle)


@torch.no_grad()
def write(codes):
    codes.view(torch.uint8).zero_()


MEDDLES = {
    "does nothing": id,
    "keeps a view": lambda codes: KEPT.append(codes[:1]),
    "keeps a view in a cycle": keep_in_a_cycle,
    "writes": write,
    "calls a block in between": id,
}
HOW, SEEN = ["does nothing"], []


class Between(nn.Sequential):
    """Calls one of its blocks between others, without gradients."""

    def forward(self, hidden):
        for block in self:
            hidden = block(hidden)
            if HOW[0] == "calls a block in between":
                with torch.no_grad():
                    self[0](hidden)
        return hidden


def meddling():
    torch.manual_seed(0)
    return Between(*(Meddling(dtype, rows=2000) for dtype in KINDS[:5:2]))


@SHARDS_CODES
@pytest.mark.parametrize("how", MEDDLES)
def test_a_frozen_block_is_computed_with_where_it_was_read(alone, tmp_path, monkeypatch, how):
    """Whoever keeps a view of it has its bytes; what is written there is gone behind the block, as with any gather."""
    monkeypatch.setitem(globals(), "HOW", [how])
    for noted in ("SEEN", "KEPT"):
        monkeypatch.setitem(globals(), noted, [])
    folder = publish(tmp_path / "base", meddling())
    config = section(tmp_path, **TIERS, buffer_count=2)
    with warnings.catch_warnings(record=True) as caught, born_meddling(folder, config) as engine:
        warnings.simplefilter("always")
        losses = [train(engine, step) for step in range(3)]
        pool = engine.optimizer.store.blocks.params.cache.pool
        in_buffers = [any(start <= at < start + size for start, size in pool.regions) for at in SEEN]
        found = values(engine)
    said = [one for one in caught if "keeps views of parameters of 0 (frozen)" in str(one.message)]
    assert len(said) == (how == "keeps a view")
    assert any(in_buffers)
    assert all(in_buffers) is (how not in ("keeps a view", "calls a block in between"))
    for view in KEPT[:2]:  # of both micro-batches
        assert torch.equal(view.view(torch.uint8), found["0.codes"][:1].view(torch.uint8))
    HOW[0] = "does nothing"
    with born_meddling(folder, section(tmp_path)) as engine:
        if how == "writes":
            found = {name: value for name, value in found.items() if "codes" in name}
            assert_same_bytes(found, {name: value for name, value in values(engine).items() if name in found})
            return
        assert [train(engine, step) for step in range(3)] == losses
        assert_same_bytes(found, values(engine))


def born_meddling(folder, config):
    with torch.device("meta"):
        model = meddling()
    return initialize(model, config, weights=folder, blocks=["Meddling"])


ROWS_OF_A_FORWARD = (1, 2, 3, 8)


@pytest.mark.parametrize(("ranks", "dtype"), [(1, "float32"), (1, "bfloat16"), (2, "float32"), (2, "bfloat16")])
@on_ranks("ranks")
def test_forwards_of_few_rows_have_the_bits_of_a_model_in_memory(rank, world_size, tmp_path, dtype):
    """Matrices lie at odd places of the file, where torch would compute other bits."""
    torch.manual_seed(0)
    dtype = getattr(torch, dtype)
    plain = nn.Sequential(nn.Linear(67, 33), nn.Linear(33, 67, bias=False), nn.Linear(67, 5)).to(dtype)
    plain[:2].requires_grad_(False)
    if rank == 0:
        (tmp_path / "base").mkdir()
        save_file(plain.state_dict(), tmp_path / "base" / "a.safetensors")
    torch.distributed.barrier()
    inputs = [torch.randn(rows, 67).to(dtype) for rows in ROWS_OF_A_FORWARD]
    for tiers in ({}, TIERS, TIERS | {"frozen": "copy"}):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(67, 33), nn.Linear(33, 67, bias=False), nn.Linear(67, 5)).to(dtype)
        model[:2].requires_grad_(False)
        config = section(tmp_path, **tiers) | {"bf16": {"enabled": dtype is torch.bfloat16}}
        with initialize(model, config, weights=tmp_path / "base", blocks=["Linear"]) as engine:
            assert files_of(engine) == (["a.safetensors"] if tiers == TIERS else [])
            for hidden in inputs:
                for no_grad in (True, False):
                    with torch.set_grad_enabled(not no_grad):
                        assert torch.equal(engine(hidden), plain(hidden)), (len(hidden), tiers)


@pytest.mark.parametrize("durable", [False, True])
def test_a_base_is_not_saved_and_must_be_there_as_it_was(alone, tmp_path, durable):
    """A checkpoint and a durable run ask for it; a copy with the same time of modification is the same file."""
    folder, config = forward_of_a_base(tmp_path)
    if durable:
        config["zero_optimization"]["offload_optimizer"]["durable"] = "run"
    small, saved = partial(build, KINDS[:2], rows=2000), tmp_path / "saved"

    def resumed():
        with born(folder, config, small) as engine:
            if durable:
                engine.resume()
            else:
                engine.load_checkpoint(saved)
            return values(engine)

    with born(folder, config, small) as engine:
        train(engine, 0)
        expected = values(engine)
        if not durable:
            engine.save_checkpoint(saved)
            assert 0 < sum(file.stat().st_size for file in saved.rglob("*.distcp")) < 2000 * WIDTH
    assert_same_bytes(resumed(), expected)
    file = (folder / "model.safetensors").resolve()
    content, before = file.read_bytes(), file.stat()
    file.rename(tmp_path / "old")
    file.write_bytes(content)
    with pytest.raises((ResumeError, ValueError), match=r"model.safetensors is another file .*touch -d @"):
        resumed()
    os.utime(file, ns=(0, before.st_mtime_ns))
    assert_same_bytes(resumed(), expected)


def test_who_writes_to_a_frozen_parameter_gets_a_copy_and_the_file_stays(alone, tmp_path):
    folder, config = forward_of_a_base(tmp_path)
    before = digest(folder)
    with born(folder, config, partial(build, KINDS[:2], rows=2000)) as engine:
        expected = values(engine)
        with pytest.warns(RuntimeWarning, match="are changed: from now on they are in the swap space"):
            zero(engine, engine.module[0].codes)
        train(engine, 0)
        found = values(engine)
        assert not found["0.codes"].any()
        for name in ("0.bias", "1.codes", "1.bias"):
            assert torch.equal(found[name], expected[name]), name
        engine.save_checkpoint(tmp_path / "saved")
    with born(folder, config, partial(build, KINDS[:2], rows=2000)) as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.load_checkpoint(tmp_path / "saved")
        assert_same_bytes(values(engine), found)
    assert digest(folder) == before


def test_what_cannot_be_read_in_place_is_refused_by_name_or_copied(alone, tmp_path, caplog):
    """Wider numbers in the file than in the model; a model with values; none but its own initialisers."""
    (tmp_path / "wide").mkdir()
    model = build(KINDS[:1])
    wide = {name: value.float() for name, value in model.state_dict().items()}
    save_file(wide, tmp_path / "wide" / "model.safetensors")
    small, asked = partial(build, KINDS[:1]), section(tmp_path, **TIERS, frozen="in_place")
    with pytest.raises(
        ConfigError, match=r"0.codes: it is torch.float32 in model.safetensors and kept as torch.bfloat"
    ):
        born(tmp_path / "wide", asked, small)
    with pytest.raises(ConfigError, match="the model has values already"):
        initialize(build(KINDS[:1]), asked)
    with torch.device("meta"), pytest.raises(ConfigError, match="there are no files to read from"):
        initialize(build(KINDS[:1]), asked)
    with born(tmp_path / "wide", section(tmp_path, **TIERS), small) as engine:
        assert "are copied to the swap files once: 0.codes: it is torch.float32" in caplog.text
        assert torch.equal(values(engine)["0.codes"], model[0].codes)


@SHARDS_CODES
def test_a_step_reads_each_byte_of_a_base_twice_and_writes_none(alone, tmp_path):
    """However many micro-batches it has, block by block; and what they read is the base alone, or nearly."""
    layers, kinds = 8, KINDS[2:3] * 8
    folder = publish(tmp_path / "base", build(kinds, rows=1000, width=1000))
    for micro_batches in (1, 8):
        config = section(tmp_path, **TIERS, accumulation=micro_batches, buffer_count=2)
        with born(folder, config, partial(build, kinds, rows=1000, width=1000)) as engine:
            train(engine, 0)
            engine.optimizer.synchronize()
            before = engine.optimizer.stats()
            for step in range(1, 4):
                train(engine, step)
            engine.optimizer.synchronize()
            after = engine.optimizer.stats()
        read = (after.param_bytes_read - before.param_bytes_read) / 3 / (layers * 1000 * 1000)
        assert 1.5 < read < 2.05, read  # less than 2 by what stays in buffers where backward begins
        assert after.param_bytes_written - before.param_bytes_written < 3 * layers * 3 * 4096


def tiny(kind, config=None, **more):
    """A causal language model of transformers, from a configuration written by hand."""
    made = getattr(transformers, config or f"{kind}Config")(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
        **more,
    )
    return getattr(transformers, f"{kind}ForCausalLM")(made)


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_routed_experts": 4}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
CLIP = {"vision_config": {**VISION, "image_size": 8, "patch_size": 4}, "text_config": {**VISION, "vocab_size": 64}}
T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 2}

FAMILIES = {
    "Llama": partial(tiny, "Llama"),
    "Qwen3Moe": partial(tiny, "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
    "Mixtral": partial(tiny, "Mixtral", num_local_experts=4),
    "DeepseekV3": partial(tiny, "DeepseekV3", first_k_dense_replace=1, n_group=2, topk_group=1, **EXPERTS, **LATENT),
    "Glm4Moe": partial(tiny, "Glm4Moe", first_k_dense_replace=1, **EXPERTS),
    "GptOss": partial(tiny, "GptOss", num_local_experts=4),
    "Gemma3": partial(tiny, "Gemma3", config="Gemma3TextConfig"),
    "CLIP": lambda: transformers.CLIPModel(transformers.CLIPConfig(projection_dim=16, **CLIP)),
    "T5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_born_in_place_from_what_it_publishes(alone, tmp_path, family):
    """Experts that are published one by one are read as the fused parameters that a model has of them."""
    torch.manual_seed(0)
    model = FAMILIES[family]().bfloat16()
    model.save_pretrained(tmp_path / "base")
    expected = load_file(tmp_path / "base" / "model.safetensors")
    with torch.device("meta"):
        unborn = FAMILIES[family]().bfloat16().requires_grad_(False)
    next(module for module in unborn.modules() if "Norm" in type(module).__name__).requires_grad_(True)
    config = section(tmp_path, param="nvme", state="nvme", frozen="in_place", buffer_count=8)
    with initialize(unborn, config, weights=tmp_path / "base") as engine:
        assert files_of(engine) == ["model.safetensors"]
        found = values(engine)
        assert_same_bytes(found, expected)
        for name, value in model.named_parameters():
            assert torch.equal(get_full_param(engine.module.get_parameter(name)).to(value.dtype), value), name


def fp8(folder):
    """A model on meta whose modules hold fp8 and scales, and files of it as they are published: all experts apart."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    latent = dict.fromkeys((*LATENT, "moe_intermediate_size"), 128) | {"qk_rope_head_dim": 32, "v_head_dim": 32}
    config = transformers.DeepseekV3Config(
        vocab_size=64, first_k_dense_replace=1, n_group=1, topk_group=1, **{**sizes, **EXPERTS, **latent}
    )
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(config).bfloat16().requires_grad_(False)
    model.model.norm.requires_grad_(True)
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    quantizer = AutoHfQuantizer.from_config(said, pre_quantized=True)
    model.config.quantization_config = quantizer.quantization_config
    quantizer.preprocess_model(model=model)
    files = {}
    for name, param in model.state_dict().items():
        drawn = torch.randint(0, 100, (param.numel() * param.itemsize,), dtype=torch.uint8)
        value, (kept, _, last) = drawn.view(param.dtype).view(param.shape), name.rpartition(".")
        if not kept.endswith("experts") or "shared" in name:
            files[name] = value
            continue
        kind = last.replace("_proj", "_proj.weight")  # of codes and of their scales
        for number, expert in enumerate(value):
            halves = expert.chunk(2) if last.startswith("gate_up") else [expert]
            names = [kind.replace("gate_up", half) for half in ("gate", "up")] if len(halves) == 2 else [kind]
            files |= {f"{kept}.{number}.{n}": half.clone() for n, half in zip(names, halves, strict=True)}
    save_file(files, folder / "model.safetensors")
    return model, files


@SHARDS_CODES
def test_fp8_with_scales_is_born_in_place_where_the_model_holds_both(alone, tmp_path):
    model, files = fp8(tmp_path)
    model.requires_grad_(False).model.norm.requires_grad_(True)
    config = section(tmp_path, param="nvme", state="nvme", frozen="in_place", buffer_count=8)
    with initialize(model, config, weights=tmp_path) as engine:
        assert_same_bytes(values(engine), files)
        assert files_of(engine) == ["model.safetensors"]
    with torch.device("meta"):
        plain = transformers.DeepseekV3ForCausalLM(model.config).requires_grad_(False)
    with pytest.raises(WeightsError, match=r"codes alone are no weights.*preprocess_model"):
        initialize(plain, config, weights=tmp_path)
