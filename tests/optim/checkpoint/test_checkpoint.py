"""Checkpoints of the engine: the same bits go on, on other tiers and on other numbers of ranks."""

import contextlib
import errno
import pickle
import platform
import warnings
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from nvme_offload import CheckpointWriteError, get_full_optimizer_state, initialize, set_full_optimizer_state
from tests.support.build import section
from tests.support.durable_run import offload_runs
from tests.support.ranks import run_ranks
from tests.support.resuming import MODES, fresh_engine, next_loss, scalars_of, steps_of
from tests.support.sharded_model import assert_same, full_state

ONE_SUBGROUP = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


def state_of(engine):
    return full_state(engine.module, engine.optimizer)


def save_and_resume(rank, world_size, root, drive):
    """Train on one tier and save; resume on both tiers, and go on as the first one does."""
    saved = {}
    for number, mode in enumerate(MODES):
        tiers = (drive, None) if number % 2 else (None, drive)
        with contextlib.ExitStack() as on_exit:
            first, other = (on_exit.enter_context(fresh_engine(mode, path)) for path in tiers)
            resumed = [other]
            if mode == "bf16":  # on the same tier too
                resumed.append(on_exit.enter_context(fresh_engine(mode, tiers[0])))
            steps_of(first, rank, range(3))
            next_loss(first)  # an evaluation right before
            assert first.save_checkpoint(root / mode, client_state={"mode": mode, "rank": torch.tensor(rank)})
            saved[mode] = state_of(first), scalars_of(first), next_loss(first)
            first.module.num_batches -= 2
            steps_of(other, rank, range(1))  # what was there before leaves no trace
            next_loss(other)
            for engine in resumed:
                path, client_state = engine.load_checkpoint(root / mode)
                assert (path, client_state) == (str(root / mode / "global_step3"), {"mode": mode, "rank": 0})
                assert_same(state_of(engine), saved[mode][0])
                assert scalars_of(engine) == scalars_of(first)
                assert next_loss(engine) == saved[mode][2], "a gathered copy is old"
                engine.module.num_batches -= 2
            losses = steps_of(first, rank, range(3, 4))
            for engine in resumed:
                assert steps_of(engine, rank, range(3, 4)) == losses
                assert_same(state_of(engine), state_of(first))
                assert scalars_of(engine) == scalars_of(first)
            assert not list(root.rglob("*.partial"))
    fail_on_one_rank(rank, root / "failed")
    return saved


def fail_on_one_rank(rank, root):
    """Every rank says so, and nothing of it is left."""
    with fresh_engine("bf16") as engine, pytest.MonkeyPatch.context() as patch:
        with pytest.raises(ValueError, match="every rank must give the same"):
            engine.save_checkpoint(root, "ab"[rank])
        assert not root.exists()
        engine.save_checkpoint(root, "good")
        if rank == 1:
            full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
            patch.setattr("nvme_offload.optim.checkpoint.storage._compact", full)
        with pytest.raises(CheckpointWriteError, match=r"next\.partial failed: ENOSPC") as caught:
            engine.save_checkpoint(root, "next")
        assert caught.value.__notes__ == [f"on rank 1, host {platform.node()}"]
        dist.barrier()
        assert sorted(path.name for path in root.iterdir()) == ["good", "latest"]


def data_bytes(folder):
    return sum(path.stat().st_size for path in folder.glob("*.distcp"))


