"""Weights exported as safetensors: what the library and Hugging Face read is what was trained."""

import errno
import json
import os
import stat
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from nvme_offload import CheckpointWriteError, WeightsError, initialize, weight_items, write_sharded, write_trace
from nvme_offload.offload.weights import writer as safetensors_writer
from nvme_offload.offload.weights.reader import SafetensorsReader
from tests.support.ranks import on_ranks
from tests.support.resuming import fresh_engine, next_loss, steps_of
from tests.support.sharded_model import assert_same, full_state

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MODES_AND_DTYPES = {"fp32": ("fp32", "bf16"), "bf16": ("bf16", "fp16"), "fp16": ("fp16", "fp32")}


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def read(folder):
    """As Hugging Face does: through the index if there is one."""
    if "model.safetensors" in names_in(folder):
        return load_file(folder / "model.safetensors")
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {}
    for name in sorted(set(weight_map.values())):
        tensors |= load_file(folder / name)
    assert {name: weight_map[name] for name in tensors} == weight_map
    return tensors


@on_ranks(2)
def test_two_ranks(rank, world_size, tmp_path):
    for mode, dtypes in MODES_AND_DTYPES.items():
        with fresh_engine(mode) as engine:
            steps_of(engine, rank, range(1))
            next_loss(engine)
            engine._drop_gathered()
            wanted = full_state(engine.module, engine.optimizer)
            for dtype in dtypes:
                torch_dtype, folder = DTYPES[dtype], tmp_path / mode / dtype
                paths = engine.export_safetensors(folder, dtype, max_shard_bytes="300KB")
                tensors = read(folder)
                assert len(paths) > 1
                assert set(names_in(folder)) == {*(path.name for path in paths), safetensors_writer.INDEX_FILE}
                assert "head.weight" not in tensors, "tied weights are stored once"
                assert tensors.keys() == engine.module.state_dict().keys() - {"head.weight"}
                for name, value in tensors.items():
                    if name == "num_batches":
                        assert value.dtype is torch.int64
                        continue
                    if (mode, dtype) == ("bf16", "bf16"):  # the upper halves: exact ties go away from zero
                        torch.testing.assert_close(value, wanted[name].to(torch_dtype), rtol=2**-7, atol=0)
                    else:
                        assert torch.equal(value, wanted[name].to(torch_dtype)), name
                    assert value.dtype is torch_dtype
            assert engine.save_16bit_model(tmp_path / mode / "16bit")
            assert names_in(tmp_path / mode / "16bit") == ["model.safetensors"]
            expected = read(tmp_path / mode / ("fp16" if mode == "fp16" else "bf16"))
            for name, value in read(tmp_path / mode / "16bit").items():
                assert torch.equal(value, expected[name]), name
            with safe_open(tmp_path / mode / "16bit" / "model.safetensors", "pt") as file:
                assert file.metadata() == {"format": "pt"}
    with fresh_engine("fp32") as engine:
        if rank == 1:
            engine.module.wide[0].weight.detach().to_local().fill_(1e6)
        with pytest.raises(ValueError, match=r"wide\.0\.weight has weights beyond 65504, which fp16 cannot hold"):
            engine.export_safetensors(tmp_path / "beyond", "fp16")
        if rank == 0:  # which wrote, and has cleaned up
            assert names_in(tmp_path / "beyond") == []


@pytest.mark.usefixtures("alone")
def test_hugging_face_reads_it(tmp_path):
    model = pytest.importorskip("tests.support.small_llama").llama(tie_word_embeddings=True)
    model.config.save_pretrained(tmp_path)
    kind = type(model)
    section = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}}
    with initialize(model, section) as engine:
        tokens = torch.arange(12).view(2, 6)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        engine.export_safetensors(tmp_path, max_shard_bytes="10KiB")
        assert len(names_in(tmp_path)) > 4
        for expected in (torch.float32, torch.bfloat16):
            read_back = kind.from_pretrained(tmp_path, dtype=expected)
            assert read_back.lm_head.weight is read_back.model.embed_tokens.weight
            for name, value in engine.module.state_dict().items():
                torch.testing.assert_close(
                    read_back.state_dict()[name].float(),
                    value.full_tensor(),
                    rtol=0 if expected.itemsize == 4 else 2**-7,
                    atol=0,
                )
            engine.save_16bit_model(tmp_path)
            assert names_in(tmp_path) == ["config.json", "model.safetensors"], "the old files are gone"


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks("world_size")
def test_fused_experts_have_the_names_and_shapes_that_are_published(rank, world_size, tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))
    if rank == 0:
        model.save_pretrained(tmp_path / "theirs")
    own = {name: value.clone() for name, value in model.state_dict().items()}
    section = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    with initialize(model, section) as engine:
        engine.export_safetensors(tmp_path / "ours", max_shard_bytes="20KiB")
        engine.export_safetensors(tmp_path / "fused", published=False)
        handed_on = dict(engine.weights())
        with warnings.catch_warnings(record=True) as said, pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("always")
            patch.setattr(transformers.modeling_utils, "revert_weight_conversion", Mock(side_effect=ValueError("no")))
            engine.export_safetensors(tmp_path / "said")
    assert any("published ones (no)" in str(each.message) for each in said) == (rank == 0)
    theirs = read(tmp_path / "theirs")
    assert len(theirs) == len(own) + 20
    for found, expected in (
        (read(tmp_path / "ours"), theirs),
        (handed_on, theirs),
        (read(tmp_path / "fused"), own),
        (read(tmp_path / "said"), own),
    ):
        assert_same(found, expected)


