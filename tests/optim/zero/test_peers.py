"""One rank fails and lives on: every other rank says which, where and of what, while it waits in a collective."""

import itertools
import logging
import random
import socket

import pytest

from nvme_offload import SwapIOError
from nvme_offload.offload._torch_private import store_of_all_ranks
from nvme_offload.optim.ranks.drives import ranks_of
from tests.optim.tiers.test_block_tiers_faults import unreadable
from tests.optim.zero.test_sharded import assert_same, full_state
from tests.support.forked import run_launched
from tests.support.ranks import run_ranks
from tests.support.tiers import EVERYTHING, loss_of, make, section, train_step

RANK = """
import logging, os, sys, threading
import torch
import torch.distributed as dist
from nvme_offload import PeerError, StateError, SwapIOError
from nvme_offload.offload._torch_private import store_of_all_ranks
from tests.optim.tiers.test_block_tiers_faults import unreadable
from tests.support.tiers import EVERYTHING, loss_of, make, section, train_step

path, moment = sys.argv[1:]
rank = int(os.environ["RANK"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
store = store_of_all_ranks()
config = section(path, **EVERYTHING, accumulation=1)
config["aio"]["engine"] = "aiofiles"


class Heard(logging.Handler):
    def emit(self, record):
        store.set("heard", record.getMessage())


def passes(engine):
    loss = loss_of(engine, 1, rank)
    if rank == 1 and moment == "backward":
        with unreadable(engine, "params"):
            engine.backward(loss)
    engine.backward(loss)


with make(config) as engine:
    threads = [thread.name for thread in threading.enumerate()]
    assert threads.count("nvme-offload-peers") == 1
    train_step(engine, 0, rank)
    if rank == 0:
        logging.getLogger("nvme_offload.optim.ranks.peers").addHandler(Heard())
        try:
            passes(engine)
        except PeerError as error:
            print(error)
            assert error.__cause__ is not None
        else:
            sys.exit("no error on rank 0")
        try:
            loss_of(engine, 2, rank)
        except StateError as error:
            assert "Another rank failed" in str(error)
        else:
            sys.exit("another pass began")
    else:
        try:
            if moment == "forward":
                with unreadable(engine, "params"):
                    passes(engine)
            passes(engine)
        except SwapIOError:
            print(store.get("heard").decode())  # waits for it: this process lives, and rank 0 is in the collective
            sys.stdout.flush()
            os._exit(0)
        sys.exit("no error on rank 1")
assert "nvme-offload-peers" not in [thread.name for thread in threading.enumerate()]
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_an_io_error_on_one_rank_is_said_on_the_other_while_both_live(tmp_path, moment):
    raised, heard = run_launched(RANK, tmp_path, moment)
    assert [raised.returncode, heard.returncode] == [0, 0], raised.stderr + heard.stderr
    for said in (heard.stdout, raised.stdout):
        assert f"rank 1, host {socket.gethostname()}, failed in {moment}: SwapIOError: read of" in said
        assert "failed: EIO" in said
        assert "end all ranks and resume from a checkpoint" in said
    assert "This rank waits for it in its next collective" in heard.stdout


class Heard(logging.Handler):
    def __init__(self, store):
        super().__init__()
        self._store = store

    def emit(self, record):
        self._store.set("heard", record.getMessage())


def one_repeats_its_step(rank, world_size, path):
    config = section(path, **EVERYTHING, accumulation=1) | {"overlap_step": "off"}
    config["aio"]["engine"] = "aiofiles"
    store, said = store_of_all_ranks(), ""
    logging.getLogger("nvme_offload.optim.ranks.peers").addHandler(Heard(store))
    with make(config) as engine:
        train_step(engine, 0, rank)
        engine.backward(loss_of(engine, 1, 0, rank))
        if rank == 1:
            with unreadable(engine, "grads"), pytest.raises(SwapIOError):
                engine.step()
            said = store.get("heard").decode()
        engine.step()
        train_step(engine, 2, rank)
        disturbed = full_state(engine.module, engine.optimizer)
    with make(config) as engine:
        for step in range(3):
            train_step(engine, step, rank)
        assert_same(disturbed, full_state(engine.module, engine.optimizer))
    return said


def test_an_io_error_in_a_step_is_said_too_and_the_step_is_finished(tmp_path):
    _, said = run_ranks(one_repeats_its_step, 2, tmp_path)
    assert said.startswith(f"rank 1, host {socket.gethostname()}, failed in step: SwapIOError: read of")
    assert said.endswith("This rank waits in its next collective until that rank has repeated the call")


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
