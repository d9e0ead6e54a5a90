"""Two ranks that end without closing anything: whatever is under way, no thread aborts the process."""

import pytest

from tests.support.training import run_child

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
