"""Checkpoints that cannot be loaded or saved: said by name, before anything changes; no code from a file runs."""

import hashlib
import itertools
import json
import math
import os
import pickle
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorProperties

from nvme_offload import CheckpointError, StateError, SwapIOError, initialize
from nvme_offload.offload._torch_private import storage_info
from nvme_offload.optim.access import values
from nvme_offload.optim.checkpoint import digests, files
from tests.support.resuming import ResumedModel, fresh_engine, loss_of, scalars_of, section, steps_of
from tests.support.sharded_model import assert_same, full_state

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def engine():
    with fresh_engine("bf16") as engine:
        steps_of(engine, 0, range(1))
        yield engine


@pytest.fixture
def saved(engine, tmp_path):
    """A folder with one checkpoint, tag "good"; the engine is a step further."""
    engine.save_checkpoint(tmp_path, "good")
    steps_of(engine, 0, range(1, 2))
    return tmp_path / "good"


def refuse(engine, folder, kind, match):
    before = full_state(engine.module, engine.optimizer), scalars_of(engine)
    with pytest.raises(kind, match=match) as caught:
        engine.load_checkpoint(folder.parent)
    assert_same(full_state(engine.module, engine.optimizer), before[0])
    assert scalars_of(engine) == before[1]
    return caught.value


def rewrite_manifest(folder):
    """As somebody would who wants a changed file to be taken for whole."""
    records = {}
    for path in folder.iterdir():
        if path.name != files.MANIFEST:
            with files.durable_file(folder / "copy") as stream:
                stream.write(path.read_bytes())
            (folder / "copy").unlink()
            records[path.name] = stream.record
    files.write_manifest(folder, records)


