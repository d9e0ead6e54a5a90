"""Every way on that a note names leads on, from every state that a step or a load is left in, to the bits of a twin."""

import re

import pytest
import torch

from nvme_offload import StateError, SwapIOError, set_full_param
from tests.optim.overlap import test_plain_modules as plain
from tests.support.failing_drive import Failing, Op
from tests.support.sharded_model import GOES_ON, assert_same, full_state
from tests.support.tiers import make, train_step
from tests.support.training import noted

FAILED, LAST = 2, 4
MODES = {"running": "off", "stopped": "forward", "begun": "backward", "guessed": "speculate", "spoilt": "backward"}
"""The `overlap_step` in which an error leaves a step so. A "load" that stopped, and a run that is "found", are none."""


class Run:
    """A loop over plain modules or an engine, in a durable run or not; one can be driven as the other."""

    def __init__(self, path, state, kind, durable):
        path.mkdir(exist_ok=True)
        config = plain.config_of(path, MODES.get(state, "off"), gradient_clipping=0.0, skip_non_finite=False)
        config["zero_optimization"]["offload_optimizer"] |= {"durable": "run"} if durable else {}
        self.path, self.engine = path, None
        if kind == "engine":
            more = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
            self.engine = make({**config, **more}, num_layers=plain.LAYERS, width=129)
            self.model, self.optimizer = self.engine.module, self.engine.optimizer
        else:
            self.model, self.optimizer = plain.made(config, getattr(torch, kind))
        self.close = (self.engine or self.optimizer).close

    def train(self, *steps):
        for step in steps:
            if self.engine is not None:
                train_step(self.engine, step)
            else:
                plain.train_step(self.model, self.optimizer, step)

    def keep(self):
        self.optimizer.synchronize()
        if self.engine is not None:
            self.engine.save_checkpoint(self.path / "saved")
        states = {name: value.clone() for name, value in self.model.state_dict().items()}, self.optimizer.state_dict()
        self.kept = list(zip((self.model, self.optimizer), states, strict=True))

    def load(self, parts):
        self.drop()
        for part, state in parts:
            part.load_state_dict(state)

    def drop(self):
        (self.engine or self.optimizer).zero_grad()

    def end_step(self):
        (self.engine or self.optimizer).step()
        self.drop()

    def resume(self):
        self.drop()
        return (self.engine or self.optimizer).resume()


WAYS = {
    r"finish_step\(\)": (FAILED + 1, lambda run: (run.optimizer.finish_step(), run.drop())),
    r"(?<!_)step\(\) (while|can be|finishes)": (FAILED + 1, Run.end_step),
    r"resume\(\)": (FAILED, Run.resume),
    "the model's before the optimizer's": (FAILED, lambda run: run.load(run.kept)),
    "the optimizer's, then the model's": (FAILED, lambda run: run.load(run.kept[::-1])),
    "load a checkpoint( to go on|.*then the model's)": (
        FAILED,
        lambda run: (run.drop(), run.engine.load_checkpoint(run.path / "saved") if run.engine else run.load(run.kept)),
    ),
}
"""A way that may be named: the steps that are done when it was followed, and how it is done."""


def left(path, state, kind, durable, monkeypatch):
    """A run that an error has left in a state, what it says, and its drive, which is well again."""
    run = Run(path, state, kind, durable)
    if durable:
        run.resume()
    run.train(*range(FAILED))
    run.keep()
    if state == "found":
        kept = run.kept
        run.close()
        run = Run(path, state, kind, durable)
        run.kept = list(zip((run.model, run.optimizer), (state for _, state in kept), strict=True))
        with pytest.raises(StateError) as said:
            run.train(FAILED)
        return run, str(said.value)
    drive = Failing(run.optimizer.store.tier, monkeypatch, Op.WRITE, first=2)
    with pytest.raises(SwapIOError) as said:  # noqa: PT012
        if state == "load":
            run.load(run.kept[1:])
        run.train(FAILED)
        run.optimizer.synchronize()
    drive.healthy = True
    if state in ("spoilt", "load"):
        run.drop()
        with pytest.raises(StateError) as said:
            run.optimizer.state_dict()
    return run, "".join([str(said.value), *getattr(said.value, "__notes__", [])])


def ends(run, done):
    run.train(*range(done, LAST))
    state = full_state(run.model, run.optimizer)
    run.close()
    return state


TWINS = {}


def twin_of(kind, path):
    """Return how a run ends that nobody disturbs. Each kind is trained once."""
    if kind not in TWINS:
        TWINS[kind] = ends(Run(path, "off", kind, durable=False), 0)
    return TWINS[kind]


def named_in(said):
    named = [way for way in WAYS if re.search(way, said)]
    assert {"finish_step", "step", "resume"} & set(re.findall(r"(\w+)\(", said)) <= set(re.findall(r"\w+", str(named)))
    return named


STATES = [*MODES, "load", "found"]
KINDS = [("bfloat16", True), ("bfloat16", False), ("float32", True), ("engine", True), ("engine", False)]
"""Each kind says what is trained, and whether it is a durable run."""
IN_EVERY_RUN = [(*kind, state) for kind in KINDS[:2] for state in STATES] + [("engine", True, "begun")]
IN_EVERY_RUN += [("engine", True, "load"), ("engine", True, "stopped")]


@pytest.mark.parametrize(
    ("kind", "durable", "state"),
    [
        pytest.param(*case, marks=[GOES_ON] * (case[0] == "engine") + [pytest.mark.slow] * (case not in IN_EVERY_RUN))
        for case in ((*kind, state) for kind in KINDS for state in STATES)
        if case[1] or case[2] not in ("guessed", "found")  # states of durable runs
    ],
)
def test_every_way_that_is_named_leads_on(alone, tmp_path, monkeypatch, eager, state, kind, durable):
    expected = twin_of(kind, tmp_path / "twin")
    run, said = left(tmp_path / "first", state, kind, durable, monkeypatch)
    ways = named_in(said)
    assert ways
    while ways:
        way = ways.pop()
        with noted(f"{way} after {said}"):
            done, follow = WAYS[way]
            follow(run)
            assert_same(ends(run, done), expected)
        if ways:  # the error may come to another call this time, in backward or in the step, and name other ways
            run, said = left(tmp_path / str(len(ways)), state, kind, durable, monkeypatch)
            ways = [way for way in ways if way in named_in(said)]


def test_nobody_finishes_a_step_whose_parameters_were_overwritten(tmp_path, monkeypatch):
    run, _ = left(tmp_path / "run", "stopped", "float32", False, monkeypatch)
    with pytest.raises(StateError, match="finish_step"):
        set_full_param(run.model.head.weight, torch.zeros(run.model.head.weight.shape))
    run.model.load_state_dict(run.kept[0][1])
    with pytest.raises(StateError, match=r"parameters that it needs are gone.*load a checkpoint"):
        run.optimizer.finish_step()
    with pytest.raises(StateError, match="parameters that it needs are gone"):
        run.model.state_dict()["head.weight"].sum()
    run.close()
