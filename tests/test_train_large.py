"""Large models: trained whole, and with adapters alone."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from nvme_offload import initialize
from tests.support.forked import ROOT
from tests.support.sharded_model import SHARDS_CODES, assert_same
from tests.support.tiers import EVERYTHING, section

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"


@pytest.fixture
def train_large(alone):
    """The script as a module, in a process without a launcher."""
    spec = importlib.util.spec_from_file_location("train_large", EXAMPLES / "train_large.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(folder, *more):
    paths = ["--nvme-path", str(folder / "state"), "--output", str(folder / "weights")]
    return [*paths, "--size", "2M", "--sequence", "16", "--keep-parameters", *more]


def test_train_large_trains_and_writes_weights_that_transformers_loads(train_large, tmp_path, capsys):
    train_large.main(arguments(tmp_path, "--steps", "2", "--memory-limit", "64"))
    printed = capsys.readouterr().out
    assert "step 2, loss" in printed
    assert "peak resident memory: " in printed
    assert not list((tmp_path / "state").iterdir())
    shape, numel = train_large.shape_of(2_000_000)
    config = LlamaConfig(vocab_size=train_large.VOCABULARY, tie_word_embeddings=True, **shape)
    config.save_pretrained(tmp_path / "weights")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "weights", dtype=torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == numel >= 2_000_000
    for name, value in load_file(tmp_path / "weights" / "model.safetensors").items():
        assert torch.equal(model.state_dict()[name], value)


def test_train_large_takes_several_micro_batches_with_everything_on_nvme(train_large, tmp_path, capsys):
    places = [argument for argument in arguments(tmp_path) if argument != "--keep-parameters"]
    train_large.main([*places, "--steps", "1", "--micro-batches", "3", "--memory-limit", "64"])
    assert "step 1, loss 10." in capsys.readouterr().out


def test_train_large_refuses_too_little_disk_and_memory_in_words(train_large, tmp_path):
    with pytest.raises(SystemExit, match=r"too little disk: .* are needed and .* are free; free space, choose other"):
        train_large.main([*arguments(tmp_path), "--size", "900000B"])
    with pytest.raises(SystemExit, match=r"resident memory was .* in born: the limit is 0.001 GiB"):
        train_large.main(arguments(tmp_path, "--memory-limit", "0.001"))
    assert not list((tmp_path / "state").iterdir())
    assert not list((tmp_path / "weights").iterdir())


def test_train_large_refuses_a_memory_limit_with_a_unit_of_its_own(train_large, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        train_large.main(arguments(tmp_path, "--memory-limit", "4G"))
    assert "--memory-limit: invalid float value: '4G'" in capsys.readouterr().err


def test_shapes_are_what_their_models_have(train_large):
    for size, least in ((2_000_000, 2e6), (2_000_000_000, 2e9)):
        shape, numel = train_large.shape_of(size)
        assert least <= numel <= 1.35 * least
        model = train_large.build(shape, 8)
        assert sum(parameter.numel() for parameter in model.parameters()) == numel


@pytest.fixture
def script(alone):
    """The script as a module, in a process without a launcher."""
    spec = importlib.util.spec_from_file_location("lora_large", ROOT / "docs" / "examples" / "lora_large.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_packed_product_has_the_bits_of_the_unpacked_one_and_keeps_what_is_packed(script):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    torch.manual_seed(0)
    blocks = torch.randint(256, (6, 2, 16), dtype=torch.uint8)
    scales = torch.randint(120, 130, (6, 2), dtype=torch.uint8)
    theirs = mxfp4.convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].T
    assert torch.equal(script.unpacked(blocks, scales, torch.float32), theirs)
    hidden, plain = (torch.randn(3, 64, generator=torch.manual_seed(1)).requires_grad_() for _ in range(2))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        found = script.packed_linear(hidden, blocks, scales)
    assert {tensor.dtype for tensor in kept} == {torch.uint8}
    expected = plain @ theirs.T
    for product in (found, expected):
        product.square().sum().backward()
    assert torch.equal(found, expected)
    assert torch.equal(hidden.grad, plain.grad)


class Largest(TorchDispatchMode):
    """Knows how many elements the largest tensor of numbers had that was made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.is_floating_point():
            self.numel = max(self.numel, found.numel())
        return found


@SHARDS_CODES
def test_mxfp4_in_place_has_the_bits_of_a_model_in_memory_and_one_expert_is_unpacked(script, tmp_path):
    base, found = tmp_path / "base", {}
    script.write_fake(base, "tiny", 2)
    kinds, config = script.kinds_in(base), json.loads((base / "config.json").read_text())
    for where in ("memory", "in place"):
        with torch.device("meta"):
            model = script.Model(kinds, config, 4)
        if not found:
            weights = script.with_adapters(base, model, tmp_path / "weights")
        of_params = {"frozen": "in_place"} if where == "in place" else {}
        given = section(tmp_path, **(EVERYTHING if of_params else {}), **of_params)
        losses = []
        with initialize(model, given, weights=weights, blocks=["Layer", "Table"]) as engine:
            for step in range(3):
                tokens = torch.randint(256, (2, 1, 12), generator=torch.manual_seed(step))
                losses += engine.accumulate(engine, tokens)
                engine.step()
            assert bool(engine.optimizer.store.blocks.bases) == (where == "in place")
            found[where] = losses, {name: value.clone() for name, value in engine.weights("own")}
    assert found["memory"][0] == found["in place"][0]
    assert_same(found["memory"][1], found["in place"][1])
    packed = load_file(weights / "base1.safetensors")
    assert_same({name: found["in place"][1][name] for name in packed}, packed)
    width, experts = 64, script.Experts({})
    for name, value in packed.items():
        if ".experts." in name:
            experts.register_parameter(name.rpartition(".")[2], nn.Parameter(value, requires_grad=False))
    hidden = torch.randn(9, width).bfloat16().requires_grad_()
    with Largest() as largest:
        experts(hidden, torch.ones(9, 4).bfloat16(), torch.arange(4).repeat(9, 1)).sum().backward()
    assert largest.numel == 2 * width * width, "of four experts one is unpacked at a time"


@SHARDS_CODES
def test_it_reads_the_base_in_place_and_writes_adapters_alone(script, tmp_path, capsys):
    model, drive = tmp_path / "model", tmp_path / "drive"
    arguments = ["--model", str(model), "--nvme-path", str(drive), "--micro-batches", "4", "--sequence", "16"]
    script.main([*arguments, "--fake", "tiny", "--layers", "3", "--steps", "3"])
    said = capsys.readouterr().out
    moved = [(int(read), int(written)) for read, written in re.findall(r"(\d+) B read, (\d+) B written", said)]
    base = sum(path.stat().st_size for path in model.iterdir())
    assert len(moved) == 3
    assert all(read < 3 * base and written < base / 4 for read, written in moved[1:]), (moved, base)
    assert "peak resident memory: " in said
    trained = load_file(drive / "lora_large" / "trained" / "model.safetensors")
    first = load_file(drive / "lora_large" / "adapters.safetensors")
    assert trained.keys() == first.keys()
    assert not any(torch.equal(trained[name], first[name]) for name in first)
    script.main([*arguments, "--steps", "1", "--skip-experts"])
    said = capsys.readouterr().out
    assert "step 1: loss 5." in said
    assert int(re.search(r"(\d+) B read", said)[1]) > 1.9 * base, (
        "all of a block is read, also what is not computed with"
    )
