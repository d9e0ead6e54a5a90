"""A load and a birth write into run directories alone, and what a crash leaves of these goes with the next run."""

import os

import pytest
import torch

from nvme_offload import initialize, weight_items, write_sharded
from nvme_offload.offload.storage.run_directory import RunDirectory
from tests.support.crashed_saves import load_quietly, put_strangers, section, small_engine, small_model, train
from tests.support.power_loss import Recording

STRANGERS = ("nvme-offload-1-0/notes.txt", ".nvme-offload-2-0/lock/mine", "nvme-offload-mine/swap", "swap", "lock")
"""What others have on the path of the swap files, named as ours are."""


def train_two_steps(engine):
    """The second waits for what the first wrote. What the last one writes may be dropped together with its file."""
    train(engine, 2)
    train(engine, 3)


def born_from_files(drive):
    with torch.device("meta"):
        model = small_model()
    with initialize(model, section(drive / "nvme"), weights=drive / "weights") as engine:
        train_two_steps(engine)


def loaded(drive):
    with small_engine(seed=1, path=drive / "nvme") as engine:
        load_quietly(engine, drive / "checkpoints")
        train_two_steps(engine)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("life", [born_from_files, loaded])
def test_a_crash_leaves_run_directories_and_the_next_run_removes_them(tmp_path, in_memory, monkeypatch, life):
    drive = tmp_path / "drive"
    put_strangers(drive / "nvme", dict.fromkeys(STRANGERS, b"theirs"))
    with small_engine() as engine:
        train(engine, 0)
        engine.save_checkpoint(drive / "checkpoints", "old")
    write_sharded(drive / "weights", weight_items(small_model()), max_shard_bytes=200)
    with Recording(drive) as recording:
        life(drive)
    history = recording.history()
    kills, losses = list(history.kills()), list(history.power_losses(num_random=2000))
    before = kills[0].image
    assert any(path.endswith("/swap") and content for crash in losses for path, content in crash.image.items())
    assert len(kills) >= 8
    assert len(losses) >= 20
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    for number, crash in enumerate([*kills, *losses]):
        new = {path for path in crash.image if path not in before}
        assert all(path.startswith(("nvme/nvme-offload-", "nvme/.nvme-offload-")) for path in new), str(crash)
        assert {path: crash.image[path] for path in before} == before, str(crash)
        path = crash.restore(in_memory / str(number)) / "nvme"
        RunDirectory(path).remove()
        left = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
        assert left == set(STRANGERS), str(crash)
        assert len(os.listdir(path)) == len(STRANGERS), str(crash)
