"""A training that goes back and forth between steps and snapshots, killed with SIGKILL in the calls that do so.

Each step has data of its own, also where a step of that number was taken before: its variant. The variants that led to
a state are committed with it, so of each life it is known which states it may go on from, and what the end must be: the
bits of a training that takes the steps of these variants and is never killed.
"""

import json
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from nvme_offload import OffloadAdamW, StateError
from nvme_offload.offload.durable.inventory import find_runs, remove_snapshot
from nvme_offload.perf.runs import command
from tests.support.durable_engine import durable, whole
from tests.support.killed_steps import DTYPES, SHAPES, be_ready_to_fork, digest_of, durable_section, fork, gradients_of
from tests.support.resuming import steps_of
from tests.support.training import params_of

NUM_STEPS = 6
NAMES = "ab"
_CHANGES = ("pwrite", "rename", "unlink", "fsync", "fdatasync", "posix_fallocate")
"""What a call does to the drive: it is killed before or after one of these."""
_MOST_CALLS, _MOST_CHANGES = 6, 8  # of a life, and of a call to the drive: after more of them it dies a little later


class OneRank:
    """An optimizer; what may change between lives does."""

    num_ranks = 1

    def __init__(self, path, name, chance, period):
        torch.manual_seed(7)
        self.params = params_of(SHAPES, *DTYPES)
        more = {"host_budget": chance.choice([None, "7MiB"]), "buffers": chance.choice([2, 3])}
        self.rewind_steps = chance.choice([1, 2, 3])
        made = durable_section(path, name, rewrite_every=period, rewind_steps=self.rewind_steps, **more)
        self.trained = OffloadAdamW(self.params, offload=made)

    def step(self, number, variant):
        gradients_of(self.params, number)
        for param in self.params:
            if param.grad is not None:
                param.grad *= 1 + variant % 5
        self.trained.step()

    def digest(self):
        state = self.trained.state_dict()["state"]
        return digest_of([*self.params, *(value for entries in state.values() for value in entries.values())])


class TwoRanks:
    """A sharded model in an engine; what may change between lives does."""

    num_ranks = 2
    rewind_steps = 1

    CHANGING = ("state", "off", "in memory too")

    def __init__(self, path, name, chance, period):
        tiers = chance.choice(self.CHANGING)
        self.trained = durable("bf16", path, name, tiers + (", logged" if period > 1 else ""))

    def step(self, number, variant):
        steps_of(self.trained, dist.get_rank(), [number + 100 * variant])

    def digest(self):
        state, scalars = whole(self.trained)
        return digest_of(state.values()) + repr(sorted(scalars.items()))


class TwoRanksOnNvme(TwoRanks):
    """The same with its parameters on the drive, and its gradients at times."""

    CHANGING = ("parameters", "everything")


KINDS = {
    "one-rank": (OneRank, 1),
    "one-rank-logged": (OneRank, 3),
    "two-ranks": (TwoRanks, 1),
    "two-ranks-logged": (TwoRanks, 3),
    "two-ranks-on-nvme": (TwoRanksOnNvme, 1),
}


class Log:
    """What one rank says of its life, in a file that outlives it."""

    def __init__(self, path):
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def say(self, *what):
        os.write(self._file, json.dumps(what).encode() + b"\n")


class DiesAtAChange:
    """Kill this process at a change to the drive, by its number from a call on; `after`: when that is done."""

    def __init__(self, call, change, *, after):
        self.call = call
        self.counts = False
        self._left = change
        self._after = after
        for name in _CHANGES:
            setattr(os, name, partial(self._change, getattr(os, name)))

    def _change(self, change, *args, **more):
        self._left -= self.counts
        if self.counts and self._left == 0:
            if self._after:
                change(*args, **more)
            os.kill(os.getpid(), signal.SIGKILL)
        return change(*args, **more)


def live(kind, path, name, seed, number, dies_at, rank):
    """Train to the end: steps, and calls that go back or keep a step, by chance that all ranks have alike."""
    make, period = KINDS[kind]
    chance = random.Random(f"{seed} {number}")
    log = Log(path / f"log.{name}.{number}.{rank}")
    dying = dies_at(rank)
    training = make(path, name, chance, period)
    with training.trained as trained:
        calls = Calls(trained, training, log, dying, chance)
        calls.resume()
        while len(calls.path) < NUM_STEPS:
            if chance.random() < 0.6:
                calls.make_one()
                continue
            variant = number * 10 + calls.number
            path_then = [*calls.path, variant]
            log.say("begin", [path_then])
            trained.client_state["path"] = path_then
            training.step(len(calls.path), variant)
            calls.path = path_then
            log.say("done", path_then)
        log.say("end", calls.path, training.digest())


