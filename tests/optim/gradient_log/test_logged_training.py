"""A training from bases and a log has the bits of one in place, whatever comes between."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nvme_offload.offload.durable.manifest import Manifest
from nvme_offload.offload.errors import CorruptionError
from nvme_offload.offload.storage.swap_space import SwapSpace
from nvme_offload.optim.kernels import KernelPool
from nvme_offload.optim.layout.master import FORM_OF_DTYPE, TILE_NUMEL
from nvme_offload.optim.tiles import StepScalars
from tests.support.kernel_twins import State, same_bits, scalars_at
from tests.support.logged_training import LoggedTraining
from tests.support.rules import CASES, RuleCase

PARAMS = [
    (3 * TILE_NUMEL + 77, torch.bfloat16, torch.bfloat16, 0),
    (5, torch.bfloat16, torch.bfloat16, 0),
    (TILE_NUMEL, torch.bfloat16, torch.bfloat16, 1),
    (TILE_NUMEL + 1001, torch.float16, torch.float16, 0),
    (TILE_NUMEL + 33, torch.float32, torch.float32, 1),
    (999, torch.float32, torch.bfloat16, 0),
]
"""Elements, dtype of the parameter, of its gradient, parameter group."""
[ADAMW] = (case for case in CASES if case.name == "AdamW")


@pytest.fixture
def space(tmp_path: Path) -> Iterator[SwapSpace]:
    space = SwapSpace([tmp_path], direct="optional")
    yield space
    space.close()


class Pair:
    """The same training twice: in place in memory, and from bases and a log in files."""

    def __init__(self, space: SwapSpace, case: RuleCase, period: int, seed: int, spare_bytes: int) -> None:
        self.rng, self.case, self.pool = random.Random(seed), case, KernelPool(1)
        self.generator = torch.Generator().manual_seed(seed)
        dtypes = [dtype for _, dtype, _, _ in PARAMS]
        weights = [(torch.randn(numel, generator=self.generator) * 0.02).numpy() for numel, *_ in PARAMS]
        self.own = [State.of(w, FORM_OF_DTYPE[d], case) for w, d in zip(weights, dtypes, strict=True)]
        for state in self.own:  # masters are born from parameters
            if state.master is not None:
                state.master.copy_(state.param.float() if state.param.dtype is torch.float16 else 0)
        params = [state.param.clone() for state in self.own]
        groups, grads = [group for *_, group in PARAMS], [grad for _, _, grad, _ in PARAMS]
        kinds = {"groups": groups, "rule": case.rule, "period": period, "grad_dtypes": grads, "pool": self.pool}
        self.logged = LoggedTraining(space, params, **kinds, spare_bytes=spare_bytes)
        self.logged.begin()
        self.kinds, self.spare_bytes = kinds, spare_bytes
        self.steps, self.lrs = [0] * len(PARAMS), [1e-2, 3e-3]
        self.kept: list[tuple[list[State], list[int]]] = []

    def step(self, *, missing: float = 0.2, zeros: float = 0.2, hands: float = 0.2) -> None:
        grads, scalars = {}, {}
        for index, (numel, _, dtype, group) in enumerate(PARAMS):
            if self.steps[index] and self.rng.random() < missing:
                continue
            if self.rng.random() < hands:  # what has no gradient then would not be in this commit
                self._set_by_hand(index)
            self.steps[index] += 1
            grads[index] = (torch.randn(numel, generator=self.generator) * 0.01).to(dtype)
            if self.rng.random() < zeros:
                grads[index][:TILE_NUMEL] = 0
            scalars[index] = self._scalars(index, group)
        for index, grad in grads.items():
            self.own[index].update(self.pool, grad, scalars[index])
        self.logged.step(grads, scalars)
        self.commit()

    def commit(self) -> None:
        self.logged.commit()
        self.kept = [*self.kept[-1:], ([state.copied() for state in self.own], list(self.steps))]

    def crash(self, space: SwapSpace) -> None:
        """Another process goes on from the newest manifest; parameters are what it makes of that."""
        for file in space._files:
            file.ranges = type(file.ranges)()
        space._owned.clear()
        before = self.logged
        params = [torch.full_like(param, 7) for param in before.params]
        lives = {"incarnation": before.incarnation + 1, "sequence": before.ring.sequence, "manifests": before.manifests}
        self.logged = LoggedTraining(space, params, **self.kinds, spare_bytes=self.spare_bytes, **lives)
        for manifest in before.manifests:
            self.logged.ring.claim(Manifest.decode(manifest).tables)
        self.go_to(-1)

    def go_to(self, place: int) -> None:
        self.logged.adopt(self.logged.manifests[place])
        kept, steps = self.kept[place]
        self.own, self.steps = [state.copied() for state in kept], list(steps)
        self.logged.manifests, self.kept = [self.logged.manifests[place]], [self.kept[place]]

    def check(self) -> None:
        for index, (state, of_param) in enumerate(zip(self.own, self.logged.state(), strict=True)):
            assert same_bits(self.logged.params[index], state.param), f"parameter {index}"
            assert state.master is None or same_bits(of_param[0], state.master), f"master of {index}"
            for own, found in zip(state.states, of_param[1:], strict=True):
                assert same_bits(own, found), f"states of {index}"

    def _scalars(self, index: int, group: int) -> StepScalars:
        scale = self.rng.choice([1.0, 0.37])
        return scalars_at(self.steps[index], self.case, lr=self.lrs[group] / self.steps[index], grad_scale=scale)

    def _set_by_hand(self, index: int) -> None:
        at = self.rng.randrange(PARAMS[index][0])
        value = self.rng.choice([0.5, -0.25, 0.0])
        self.own[index].param[at] = value
        self.logged.params[index][at] = value


@pytest.mark.parametrize(
    ("case", "period"), [*((ADAMW, period) for period in (1, 2, 3, 4)), *((case, 3) for case in CASES[1:])], ids=str
)
def test_the_bits_are_those_of_a_training_in_place(space, case, period):
    pair = Pair(space, case, period, seed=period, spare_bytes=1 << 20)
    for number in range(14):
        pair.step()
        if number == 5:
            pair.lrs = [2e-2, 1e-4]
        if number in (6, 11):
            pair.crash(space)
        if number == 9:
            pair.go_to(0)
        if number % 3 == 0 or number in (6, 9, 11, 13):
            pair.check()
    assert pair.logged.num_overflows == 0


def test_an_entry_without_room_for_what_was_changed_by_hand_becomes_a_base(space):
    pair = Pair(space, ADAMW, 4, seed=9, spare_bytes=0)
    for _ in range(8):
        pair.step(missing=0, zeros=0, hands=0.5)
    pair.check()
    assert pair.logged.num_overflows > 0
    pair.crash(space)
    pair.check()


def test_what_a_damaged_entry_has_is_not_replayed(space):
    pair = Pair(space, ADAMW, 3, seed=2, spare_bytes=0)
    for _ in range(2):
        pair.step(missing=0, zeros=0, hands=0)
    chain = next(record.current for record in pair.logged.ring.slots if record.current.log)
    stripe = chain.log[0].extent.stripes[0]
    with open(pair.logged.space.path_of(stripe.fd), "r+b") as file:
        file.seek(stripe.offset + 4096 + 17)
        byte = file.read(1)
        file.seek(stripe.offset + 4096 + 17)
        file.write(bytes([byte[0] ^ 4]))
    with pytest.raises(CorruptionError):
        pair.check()
