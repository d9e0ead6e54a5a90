"""Ranks that say through files what they have written, and one that waits for all of them."""

import threading

import pytest

from nvme_offload import CheckpointWriteError
from nvme_offload.optim.checkpoint.files import FileRecord
from nvme_offload.optim.checkpoint.others import Others
from nvme_offload.optim.checkpoint.storage import RankFile


def written(rank):
    return RankFile(f"__{rank}_0.distcp", FileRecord(10, f"digest {rank}"), [])


@pytest.fixture
def waiting(tmp_path, monkeypatch):
    """Rank 0 of 2, and an event that is set when it has looked for rank 1 and not found it."""
    first, looked = Others(tmp_path, 0, 2), threading.Event()
    size_bytes = first._size_bytes

    def looking():
        now = size_bytes()
        looked.set()
        return now

    monkeypatch.setattr(first, "_size_bytes", looking)
    first.say(written(0))
    return first, looked


def test_a_file_that_another_rank_renames_meanwhile_is_not_missed(tmp_path, waiting):
    first, looked = waiting
    listed = tmp_path / "rank1.new.said"
    listed.symlink_to(tmp_path / "renamed")  # listed, and not there for who asks for its size

    def say():
        looked.wait()
        listed.unlink()
        Others(tmp_path, 1, 2).say(written(1))

    other = threading.Thread(target=say)
    other.start()
    assert first.heard() == [written(0), written(1)]
    other.join()
    first.clear()
    assert list(tmp_path.iterdir()) == []


def test_what_another_rank_failed_with_is_raised(tmp_path, waiting):
    first, looked = waiting
    other = threading.Thread(target=lambda: looked.wait() and Others(tmp_path, 1, 2).say_failed(OSError("no room")))
    other.start()
    with pytest.raises(CheckpointWriteError, match="on rank 1: OSError: no room"):
        first.heard()
    other.join()
