"""Children made by fork, as a DataLoader makes them: they cannot use the optimizer, and cannot hurt it."""

import multiprocessing
import os

import pytest
import torch
from torch.utils.data import DataLoader

from nvme_offload import ForkError
from tests.support.training import BLOCK, assert_same_training, params_of, set_grads

fork = multiprocessing.get_context("fork")


def what_a_child_may_do(optimizer, params, answers):
    # Nothing large is computed here: torch's own OpenMP threads do not survive a fork either.
    calls = {
        "step": optimizer.step,
        "synchronize": optimizer.synchronize,
        "state_dict": optimizer.state_dict,
        "finish_step": optimizer.finish_step,
        "load_state_dict": lambda: optimizer.load_state_dict({"state": {}, "param_groups": []}),
        "add_param_group": lambda: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]}),
        "read": lambda: optimizer.state[params[0]]["exp_avg"],
        "write": lambda: optimizer.state[params[0]].update(exp_avg=params[0]),
    }
    for name, call in calls.items():
        try:
            call()
        except ForkError as error:
            answers.put((name, str(error)))
        except BaseException as error:
            answers.put((name, f"wrong: {error!r}"))
        else:
            answers.put((name, "wrong: it worked"))
    optimizer.close()
    answers.put(("closed", "closed"))


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
                answers = fork.Queue()
                child = fork.Process(target=what_a_child_may_do, args=(optimizer, params, answers))
                child.start()
                told = dict(answers.get(timeout=60) for _ in range(9))
                child.join(60)
                assert child.exitcode == 0
                assert told.pop("closed") == "closed"
                for name, answer in told.items():
                    assert f"made in process {os.getpid()} and is used in process {child.pid}" in answer, name
                assert device == "cpu" or list(drive.iterdir()) != []
        runs.append(optimizer)
    assert_same_training(*runs)


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
