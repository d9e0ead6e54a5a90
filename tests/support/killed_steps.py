"""A training that is killed with SIGKILL again and again, at random instants, and goes on from its latest step.

Runs in a process of its own, which imports torch once and forks each life of the training.
"""

import faulthandler
import hashlib
import json
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from nvme_offload import OffloadAdamW
from nvme_offload.offload.durable import run_copies
from nvme_offload.offload.durable.inventory import find_runs
from tests.support.durable_engine import durable, whole
from tests.support.hosts import Place, entries
from tests.support.resuming import steps_of
from tests.support.training import params_of, section

SHAPES = [(70_001,), (999,), (65_537,), (5,), (9_999,)]
DTYPES = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float16, torch.bfloat16)
NUM_STEPS = 12
_PAGE = struct.Struct("<qqq")  # resumed at, steps begun, steps that returned
_ATTEMPTS = 400


def durable_section(path, name, *, rewind_steps=1, rewrite_every=1, other=None, **more):
    """With the folder of an `other` drive the run has a copy there."""
    made = section(path, sub_group_size=65536, clip=1.0, **more)
    offload = made["zero_optimization"]["offload_optimizer"]
    offload["staging_budget"] = "8MiB"
    if name:
        offload |= {"durable": name, "rewind_steps": rewind_steps, "rewrite_every": rewrite_every}
        if other:
            offload |= {"nvme_path": [str(path), str(other)], "copies": 2}
    return made


def gradients_of(params, step):
    """From torch's own random numbers, which a resumed run must have back; now and then none, or one not finite."""
    for number, param in enumerate(params):
        grad = (torch.randn(param.shape) * 0.1).to(param.dtype)
        param.grad = None if number == step % 7 else grad
    if step % 11 == 5 and params[2].grad is not None:
        params[2].grad[0] = float("inf")


def digest_of(tensors):
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def train_optimizer(path, name, note, **more):
    """Train to the end, from the latest step that is committed if there is one; the digest of all that came out."""
    torch.manual_seed(7)
    params = params_of(SHAPES, *DTYPES)
    groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:]}]
    with OffloadAdamW(groups, offload=durable_section(path, name, **more)) as optimizer:
        for number in steps_left(optimizer, name, note):
            gradients_of(params, number)
            optimizer.param_groups[0]["lr"] = 1e-2 / (number + 1)
            if number % 13 == 4:
                with torch.no_grad():
                    params[0][:70] += 1
                    params[1][:7] -= 1
            optimizer.step()
        state = optimizer.state_dict()["state"]
        return digest_of([*params, *(value for entries in state.values() for value in entries.values())])


