"""A fine-tune of adapters on a base that lives on NVMe: the base is gathered from there, and never written again."""

import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from nvme_offload import ClosedError, OffloadAdamW, initialize
from nvme_offload.optim.telemetry import run_record
from tests.support.ranks import on_ranks
from tests.support.sharded_model import SHARDS_CODES, assert_same, full_state
from tests.support.small_llama import LENGTH, llama
from tests.support.tiers import EVERYTHING, Model, section, train_step
from tests.support.training import storage_io

VOCABULARY, RANK = 256, 4
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale": 64}, "bf16": {"enabled": False}}
FP32 = {"bf16": {"enabled": False}}


class Adapted(nn.Module):
    """A frozen Linear and a product of two thin matrices beside it (LoRA, arXiv:2106.09685)."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(RANK, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, hidden):
        return self.base(hidden) + hidden @ self.down.T.to(hidden.dtype) @ self.up.T.to(hidden.dtype)


def adapted_llama(dtype):
    """All of it frozen but for adapters of the queries and values, in the dtype of its weights."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
    model = llama(tie_word_embeddings=True, use_cache=False, **sizes).requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))
    return model.to(dtype)


def fine_tune(model, config, steps=3):
    """Whole state at the end; bytes that the kernel says each step has written; the engine's figures of the base."""
    written = []
    with initialize(model, config) as engine:
        for step in range(steps):
            engine.optimizer.synchronize()
            before = storage_io()[1]
            tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(step))
            for _ in range(engine.gradient_accumulation_steps):
                engine.backward(engine(input_ids=tokens, labels=tokens).loss)
                engine.step()
            engine.optimizer.synchronize()
            written.append(storage_io()[1] - before)
        blocks = engine.optimizer.store.blocks
        of_params = blocks.params.cache.blocks if blocks.params is not None else []
        sizes = {block.name: block.size_bytes for block in of_params}
        whole_state = sum(slot.extent.size_bytes for slot in engine.optimizer.store.slots if slot.extent is not None)
        grads = sum(block.size_bytes for block in blocks.grads.cache.blocks) if blocks.grads is not None else 0
        return full_state(engine.module, engine.optimizer), written, sizes, whole_state + grads


@pytest.mark.parametrize(
    ("keys", "dtype", "itemsize"),
    [(BF16, torch.bfloat16, 2), pytest.param(FP16, torch.float16, 2, marks=pytest.mark.slow), (FP32, torch.float32, 4)],
    ids=["bf16", "fp16", "fp32"],
)
def test_of_the_base_no_byte_is_written_in_a_step(alone, tmp_path, monkeypatch, keys, dtype, itemsize):
    """By the kernel's count, to the byte: what is written is the adapters, their gradients and their state."""
    monkeypatch.setattr(run_record, "SECONDS", math.inf)  # a slow machine notes how the run is in the middle of a step
    expected, *_ = fine_tune(adapted_llama(dtype), section(tmp_path, accumulation=1) | keys)
    model = adapted_llama(dtype)
    base_numel = sum(param.numel() for param in model.parameters() if not param.requires_grad)
    config = section(tmp_path, **EVERYTHING, accumulation=1) | keys
    ours, written, sizes, of_state = fine_tune(model, config)
    assert_same(ours, expected)
    base = sum(size for name, size in sizes.items() if name.endswith("(frozen)"))
    adapters = sum(size for name, size in sizes.items() if not name.endswith("(frozen)"))
    assert base >= itemsize * base_numel > 20 * adapters
    assert min(written[1:]) == adapters + of_state, written  # what a process writes once, as byte code, is in one step


@pytest.mark.parametrize("keys", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def test_a_frozen_block_from_meta_is_born_on_its_tier(alone, tmp_path, keys):
    states = []
    for tiers in ({}, EVERYTHING):
        torch.manual_seed(0)
        with torch.device("meta"):
            model = Model(num_layers=2)
        model.layers[0].requires_grad_(False)
        model.layers[1].up.requires_grad_(False)
        with initialize(model, section(tmp_path, **tiers) | keys) as engine:
            train_step(engine, 0)
            states.append(full_state(engine.module, engine.optimizer))
    assert_same(*states)


def test_a_base_goes_with_its_tier(alone, tmp_path):
    with initialize(adapted_llama(torch.bfloat16), section(tmp_path, param="nvme")) as engine:
        model = engine.module
        with pytest.raises(ValueError, match="is on the parameter tier of another optimizer"):
            OffloadAdamW([model.model.norm.weight], offload={"zero_optimization": {"stage": 3}})
    with pytest.raises(ClosedError, match="the parameter tier"):
        model.model.norm.weight.sum()


AS_STORED = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.int32)

