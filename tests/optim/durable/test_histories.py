"""Several ranks go on from one commit of one history, or are told on all ranks why they cannot."""

import errno
import shutil
import warnings
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from nvme_offload import ResumeError
from tests.support.durable_engine import durable, settle, whole
from tests.support.failing_drive import flip_bit
from tests.support.ranks import on_ranks
from tests.support.resuming import steps_of
from tests.support.sharded_model import assert_same


def in_life(path, rank, action):
    """What `action(engine)` returns in a life of its own."""
    with durable("bf16", path, "run") as engine, warnings.catch_warnings(action="ignore"):
        found = action(engine)
        settle(engine)
    dist.barrier()
    return found


def refused(action, kind, words):
    with pytest.raises(kind, match=words):
        action()


@on_ranks(2)
def test_a_folder_restored_from_before_the_run_went_back_is_refused_and_never_mixed(rank, world_size, drive):
    folder, backup = drive / f"nvme-durable-run-rank{rank}", drive / f"backup{rank}"

    def begin(engine):
        engine.resume()
        steps_of(engine, rank, range(3))
        assert engine.snapshot("before") == 3
        at_snapshot = whole(engine)[0]
        steps_of(engine, rank, range(3, 6))
        return at_snapshot

    at_snapshot = in_life(drive, rank, begin)
    shutil.copytree(folder, backup)

    def in_another_history(back, steps):
        def act(engine):
            engine.resume()
            back(engine)
            steps_of(engine, rank, steps)

        in_life(drive, rank, act)
        if rank == 1:
            shutil.rmtree(folder)
            shutil.copytree(backup, folder)
        dist.barrier()

    in_another_history(lambda engine: engine.resume("before"), range(13, 16))

    def refuse(engine):
        words = (
            r"(?s)no step that all ranks have of one history: rank 0 has step 6 \(\w{8}\) and step 5 .*rank0 on host"
        )
        refused(engine.resume, ResumeError, words + r".* rank 1 has step 6 .*rank1 on host .* Nothing has changed")
        assert engine.resume("before") == (3, {})
        assert_same(whole(engine)[0], at_snapshot)
        steps_of(engine, rank, range(3, 6))

    in_life(drive, rank, refuse)
    shutil.rmtree(backup)
    shutil.copytree(folder, backup)
    in_another_history(lambda engine: engine.rewind(), range(25, 26))

    def refuse_where_they_parted(engine):
        words = "steps of different histories: rank 0 has step 6 .* and step 5 .*; rank 1 has step 6 .* and step 5"
        refused(engine.resume, ResumeError, words)
        refused(engine.resume, ResumeError, words)  # nothing has changed
        assert engine.resume("before") == (3, {})

    in_life(drive, rank, refuse_where_they_parted)


WORDS = ("snapshot", "prepared", "unreadable")


@on_ranks(2)
def test_a_snapshot_that_one_rank_lacks_is_completed_or_refused_on_all_ranks(rank, world_size, drive):
    folder = drive / f"nvme-durable-run-rank{rank}"

    def begin(engine):
        engine.resume()
        steps_of(engine, rank, range(2))
        for name in ("lost", "withdrawn", "gone", "damaged"):
            assert engine.snapshot(name) == 2
        steps_of(engine, rank, range(2, 4))

    in_life(drive, rank, begin)
    (folder / "snapshot.gone").rename(folder / "prepared.gone")
    if rank == 1:
        (folder / "snapshot.lost").unlink()
        (folder / "snapshot.withdrawn").rename(folder / "prepared.withdrawn")
        flip_bit(folder / "snapshot.damaged", 500)
    dist.barrier()

    def look(engine):
        assert engine.resume() == (4, {})
        refused(lambda: engine.resume("lost"), ResumeError, "'lost' that all ranks can read: on rank 1, host .* not in")
        refused(lambda: engine.resume("damaged"), ResumeError, "on rank 1, host .*is damaged: .*rank1.snapshot.damaged")
        refused(lambda: engine.resume("gone"), KeyError, "no snapshot 'gone'; there are: withdrawn")
        refused(lambda: engine.snapshot("lost"), ValueError, "it is taken")
        assert engine.resume("withdrawn") == (2, {})
        steps_of(engine, rank, range(2, 4))
        engine.remove_snapshot("lost")
        engine.remove_snapshot("damaged")
        refused(lambda: engine.remove_snapshot("lost"), KeyError, "no snapshot 'lost'; there are: withdrawn")
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
                patch.setattr("nvme_offload.offload.durable.snapshots.replace_in", full)
            refused(lambda: engine.snapshot("lost"), OSError, "No space left")
        assert engine.snapshot("lost") == 4

    in_life(drive, rank, look)
    assert {file.name for file in folder.iterdir() if "." in file.name and file.name.split(".")[0] in WORDS} == {
        "snapshot.lost",
        "snapshot.withdrawn",
    }
