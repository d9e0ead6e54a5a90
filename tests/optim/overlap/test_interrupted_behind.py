"""An exception between any two instructions of the main thread while updates go on behind a step."""

import pytest
import torch

from nvme_offload import OffloadAdamW
from tests.optim.test_interrupts import default_handler  # noqa: F401
from tests.support.interrupts import STRIKES, every, raise_struck, send_sigint, strided, struck
from tests.support.pairs import each_value_once
from tests.support.sharded_model import assert_same, full_state
from tests.support.tiers import check_buffers, goes_on, loss_of, make, section
from tests.support.training import assert_same_training, noted


class Pair:
    """An optimizer that updates behind its steps, and one that does not, which nobody disturbs."""

    def __init__(self, path):
        config = section(path, state="nvme", accumulation=1)
        self.engine = make(config, num_layers=2, width=129)
        self.twin = make({**config, "overlap_step": "off"}, num_layers=2, width=129)
        self.optimizer = self.engine.optimizer
        self.steps = 0
        for _ in range(2):
            self.backward()
            self.step()

    def backward(self):
        for one in (self.engine, self.twin):
            one.module.zero_grad()
            loss_of(one.module, self.steps).backward()
        self.steps += 1

    def step(self):
        self.optimizer.step()
        self.twin.optimizer.step()

    def check(self, place):
        with noted(f"struck at {place}"):
            self.backward()
            self.step()
            assert_same(*[full_state(one.module, one.optimizer) for one in (self.engine, self.twin)])
        check_buffers(self.optimizer, place)

    def close(self):
        self.engine.close()
        self.twin.close()


@pytest.fixture
def pair(alone, tmp_path):
    pair = Pair(tmp_path)
    yield pair
    pair.close()


@STRIKES
@strided(1409)
def test_a_step_is_handed_over_finished_or_repeated(pair, strike, stride):
    for interrupt in every(stride, strike):
        pair.backward()
        pair.twin.optimizer.step()
        before = pair.optimizer.num_steps
        struck(interrupt, pair.optimizer.step)
        assert goes_on(pair.optimizer, before)
        pair.check(interrupt.place)


@STRIKES
@strided(499)
def test_so_is_the_first_step_behind_which_the_thread_begins(tmp_path, strike, stride):
    for interrupt in every(stride, strike):
        runs = [plain_module(tmp_path, overlap) for overlap in ("forward", "off")]
        with runs[0][1] as optimizer, runs[1][1] as twin:
            for model, _ in runs:
                model(torch.ones(3, 129, dtype=torch.bfloat16)).sum().backward()
            twin.step()
            struck(interrupt, optimizer.step)
            assert goes_on(optimizer, 0)
            optimizer.step()
            twin.step()
            assert_same_training(optimizer, twin)


def plain_module(path, overlap):
    """A model that is the same every time, and its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Linear(129, 65, dtype=torch.bfloat16)
    config = {**section(path, state="nvme", accumulation=1), "overlap_step": overlap}
    optimizer = OffloadAdamW(model.parameters(), lr=1e-2, offload={**config, "bf16": {}, "optimizer": None})
    if overlap != "off":
        optimizer.overlap_with(model)
    return model, optimizer


WAITERS = {
    "forward": lambda pair: loss_of(pair.engine.module, 77),
    "state_dict": lambda pair: pair.optimizer.state_dict(),
    "synchronize": lambda pair: pair.optimizer.synchronize(),
    "zero_grad": lambda pair: pair.optimizer.zero_grad(set_to_none=False),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@strided(3203)
@pytest.mark.parametrize(("name", "strike"), each_value_once(list(WAITERS), [raise_struck, send_sigint]))
def test_who_waits_for_updates_can_be_interrupted(pair, name, strike, stride):
    for interrupt in every(stride, strike):
        pair.backward()
        pair.step()
        struck(interrupt, lambda: WAITERS[name](pair))
        pair.engine.module.reshard()
        for module in pair.engine.module.layers:
            module.reshard()
        pair.check(interrupt.place)


@STRIKES
@strided(1409)
def test_finishing_what_stopped_behind_a_step_can_be_cut_short(pair, monkeypatch, strike, stride):
    for interrupt in every(stride, strike):
        pair.backward()
        pair.twin.optimizer.step()
        with monkeypatch.context() as patch:
            patch.setattr(pair.optimizer.store.pipeline, "advance", lambda ahead: raise_struck())
            pair.optimizer.step()
            pair.optimizer.store.worker.wait_until(lambda: pair.optimizer.store.record.phase.name == "STOPPED")
        assert pair.optimizer.has_unfinished_step
        struck(interrupt, pair.optimizer.finish_step)
        if not goes_on(pair.optimizer, None):
            assert strike is raise_struck, "Ctrl-C is held back where a step could not be finished"
            state, weights = pair.twin.optimizer.state_dict(), pair.twin.module.state_dict()
            pair.optimizer.load_state_dict(state)
            pair.engine.module.load_state_dict(weights)
            pair.optimizer.load_state_dict(state)
        pair.check(interrupt.place)
