"""`OffloadAdamW` over subgroups on a tier, beside a training in memory: a state is a position in that training."""

import functools
import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from nvme_offload import OffloadAdamW, OutOfSpaceError, StateError
from tests.support.simulator.case import Strike
from tests.support.simulator.run import Player
from tests.support.simulator.subjects.base import Subject, aio_options
from tests.support.training import SETTINGS, Twin, bits, params_of, section

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TRAININGS = (
    ([[((70,), BF16)], [((9,), BF16), ((5, 7), FP16)], [((3, 3), FP32)]], 1.0),
    ([[((33,), BF16)], [((257,), BF16)], [((1,), BF16)], [((64,), FP32), ((5,), BF16)]], 0.0),
    ([[((11,), FP16)], [((1200,), BF16)], [((40,), FP32)], [((900,), BF16)], [((2,), BF16)]], 0.5),
)
"""Shapes and dtypes of the parameters of each group, and the clipping. A subgroup holds one dtype of one group."""


class Trajectory:
    """All states of one of the trainings: an independent reference in numpy, step by step."""

    def __init__(self, groups: Any, clip: float) -> None:
        self.groups, self.clip = groups, clip
        self.flat = [described for group in groups for described in group]
        self._twin = Twin(self.fresh(), clip=clip)
        self._states = [self._state()]

    def fresh(self) -> list[Parameter]:
        return [params_of([shape], dtype)[0] for shape, dtype in self.flat]

    @functools.cache  # noqa: B019 - as old as the process
    def grads(self, step: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        return [(torch.randn(shape, generator=generator) * 0.1).to(dtype) for shape, dtype in self.flat]

    def at(self, step: int) -> dict[str, Any]:
        """The state after so many steps: a state dict, and bits of the parameters."""
        while len(self._states) <= step:
            self._twin.step(self.grads(len(self._states) - 1))
            self._states.append(self._state())
        return self._states[step]

    def _state(self) -> dict[str, Any]:
        twin, entries = self._twin, {}
        for number, (shape, dtype) in enumerate(self.flat):
            named = {name: torch.tensor(values[number]).view(shape) for name, values in twin.states.items()}
            named["step"] = torch.tensor(float(twin.steps[number]))
            if dtype is not FP32:
                named["master"] = torch.tensor(twin.masters[number]).view(shape)
            entries[number] = named
        return {"state": entries, "params": [twin.param_bits(i).copy() for i in range(len(self.flat))]}


@functools.cache
def trajectory(number: int) -> Trajectory:
    return Trajectory(*TRAININGS[number])


class OptimizerSubject(Subject):
    """Steps, reads, loads, new processes: after each the state is a known one, or the optimizer says that it is not."""

    weight = 5
    calls = {  # noqa: RUF012
        "step": 10, "synchronize": 2, "state_dict": 2, "entry": 2, "set_entry": 2, "load": 2, "drop_copies": 1,
        "reopen": 1, "kill": 1,
    }  # fmt: skip
    most_calls = 9

    @staticmethod
    def draw_options(draw: random.Random) -> dict[str, Any]:
        own = aio_options(draw) | {"training": draw.randrange(len(TRAININGS)), "buffers": draw.randint(2, 4)}
        own |= {"patience": draw.randint(0, 6), "opening": draw.choice((0, 0, 0, int(1500 ** draw.random())))}
        return own

    def __init__(self, player: Player) -> None:
        super().__init__(player)
        self.training = trajectory(self.options["training"])
        self.patience = self.options["patience"]
        self.position = 0
        opening = self.options["opening"]
        self.open(Strike("raise", opening) if opening else None)

    def open(self, strike: Strike | None = None) -> None:
        """Make parameters and optimizer; what keeps the first attempt from it leaves nothing behind."""
        self.params = self.training.fresh()
        params = iter(self.params)
        groups = [{"params": [next(params) for _ in group]} for group in self.training.groups]
        how = {"buffers": self.options["buffers"], "clip": self.training.clip, "sub_group_size": 1}
        options = section(self.player.folder, **how, **self.aio)
        make = lambda: self._make(groups, options)  # noqa: E731
        made, cut = self.player.struck(strike, make)
        while made is None:
            assert cut is not None or self.case.full_at, "nothing was to keep it from being made"
            made, cut = make(), None
        self.optimizer = made

    def _make(self, groups: list[dict[str, Any]], options: dict[str, Any]) -> OffloadAdamW | None:
        try:
            optimizer = OffloadAdamW([dict(group) for group in groups], offload=options, **SETTINGS)
            optimizer.place()
        except OutOfSpaceError:
            return None
        return optimizer

    def do_step(self, draw: random.Random, strike: Strike | None) -> None:
        optimizer = self.optimizer
        self.set_grads()
        before = optimizer.num_steps
        _, error = self.struck(strike, optimizer.step)
        if error is not None:
            self._check_note(error, before, strike)
        if optimizer.has_unfinished_step:
            if not self._finish_step(strike):
                return
        elif optimizer.num_steps == before:
            self.persist(optimizer.step)
        self.position += 1

    def do_synchronize(self, draw: random.Random, strike: Strike | None) -> None:
        self.struck(strike, self.optimizer.synchronize)

    def do_state_dict(self, draw: random.Random, strike: Strike | None) -> None:
        found, error = self.struck(strike, self.optimizer.state_dict)
        if error is None:
            self.compare(found)

    def do_entry(self, draw: random.Random, strike: Strike | None) -> None:
        number = draw.randrange(len(self.params))
        name = draw.choice(sorted(self.training.at(0)["state"][number]))
        found, error = self.struck(strike, lambda: self.optimizer.state[self.params[number]][name])
        if error is None:
            self._same(found, self.training.at(self.position)["state"][number][name], f"{name} of parameter {number}")

    def do_set_entry(self, draw: random.Random, strike: Strike | None) -> None:
        """To the value that it has."""
        number = draw.randrange(len(self.params))
        name = draw.choice(sorted(self.training.at(0)["state"][number]))
        value = self.training.at(self.position)["state"][number][name].clone()
        entry = self.optimizer.state[self.params[number]]
        _, error = self.struck(strike, lambda: entry.__setitem__(name, value))
        if self.optimizer.has_unfinished_step:
            assert error is not None
            self._refuses(self.optimizer.step, "a load stopped halfway")
            self.load(self.position, None)

    def do_load(self, draw: random.Random, strike: Strike | None) -> None:
        self.load(draw.randint(max(0, self.position - 2), self.position + 1), strike)

    def do_drop_copies(self, draw: random.Random, strike: Strike | None) -> None:
        self.struck(strike, self.optimizer.store.pipeline.drop_copies)

    def do_reopen(self, draw: random.Random, strike: Strike | None) -> None:
        """Another process, to which the state dict was handed."""
        self.persist(lambda: self.compare(self.optimizer.state_dict()))
        _, error = self.struck(strike, self.optimizer.close)
        if error is not None:
            self.optimizer.close()
        self.open()
        self.load(self.position, None)

    def do_kill(self, draw: random.Random, strike: Strike | None) -> None:
        """Another process, on a drive as this one leaves it that was killed anywhere in a step."""
        self.set_grads()
        put_back = self.player.killed(draw.randrange(1, 1500), lambda: self.attempt(self.optimizer.step))
        self.optimizer.close()
        del self.optimizer
        gc.collect()
        put_back()
        self.position = max(0, self.position - draw.randrange(2))  # what it had saved somewhere
        self.open()
        self.load(self.position, None)

    def finish(self) -> None:
        optimizer = self.optimizer
        self.persist(optimizer.synchronize)
        pipeline, pool = optimizer.store.pipeline, optimizer.store.pipeline.pool
        assert pool.num_free + len({slot.buffer.place for slot in pipeline.residents}) == pool.num_buffers
        if self.case.seed % 4:
            self.persist(pipeline.drop_copies)  # all that is compared comes from the drive
            assert pool.num_free == pool.num_buffers, "a buffer leaked"
        self.persist(lambda: self.compare(optimizer.state_dict()))
        self.set_grads()
        self.persist(optimizer.step)
        self.position += 1
        self.compare(optimizer.state_dict())
        optimizer.close()
        del self.optimizer

    # Calls that fail.

    def struck(self, strike: Strike | None, call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """What a call returned, or what struck it, or the error of the drive."""
        outcome, cut = self.player.struck(strike, lambda: self.attempt(call))
        return (None, cut) if cut is not None else outcome

    def persist(self, call: Callable[[], Any]) -> None:
        """Call again, or finish the step, until it works. The drive is well when patience is at an end."""
        error: BaseException | None = self.struck(None, call)[1]
        while error is not None:
            self.patience -= 1
            if self.patience <= 0:
                self.drive.well = True
            assert self.patience > -8, f"the drive is well: {error!r}"
            if self.optimizer.has_unfinished_step:
                call = self.optimizer.finish_step
            error = self.struck(None, call)[1]

    def _finish_step(self, strike: Strike | None) -> bool:
        """Finish a step that stopped halfway, or load where that cannot be done; whether the step was taken."""
        for refused in (self.optimizer.step, self.optimizer.state_dict):
            self._refuses(refused, "stopped after")
        try:
            self.persist(self.optimizer.finish_step)
        except StateError:
            assert strike.kind.startswith("raise"), "Ctrl-C is held back where a step could not be finished"
            self.load(self.position, None)
            return False
        return True

    def _refuses(self, call: Callable[[], Any], why: str) -> None:
        with pytest.raises(StateError, match=why):
            call()

    def _check_note(self, error: BaseException, before: int, strike: Strike | None) -> None:
        (note,) = getattr(error, "__notes__", [""])
        halfway, complete = self.optimizer.has_unfinished_step, self.optimizer.num_steps > before
        if not note:
            assert strike is not None
            assert not halfway
        elif halfway:
            assert f"step {before + 1} stopped after" in note, note
        else:
            assert note.startswith(f"Step {before + 1} {'is complete' if complete else 'has updated'}"), note

    # States.

    def set_grads(self) -> None:
        for param, grad in zip(self.params, self.training.grads(self.position), strict=True):
            param.grad = grad.clone()

    def load(self, position: int, strike: Strike | None) -> None:
        """Go to a position, also where that is cut short at first."""
        state = self.training.at(position)
        for param, expected in zip(self.params, state["params"], strict=True):
            param.data.copy_(torch.from_numpy(expected.copy()).view(param.dtype).view(param.shape))
        numbers = iter(range(len(self.params)))
        groups = self.optimizer.param_groups
        packed = [{**group, "params": [next(numbers) for _ in group["params"]]} for group in groups]
        given = {"state": state["state"], "param_groups": packed}
        _, error = self.struck(strike, lambda: self.optimizer.load_state_dict(given))
        while error is not None:
            if self.optimizer.has_unfinished_step:
                self._refuses(self.optimizer.step, "a load stopped halfway")
            self.patience -= 1
            self.drive.well = self.drive.well or self.patience <= 0
            assert self.patience > -8, f"the drive is well: {error!r}"
            _, error = self.struck(None, lambda: self.optimizer.load_state_dict(given))
        self.position = position

    def compare(self, found: dict[str, Any]) -> None:
        """Parameters and the whole state are those of the position."""
        expected = self.training.at(self.position)
        for number, (param, its_bits) in enumerate(zip(self.params, expected["params"], strict=True)):
            assert np.array_equal(bits(param), its_bits), f"parameter {number} at step {self.position}"
        assert found["state"].keys() == expected["state"].keys()
        for number, named in expected["state"].items():
            entries = found["state"][number]
            assert entries.keys() == named.keys(), (number, entries.keys())
            for name, value in named.items():
                self._same(entries[name], value, f"{name} of parameter {number}")

    def _same(self, found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        one, other = (tensor.float().contiguous().view(torch.int32) for tensor in (found, expected))
        assert torch.equal(one, other), f"{what} at step {self.position}"