def train_on_rows(path, name, note):
    """The same over rows that are drawn anew in each epoch, by a loader of an epoch; the second one is cut, too."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.3), torch.nn.Linear(64, 8)).bfloat16()
    rows = torch.randn(36, 8).bfloat16()

    def batches(epoch):
        drawn = torch.Generator().manual_seed(epoch)
        return enumerate(torch.utils.data.DataLoader(rows, 6, shuffle=True, generator=drawn))

    numbered = ((6 * epoch + index, batch) for epoch in range(2) for index, batch in batches(epoch))
    with OffloadAdamW(model.parameters(), lr=1e-2, offload=durable_section(path, name)) as optimizer:
        for number in steps_left(optimizer, name, note):
            batch = next(batch for index, batch in numbered if index == number)  # those before are passed over
            (model(batch) - batch).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return digest_of(model.parameters())


def train_engine(path, name, note, tiers="state", other=None):
    """The same of a sharded model, on the ranks of this process group."""
    with durable("bf16", path, name, tiers, other=other) as engine:
        for number in steps_left(engine, name, note):
            steps_of(engine, dist.get_rank(), [number])
        state, scalars = whole(engine)
        return digest_of(state.values()) + repr(sorted(scalars.items()))


def steps_left(trained, name, note):
    """Resume what has a name, and yield the number of each step that is left; what they come to is noted."""
    found = trained.resume() if name else None
    step, position = (found[0], found[1]["position"]) if found else (0, 0)
    assert step == position, (step, position)
    note(step, 0, 0)
    for number in range(step, NUM_STEPS):
        note(step, number + 1, number)
        if name:
            trained.client_state["position"] = number + 1
        yield number
        note(step, number + 1, number + 1)


class Kind(NamedTuple):
    """A training."""

    train: Callable
    num_ranks: int = 1
    how: Mapping = {}  # it is made to last
    plain: Mapping = {}  # how the one is made that it is compared with, which does not last
    copies: bool = False  # it is on two drives, of which one is erased now and then
    hosts: bool = False  # a host for each rank, with its own drives: they start in any order, one may be killed alone


KINDS = {
    "on-nvme": Kind(train_optimizer),
    "in-memory-too": Kind(train_optimizer, how={"host_budget": "7MiB"}),
    "logged": Kind(train_optimizer, how={"rewrite_every": 3, "buffers": 2}),
    "logged-in-memory-too": Kind(train_optimizer, how={"rewrite_every": 3, "buffers": 2, "host_budget": "7MiB"}),
    "on-rows": Kind(train_on_rows),
    "copies": Kind(train_optimizer, copies=True),
    "copies-logged": Kind(train_optimizer, how={"rewrite_every": 3, "buffers": 2}, copies=True),
    "two-ranks-copies-logged": Kind(train_engine, 2, {"tiers": "state, logged"}, copies=True),
    "two-hosts-copies": Kind(train_engine, 2, copies=True, hosts=True),
    "two-hosts-copies-logged": Kind(train_engine, 2, {"tiers": "parameters, logged"}, copies=True, hosts=True),
}


def fork(life):
    """A process of its own for a life; its number."""
    pid = os.fork()
    if pid:
        return pid
    try:
        life()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


class Lives:
    """Lives of one run, and what they noted in memory that outlives them."""

    def __init__(self, path, kind, name, seed, *, lasting=True, other=None, hosts=()):
        self.path, self.kind, self.name, self.lasting = path, kind, name, lasting
        self.other, self.num_erased, self.num_behind = other, 0, 0
        self.random = random.Random(seed)
        self.hosts = dict(zip("ab", hosts, strict=True)) if kind.hosts else {}
        self.order = [*self.hosts] or [""]
        for host in self.order:
            for drive in filter(None, (path, other)):
                (drive / host).mkdir(exist_ok=True)
        self.pages = [mmap.mmap(-1, mmap.PAGESIZE) for _ in range(kind.num_ranks)]
        self.number = 0
        self.history = []

    def digest(self, seconds=None):
        """Live once, killed after so many seconds; the digest of a life that came to its end, or None."""
        finished = min(returned for _, _, returned in self._notes())
        for rank in range(self.kind.num_ranks):
            self._note(rank, -1, 0, 0)
        if self.other and self.number:
            self._erase_a_drive()
        self.number += 1
        self.random.shuffle(self.order)
        pids = [fork(partial(self._life, rank)) for rank in range(self.kind.num_ranks)]
        killed = seconds is not None and self._kill(pids, seconds)
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        assert killed or not any(statuses), f"{self.name}: a life ended with statuses {statuses}"
        self._hold_resumed_to(finished)
        return None if any(statuses) else self._ended()

    def _erase_a_drive(self):
        """Now and then, where the other one of the host has all."""
        host = self.random.choice(self.order)
        paths = [self.path / host, self.other / host]
        (run,) = find_runs(paths, self.name) or [None]
        if (
            run is None
            or len(run.ranks) < self.kind.num_ranks // len(self.order)
            or any(rank.copies.num_whole < len(paths) for rank in run.ranks)
        ):
            self.num_behind += 1
        elif self.random.random() < 0.6:
            self.num_erased += 1
            for folder in self.random.choice(paths).glob(f"nvme-durable-{self.name}-rank*"):
                shutil.rmtree(folder)

    def _life(self, rank):
        host = ""
        if self.kind.train is not train_optimizer:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(self.kind.num_ranks))
        if self.kind.hosts:
            os.environ.update(MASTER_ADDR=self.order[0], MASTER_PORT="29500")
            host = self.order[rank]
            self.hosts[host]()
        elif self.kind.train is not train_optimizer:
            met = f"file://{self.path}/{self.name}.{self.number}"
            dist.init_process_group("gloo", init_method=met, rank=rank, world_size=self.kind.num_ranks)
        name, how = (self.name, self.kind.how) if self.lasting else (None, self.kind.plain)
        if self.other:
            how = {**how, "other": self.other / host}
        self._end_of(rank).write_text(self.kind.train(self.path / host, name, partial(self._note, rank), **how))
        if dist.is_initialized():
            dist.barrier()  # who ends first may serve the others

    def _hold_resumed_to(self, finished):
        """What this life went on from, against what the one before had done."""
        for rank, (resumed, _, returned) in enumerate(self._notes()):
            if resumed >= 0:
                said = f"{self.name}: {finished} steps done, rank {rank} resumed at {resumed}"
                assert finished - 1 <= resumed <= finished + 1, said
            if returned == 0:  # not one of its own
                self._note(rank, resumed, 0, finished if resumed < 0 else resumed)
        if (resumed := max(resumed for resumed, _, _ in self._notes())) >= 0:
            self.history.append(resumed)

    def _kill(self, pids, seconds):
        """After so many seconds, one rank after another; most of the time not before the training has begun."""
        if self.random.random() < 0.8:
            while self._notes()[0][0] < 0 and not _has_ended(pids[0]):
                time.sleep(0.001)
        time.sleep(seconds)
        if _has_ended(pids[0]):
            return False
        # Without those that have not met it yet a rank waits in torch, until its launcher ends it.
        alone = self.hosts and all(resumed >= 0 for resumed, _, _ in self._notes())
        for pid in self.random.sample(pids, self.random.randint(1, len(pids)) if alone else len(pids)):
            os.kill(pid, signal.SIGKILL)
            time.sleep(self.random.choice([0, 0.01, 0.2]) if len(pids) > 1 else 0)
        return True

    def _notes(self):
        return [_PAGE.unpack(page[: _PAGE.size]) for page in self.pages]

    def _note(self, rank, *numbers):
        self.pages[rank][: _PAGE.size] = _PAGE.pack(*numbers)

    def _end_of(self, rank):
        return self.path / f"{self.name}.end{rank}"

    def _ended(self):
        return [self._end_of(rank).read_text() for rank in range(self.kind.num_ranks)]


def _has_ended(pid):
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def kill(root, name, num_kills, seed, other):
    """Kill runs of this kind so often; how often, and what each life went on from."""
    kind = KINDS[name]
    with entries([Place(host, {}) for host in "ab"]) if kind.hosts else nullcontext(()) as hosts:
        return _kill(name, num_kills, seed, other, partial(Lives, root, kind, hosts=hosts))


def _kill(name, num_kills, seed, other, lives_of):
    kind, begun = KINDS[name], time.monotonic()
    expected = lives_of(f"{name}-plain", seed, lasting=False).digest()
    seconds = time.monotonic() - begun
    done = rounds = 0
    history = []
    erased = behind = 0
    while done < num_kills:
        lives = lives_of(f"{name}-{rounds}", seed + rounds, other=other if kind.copies else None)
        for _ in range(_ATTEMPTS):
            digest = lives.digest(lives.random.uniform(0, 0.4 * seconds) if done < num_kills else None)
            if digest is not None:
                break
            done += 1
        assert digest == expected, f"{lives.name} (seed {seed + rounds}): other bits, resumed at {lives.history}"
        history.append(lives.history)
        rounds, erased, behind = rounds + 1, erased + lives.num_erased, behind + lives.num_behind
    return {"kills": done, "history": history, "erased": erased, "behind": behind}


def be_ready_to_fork():
    """Say nothing, have one thread, and have imported what lives need."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch._C._ensureCUDADeviceGuardSet = lambda: None  # as in simulator/install.py: it forks
    torch.compiler.disable(lambda: None)()  # imports what every life would import once more


def main(root, num_kills, seed, *names):
    """Kill runs of each of these kinds so often, and return what became of them."""
    faulthandler.enable()
    be_ready_to_fork()
    run_copies._LEAST_SHARE_BYTES, run_copies._PIECE_BYTES = 1 << 20, 1 << 16  # kills come while a copy is made again
    with tempfile.TemporaryDirectory(dir="/dev/shm" if any(KINDS[name].copies for name in names) else None) as other:
        return {name: kill(Path(root), name, int(num_kills), int(seed), Path(other)) for name in names}


if __name__ == "__main__":
    json.dump(main(*sys.argv[1:]), sys.stdout)
