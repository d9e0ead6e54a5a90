"""A training that is killed with SIGKILL at random instants ends with the bits of one that never was."""

import errno
import os
import warnings
from unittest.mock import Mock

import pytest

from nvme_offload import OffloadAdamW
from tests.support import bystanders, killed_histories, killed_steps
from tests.support.hosts import why_not
from tests.support.killed_steps import DTYPES, KINDS, SHAPES, durable_section
from tests.support.training import params_of, returned_in_child, set_grads

QUICK = ["logged-in-memory-too", "on-rows"]  # of engines, on all tiers and two ranks: test_drawn_runs.py


def test_killed_now_and_then_it_ends_with_the_same_bits(drive):
    outcome = returned_in_child(killed_steps.main, drive, 6, 3, *QUICK, timeout=600)
    assert sum(found["kills"] for found in outcome.values()) >= 6
    resumed = [step for found in outcome.values() for life in found["history"] for step in life]
    assert any(step > 0 for step in resumed), "no life went on from a step"


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(5))
def test_killed_a_thousand_times_it_ends_with_the_same_bits(drive, seed):
    outcome = returned_in_child(killed_steps.main, drive, 24, 100 * seed, *KINDS, timeout=7200)
    assert sum(found["kills"] for found in outcome.values()) >= 200
    for name, found in outcome.items():
        assert any(step > 0 for life in found["history"] for step in life), f"{name}: no life went on from a step"


on_hosts = pytest.mark.skipif(bool(reason := why_not()), reason=reason)
ON_HOSTS = ["two-hosts-copies", "two-hosts-copies-logged"]
LOSING = ["copies", "copies-logged", "two-ranks-copies-logged"]


@pytest.mark.parametrize(
    ("num_kills", "kinds"),
    [
        (6, ["copies-logged"]),
        pytest.param(70, LOSING, marks=[pytest.mark.slow, pytest.mark.timeout(7200)]),
        pytest.param(70, ON_HOSTS, marks=[pytest.mark.slow, pytest.mark.timeout(7200), on_hosts], id="hosts"),
    ],
)
def test_killed_and_now_and_then_a_drive_is_erased_it_ends_with_the_same_bits(drive, num_kills, kinds):
    if os.stat("/dev/shm").st_dev == drive.stat().st_dev:
        pytest.skip("there is no second device")
    outcome = returned_in_child(killed_steps.main, drive, num_kills, 11, *kinds, timeout=7200)
    assert all(found["kills"] >= num_kills for found in outcome.values())
    for what in ("erased", "behind"):  # of few kills, no drive may be erased, and no copy be cut off
        assert sum(found[what] for found in outcome.values()) >= num_kills // 16, outcome


def test_killed_in_the_calls_that_go_back_and_forth_all_ranks_are_in_one_history(drive):
    outcome = returned_in_child(killed_histories.main, drive, 3, 1, "one-rank-logged", "two-ranks-logged", timeout=280)
    assert sum(found["kills"] for found in outcome.values()) >= 6
    assert sum(sum(found["inside"].values()) for found in outcome.values()) >= 2


@pytest.mark.slow
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("seed", range(2, 12))
def test_killed_hundreds_of_times_in_these_calls(drive, seed):
    outcome = returned_in_child(killed_histories.main, drive, 12, seed, *killed_histories.KINDS, timeout=14400)
    assert sum(sum(found["inside"].values()) for found in outcome.values()) >= 20


@pytest.mark.slow
@pytest.mark.parametrize(("num_kills", "kinds"), [(3, ["logged"]), (40, ["on-nvme", "logged-in-memory-too"])])
def test_who_trains_beside_one_that_is_killed_has_the_bits_of_a_run_alone(drive, num_kills, kinds):
    """Two runs that last, one that does not, and a stranger's files, all on one path."""
    outcome = returned_in_child(bystanders.main, drive, num_kills, 5, *kinds, timeout=1200)
    assert all(found["kills"] >= num_kills for found in outcome["killed"].values())
    assert min(outcome["ended"].values()) >= 1, outcome


@pytest.mark.parametrize("period", [1, 3])
def test_no_write_goes_where_the_latest_commit_refers_to_so_a_late_one_of_a_dead_process_hurts_nothing(
    drive, monkeypatch, period
):
    """What is under way when a process dies began after its latest commit or the one before that failed."""
    with OffloadAdamW(params_of(SHAPES, *DTYPES), offload=durable_section(drive, "run", rewrite_every=period)) as run:
        tier, commits, seen = run.store.tier, run.durable.commits, []
        write = tier.write

        def watched(extent, *more, **how):
            for manifest in commits.run.committed[:1]:
                chains = commits.run.extents.chains_of(manifest.tables, [s.layout for s in commits.run.extents.slots])
                kept = [stripe for chain in chains for written in chain for stripe in written.extent.stripes]
                seen.append(len(kept))
                for mine in extent.stripes:
                    for theirs in kept:
                        apart = mine.offset + mine.size_bytes <= theirs.offset
                        assert apart or theirs.offset + theirs.size_bytes <= mine.offset, (mine, theirs)
            return write(extent, *more, **how)

        monkeypatch.setattr(tier, "write", watched)
        failing, full = [4, 5, 6], Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        for step in range(12):
            set_grads(run.param_groups[0]["params"], step)
            with monkeypatch.context() as patch, warnings.catch_warnings(action="ignore"):
                if step in failing:
                    patch.setattr("nvme_offload.offload.durable.manifest.ManifestFiles.write", full)
                run.step()
                commits.settle()
        assert run.stats().failed_commits == len(failing)
        assert len(seen) > 30