class Calls:
    """Calls that change histories, and the state that the training is in: the variants of its steps."""

    def __init__(self, trained, training, log, dying, chance):
        self._trained, self._training, self._log, self._dying, self._chance = trained, training, log, dying, chance
        self.path = []
        self.number = 0

    def resume(self):
        self._log.say("call", "resume")
        self._make(lambda: self._take(self._trained.resume()))
        self._log.say("resumed", self.path)

    def make_one(self):
        """Make a call by chance. Those that are refused are refused on all ranks, in these words."""
        self.number += 1
        call = self._chance.choice([self.snapshot, self.snapshot, self.remove, self.back, self.back, self.rewind])
        name, steps = self._chance.choice(NAMES), self._chance.randint(1, self._training.rewind_steps)
        try:
            call(steps if call == self.rewind else name)
            self._log.say("done", self.path)
        except (KeyError, ValueError, StateError) as refused:
            said = str(refused)
            assert any(
                words in said for words in ("no snapshot", "it is taken", "committed step", "before the latest")
            ), said
            self._log.say("refused", said)
        self._trained.client_state["path"] = self.path

    def snapshot(self, name):
        self._log.say("kept", name, self.path)
        self._log.say("call", "snapshot")
        self._make(lambda: self._trained.snapshot(name))

    def remove(self, name):
        self._log.say("call", "remove_snapshot")
        self._make(lambda: self._trained.remove_snapshot(name))

    def back(self, name):
        self._log.say("goes to", name)
        self._log.say("call", "resume(name)")
        self._make(lambda: self._take(self._trained.resume(name)))

    def rewind(self, steps):
        self._log.say("begin", [self.path[:-steps]])
        self._log.say("call", "rewind")
        self._make(lambda: self._take(self._trained.rewind(steps)))

    def _make(self, call):
        if self._dying is not None:
            self._dying.counts = self.number >= self._dying.call
        call()
        if self._dying is not None:
            self._dying.counts = False

    def _take(self, found):
        step, client_state = found or (0, {"path": []})
        self.path = list(client_state["path"])
        assert step == len(self.path), (step, self.path)


def end_of(kind, path, variants, rank):
    """Take steps of these variants, and write the digest of what comes out."""
    make, period = KINDS[kind]
    training = make(path, None, random.Random(0), period)
    with training.trained:
        for number, variant in enumerate(variants):
            training.step(number, variant)
        (path / f"plain.{rank}").write_text(training.digest())


def look_at_runs(path, name, chance):
    """List the runs, and remove a snapshot of one at times; killed at some change to the drive."""
    dying = DiesAtAChange(0, chance.randint(1, 4), after=chance.random() < 0.5)
    run = next((run for run in find_runs([path]) if run.name == name), None)
    if run is None:  # its life was killed before there was any of it
        return
    assert command._table([run])
    dying.counts = True
    if run.snapshots and chance.random() < 0.3:
        remove_snapshot(run, chance.choice(run.snapshots))


