"""A run that was killed, exported from its directories: what `resume()` would have had, without the model."""

import io
import json
import os
import shutil
import signal
import socket
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from nvme_offload import OffloadAdamW, ResumeError
from nvme_offload.offload.durable.manifest import Manifest
from nvme_offload.offload.weights import writer
from nvme_offload.optim.checkpoint import storage
from nvme_offload.optim.durable.content import Content
from tests.support import resuming
from tests.support.durable_engine import TIERS, durable, settle, whole
from tests.support.durable_run import offload_runs
from tests.support.failing_drive import flip_bit
from tests.support.killed_steps import durable_section, gradients_of
from tests.support.ranks import run_ranks
from tests.support.resuming import steps_of
from tests.support.sharded_model import assert_same
from tests.support.training import assert_same_bits, params_of

FROZEN = {"blocks.1.0.weight", "blocks.1.0.bias"}
DTYPES = ("fp32", "bf16", "own")


def exported(*arguments, status=(0,)):
    code, output = offload_runs("export", *arguments)
    assert code in status, output
    return " ".join(output.replace("│", " ").split())


refused = partial(exported, status=(1, 2))
"""It returns the words of an export that writes nothing."""


def weights_in(folder):
    """As the library that defines the format reads them."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


# Runs that are killed.


def train_until_killed(rank, world_size, path, mode, tiers):
    with durable(mode, path, "run", tiers) as engine:
        steps_of(engine, rank, range(2))
        engine.snapshot("early")
        steps_of(engine, rank, range(2, 5))
        if world_size > 1:  # none of them waits for one that is dead
            settle(engine)
            torch.distributed.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def resume_and_export(rank, world_size, path, folder, mode, tiers):
    steps = []
    with durable(mode, path, "run", tiers) as engine:
        for snapshot in (None, "early"):
            steps.append(engine.resume(snapshot)[0])
            for dtype in DTYPES:
                engine.export_safetensors(folder / f"{snapshot}-{dtype}", dtype)
    return steps


QUICK = [(2, "fp16", "everything, logged")]
SLOW = [(ranks, mode, tiers) for ranks in (1, 2) for mode in ("bf16", "fp16", "fp32") for tiers in TIERS]
SLOW = [case for case in SLOW if case not in QUICK and case[2].removesuffix(", logged") not in ("off", "backward")]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize(("world_size", "mode", "tiers"), CASES)
def test_the_weights_of_a_run_that_was_killed_are_those_that_it_resumes_with(drive, tmp_path, world_size, mode, tiers):
    with pytest.raises(AssertionError, match=rf"ranks ended with \[-{signal.SIGKILL:d}"):
        run_ranks(train_until_killed, world_size, drive, mode, tiers)
    before = {path: path.read_bytes() for path in drive.rglob("*") if path.is_file() and path.name != "owner"}
    for snapshot in (None, "early"):
        chosen = ["--snapshot", snapshot] if snapshot else []
        for dtype in DTYPES:
            exported("run", tmp_path / f"{snapshot}-{dtype}", drive, "--dtype", dtype, "--partly", *chosen)
    assert {path: path.read_bytes() for path in before} == before
    steps = run_ranks(resume_and_export, world_size, drive, tmp_path / "resumed", mode, tiers)[0]
    assert steps[0] in (4, 5)
    assert steps[1] == 2
    for snapshot in (None, "early"):
        for dtype in DTYPES:
            expected = weights_in(tmp_path / "resumed" / f"{snapshot}-{dtype}")
            assert expected.keys() > FROZEN
            kept = {name: value for name, value in expected.items() if name not in FROZEN}
            assert_same_bits(weights_in(tmp_path / f"{snapshot}-{dtype}"), kept)


@pytest.mark.usefixtures("alone")
def test_gradients_that_were_logged_in_fp32_are_read_as_such(drive, tmp_path, monkeypatch):
    monkeypatch.setitem(TIERS, "wide, logged", {"rewrite_every": 3, "data_types": {"grad_accum_dtype": "fp32"}})
    with durable("bf16", drive, "run", "wide, logged") as engine:
        steps_of(engine, 0, range(2))
        assert {record.log_dtype for record in engine.optimizer.store.table} == {torch.float32}
        engine.optimizer.durable.commits.settle()
        engine.export_safetensors(tmp_path / "live")
    exported("run", tmp_path / "out", drive, "--partly")
    live = weights_in(tmp_path / "live")
    assert_same_bits(weights_in(tmp_path / "out"), {name: live[name] for name in live.keys() - FROZEN})


# As a checkpoint.


class Unfrozen(resuming.ResumedModel):
    def __init__(self):
        super().__init__()
        self.requires_grad_(True)


@contextmanager
def engine_without_frozen_parameters(*arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resuming, "ResumedModel", Unfrozen)
        with durable(*arguments) as engine:
            yield engine


def train_all_until_killed(rank, world_size, path, mode, tiers):
    with engine_without_frozen_parameters(mode, path, "run", tiers) as engine:
        engine.client_state["rank"] = rank
        steps_of(engine, rank, range(4))
        settle(engine)
        torch.distributed.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def resume_all(rank, world_size, path, mode, tiers):
    with engine_without_frozen_parameters(mode, path, "run", tiers) as engine:
        assert engine.resume() == (4, {"rank": rank})
        return whole(engine), (steps_of(engine, rank, [4]), whole(engine))


def load_all(rank, world_size, path, saved, mode, tiers):
    with engine_without_frozen_parameters(mode, path, None, tiers) as engine:
        assert engine.load_checkpoint(saved) == (str(saved / "global_step4"), {"rank": 0})
        return whole(engine), (steps_of(engine, rank, [4]), whole(engine))


QUICK = [(2, 1, "bf16", "state, logged")]
SLOW = [(1, 1, "bf16", "everything"), (1, 2, "fp16", "state"), (2, 2, "bf16", "everything, logged")]
SLOW += [(3, 2, mode, "state, logged") for mode in ("bf16", "fp16", "fp32")] + [(2, 3, "fp32", "in memory too")]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize(("world_size", "after", "mode", "tiers"), CASES)
def test_its_checkpoint_is_loaded_on_any_number_of_ranks(drive, tmp_path, world_size, after, mode, tiers):
    with pytest.raises(AssertionError, match=rf"ranks ended with \[-{signal.SIGKILL:d}"):
        run_ranks(train_all_until_killed, world_size, drive, mode, tiers)
    assert "exported step 4 of run" in exported("run", tmp_path / "saved", drive, "--what", "checkpoint")
    assert sorted(os.listdir(tmp_path / "saved")) == ["global_step4", "latest"]
    resumed, resumed_on = run_ranks(resume_all, world_size, drive, mode, tiers)[0]
    loaded, loaded_on = run_ranks(load_all, after, drive, tmp_path / "saved", mode, tiers)[0]
    assert loaded[1] == resumed[1]
    assert_same(loaded[0], resumed[0])
    if world_size == after:
        assert loaded_on[0] == resumed_on[0]
        assert_same(loaded_on[1][0], resumed_on[1][0])


@pytest.mark.usefixtures("alone")
def test_what_is_no_checkpoint_is_refused_and_leaves_nothing(small, drive, tmp_path, monkeypatch):
    small.optimizer.close()
    out = tmp_path / "out"
    assert "is of an optimizer without an engine" in refused("small", out, drive, "--what", "checkpoint")
    with durable("bf16", drive, "frozen") as engine:
        steps_of(engine, 0, range(1))
    output = refused("frozen", out, drive, "--what", "checkpoint")
    assert "does not keep blocks.1.0.weight, blocks.1.0.bias, which were always frozen" in output
    assert "does not keep blocks.1.0.weight, blocks.1.0.bias: parameters that were" in refused("frozen", out, drive)
    with engine_without_frozen_parameters("bf16", drive, "run") as engine:
        steps_of(engine, 0, range(1))
    torch.distributed.destroy_process_group()
    with monkeypatch.context() as patch:
        patch.setattr(storage, "_compact", Mock(side_effect=OSError(28, "no space is left")))
        assert "failed: ENOSPC" in refused("run", out, drive, "--what", "checkpoint")
    assert not out.exists()
    damage(drive / "nvme-durable-run-rank0", "slots")
    assert "the state of subgroup 0" in refused("run", out, drive, "--what", "checkpoint")
    assert not out.exists()


# One small run of an optimizer alone, for all else.


@pytest.fixture
def small(drive):
    """Four steps of five parameters, of which a snapshot after the second; returns their values after each."""
    torch.manual_seed(0)
    params = params_of([(300, 235), (999,), (65_537,), (5,), (9_999,)], torch.bfloat16, torch.float32, torch.float16)
    named = [(f"weights.{number}", param) for number, param in enumerate(params)]
    truth = {}
    with OffloadAdamW(named, lr=1e-2, offload=durable_section(drive, "small", rewrite_every=2)) as optimizer:
        for step in range(1, 5):
            gradients_of(params, step)
            optimizer.step()
            truth[step] = {name: param.detach().clone() for name, param in named}
            if step == 2:
                optimizer.snapshot("second")
        optimizer.durable.commits.settle()
        small = SimpleNamespace(drive=drive, truth=truth, optimizer=optimizer)
        small.rank = drive / "nvme-durable-small-rank0"
        yield small


def test_older_steps_and_snapshots_of_an_optimizer_alone(small, tmp_path):
    small.optimizer.close()
    asked = {"newest": (4, []), "older": (3, ["--step", 3]), "kept": (2, ["--snapshot", "second"])}
    for name, (step, options) in asked.items():
        output = exported("small", tmp_path / name, small.drive, "--dtype", "bf16", "--max-shard", "100KB", *options)
        assert f"exported step {step} of small: " in output
        found = weights_in(tmp_path / name)
        truth = small.truth[step].items()
        of_16_bits = {name: value if value.dtype is torch.float32 else value.bfloat16() for name, value in truth}
        names = [name for name, value in small.truth[step].items() if value.dtype is not torch.float16]
        assert_same_bits({name: found[name] for name in names}, {name: of_16_bits[name] for name in names})
        assert found.keys() == of_16_bits.keys()
    index = json.loads((tmp_path / "newest" / writer.INDEX_FILE).read_text())
    assert index["weight_map"].keys() == small.truth[4].keys()
    exported("small", tmp_path / "masters", small.drive)
    for name, master in weights_in(tmp_path / "masters").items():
        assert master.dtype is torch.float32
        rounded = master.to(small.truth[4][name].dtype)
        torch.testing.assert_close(rounded, small.truth[4][name], rtol=2**-7, atol=0)  # ties of bf16 go away from zero


def test_one_that_is_alive_is_refused_and_goes_on(small, tmp_path):
    output = refused("small", tmp_path / "out", small.drive)
    assert f"process {os.getpid()} on " in output
    assert "; it writes its own: engine.export_safetensors(dir)" in output
    assert not (tmp_path / "out").exists()
    small.optimizer.step()
    small.optimizer.close()
    assert "exported step 5" in exported("small", tmp_path / "out", small.drive)


def test_what_it_wrote_down_of_itself_is_what_resume_compares(small):
    small.optimizer.close()
    named = [(f"others.{number}", torch.nn.Parameter(value)) for number, value in enumerate(small.truth[4].values())]
    optimizer = OffloadAdamW(named, lr=1e-2, offload=durable_section(small.drive, "small", rewrite_every=2))
    said = r"parameters.weights.0: \{.*\} was committed, nothing is here"
    with optimizer, pytest.raises(ResumeError, match=said):
        optimizer.resume()
    (identity,) = small.rank.glob("identity.*.json")
    identity.write_bytes(identity.read_bytes().replace(b'"offsets":[0', b'"offsets":[1', 1))
    assert "is damaged: it is not what its name says" in refused("small", small.drive / "out", small.drive)


def test_words_that_lead_nowhere_leave_nothing(small, tmp_path):
    small.optimizer.close()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    out, drive = tmp_path / "out" / "deep", small.drive
    assert "there is no durable run 'other'" in refused("other", out, drive)
    assert "has no step 1 that all ranks have; held are: 3, 4" in refused("small", out, drive, "--step", 1)
    assert "there are: second" in refused("small", out, drive, "--snapshot", "first")
    assert "leave out --step" in refused("small", out, drive, "--snapshot", "second", "--step", 2)
    assert "dtype 'int8': must be one of fp32, bf16, fp16" in refused("small", out, drive, "--dtype", "int8")
    assert "write a whole number of bytes" in refused("small", out, drive, "--max-shard", "8G")
    assert "is no empty folder: name a new one" in refused("small", tmp_path / "taken", drive)
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["notes.txt"]
    assert not out.parent.exists()


def damage(folder, table):
    """Flip a bit of the first base or log entry that the newest manifest refers to."""
    found = [Manifest.decode(file.read_bytes()) for file in folder.glob("manifest.?")]
    newest = max((manifest for manifest in found if manifest), key=lambda manifest: manifest.sequence)
    first = 3 if table == "slots" else 5  # columns before the first stripe
    flip_bit(folder / "swap", int(newest.tables[table][0][first + 1]) + 700)


@pytest.mark.parametrize(("table", "said"), [("slots", "the state of subgroup 0"), ("log", "the log of subgroup")])
def test_a_flipped_bit_is_refused_by_name_and_leaves_nothing(small, tmp_path, table, said):
    small.optimizer.close()
    damage(small.rank, table)
    output = refused("small", tmp_path / "out", small.drive)
    assert said in output
    assert "nvme-durable-small-rank0/swap" in output
    assert not (tmp_path / "out").exists()


def test_ranks_and_paths_that_are_missing_are_named(drive, tmp_path):
    paths = [drive / name for name in "ab"]
    run_ranks(train_a_little, 3, paths)
    for rank in (0, 2):
        shutil.move(paths[0] / f"nvme-durable-run-rank{rank}", tmp_path)
        shutil.move(paths[1] / f"nvme-durable-run-rank{rank}", tmp_path / f"other{rank}")
    output = refused("run", tmp_path / "out", *paths)
    assert f"of 3 ranks, and of ranks 0, 2 (host {socket.gethostname()}) no directory is here" in output
    assert "Mount or copy here those of another host" in output
    assert "has 2 paths, and 1 of them are among these folders: name all" in refused("run", tmp_path / "out", paths[1])
    assert not (tmp_path / "out").exists()


def train_a_little(rank, world_size, paths):
    for path in paths:
        path.mkdir(exist_ok=True)
    params = params_of([(999,)], torch.bfloat16)
    section = durable_section(paths[0], "run")
    section["zero_optimization"]["offload_optimizer"]["nvme_path"] = list(map(str, paths))
    with OffloadAdamW(params, offload=section) as optimizer:
        gradients_of(params, 1)
        optimizer.step()


def test_directories_of_another_version_say_what_to_do(small, tmp_path):
    small.optimizer.close()
    about = json.loads((small.rank / "run.json").read_text())
    (small.rank / "run.json").write_text(json.dumps(about | {"format": 2}))
    said = "is of format 2, and this version reads 1: go on with the version that made it and save a checkpoint"
    assert said in refused("small", tmp_path / "out", small.drive)
    assert said in " ".join(offload_runs(small.drive)[1].split())
    assert offload_runs("remove", "small", small.drive)[0] == 0


def test_a_target_without_room_is_said_and_leaves_nothing(small, tmp_path, monkeypatch):
    small.optimizer.close()
    opened, calls = writer._Export._open, []

    def fail_later(export, *arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        opened(export, *arguments)

    monkeypatch.setattr(writer._Export, "_open", fail_later)
    output = refused("small", tmp_path / "out", small.drive, "--max-shard", "100KB")
    assert len(calls) == 3
    assert "failed: ENOSPC" in output
    assert not (tmp_path / "out").exists()


CONTENT = {
    "format": 1,
    "step": 3,
    "tick": 4,
    "steps": torch.ones(2, dtype=torch.int64),
    "groups": [{"lr": 0.1}],
    "client_state": {},
    "engine": {},
    "generators": {},
}


def decoded(**changes):
    buffer = io.BytesIO()
    torch.save(CONTENT | changes, buffer)
    return Content.decode(buffer.getvalue(), Path("folder"))


def test_content_is_read_as_it_was():
    assert (decoded().step, decoded().tick, decoded().groups) == (3, 4, [{"lr": 0.1}])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", "3"),
        ("step", -1),
        ("tick", 2.5),
        ("steps", [1, 1]),
        ("steps", torch.ones(2)),
        ("steps", torch.ones(1, 2, dtype=torch.int64)),
        ("groups", {}),
        ("client_state", []),
        ("engine", None),
        ("generators", 7),
        ("another", 7),
    ],
)
def test_a_field_of_content_that_no_run_writes_is_named(name, value):
    with pytest.raises(
        ResumeError, match=f"folder has a manifest whose content cannot be read: .*{name}|counts of steps"
    ):
        decoded(**{name: value})
