"""A model that is only run: no state, its parameters on NVMe, each read once for a forward."""

import pytest
import torch
from torch import nn

from nvme_offload import initialize
from tests.support.build import section
from tests.support.ranks import on_ranks

WIDTH, DEPTH = 256, 6
BF16 = {"bf16": {"enabled": True}}


def frozen():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))).bfloat16().requires_grad_(False)


def on_nvme(path, **param):
    config = section(path, **BF16)
    config["zero_optimization"]["offload_param"] = {"device": "nvme", "nvme_path": str(path), **param}
    return config


def inputs():
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_forwards_of_a_frozen_model_read_it_once_and_have_its_bits(rank, world_size, tmp_path):
    model = frozen()
    numel = sum(param.numel() for param in model.parameters())
    with torch.no_grad():
        expected = model(inputs())
    own = tmp_path / str(rank)
    own.mkdir()
    with initialize(model, on_nvme(own)) as engine, torch.no_grad():
        engine.eval()
        for _ in range(3):
            assert torch.equal(engine(inputs()), expected)
        before = engine.optimizer.stats()
        for _ in range(6):
            assert torch.equal(engine(inputs()), expected)
        stats = engine.optimizer.stats()
        assert stats.state_bytes == 0
        read = stats.param_bytes_read - before.param_bytes_read
        assert (
            0 < read * world_size / numel / 6 <= 2.4 * 4 / DEPTH
        )  # a bias has a page; two of four buffers keep theirs
        assert stats.param_reads_ahead - before.param_reads_ahead == stats.param_reads - before.param_reads


@pytest.mark.parametrize("buffers", [2, 3, 5, DEPTH])
def test_all_but_two_buffers_keep_what_they_have(alone, tmp_path, buffers):
    with initialize(frozen(), on_nvme(tmp_path, buffer_count=buffers)) as engine, torch.no_grad():
        engine.eval()
        for _ in range(3):
            engine(inputs())
        before = engine.optimizer.stats()
        for _ in range(10):
            engine(inputs())
        stats = engine.optimizer.stats()
    reads = stats.param_reads - before.param_reads
    assert reads <= 10 * (DEPTH - (buffers - 2) if buffers < DEPTH else 0)
    assert (stats.param_reads_ahead - before.param_reads_ahead, stats.param_reads_unused) == (reads, 0)


def test_it_has_no_step_and_says_so(alone, tmp_path):
    with initialize(frozen(), on_nvme(tmp_path)) as engine:
        with pytest.raises(RuntimeError, match="a loss with a graph"):
            engine.backward(engine(inputs()).float().sum())
        with pytest.raises(RuntimeError, match=r"called before engine\.backward"):
            engine.step()


def test_a_llama_generates_the_tokens_that_it_does_in_memory(alone, tmp_path):
    small_llama = pytest.importorskip("tests.support.small_llama", reason="transformers is not installed")
    prompt = torch.randint(small_llama.VOCABULARY, (2, 4), generator=torch.Generator().manual_seed(2))
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = small_llama.llama(torch.bfloat16).eval().generate(prompt, **options)
    model = small_llama.llama(torch.bfloat16).requires_grad_(False)
    numel, forwards = sum(param.numel() for param in model.parameters()), []
    model.register_forward_hook(lambda *unused: forwards.append(1))
    with initialize(model, on_nvme(tmp_path, buffer_count=2)) as engine, torch.no_grad():
        engine.eval()
        for _ in range(2):  # at the end of the first it knows the order
            before, count = engine.optimizer.stats().param_bytes_read, len(forwards)
            assert torch.equal(engine.module.generate(prompt, **options), expected)
        read = engine.optimizer.stats().param_bytes_read - before
        blocks, count = engine.optimizer.store.blocks.params.cache.blocks, len(forwards) - count
        ahead = max(block.size_bytes for block in blocks)  # read ahead at the end, and counted when it is there
        assert 2 * numel * count - ahead <= read <= (2 * numel + 4096 * len(blocks)) * count + ahead


def test_an_encoder_that_generate_calls_itself_is_gathered(alone, tmp_path):
    """Before the model is called; an interrupted one and a step in between change nothing."""
    small_llama = pytest.importorskip("tests.support.small_llama", reason="transformers is not installed")
    prompt = torch.randint(small_llama.VOCABULARY, (2, 4), generator=torch.Generator().manual_seed(2))
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
    with initialize(small_llama.t5(), on_nvme(tmp_path, buffer_count=2)) as engine:
        for _ in range(2):
            engine.train()
            engine.backward(engine(input_ids=prompt, labels=prompt).loss)
            engine.step()
            engine.eval()
            plain = small_llama.t5().eval()
            plain.load_state_dict(dict(engine.weights()), strict=False)  # tied ones come once
            for beams in (1, 3):
                with pytest.raises(ValueError, match="nonsense"):
                    engine.module.generate(prompt, nonsense=True)
                found = engine.module.generate(prompt, num_beams=beams, **options)
                assert torch.equal(found, plain.bfloat16().generate(prompt, num_beams=beams, **options))


@pytest.mark.parametrize("dtype", ["own", "fp32", "fp16"])
def test_weights_come_one_by_one_as_an_export_has_them(alone, tmp_path, dtype):
    model = frozen().requires_grad_(True)
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    kinds = {"own": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
    with initialize(model, on_nvme(tmp_path)) as engine:
        found = {name: value.clone() for name, value in engine.weights(dtype)}
        assert found.keys() == values.keys()
        for name, value in found.items():
            assert value.dtype is kinds[dtype]
            assert torch.equal(value, values[name].to(kinds[dtype]))
        with pytest.raises(ValueError, match="dtype 'int8': must be one of fp32, bf16, fp16, own"):
            engine.weights("int8")
