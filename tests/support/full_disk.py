"""Durable trainings on a small file system of their own, which others fill."""

import errno
import os
import signal
import socket
import warnings
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from nvme_offload import OffloadAdamW, OutOfSpaceError
from tests.support.killed_steps import durable_section, fork
from tests.support.ranks import run_ranks
from tests.support.training import assert_same_bits, params_in, params_of, set_grads, snapshot

SHAPES = [(70_001,), (999,), (131_072,), (5,)]
MIB = 1 << 20
LARGE = 8 * MIB  # of a client_state that outgrows its place in the manifest
ROOM = {1: 0, 3: 4 * MIB}
"""What others leave, by period: no room for that, and for what is rewritten out of turn while nothing is committed."""


def fresh(path, name, period):
    params = params_of(SHAPES, torch.bfloat16, torch.bfloat16, torch.float16)
    return OffloadAdamW(params, lr=1e-2, offload=durable_section(path, name, rewrite_every=period))


def train(optimizer, steps):
    for step in steps:
        set_grads(params_in(optimizer), step)
        if optimizer.is_durable:
            optimizer.client_state["position"] = step + 1
        optimizer.step()


def settled(optimizer):
    optimizer.durable.commits.settle()
    return optimizer.stats()


def expected(path, num_steps):
    with fresh(path, None, 1) as optimizer:
        train(optimizer, range(num_steps))
        return snapshot(optimizer)


def fill(path, room):
    """Others leave so many bytes."""
    system = os.statvfs(path)
    filler_of(path).write_bytes(bytes(system.f_bavail * system.f_frsize - room))


def filler_of(path):
    return Path(path) / "filler"


@contextmanager
def warned():
    """What is warned of inside, about commits."""
    found = []
    with warnings.catch_warnings(record=True, action="always") as all_of_them:
        yield found
    found += [text for warning in all_of_them if "commit" in (text := str(warning.message))]


def assert_said_once(texts, step, cause="failed: ENOSPC"):
    [said] = texts
    for part in (f"training goes on (step {step} lasts):", "/manifest.", cause, "free space on it"):
        assert part in said, said


def go_through_an_outage(optimizer, steps, last):
    """None of these steps can be committed, and that is said once."""
    optimizer.client_state["large"] = torch.zeros(LARGE, dtype=torch.uint8)
    failed = optimizer.stats().failed_commits
    with warned() as texts:
        for step in steps:
            train(optimizer, [step])
            found = settled(optimizer)
            assert found.committed_step == last, found
            assert "failed: ENOSPC" in found.commit_failure, found
    assert found.failed_commits == failed + len(steps), found
    assert_said_once(texts, last)


def one_rank(path, period):
    """A run whose disk is full is killed, goes on from its latest step, and has the bits of a run with room."""
    pid = fork(lambda: _until_killed(path, period))
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status), status
    with fresh(path, "run", period) as optimizer:
        assert optimizer.resume() == (4, {"position": 4})
        train(optimizer, range(4, 8))
        assert settled(optimizer).committed_step == 8
        go_through_an_outage(optimizer, range(8, 13), 8)
        filler_of(path).unlink()
        train(optimizer, [13])
        found = settled(optimizer)
        assert (found.committed_step, found.commit_failure) == (14, None), found
        assert_same_bits(snapshot(optimizer), expected(path, 14))
    with fresh(path, "run", period) as optimizer:
        step, client_state = optimizer.resume()
        assert (step, client_state["position"], client_state["large"].numel()) == (14, 14, LARGE)
        assert_same_bits(snapshot(optimizer), expected(path, 14))


def _until_killed(path, period):
    optimizer = fresh(path, "run", period)
    train(optimizer, range(4))
    assert settled(optimizer).committed_step == 4
    fill(path, ROOM[period])
    go_through_an_outage(optimizer, range(4, 11), 4)
    os.kill(os.getpid(), signal.SIGKILL)


def nothing_left(path, period):
    """With a log, steps that are not committed need more and more space: one stops, and is finished with room."""
    with fresh(path, "run", period) as optimizer:
        train(optimizer, range(4))
        assert settled(optimizer).committed_step == 4
        fill(path, 0)
        optimizer.client_state["large"] = torch.zeros(LARGE, dtype=torch.uint8)
        with warned() as texts, pytest.raises(OutOfSpaceError) as caught:
            _train_and_settle(optimizer, range(4, 12))
        assert_said_once(texts, 4)
        assert any("Commits fail (step 4 lasts" in note for note in caught.value.__notes__), caught.value.__notes__
        filler_of(path).unlink()
        optimizer.finish_step()
        done = optimizer.durable.commits.step
        assert settled(optimizer).committed_step == done
        assert_same_bits(snapshot(optimizer), expected(path, done))


def _train_and_settle(optimizer, steps):
    for step in steps:
        train(optimizer, [step])
        settled(optimizer)


def two_ranks(path, period):
    """The disk is full for one of them; the other takes back what it has committed."""
    run_ranks(_rank, 2, path, period)


def _rank(rank, world_size, path, period):
    with fresh(path, "run", period) as optimizer:
        with pytest.MonkeyPatch.context() as patch, warned() as texts:
            if rank == 1:  # cannot write down what the run is
                full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
                patch.setattr(type(optimizer.durable.commits.run), "identify", full)
            train(optimizer, range(2))
            assert settled(optimizer).committed_step is None
        assert len(texts) == 1
        train(optimizer, range(2, 4))
        assert settled(optimizer).committed_step == 4
        if rank == 0:
            fill(path, ROOM[period])
        optimizer.durable.commits.ranks().all(True)
        if rank == 1:
            optimizer.client_state["large"] = torch.zeros(LARGE, dtype=torch.uint8)
        with warned() as texts:
            for step in range(4, 9):
                train(optimizer, [step])
                found = settled(optimizer)
                assert found.committed_step == 4, found
                assert found.commit_failure is not None
        if rank == 1:
            assert_said_once(texts, 4)
        else:
            [said] = texts
            assert "training goes on (step 4 lasts" in said, said
            assert f"one that failed on rank 1, host {socket.gethostname()}: " in said, said
        if rank == 0:
            filler_of(path).unlink()
        optimizer.durable.commits.ranks().all(True)
        train(optimizer, [9])
        found = settled(optimizer)
        assert (found.committed_step, found.commit_failure) == (10, None), found
        after = snapshot(optimizer)
        assert_same_bits(after, expected(path, 10))
    with fresh(path, "run", period) as optimizer:
        assert optimizer.resume()[0] == 10
        assert_same_bits(snapshot(optimizer), after)