PACKED = (torch.uint8, torch.float4_e2m1fn_x2)  # two codes of 4 bits each


class Quantized(nn.Module):
    """A base in codes of one of these dtypes with its scale, and an adapter."""

    def __init__(self, dtype, rows):
        super().__init__()
        codes = torch.randint(0, 100, (rows, 16))
        self.codes = nn.Parameter(
            codes.to(torch.uint8).view(dtype) if dtype in PACKED else codes.to(dtype), requires_grad=False
        )
        self.register_buffer("scale", torch.tensor(0.002))
        self.adapter = nn.Linear(16, 16)

    def forward(self, hidden):
        codes = self.codes
        assert codes.dtype in (*AS_STORED, *PACKED), "never cast"
        if codes.dtype in PACKED:
            codes = torch.cat((codes.view(torch.uint8) & 15, codes.view(torch.uint8) >> 4))
        base = codes.to(hidden.dtype) * self.scale.to(hidden.dtype)
        return self.adapter(hidden) + hidden @ base.T @ base


def quantized_training(engine, rank):
    """Losses of three steps, and the bytes that a tier of parameters wrote in the last two."""
    losses, written = [], []
    for step in range(3):
        hidden = torch.randn(2, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = engine(hidden).float().square().mean()
        engine.backward(loss)
        engine.step()
        engine.optimizer.synchronize()
        losses.append(loss.item())
        written.append(engine.optimizer.stats().param_bytes_written)
    return losses, written[-1] - written[0]


def as_bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


@SHARDS_CODES
@pytest.mark.parametrize(
    ("ranks", "keys"),
    [
        pytest.param(1, BF16, marks=pytest.mark.slow),
        (1, FP16),
        pytest.param(2, BF16, marks=pytest.mark.slow),
        pytest.param(2, {**FP32, "torch_autocast": {"enabled": True, "dtype": "bf16"}}, marks=pytest.mark.slow),
    ],
    ids=["bf16", "fp16", "bf16 on two ranks", "autocast on two ranks"],
)
@on_ranks("ranks")
def test_a_quantized_base_is_its_bytes_on_the_tier(rank, world_size, tmp_path, keys):
    """The first and the last layer have nothing but codes beside what is trained; the others a frozen norm, too."""
    results = []
    for tiers in ({}, {"param": "nvme", "grads": "nvme", "buffer_count": 3}):
        torch.manual_seed(0)
        # 13 rows: two ranks have shards of different sizes, one of them with padding
        model = nn.Sequential(*(Quantized(dtype, 13) for dtype in AS_STORED), Quantized(torch.uint8, 13))
        for layer in model[1:-1]:
            layer.norm = nn.LayerNorm(16).requires_grad_(False)
        saved = tmp_path / f"saved {len(tiers)}"
        with initialize(model, section(tmp_path, **tiers, accumulation=1) | keys) as engine:
            losses, written = quantized_training(engine, rank)
            weights = {name: value.clone() for name, value in engine.weights("own")}
            engine.save_checkpoint(saved)
            engine.export_safetensors(saved, "bf16")
            with torch.no_grad():
                engine.module[0].codes.zero_()
            engine.load_checkpoint(saved)
            assert all(torch.equal(as_bytes(value), as_bytes(weights[name])) for name, value in engine.weights("own"))
            if tiers:
                blocks = engine.optimizer.store.blocks.params.cache.blocks
                trained = sum(block.size_bytes for block in blocks if not block.name.endswith("(frozen)"))
                assert written == 2 * trained, "not a byte of the base"
                assert sum(p.to_local().untyped_storage().nbytes() for p in engine.module.parameters()) == 0
        results.append((losses, weights, load_file(saved / "model.safetensors")))
    (expected, kept, exported), (losses, weights, files) = results
    assert losses == expected
    assert [weights[f"{number}.codes"].dtype for number in range(5)] == list(AS_STORED)
    for name, value in weights.items():
        assert torch.equal(as_bytes(value), as_bytes(kept[name])), name
        if name.endswith("codes"):
            assert torch.equal(as_bytes(value), as_bytes(files[name])), name
            assert exported[name].dtype is files[name].dtype is value.dtype


@SHARDS_CODES
def test_a_model_of_nothing_but_codes_is_run_from_the_tier(alone, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(Quantized(dtype, 16) for dtype in (*AS_STORED, *PACKED))).requires_grad_(False)
    for layer in model:
        layer.adapter = nn.Identity()
    hidden = torch.randn(2, 16)
    expected = model(hidden)
    with initialize(model, section(tmp_path, param="nvme") | FP32) as engine, torch.no_grad():
        assert torch.equal(engine(hidden), expected)
        assert engine.optimizer.stats().param_bytes_read > 0
