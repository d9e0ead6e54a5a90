"""One rank fails and lives on: every other rank says which, where and of what, while it waits in a collective."""

import itertools
import logging
import random
import resource
import socket
import threading
from contextlib import nullcontext, suppress

import pytest
import torch.distributed as dist

from nvme_offload import PeerError, StateError, SwapIOError
from nvme_offload.offload._torch_private import store_of_all_ranks
from nvme_offload.optim.ranks.drives import ranks_of
from tests.optim.tiers.test_block_tiers_faults import unreadable
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sharded_model import assert_same, full_state
from tests.support.tiers import EVERYTHING, loss_of, make, section, train_step


class Heard(logging.Handler):
    def __init__(self, store):
        super().__init__()
        self._store = store

    def emit(self, record):
        self._store.set("heard", record.getMessage())


def one_fails_in_a_pass(rank, world_size, path, moment):
    config = section(path, **EVERYTHING, accumulation=1)
    config["aio"]["engine"] = "aiofiles"
    store = store_of_all_ranks()
    logging.getLogger("nvme_offload.optim.ranks.peers").addHandler(Heard(store))
    with make(config, num_layers=4) as engine:
        assert [thread.name for thread in threading.enumerate()].count("nvme-offload-peers") == 1
        train_step(engine, 0, rank)
        if moment == "behind":
            engine.backward(loss_of(engine, 1, 0, rank))
            with unreadable(engine, "grads") if rank == 1 else nullcontext(), suppress(SwapIOError):
                engine.step()
                engine.optimizer.synchronize()
        of_this = StateError if moment == "behind" else SwapIOError
        with pytest.raises(of_this if rank == 1 else PeerError) as caught:
            a_pass(engine, rank, moment if rank == 1 else None)
        way_on = "Other ranks wait for this one in a collective: end them all" if rank == 1 else "Another rank failed"
        for act in (engine.step, lambda: loss_of(engine, 2, rank)):
            with pytest.raises(StateError, match=way_on):
                act()
        if rank == 1:
            said = store.get("heard").decode()  # waits for it: this process lives, and rank 0 is in the collective
        else:
            said = str(caught.value)
            assert caught.value.__cause__ is not None
        dist.destroy_process_group()  # as if this process had ended
    assert "nvme-offload-peers" not in [thread.name for thread in threading.enumerate()]
    return said


def a_pass(engine, rank, fails):
    with unreadable(engine, "params") if fails == "forward" else nullcontext():
        loss = loss_of(engine, 1, rank)
    with unreadable(engine, "params") if fails == "backward" else nullcontext():
        engine.backward(loss)


@pytest.mark.parametrize("moment", ["forward", "backward", "behind"])
def test_an_io_error_on_one_rank_is_said_on_the_other_while_both_live(tmp_path, moment):
    raised, heard = run_ranks(one_fails_in_a_pass, 2, tmp_path, moment)
    for said in (heard, raised):
        what = "forward: StateError" if moment == "behind" else f"{moment}: SwapIOError: read of"
        assert f"rank 1, host {socket.gethostname()}, failed in {what}" in said
        assert ("call finish_step()" if moment == "behind" else "failed: EIO") in said
        assert "end all ranks and resume from a checkpoint" in said
    assert "This rank waits for it in its next collective" in heard


def one_repeats_its_step(rank, world_size, path):
    config = section(path, **EVERYTHING, accumulation=1) | {"overlap_step": "off"}
    config["aio"]["engine"] = "aiofiles"
    store, said = store_of_all_ranks(), ""
    logging.getLogger("nvme_offload.optim.ranks.peers").addHandler(Heard(store))
    with make(config, num_layers=4) as engine:
        train_step(engine, 0, rank)
        engine.backward(loss_of(engine, 1, 0, rank))
        if rank == 1:
            with unreadable(engine, "grads"), pytest.raises(SwapIOError):
                engine.step()
            said = store.get("heard").decode()
        engine.step()
        train_step(engine, 2, rank)
        assert engine._peers.instead_of(RuntimeError()) is None, "nobody waits any more: an error is the user's own"
        disturbed = full_state(engine.module, engine.optimizer)
    with make(config, num_layers=4) as engine:
        for step in range(3):
            train_step(engine, step, rank)
        assert_same(disturbed, full_state(engine.module, engine.optimizer))
    return said


def test_an_io_error_in_a_step_is_said_too_and_the_step_is_finished(tmp_path):
    _, said = run_ranks(one_repeats_its_step, 2, tmp_path)
    assert said.startswith(f"rank 1, host {socket.gethostname()}, failed in step: SwapIOError: read of")
    assert said.endswith("This rank waits in its next collective until that rank has repeated the call")


@on_ranks(2)
def test_an_io_error_of_an_update_in_backward_says_one_way_on(rank, world_size, tmp_path):
    config = section(tmp_path, state="nvme", accumulation=1) | {"overlap_step": "backward", "skip_non_finite": False}
    with make(config | {"gradient_clipping": 0.0}, num_layers=4, width=150) as engine:
        train_step(engine, 0, rank)
        loss = loss_of(engine, 1, rank)
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1 if rank == 0 else 0, -1))
        try:
            engine.backward(loss)
            engine.step()
        except SwapIOError as error:
            ways_on = [note for note in error.__notes__ if "call step()" in note or "call finish_step()" in note]
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        assert rank == 0 or len(ways_on) <= 1, ways_on  # none where backward ended: the others wait
        dist.destroy_process_group()


def test_a_rank_is_given_to_who_reaches_it():
    """Against all permutations."""
    for seed in range(300):
        random_ = random.Random(seed)
        numbers = range(random_.randint(1, 5))
        reached = [set(random_.sample(numbers, random_.randint(0, len(numbers)))) for _ in numbers]
        wanted = set().union(*reached)

        def serves(ranks, reached=reached, wanted=wanted):
            return all(rank in reached[number] for number, rank in enumerate(ranks) if rank in wanted)

        found, every = ranks_of(reached), [ranks for ranks in itertools.permutations(numbers) if serves(ranks)]
        assert (tuple(found) in every) if every else found is None, (seed, reached, found)
        assert not serves(numbers) or found == [*numbers], (seed, reached, found)
