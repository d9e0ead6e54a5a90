"""docs/examples/lora_large.py: adapters are trained over packed weights, which are read where they are."""

import importlib.util
import re

import pytest
import torch
from safetensors.torch import load_file

from tests.support.forked import ROOT


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
    script.main([*arguments, "--steps", "1"])
    assert "step 1: loss 5." in capsys.readouterr().out
