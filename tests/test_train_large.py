"""docs/examples/train_large.py: trains, writes weights that transformers loads, refuses in words what cannot work."""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

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
