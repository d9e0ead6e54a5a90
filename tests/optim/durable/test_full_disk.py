"""A full disk, or a drive that fails, while a durable run commits: it goes on, says so once, and loses no step."""

import errno
import os
from unittest.mock import Mock

import pytest

from nvme_offload import OutOfSpaceError, ResumeError
from tests.support.full_disk import fresh, settled, train, warned
from tests.support.sandbox import needs_mounts, run_python
from tests.support.training import assert_same_bits, snapshot

CODE = """
import sys
import torch
from tests.support import full_disk
if __name__ == "__main__":
    torch.set_num_threads(1)
    getattr(full_disk, sys.argv[1])(sys.argv[2], int(sys.argv[3]))
"""


@needs_mounts
@pytest.mark.parametrize("period", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("ranks", ["one_rank", pytest.param("two_ranks", marks=pytest.mark.slow)])
def test_a_full_disk_while_committing_loses_no_committed_step(tmp_path, ranks, period):
    child = run_python(CODE, ranks, tmp_path, period, mounts={tmp_path: "tmpfs,size=64m"})
    assert child.returncode == 0, child.stderr
    assert "commits succeed again" in child.stderr


@needs_mounts
@pytest.mark.slow
def test_a_step_that_finds_no_room_while_commits_fail_says_both_and_is_finished(tmp_path):
    child = run_python(CODE, "nothing_left", tmp_path, 3, mounts={tmp_path: "tmpfs,size=64m"})
    assert child.returncode == 0, child.stderr


@pytest.mark.parametrize("period", [1, 3])
def test_a_manifest_that_the_drive_does_not_take_is_said_once_until_it_does(drive, monkeypatch, period):
    written = os.pwrite

    def broken(fd, content, offset):
        if os.readlink(f"/proc/self/fd/{fd}").rpartition("/")[2].startswith("manifest."):
            raise OSError(errno.EIO, "Input/output error")
        return written(fd, content, offset)

    with fresh(drive, "run", period) as optimizer:
        train(optimizer, range(3))
        assert settled(optimizer).committed_step == 3
        with monkeypatch.context() as patch, warned() as texts:
            patch.setattr(os, "pwrite", broken)
            for step in range(3, 9):
                train(optimizer, [step])
                found = settled(optimizer)
                assert (found.committed_step, found.failed_commits) == (3, step - 2)
        [said] = texts
        for part in ("/manifest.", "failed: EIO", "smartctl"):
            assert part in found.commit_failure
            assert part in said
        assert "training goes on (step 3 lasts):" in said
        train(optimizer, [9])
        found = settled(optimizer)
        assert (found.committed_step, found.commit_failure) == (10, None)
        with monkeypatch.context() as patch, warned() as texts:
            patch.setattr(os, "pwrite", broken)
            train(optimizer, [10])
            settled(optimizer)
        assert "training goes on (step 10 lasts):" in texts[0]
        train(optimizer, [11])
        after = snapshot(optimizer)
    with fresh(drive, "run", period) as optimizer:
        assert optimizer.resume()[0] == 12
        assert_same_bits(snapshot(optimizer), after)


def test_where_there_is_no_room_to_go_on_nothing_is_taken_for_damaged(drive, monkeypatch):
    full = Mock(side_effect=OutOfSpaceError(path=drive, needed_bytes=1, free_bytes=0))
    with fresh(drive, "run", 3) as optimizer:
        train(optimizer, range(3))
        after = snapshot(optimizer)
    with monkeypatch.context() as patch, fresh(drive, "run", 3) as optimizer:
        patch.setattr("nvme_offload.offload.durable.extent_pool.ExtentPool.want", full)
        with warned() as texts, pytest.raises(ResumeError, match=r"is whole, and cannot go on now: .* ENOSPC"):
            optimizer.resume()
        assert not texts
    with fresh(drive, "run", 3) as optimizer:
        assert optimizer.resume()[0] == 3
        assert_same_bits(snapshot(optimizer), after)


def test_a_run_that_ends_while_commits_fail_says_which_step_is_there(drive, monkeypatch):
    full = Mock(side_effect=OSError(errno.ENOSPC, "no space is left"))
    with warned() as texts, fresh(drive, "run", 1) as optimizer:
        train(optimizer, range(2))
        settled(optimizer)
        monkeypatch.setattr("nvme_offload.offload.durable.manifest.ManifestFiles.write", full)
        train(optimizer, range(2, 5))
    assert "training goes on (step 2 lasts" in texts[0]
    assert "step 5 was the latest, and is not committed (step 2 lasts)" in texts[1]
    assert len(texts) == 2
