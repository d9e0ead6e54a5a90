"""Children made by fork, as a DataLoader makes them: they cannot use the optimizer, and cannot hurt it."""

import multiprocessing
import os

import pytest
import torch
from torch.utils.data import DataLoader

from nvme_offload import ForkError, initialize
from tests.support.build import section
from tests.support.training import BLOCK, assert_same_training, params_of, set_grads

fork = multiprocessing.get_context("fork")


def check_refused_in_a_child(calls):
    """Each of these calls raises `ForkError` in a forked child, which ends by itself after it has closed all."""

    def call_each(answers):  # nothing large: torch's own OpenMP threads do not survive a fork either
        for name, call in calls.items():
            try:
                answers.put((name, f"it gave {call()!r}"))
            except BaseException as error:
                answers.put((name, repr(error)))

    answers = fork.Queue()
    child = fork.Process(target=call_each, args=(answers,))
    child.start()
    told = dict(answers.get(timeout=60) for _ in calls)
    child.join(60)
    assert child.exitcode == 0
    assert told == dict.fromkeys(calls, repr(ForkError("OffloadAdamW", os.getpid(), child.pid))) | {
        "close": "it gave None"
    }


def calls_of(optimizer, params):
    names = "step try_step finish_step synchronize place state_dict stats begin_iteration zero_grad catch_up"
    return {
        **{name: getattr(optimizer, name) for name in names.split()},
        "load_state_dict": lambda: optimizer.load_state_dict({"state": {}, "param_groups": []}),
        "add_param_group": lambda: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]}),
        "clip_grad_norm_": lambda: optimizer.clip_grad_norm_(1.0),
        "expect_step": lambda: optimizer.expect_step(True),
        "read": lambda: optimizer.state[params[0]]["exp_avg"],
        "write": lambda: optimizer.state[params[0]].update(exp_avg=params[0]),
        "close": optimizer.close,
    }


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_a_child_is_refused_in_words_and_does_not_hurt_its_parent(make_adamw, drive, device):
    runs = []
    for forks in (False, True):
        params = params_of([(3 * BLOCK,), (70,)], torch.bfloat16, torch.float32)
        optimizer = make_adamw(params, device if forks else "cpu", buffers=2)
        for step in range(4):
            set_grads(params, step)
            optimizer.step()
            if forks and step in (0, 2):
                check_refused_in_a_child(calls_of(optimizer, params))
                assert device == "cpu" or list(drive.iterdir()) != []
        runs.append(optimizer)
    assert_same_training(*runs)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_is_refused_in_words_between_backward_and_step(alone, tmp_path):
    """Updates have begun, and a load would wait for other ranks: in a child nobody does either."""
    config = section(tmp_path, adamw={}, overlap_step="backward", skip_non_finite=False)
    with initialize(torch.nn.Linear(70, 70), config) as engine:
        engine.backward(engine(torch.ones(1, 70)).sum())
        check_refused_in_a_child(
            {
                "load": lambda: engine.load_checkpoint(tmp_path),
                "backward": lambda: engine.backward(torch.ones((), requires_grad=True)),
                **calls_of(engine.optimizer, list(engine.parameters())),
            }
        )
        engine.step()


class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.full((8,), float(index), dtype=torch.bfloat16)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_dataloader_workers_come_and_go_between_steps(make_adamw):
    """Workers are forked while writes of the step before are under way."""

    def train(device, workers):
        params = params_of([(3 * BLOCK,), (8,)], torch.bfloat16)
        optimizer = make_adamw(params, device, buffers=2)
        for _ in range(3):
            context = "fork" if workers else None
            for batch in DataLoader(Noise(), batch_size=2, num_workers=workers, multiprocessing_context=context):
                optimizer.zero_grad()
                ((params[0].float() ** 2).sum() + (params[1] * batch).sum()).backward()
                optimizer.step()
        return optimizer

    assert_same_training(train("nvme", 2), train("cpu", 0))
