"""The latest commit has a state: steps that stop behind `step()`, what cannot be committed, loads in between."""

import itertools
import warnings

import pytest
import torch

from nvme_offload import OffloadAdamW, StateError
from tests.support.failing_drive import Failing, Op
from tests.support.killed_steps import durable_section
from tests.support.ranks import on_ranks
from tests.support.tiers import Model, loss_of
from tests.support.training import assert_same_bits, params_in, params_of, set_grads, snapshot, take_steps

SHAPES = [(70_001,), (999,)]


def plain(drive, **more):
    params = params_of(SHAPES, torch.bfloat16, torch.float32)
    return OffloadAdamW(params, lr=1e-2, offload=durable_section(drive, "run", **more))


def hidden(drive, **more):
    """A module whose updates go on behind `step`, with more state than its two staging buffers hold."""
    torch.manual_seed(0)
    model = Model(num_layers=6, width=129).to(torch.bfloat16)
    section = durable_section(drive, "run", buffers=2, **more) | {"overlap_step": "forward"}
    optimizer = OffloadAdamW(model.parameters(), lr=1e-2, offload=section)
    optimizer.overlap_with(model)
    return model, optimizer


def steps_of(model, optimizer, numbers):
    for number in numbers:
        loss_of(model, number, 0).backward()
        optimizer.step()
        optimizer.zero_grad()


def stopped_behind(model, optimizer, monkeypatch):
    """Take a step whose updates stop behind it."""
    steps_of(model, optimizer, range(2))
    optimizer.synchronize()
    failing = Failing(optimizer.store.tier, monkeypatch, Op.READ)
    steps_of(model, optimizer, [2])
    with pytest.raises(OSError, match="behind a step"):
        optimizer.synchronize()
    assert optimizer.has_unfinished_step
    failing.healthy = True


def test_a_step_that_stopped_behind_is_committed_once_when_it_is_finished(drive, monkeypatch):
    model, optimizer = hidden(drive)
    with optimizer:
        stopped_behind(model, optimizer, monkeypatch)
        optimizer.finish_step()
        steps_of(model, optimizer, [3])
        optimizer.synchronize()
        after = snapshot(optimizer)
    with hidden(drive)[1] as optimizer:
        assert optimizer.resume() == (4, {})
        assert_same_bits(snapshot(optimizer), after)


def test_a_load_in_place_of_what_stopped_behind_is_not_committed_as_that_step(drive, monkeypatch):
    model, optimizer = hidden(drive)
    with optimizer:
        steps_of(model, optimizer, [0])
        loaded = optimizer.state_dict()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        stopped_behind(model, optimizer, monkeypatch)
        optimizer.load_state_dict(loaded)
        model.load_state_dict(weights)
        with (
            pytest.warns(RuntimeWarning, match="a load in their place"),
            pytest.raises(StateError, match="one whose commit failed"),
        ):
            optimizer.snapshot("as-loaded")
        optimizer.commit()
        optimizer.snapshot("as-loaded")
        after = snapshot(optimizer)
    with hidden(drive)[1] as optimizer:
        optimizer.resume("as-loaded")
        assert_same_bits(snapshot(optimizer), after)


def test_what_cannot_be_committed_is_raised_once_and_no_snapshot_takes_the_step_before_for_it(drive):
    with plain(drive) as optimizer, warnings.catch_warnings(action="error"):
        take_steps(optimizer, params_in(optimizer), 0)
        optimizer.client_state["seen"] = object()
        set_grads(params_in(optimizer), 1)
        with pytest.raises(ValueError, match=r"client_state\['seen'\]"):
            optimizer.step()
        assert optimizer.num_steps == 2
        with pytest.raises(StateError, match="one whose commit failed"):
            optimizer.snapshot("second")
        optimizer.client_state.clear()
        optimizer.commit()
        assert optimizer.snapshot("second") == 2


@on_ranks(2)
def test_what_one_rank_cannot_commit_lasts_on_none(rank, world_size, tmp_path):
    """So whoever is killed in the next step has one that both have."""
    path = tmp_path / f"rank{rank}"
    path.mkdir()
    with plain(path) as optimizer:
        take_steps(optimizer, params_in(optimizer), 0)
        set_grads(params_in(optimizer), 1)
        if rank:
            optimizer.client_state["seen"] = object()
            with pytest.raises(ValueError, match="client_state"):
                optimizer.step()
            optimizer.client_state.clear()
        else:
            optimizer.step()
        with warnings.catch_warnings(action="ignore"):
            assert not optimizer.durable.commits.settle()
        assert [manifest.step for manifest in optimizer.durable.commits.run.committed] == [1]
        take_steps(optimizer, params_in(optimizer), 2)
    with plain(path) as optimizer:
        assert optimizer.resume() == (3, {})


def test_a_state_follows_only_those_that_the_table_says(drive):
    with plain(drive) as optimizer:
        latest = optimizer.durable.commits.durable.latest
        CommitState = type(latest.state)  # noqa: N806  # a class
        ways = {
            CommitState.SETTLED: [],
            CommitState.PENDING: [CommitState.PENDING],
            CommitState.UNDER_WAY: [CommitState.PENDING, CommitState.UNDER_WAY],
            CommitState.LASTING: [CommitState.PENDING, CommitState.UNDER_WAY, CommitState.LASTING],
            CommitState.FAILED: [CommitState.FAILED],
        }
        allowed = set()
        for before, after in itertools.product(CommitState, CommitState):
            latest.state = CommitState.SETTLED
            for state in ways[before]:
                latest.become(state)
            try:
                latest.become(after)
            except StateError as error:
                assert after.value in str(error)  # noqa: PT017  # of most pairs it is raised
            else:
                allowed.add((before.name, after.name))
        assert allowed == {
            *(("SETTLED", "PENDING"), ("SETTLED", "FAILED"), ("PENDING", "UNDER_WAY"), ("PENDING", "FAILED")),
            *(("UNDER_WAY", "LASTING"), ("UNDER_WAY", "FAILED"), ("LASTING", "SETTLED"), ("FAILED", "SETTLED")),
        }
        latest.state = CommitState.SETTLED