def flip(data, position):
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def test_a_file_that_is_missing_cut_off_or_changed_is_named(engine, saved):
    names = sorted(path.name for path in saved.iterdir() if path.name != files.MARKER)
    assert names == [".metadata", "__0_0.distcp", "manifest.json", "objects.pt", "state.json"]
    for name in names:
        path, whole = saved / name, (saved / name).read_bytes()
        for damaged in (
            None,
            b"",
            whole[:-1],
            whole + b"\0",
            flip(whole, 0),
            flip(whole, len(whole) // 2),
            flip(whole, len(whole) - 2),
        ):
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            assert refuse(engine, saved, CheckpointError, "is damaged|is missing|cannot be read").path == path
        path.write_bytes(whole)
    assert engine.load_checkpoint(saved.parent)[0] == str(saved)


def test_a_digest_of_another_kind_is_refused_by_name(engine, saved):
    manifest = json.loads((saved / files.MANIFEST).read_text())
    manifest["files"]["state.json"] = {"size_bytes": 1, "sha256": "0"}
    digest = hashlib.sha256(json.dumps(manifest["files"], sort_keys=True).encode()).hexdigest()
    (saved / files.MANIFEST).write_text(json.dumps(manifest | {"sha256": digest}))
    refuse(engine, saved, CheckpointError, "'sha256', which this version does not know")


BLOCK, PORTION = 1 << 16, digests.PORTION_BYTES


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, PORTION, PORTION + 1, 3 * PORTION + BLOCK + 5])
def test_digests_are_those_of_the_bytes_however_they_are_written_and_read(tmp_path, size, monkeypatch):
    data = torch.randint(0, 256, (size,), dtype=torch.uint8).numpy().tobytes()
    written = []
    for num_writes in (1, 3, 7):
        cuts = [size * part // num_writes for part in range(num_writes + 1)]
        with files.durable_file(tmp_path / "file") as stream:
            for start, stop in itertools.pairwise(cuts):
                stream.write(data[start:stop])
        assert (tmp_path / "file").read_bytes() == data
        written.append(stream.record)
    assert written == written[:1] * 3
    seen = []
    for num_threads in (1, 3):
        monkeypatch.setattr(digests, "num_threads_of_rank", lambda num=num_threads: num)
        files.verify(tmp_path / "file", written[0], seen.append)
    assert sum(seen) == 2 * size
    for position in {0, size // 2, size - 1} if size else ():
        (tmp_path / "file").write_bytes(flip(data, position))
        with pytest.raises(CheckpointError, match="is damaged"):
            files.verify(tmp_path / "file", written[0])


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_in_the_metadata_does_not_run(engine, saved, tmp_path):
    marker = tmp_path / "ran"
    (saved / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    rewrite_manifest(saved)
    refuse(engine, saved, CheckpointError, r"\.metadata asks for posix\.mkdir, which could run code")
    assert not marker.exists()
    pickle.loads(pickle.dumps(Evil(marker)))
    assert marker.exists(), "it would have"


def test_code_among_the_objects_does_not_run(engine, saved, tmp_path):
    marker = tmp_path / "ran"
    torch.save({"client_state": Evil(marker), "lr_scheduler": None}, saved / "objects.pt")
    rewrite_manifest(saved)
    refuse(engine, saved, CheckpointError, r"objects\.pt cannot be loaded without running code")
    assert not marker.exists()


def test_what_one_torch_writes_another_reads_though_it_knows_fewer_properties_of_a_tensor(engine, saved, monkeypatch):
    plain, made = TensorProperties.__getstate__, TensorProperties.__setstate__
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    with monkeypatch.context() as newer:
        newer.setattr(TensorProperties, "__getstate__", lambda properties: (*plain(properties)[:5], (64, 1)))
        newer.setattr(TensorProperties, "__setstate__", lambda properties, state: made(properties, state[:5]))
        (saved / ".metadata").write_bytes(pickle.dumps(metadata))
        engine.save_checkpoint(saved.parent, "ours")
    rewrite_manifest(saved)
    engine.load_checkpoint(saved.parent, "good")
    assert engine.load_checkpoint(saved.parent, "ours")[0]
    found = FileSystemReader(saved.parent / "ours").read_metadata()
    assert found.state_dict_metadata.keys() == metadata.state_dict_metadata.keys()


def change_place(saved, **place):
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    index = next(iter(metadata.storage_data))
    metadata.storage_data[index] = storage_info(**place)
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    rewrite_manifest(saved)


def test_code_in_place_of_a_tensor_does_not_run(engine, saved, tmp_path):
    """Found only when it is read: the load stops halfway, which is said until another one succeeds."""
    marker, good = tmp_path / "ran", tmp_path / "other" / "good"
    engine.save_checkpoint(good.parent, "good")
    torch.save(Evil(marker), saved / "__9_0.distcp")
    change_place(saved, relative_path="__9_0.distcp", offset=0, length=(saved / "__9_0.distcp").stat().st_size)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        engine.load_checkpoint(saved.parent)
    assert not marker.exists()
    with pytest.raises(StateError, match="a load stopped halfway"):
        engine.save_checkpoint(tmp_path, "broken")
    engine.load_checkpoint(good.parent)
    engine.save_checkpoint(tmp_path, "whole")


def test_tensors_outside_the_checkpoint_are_not_read(engine, saved):
    change_place(saved, relative_path="../secret", offset=0, length=10)
    refuse(engine, saved, CheckpointError, r"places .* in '\.\./secret', outside the checkpoint")


def test_a_model_that_does_not_fit_is_said_by_name(saved):
    class Other(ResumedModel):
        def __init__(self):
            super().__init__()
            self.wide = nn.Sequential(nn.Linear(37, 3000), nn.GELU(), nn.Linear(3000, 37))
            self.added = nn.Parameter(torch.ones(3))
            del self.num_batches
            self.num_batches = 0

        def forward(self, tokens):
            return super().forward(tokens) * self.added.mean()

    with initialize(Other(), section("bf16")) as engine:
        before = full_state(engine.module, engine.optimizer)
        with pytest.raises(ValueError, match="does not fit; nothing was changed") as caught:
            engine.load_checkpoint(saved.parent)
        message = str(caught.value)
        assert "not in the checkpoint: model.added, optim.state.added.exp_avg" in message
        assert "not in the model and its optimizer: model.num_batches" in message
        assert "model.wide.0.weight is torch.float32 of shape (3000, 37), in the checkpoint" in message
        assert "shape (3008, 37)" in message
        assert_same(full_state(engine.module, engine.optimizer), before)


def test_an_untied_model_does_not_fit_a_tied_checkpoint(engine, saved):
    model = ResumedModel()
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    with initialize(model, section("bf16")) as untied:
        with pytest.raises(ValueError, match=r"not in the checkpoint: optim\.state\.head\.weight\.exp_avg"):
            untied.load_checkpoint(saved.parent)
        steps_of(untied, 0, range(1))
        untied.save_checkpoint(saved.parent, "untied")
    with pytest.raises(ValueError, match=r"model\.head\.weight and model\.embedding\.weight are one parameter here"):
        engine.load_checkpoint(saved.parent, "untied")


def change_state(saved, **changes):
    state = json.loads((saved / "state.json").read_bytes())
    (saved / "state.json").write_text(json.dumps({**state, **changes}))
    rewrite_manifest(saved)


def test_a_run_that_does_not_fit_is_said(engine, saved):
    original = json.loads((saved / "state.json").read_bytes())
    change_state(saved, format=2)
    refuse(engine, saved, CheckpointError, r"state\.json has format 2; this version reads 1")
    change_state(saved, format=1, global_steps=-5)
    refuse(engine, saved, CheckpointError, r"state\.json has global_steps = -5, which must be 0 or more")
    (saved / "state.json").write_text("[" * 200_000)
    rewrite_manifest(saved)
    refuse(engine, saved, CheckpointError, r"state\.json is not the state of a run")
    (saved / "state.json").write_text(json.dumps(original))
    change_state(saved, lr_scheduler="OneCycleLR")
    refuse(engine, saved, ValueError, "the schedule of a OneCycleLR, this run a LambdaLR")
    change_state(saved, lr_scheduler="LambdaLR", param_groups=original["param_groups"] * 2)
    refuse(engine, saved, ValueError, "has 2 parameter groups, this run 1")
    [group] = original["param_groups"]
    change_state(saved, param_groups=[{**group, "options": {**group["options"], "lr": -1}}])
    refuse(engine, saved, ValueError, "lr = -1: must be a finite number")
    change_state(saved, param_groups=[{**group, "params": group["params"][1:]}])
    refuse(engine, saved, ValueError, rf"holds other parameters in the checkpoint \({group['params'][0]}\)")
    change_state(saved, param_groups=[group], loss_scale={"loss_scale": 2})
    refuse(engine, saved, CheckpointError, "has a loss scale without")
    change_state(saved, loss_scale=None)
    engine.load_checkpoint(saved.parent)


def test_what_only_one_side_has_is_said(saved):
    with (
        fresh_engine("fp16") as engine,
        pytest.warns(RuntimeWarning, match="this run has a loss scale and the checkpoint has none"),
    ):
        engine.load_checkpoint(saved.parent)
    with (
        fresh_engine("bf16", scheduler=None) as engine,
        pytest.warns(RuntimeWarning, match="the checkpoint has a schedule and this run has none"),
    ):
        engine.load_checkpoint(saved.parent)


def test_no_checkpoint_is_no_error_but_a_missing_one_is(engine, saved, tmp_path):
    (tmp_path / "other" / "notes").mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="other holds no checkpoint"):
        assert engine.load_checkpoint(tmp_path / "other") == (None, None)
    with pytest.warns(RuntimeWarning, match=r"missing holds no checkpoint \(there is no such folder\)"):
        assert engine.load_checkpoint(tmp_path / "missing") == (None, None)
    for call in (engine.save_checkpoint, engine.load_checkpoint, engine.export_safetensors, engine.save_16bit_model):
        for folder in ("", None):
            with pytest.raises(ValueError, match=r"the folder is .*: name one; '\.' is the current folder"):
                call(folder)
    with pytest.raises(CheckpointError, match="better does not exist; checkpoints there: good"):
        engine.load_checkpoint(tmp_path, "better")
    (tmp_path / "latest").write_text("gone")
    with pytest.raises(CheckpointError, match="gone does not exist; checkpoints there: good"):
        engine.load_checkpoint(tmp_path)
    (tmp_path / "latest").write_bytes(b"../\xff")
    with pytest.raises(CheckpointError, match="latest is damaged"):
        engine.load_checkpoint(tmp_path)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("latest")
    with pytest.raises(CheckpointError, match="latest cannot be read: Too many levels of symbolic links; name a tag"):
        engine.load_checkpoint(tmp_path)
    assert engine.load_checkpoint(tmp_path, "good")[1] == {}
    engine.save_checkpoint(tmp_path, 12)  # scripts of DeepSpeed's do so
    assert engine.load_checkpoint(tmp_path, 12)[0] == str(tmp_path / "12")


def test_what_cannot_be_saved_is_refused_before_a_file_is_made(engine, tmp_path):
    root = tmp_path / "root"
    with pytest.raises(ValueError, match=r"client_state cannot be saved \(.*without running code"):
        engine.save_checkpoint(root, client_state={"model": Evil(tmp_path / "ran")})
    for odd in ("epoch", [("epoch", 1)]):
        with pytest.raises(ValueError, match=r"client_state is a (str|list): write a dict"):
            engine.save_checkpoint(root, client_state=odd)
    for tag in ("", "a/b", "..", "latest", "x.partial", "x.replaced", "end ", "two\nlines", "\udcff"):
        with pytest.raises(ValueError, match="must be the name of a folder"):
            engine.save_checkpoint(root, tag)
    with pytest.raises(ValueError, match=r"no such user; write './~nobody-is-called-so' for a name with '~'"):
        engine.save_checkpoint("~nobody-is-called-so")
    engine.optimizer.param_groups[0]["note"] = object()
    with pytest.raises(ValueError, match=r"parameter group 0: note = .* cannot be saved"):
        engine.save_checkpoint(root)
    engine.optimizer.param_groups[0]["note"] = math.nan
    with pytest.raises(ValueError, match="parameter group 0: note = nan cannot be saved"):
        engine.save_checkpoint(root)
    del engine.optimizer.param_groups[0]["note"]
    engine.backward(loss_of(engine, 0, 5))
    with pytest.raises(StateError, match="expected a call between two steps, actual 1 of 1 micro-batches done"):
        engine.save_checkpoint(root)
    assert not root.exists()
    engine.step()
    engine.save_checkpoint(root)
    assert sorted(path.name for path in root.iterdir()) == ["global_step2", "latest"]


def test_folders_of_others_stay(engine, tmp_path):
    for name in ("mine", "mine2.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("all of it")
    for tag in ("mine", "mine2"):
        with pytest.raises(FileExistsError, match="exists and is no checkpoint of this program; choose another tag"):
            engine.save_checkpoint(tmp_path, tag)
    with files.locked(tmp_path), pytest.raises(StateError, match="another run saves there"):
        engine.save_checkpoint(tmp_path, "a")
    engine.save_checkpoint(tmp_path, "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "latest", "mine", "mine2.partial"]
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "all of it"
    assert (tmp_path / "mine2.partial" / "thesis.tex").read_text() == "all of it"


def contents(root):
    return {str(path.relative_to(root)): path.is_dir() or path.read_bytes() for path in sorted(root.rglob("*"))}


def test_what_others_call_like_ours_is_not_touched(engine, tmp_path):
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    engine.save_checkpoint(elsewhere, "best")
    root.mkdir()
    for name in ("a.partial", "b.replaced", "c.partial", "latest.partial"):
        (root / name).mkdir()
        for file in ("state.json", "results.distcp", "manifest.json", "latest"):
            (root / name / file).write_text("theirs")
    (root / "c").mkdir()
    (root / "d.partial").write_text("theirs")
    (root / "e.partial").mkdir()
    for name in ("f.partial", "g.replaced", "h"):
        (root / name).symlink_to(elsewhere / "best")
    before, linked = contents(root), contents(elsewhere)
    engine.save_checkpoint(root, "next")
    engine.save_checkpoint(root, "next")
    with pytest.raises(FileExistsError, match="exists and is no checkpoint of this program"):
        engine.save_checkpoint(root, "h")
    assert contents(elsewhere) == linked
    after = contents(root)
    assert {name: after.get(name) for name in before} == before
    assert {name.split("/")[0] for name in after.keys() - before.keys()} == {"next", "latest"}
    assert (root / "h").is_symlink()
    assert engine.load_checkpoint(root, "h")[0] == str(root / "h")


def test_a_folder_without_our_marker_is_not_replaced_and_loads(engine, tmp_path):
    engine.save_checkpoint(tmp_path, "a")
    (tmp_path / "a" / files.MARKER).unlink()
    with pytest.raises(FileExistsError, match="exists and is no checkpoint of this program"):
        engine.save_checkpoint(tmp_path, "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "latest"]
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "a")


def test_a_tier_that_fails_while_saving_leaves_nothing(engine, saved, monkeypatch):
    error = SwapIOError(5, path="swap", offset=0, size_bytes=1, direction="read")
    with monkeypatch.context() as patch:
        patch.setattr(values, "read_run", Mock(side_effect=error))
        with pytest.raises(SwapIOError, match="read of 1 bytes at offset 0 of swap"):
            engine.save_checkpoint(saved.parent, "next")
    assert sorted(path.name for path in saved.parent.iterdir()) == ["good", "latest"]
    engine.save_checkpoint(saved.parent, "next")