def other_meshes(rank, root):
    """Hybrid sharding saves each copy once; two pairs of ranks, as in a pipeline, save for themselves."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with fresh_engine("bf16", mesh=mesh, seed=1) as hybrid, fresh_engine("bf16", mesh=mesh["shard"], seed=2) as pair:
        hybrid.load_checkpoint(root / "bf16")
        hybrid.save_checkpoint(root / "hybrid")
        pair.load_checkpoint(root / "hybrid")
        pair.save_checkpoint(root / f"pair{rank // 2}")
        assert_same(state_of(pair), state_of(hybrid))
        expected = state_of(hybrid)
    with fresh_engine("bf16", seed=3) as engine:
        for name in ("hybrid", "pair0", "pair1"):
            engine.load_checkpoint(root / name)
            assert_same(state_of(engine), expected)
    saved, again = data_bytes(root / "bf16" / "global_step3"), data_bytes(root / "hybrid" / "global_step3")
    assert again < 1.01 * saved
    return expected


def load_and_look(rank, world_size, root, drive, modes):
    seen = {}
    for mode, path in modes.items():
        with fresh_engine(mode, path, seed=1) as engine:
            assert engine.load_checkpoint(root / mode)[1]["mode"] == mode
            seen[mode] = state_of(engine), scalars_of(engine), next_loss(engine)
    if world_size == 4:
        assert_same(other_meshes(rank, root), seen["bf16"][0])
    return seen


@pytest.fixture(scope="module")
def saved_at_2(once, tmp_path_factory):
    """A folder of checkpoints saved by two ranks, a folder for tiers, and what was saved."""
    drive = tmp_path_factory.mktemp("drive")

    def saved(root):
        found, _ = run_ranks(save_and_resume, 2, root, drive)
        assert not list(drive.iterdir())
        return root, found

    root, found = once("checkpoints", saved)
    return root, drive, found


def compare(seen, saved):
    for mode in seen:
        assert_same(seen[mode][0], saved[mode][0])
        assert seen[mode][1] == saved[mode][1]
        assert seen[mode][2] == pytest.approx(saved[mode][2], rel=1e-3)


def test_what_two_ranks_save_two_ranks_resume_bit_for_bit_on_any_tier(saved_at_2):
    _, _, saved = saved_at_2
    assert saved["fp16"][1]["loss_scale"]["loss_scale"] == 2**9
    assert saved["bf16"][1]["global_steps"] == 3


@pytest.mark.usefixtures("alone")
def test_one_process_resumes_it(saved_at_2):
    root, drive, saved = saved_at_2
    compare(load_and_look(0, 1, root, drive, dict(zip(MODES, (drive, drive, None, drive), strict=True))), saved)


@pytest.mark.slow
def test_four_ranks_resume_it(saved_at_2):
    root, drive, saved = saved_at_2
    for seen in run_ranks(load_and_look, 4, root, drive, {"bf16": drive, "int8": None}):
        compare(seen, saved)
    assert not list(drive.iterdir())
    assert not dist.is_initialized()


@pytest.mark.usefixtures("alone")
def test_a_load_in_the_middle_of_an_accumulation_drops_its_gradients(tmp_path):
    """In stage 1 FSDP2 has not reduced them yet."""
    zero = {**ONE_SUBGROUP["zero_optimization"], "stage": 1}
    norms = []
    with fresh_engine("bf16", zero_optimization=zero, gradient_accumulation_steps=2) as engine:
        engine.save_checkpoint(tmp_path)
        for num_before in (0, 1):
            steps_of(engine, 0, range(7, 7 + num_before))
            engine.load_checkpoint(tmp_path)
            steps_of(engine, 0, range(2))
            norms.append(engine.get_global_grad_norm())
    assert norms[0] == norms[1]


@pytest.mark.usefixtures("alone")
def test_counts_of_steps_that_fp32_would_round_are_loaded_into_runs_with_few_and_back(tmp_path):
    with fresh_engine("bf16") as engine, fresh_engine("bf16", seed=1) as other:
        for each in (engine, other):
            steps_of(each, 0, range(2))
        groups = (each.optimizer.param_groups[0]["params"] for each in (engine, other))
        few, many = ([param for param in group if param.requires_grad] for group in groups)
        for param in many:
            set_full_optimizer_state(param, "step", torch.tensor(2**24 + 3))
        engine.save_checkpoint(tmp_path, "few")
        other.save_checkpoint(tmp_path, "many")
        for each, params, tag, count in ((engine, few, "many", 2**24 + 3), (other, many, "few", 2)):
            each.load_checkpoint(tmp_path, tag)
            assert {int(get_full_optimizer_state(param, "step")) for param in params} == {count}


@pytest.mark.usefixtures("alone")
def test_large_parameters_are_cut_into_items(tmp_path, monkeypatch):
    """In one subgroup of several items; how a checkpoint was cut does not matter to who loads it."""
    num_items = []
    for limit in (2**24, 2**16):
        with (
            fresh_engine("bf16", **ONE_SUBGROUP) as engine,
            fresh_engine("bf16", seed=1, **ONE_SUBGROUP) as other,
            monkeypatch.context() as patch,
        ):
            steps_of(engine, 0, range(2))
            patch.setattr("nvme_offload.optim.checkpoint.contents.MAX_CHUNK_NUMEL", limit)
            engine.save_checkpoint(tmp_path, str(limit))
            num_items.append(len(pickle.loads((tmp_path / str(limit) / ".metadata").read_bytes()).storage_data))
            other.load_checkpoint(tmp_path)
            assert_same(state_of(other), state_of(engine))
            patch.undo()
            steps_of(other, 0, range(2, 3))
            other.load_checkpoint(tmp_path)
            assert_same(state_of(other), state_of(engine))
    assert num_items[1] > num_items[0] + 6


def normed(path):
    """An engine of a durable run, whose buffers each rank computes from its own data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    made = section(path, adamw={"lr": 1e-3}, train_batch_size=16)
    made["zero_optimization"]["offload_optimizer"]["durable"] = "run"
    return initialize(model, made)


def buffers_of(engine):
    return {name: buffer.clone() for name, buffer in engine.module.named_buffers()}


def save_buffers(rank, world_size, root, drive):
    with normed(drive) as engine:
        for step in range(2):
            inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * step + rank)) * (1 + rank)
            engine.backward(engine(inputs).square().mean())
            engine.step()
        mine = buffers_of(engine)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            engine.save_checkpoint(root, "waited")
            engine.save_checkpoint(root, "beside", background=True)
            engine.wait_for_checkpoint()
        told = [str(each.message) for each in said if "differ between ranks" in str(each.message)]
        assert all("2 buffers differ between ranks, such as model.1.running_mean" in each for each in told)
        assert len(told) == 2 * (rank == 0)
        engine.export_safetensors(root / "export")
        handed_on = {name: value for name, value in engine.weights("fp32") if name in mine}
        assert_same(buffers_of(engine), mine)  # its own go on
    with normed(drive) as engine:
        engine.resume()
        assert_same(buffers_of(engine), mine)
    found = [handed_on]
    for tag in ("waited", "beside"):
        with normed(drive / tag) as engine:
            engine.load_checkpoint(root, tag)
            found.append(buffers_of(engine))
    return mine, found


def test_buffers_are_the_first_ranks_in_files_for_all_and_each_ranks_own_in_a_durable_run(tmp_path):
    root, drive = tmp_path / "saved", tmp_path / "drive"
    for folder in (drive, drive / "waited", drive / "beside"):
        folder.mkdir()
    (first, found), (second, more) = run_ranks(save_buffers, 2, root, drive)
    assert not first["1.running_mean"].equal(second["1.running_mean"])
    assert offload_runs("export", "run", tmp_path / "of-run", drive)[0] == 0
    exports = [load_file(folder / "model.safetensors") for folder in (root / "export", tmp_path / "of-run")]
    for buffers in (*found, *more, *exports):
        assert_same({name: buffers[name] for name in first}, first)
