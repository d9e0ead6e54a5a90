"""The same training twice: in place, and as a durable run with a log."""

import contextlib
import random

import torch

from tests.support.killed_steps import durable_section
from tests.support.rules import CASES
from tests.support.training import BLOCK, assert_same_bits, params_of, section, set_grads, snapshot

SHAPES = [(2 * BLOCK + 77,), (5,), (BLOCK,), (1001,), (BLOCK + 33,), (999,)]
DTYPES = (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float16, torch.float32, torch.float16)
ADAMW = CASES[0]


class Pair:
    """The same training twice: in host memory, and as a run with a log."""

    def __init__(self, drive, case, period, seed, shapes=SHAPES, dtypes=DTYPES, **more):
        self.rng, self.case, self.shapes, self.dtypes = random.Random(seed), case, shapes, dtypes
        self.section = durable_section(drive, "run", rewrite_every=period, **{"buffers": 2, **more})
        self.plain, self.own = self._made(section(sub_group_size=65536, clip=1.0))
        self.params, self.logged = self._made(self.section)
        self.before = None
        self.number = 0

    def _made(self, where):
        params = params_of(self.shapes, *self.dtypes)
        return params, self.case.make([{"params": params[::2]}, {"params": params[1::2]}], where)

    def step(self, *, without=None, missing=0.2, zeros=0.2, hands=0.2, by=None):
        self.before = snapshot(self.own)
        everybody, self.number = range(len(self.shapes)), self.number + 1
        if without is None:
            without = {index for index in everybody if self.number > 1 and self.rng.random() < missing}
        for params in (self.plain, self.params):
            set_grads(params, self.number, without=without)
        for index in sorted(set(everybody) - set(without)):
            if self.rng.random() < zeros:
                for params in (self.plain, self.params):
                    params[index].grad[:BLOCK] = 0
            if self.rng.random() < hands:
                self.set_by_hand(index, self.rng.choice([0.5, -0.25, 0.0]))
        for optimizer in (self.own, self.logged):
            optimizer.param_groups[1]["lr"] = 1e-2 / self.number
        self.own.step()
        (by or self.logged.step)()

    def plain_step(self, **more):
        self.step(missing=0, zeros=0, hands=0, **more)

    def step_and_wait_on_a_drive_that_fails(self):
        for call in (self.logged.step, self.logged.synchronize):
            with contextlib.suppress(OSError):  # the one or the other finds it
                call()

    def set_by_hand(self, index, value, size=1):
        with torch.no_grad():
            for params in (self.plain, self.params):
                params[index][:size] = value

    def reopen(self):
        """Another process goes on from the newest step; parameters are what it makes of that."""
        self.logged.close()
        self.params, self.logged = self._made(self.section)
        with torch.no_grad():
            for param in self.params:
                param.fill_(7)
        assert self.logged.resume() == (self.number, {})

    def go_back(self):
        """Both are as they were before the latest step."""
        self.number -= 1
        assert self.logged.rewind() == (self.number, {})
        assert_same_bits(snapshot(self.logged), self.before)
        own = [param for group in self.own.param_groups for param in group["params"]]
        with torch.no_grad():
            for param, value in zip(own, self.before["params"], strict=True):
                param.copy_(value)
        self.own.load_state_dict({key: self.before[key] for key in ("state", "param_groups")})

    def load(self):
        """The durable one has what the other has."""
        checkpoint = self.own.state_dict()
        self.logged.load_state_dict(checkpoint)
        with torch.no_grad():
            for param, its in zip(self.params, self.plain, strict=True):
                param.copy_(its)
        self.logged.load_state_dict(checkpoint)

    def check(self):
        assert_same_bits(snapshot(self.logged), snapshot(self.own))

    @property
    def chains(self):
        """Of those that have a log."""
        chains = [record.current for record in self.logged.store.durability.run.extents.slots]
        return [chain for chain in chains if chain.log]

    def close(self):
        self.own.close()
        self.logged.close()
