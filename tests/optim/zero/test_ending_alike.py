"""All ranks fail where one fails, and name its rank, host and place; and ranks end cleanly without a close."""

import socket

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nvme_offload import ConfigError, ResumeError, SwapIOError, initialize
from tests.support.ranks import on_ranks, run_ranks
from tests.support.small_engine import section
from tests.support.training import run_child

ON_RANK_1 = [f"on rank 1, host {socket.gethostname()}"]


def model(device="cpu"):
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))


def refused(rank, error, match, *args, **more):
    with pytest.raises(error, match=match) as caught:
        initialize(*args, **more)
    assert caught.value.__notes__ == ON_RANK_1


def fail(*_):
    raise ZeroDivisionError("a scheduler of the user's")


@on_ranks(2)
def test_initialize_fails_on_all_ranks_where_it_fails_on_one(rank, world_size, tmp_path):
    """One after the other in the same process group, which is as before each time."""
    is_first, config = rank == 0, section(path=tmp_path)
    missing = tmp_path / "missing"
    refused(rank, ConfigError, "missing", model(), config if is_first else str(missing))
    refused(rank, ConfigError, "stage", model(), config if is_first else section(7))
    refused(rank, ValueError, "has no parameters", model() if is_first else nn.ReLU(), config)
    refused(rank, Exception, "missing", model("meta"), config, weights=None if is_first else missing)
    refused(rank, TypeError, "pass a subclass", model(), config, optimizer=None if is_first else torch.optim.SGD)
    other = section(path=tmp_path if is_first else missing)
    refused(rank, SwapIOError, f"{missing}.*no such folder", model(), other)
    named = {"stage": 3, "offload_optimizer": {**other["zero_optimization"]["offload_optimizer"], "durable": "run"}}
    refused(rank, SwapIOError, f"{missing}.*no such folder", model(), other | {"zero_optimization": named})
    refused(rank, ZeroDivisionError, "user's", model(), config, lr_scheduler=(lambda _: None) if is_first else fail)
    refused(rank, ZeroDivisionError, "user's", model("meta"), config, init=None if is_first else fail)
    with initialize(model(), config) as engine:
        engine.backward(engine(torch.ones(2, 8)).sum())
    dist.barrier()
    assert not list(tmp_path.glob(".nvme-offload-*")), "a rank that had succeeded has given back its files"


def durable(path, name="run"):
    config = section(path=path, gradient_accumulation_steps=1)
    config["zero_optimization"]["offload_optimizer"]["durable"] = name
    return initialize(model(), config)


def take_steps(rank, world_size, path, num_steps=2):
    """Each rank has a drive of its own."""
    with durable(path / f"drive{rank}") as engine:
        for _ in range(num_steps):
            engine.backward(engine(torch.ones(2, 8)).square().sum())
            engine.step()


def resume_fails(rank, world_size, path):
    with durable(path / f"drive{rank}") as engine:
        with pytest.raises(SwapIOError, match=r"identity\..*is no file") as caught:
            engine.resume()
        assert caught.value.__notes__ == ON_RANK_1


def test_resume_fails_on_all_ranks_where_it_fails_on_one(tmp_path):
    """What rank 1 has lost, it cannot write anew either."""
    for rank in range(2):
        (tmp_path / f"drive{rank}").mkdir()
    run_ranks(take_steps, 2, tmp_path)
    [file] = (tmp_path / "drive1").glob("*/identity.*")
    file.unlink()
    file.with_name(f"{file.name}.new").mkdir()
    run_ranks(resume_fails, 2, tmp_path)


def in_another_order(rank, world_size, path, order):
    with durable(path / f"drive{order[rank]}") as engine:
        with pytest.raises(ResumeError, match="the ranks are not where their commits are") as caught:
            engine.resume()
        return caught.value.problem


def in_their_own(rank, world_size, path):
    with durable(path / f"drive{rank}") as engine:
        return engine.resume()[0]


def test_ranks_in_another_order_are_refused_with_the_place_of_each_directory(tmp_path):
    for rank in range(3):
        (tmp_path / f"drive{rank}").mkdir()
    run_ranks(take_steps, 3, tmp_path)
    first, *others = run_ranks(in_another_order, 3, tmp_path, [1, 0, 2])
    assert others == [first, first], "also where the rank itself is where it was"
    for drive, looks in ((0, 1), (1, 0)):
        folder = tmp_path / f"drive{drive}" / f"nvme-durable-run-rank{drive}"
        assert f"that of rank {drive} is in {folder} on host {socket.gethostname()}, where rank {looks} looks" in first
    assert f"Start ranks 0, 1, 2 on host {socket.gethostname()}" in first
    assert run_ranks(in_their_own, 3, tmp_path) == [2, 2, 2], "nothing has changed"


ROUNDS, MODES = 50, ("hidden", "durable", "background", "watched", "background and watched")

ENDS = """
import os, sys, threading
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from tests.support.tiers import make, section, train_step

folder, rounds, modes = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
torch.set_num_threads(1)


def rank_of(number):
    for rank in range(2):
        if os.fork() == 0:
            os.environ.update(RANK=str(rank), WORLD_SIZE="2")
            store = dist.FileStore(f"{folder}/store{number}", 2)
            dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
            return rank
    return None


def watch(optimizer):
    while True:
        optimizer.stats()


def train(rank, mode, number):
    path = f"{folder}/{number}"
    os.makedirs(path, exist_ok=True)
    config = section(path, state="nvme", accumulation=1)
    if mode.startswith(("durable", "background")):
        config["zero_optimization"]["offload_optimizer"]["durable"] = "run"
    engine = make(config, num_layers=2, width=129)
    for step in range(2):
        train_step(engine, step, rank)
    if "background" in mode:
        engine.save_checkpoint(f"{folder}/saved{number}", background=True)
    train_step(engine, 2, rank)
    if "watched" in mode:  # not before: it takes a processor
        threading.Thread(target=watch, args=(engine.optimizer,), daemon=True).start()
    dist.destroy_process_group()
    return engine


torch.compiler.disable(lambda: None)()  # imports what every rank would import once more
for number, mode in enumerate(modes * rounds):
    rank = rank_of(number)
    if rank is not None:
        left = train(rank, mode, number)  # and the interpreter ends
        break
    for _ in range(2):
        _, status = os.wait()
        assert status == 0, f"{mode} {number}: {status}"
else:
    print(len(modes) * rounds, "ends")
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_ranks_end_cleanly_without_being_closed(drive):
    said = run_child(ENDS, drive, ROUNDS, *MODES, timeout=3600, fresh=True)
    assert said.split() == [str(len(MODES) * ROUNDS), "ends"]