@pytest.mark.usefixtures("alone")
def test_what_fails_leaves_nothing_of_it(tmp_path, monkeypatch):
    with fresh_engine("bf16") as engine:
        with pytest.raises(ValueError, match="dtype 'int8': must be one of fp32, bf16, fp16"):
            engine.export_safetensors(tmp_path, "int8")
        with pytest.raises(ValueError, match="max_shard_bytes 0: must be positive"):
            engine.export_safetensors(tmp_path, max_shard_bytes=0)
        engine.save_16bit_model(tmp_path)
        (tmp_path / "tokenizer.json").write_text("{}")
        before = (tmp_path / "model.safetensors").read_bytes()
        steps_of(engine, 0, range(1))
        opened, calls = safetensors_writer._Export._open, []

        def fail_later(export, path, header):
            calls.append(path)
            if len(calls) == 3:
                raise OSError(28, "No space left on device")
            opened(export, path, header)

        monkeypatch.setattr(safetensors_writer._Export, "_open", fail_later)
        with pytest.raises(CheckpointWriteError, match=r"failed: ENOSPC.*free space"):
            engine.export_safetensors(tmp_path, max_shard_bytes="300KB")
        assert names_in(tmp_path) == ["model.safetensors", "tokenizer.json"]
        assert (tmp_path / "model.safetensors").read_bytes() == before
        monkeypatch.undo()
        engine.export_safetensors(tmp_path, max_shard_bytes="300KB")
        replace = Path.replace

        def replace_until(source, target):
            if target.name.startswith("model-00002"):
                raise OSError(errno.EIO, "Input/output error")
            return replace(source, target)

        monkeypatch.setattr(Path, "replace", replace_until)
        with pytest.raises(CheckpointWriteError, match=r"EIO.*perhaps over earlier ones, without the index"):
            engine.export_safetensors(tmp_path, max_shard_bytes="300KB")
        with pytest.raises(WeightsError, match="an export was interrupted"):
            SafetensorsReader(tmp_path)
        monkeypatch.undo()
        engine.save_16bit_model(tmp_path)
        assert names_in(tmp_path) == ["model.safetensors", "tokenizer.json"]
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointWriteError, match="EEXIST"):
            engine.save_16bit_model(tmp_path / "file")


def test_home_is_known_wherever_a_path_is_given(alone, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "offload.json").write_text("{}")
    with initialize(torch.nn.Linear(3, 2), "~/offload.json") as engine:
        engine.save_checkpoint("~/saved", "first")
        assert engine.load_checkpoint("~/saved")[0] == str(tmp_path / "saved" / "first")
        [file] = engine.export_safetensors("~/weights")
        written = write_sharded("~/more", weight_items(engine.module))
        write_trace(engine.timeline(), "~/trace.json")
    assert [file, *written] == [tmp_path / folder / "model.safetensors" for folder in ("weights", "more")]
    with torch.device("meta"):
        model = torch.nn.Linear(3, 2)
    with initialize(model, {}, weights="~/weights") as other:
        assert torch.equal(dict(other.weights())["bias"], load_file(file)["bias"])
    assert names_in(tmp_path) == ["more", "offload.json", "saved", "trace.json", "weights"]


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_who_may_read_what_is_saved_is_up_to_the_umask_and_swap_files_are_the_owners(mask, tmp_path):
    nvme, saved = tmp_path / "nvme", tmp_path / "saved"
    before = os.umask(mask)
    try:
        nvme.mkdir()
        saved.mkdir()
        with fresh_engine("bf16", nvme, run_log=str(saved / "log.jsonl")) as engine:
            steps_of(engine, 0, range(1))
            engine.save_checkpoint(saved / "checkpoint")
            engine.export_safetensors(saved / "export")
            swap = {stat.S_IMODE(each.lstat().st_mode) for each in nvme.rglob("*")}
    finally:
        os.umask(before)
    made = [saved, *saved.rglob("*")]
    assert swap == {0o700, 0o600}
    assert {stat.S_IMODE(each.stat().st_mode) for each in made} == {0o777 & ~mask, 0o666 & ~mask}
