"""A call that was cut short anywhere is made again, and then does what it would have done at once."""

import gc
import os
from functools import partial
from itertools import islice

import pytest
import torch

from nvme_offload.offload.weights.staging import HiddenFolder
from tests.support.interrupts import every, raise_struck, struck
from tests.support.training import assert_same_training, params_of, take_steps

SHAPES, DTYPES = [(9,), (7,), (3,)], (torch.bfloat16, torch.float16, torch.float32)


def trained(make_adamw, device, *steps):
    params = params_of(SHAPES, *DTYPES)
    optimizer = make_adamw(params, device)
    take_steps(optimizer, params, *steps)
    return optimizer


def descriptors():
    names = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sorted(os.readlink(name) for name in names if os.path.lexists(name))


def points(most):
    """The first ones, and all of them where there is time."""
    return pytest.mark.parametrize("most", [most, pytest.param(None, marks=pytest.mark.slow)])


@points(12)
def test_a_load_that_was_cut_short_is_made_again(make_adamw, most):
    """Its hook must not stay: a second one would find nothing left to load, and begin the state afresh."""
    other = trained(make_adamw, "cpu", 1, 2, 3)
    optimizer, checkpoint = trained(make_adamw, "nvme", 4), other.state_dict()
    for interrupt in islice(every(1, raise_struck), most):
        struck(interrupt, partial(optimizer.load_state_dict, checkpoint))
        load_all(optimizer, other)
        assert_same_training(optimizer, other)


def load_all(optimizer, other):
    for group, its in zip(optimizer.param_groups, other.param_groups, strict=True):
        for param, value in zip(group["params"], its["params"], strict=True):
            param.data.copy_(value.data)
    optimizer.load_state_dict(other.state_dict())


@pytest.mark.parametrize("stride", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_a_close_that_was_cut_short_is_made_again(make_adamw, tmp_path, stride):
    trained(make_adamw, "nvme", 1).close()
    gc.collect()
    before = descriptors()
    for interrupt in every(stride, raise_struck):
        optimizer = trained(make_adamw, "nvme", 1)
        struck(interrupt, optimizer.close)
        optimizer.close()
        assert descriptors() == before, interrupt.place


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one in a finalizer is told
@points(40)
def test_a_folder_of_an_export_is_not_kept_locked(tmp_path, most):
    for number, interrupt in enumerate(islice(every(1, raise_struck), most)):
        folder = tmp_path / str(number)
        folder.mkdir()
        struck(interrupt, partial(HiddenFolder, folder))
        interrupt.kept = None  # its frames have what was being made
        HiddenFolder(folder).remove()
        assert list(folder.iterdir()) == []