class Histories:
    """Lives of one run, what they said, and what they might go on from."""

    def __init__(self, path, kind, name, seed):
        self.path, self.kind, self.name, self.seed = path, kind, name, seed
        self.num_ranks = KINDS[kind][0].num_ranks
        self.chance = random.Random(seed)
        self.kept = {name: [] for name in NAMES}
        self.allowed = [[]]
        self.number = 0
        self.inside = []  # calls in which it was killed

    def live(self, *, killed):
        """Live once; whether it came to its end."""
        self.number += 1
        at_change = killed and self.chance.random() < 0.8
        life = partial(live, self.kind, self.path, self.name, self.seed, self.number, self._some_death(at_change))
        pids = [fork(partial(self._as_rank, rank, f"met.{self.name}.{self.number}", life)) for rank in self._ranks]
        if killed and not at_change:
            time.sleep(self.chance.uniform(0, 2))
            self._kill(pids)
        statuses = self._wait(pids)
        said = [self._said(rank) for rank in self._ranks]
        died = any(statuses)
        assert not died or (killed and signal.SIGKILL in statuses), f"{self._place}: ended with {statuses}"
        self._check(said, died=died)
        return not died

    def _some_death(self, at_change):
        """Gives what one rank, or each, dies of."""
        rank = self.chance.choice([*self._ranks, None])
        of_ranks = []
        for _ in self._ranks:
            call, change = self.chance.randrange(_MOST_CALLS), self.chance.randint(1, _MOST_CHANGES)
            of_ranks.append(partial(DiesAtAChange, call, change, after=self.chance.random() < 0.5))
        return lambda number: of_ranks[number]() if at_change and rank in (number, None) else None

    @property
    def _ranks(self):
        return range(self.num_ranks)

    @property
    def _place(self):
        return f"{self.name} (kind {self.kind}, seed {self.seed}, life {self.number})"

    def _as_rank(self, rank, met, life):
        if self.num_ranks > 1:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(self.num_ranks))
            store = f"file://{self.path}/{met}"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=self.num_ranks)
        life(rank)
        if dist.is_initialized():
            dist.barrier()

    def _wait(self, pids):
        """The statuses. Where one rank is killed, the others are, at once or later: they would wait for it."""
        statuses, waiting, end = {}, list(pids), time.monotonic() + 240
        while waiting:
            assert time.monotonic() < end or self._kill(waiting), f"{self._place}: a rank waits"
            for pid in list(waiting):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    statuses[pid] = status
                    waiting.remove(pid)
                    time.sleep(self.chance.choice([0, 0.01, 0.3]) if status else 0)
                    self._kill(waiting if status else [])
            time.sleep(0.005)
        return [statuses[pid] for pid in pids]

    def _kill(self, pids):
        for pid in self.chance.sample(pids, len(pids)):
            os.kill(pid, signal.SIGKILL)
            time.sleep(self.chance.choice([0, 0.01, 0.2]) if len(pids) > 1 else 0)

    def _said(self, rank):
        file = self.path / f"log.{self.name}.{self.number}.{rank}"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def _check(self, said, *, died):
        """All ranks went on from one state, which the life before may have left."""
        resumed = [what[1] for of_rank in said for what in of_rank if what[0] == "resumed"]
        for path in resumed:
            assert path == resumed[0], f"{self._place}: ranks went on from {resumed}"
            assert path in self.allowed, f"{self._place}: went on from {path}, and might from {self.allowed}"
        for of_rank in said:
            for what in of_rank:
                if what[0] == "kept" and what[2] not in self.kept[what[1]]:
                    self.kept[what[1]].append(what[2])
        states = [path for of_rank in said for path in self._states(of_rank)]
        self.allowed = [path for place, path in enumerate(states) if path not in states[:place]]
        if died:
            last = [next((w for w in reversed(of_rank) if w[0] != "kept"), ["nothing"]) for of_rank in said]
            self.inside += [what[1] for what in last if what[0] == "call"][:1]
        else:
            (ended,) = {json.dumps(of_rank[-1][1]) for of_rank in said}
            self.end = json.loads(ended), [of_rank[-1][2] for of_rank in said]

    def _states(self, said):
        """What the next life may go on from, as this rank says: what it has come to, before that, and what it began."""
        done, begun = [], []
        for kind, *what in said:
            if kind in ("resumed", "done"):
                done.append(what[0])
                begun = []
            elif kind == "begin":
                begun = what[0]
            elif kind == "goes to":
                begun = self.kept[what[0]]
        if not any(kind == "resumed" for kind, *_ in said):
            return self.allowed
        return [*done[-2:], *([] if len(done) > 1 else self.allowed), *begun]

    def plain_end(self):
        """The digests of a training that takes the same steps and is never killed."""
        path = self.end[0]
        life = partial(end_of, self.kind, self.path, path)
        pids = [fork(partial(self._as_rank, rank, f"met.{self.name}.plain", life)) for rank in self._ranks]
        assert self._wait(pids) == [0] * self.num_ranks
        return [(self.path / f"plain.{rank}").read_text() for rank in self._ranks]


def kill(root, kind, num_kills, seed):
    """Kill runs of this kind so often; how often, and in which calls."""
    kills, inside, rounds = 0, [], 0
    while kills < num_kills:
        histories = Histories(root, kind, f"{kind}-{seed}-{rounds}", 1000 * seed + rounds)
        while not histories.live(killed=kills < num_kills):
            kills += 1
            pid = fork(partial(look_at_runs, root, histories.name, histories.chance))
            status = os.waitpid(pid, 0)[1]
            assert status in (0, signal.SIGKILL), f"{histories.name}: `offload runs` ended with {status}"
            kills, inside = kills + bool(status), inside + ["offload runs"] * bool(status)
        expected = histories.plain_end()
        assert histories.end[1] == expected, f"{histories.name}: other bits at the end of {histories.end[0]}"
        inside += histories.inside
        rounds += 1
    return {"kills": kills, "inside": {call: inside.count(call) for call in sorted(set(inside))}}


def main(root, num_kills, seed, *kinds):
    """Kill runs of each of these kinds so often, and return what became of them."""
    be_ready_to_fork()
    found = {}
    for kind in kinds:
        folder = Path(root) / kind
        folder.mkdir()
        found[kind] = kill(folder, kind, int(num_kills), int(seed))
    return found


if __name__ == "__main__":
    json.dump(main(*sys.argv[1:]), sys.stdout)
