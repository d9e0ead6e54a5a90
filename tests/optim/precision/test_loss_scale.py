import pytest
import torch

from nvme_offload.optim.precision.loss_scale import LossScaler


def scaler(**changes):
    settings = {
        "loss_scale": 1024.0,
        "dynamic": True,
        "growth_interval": 3,
        "hysteresis": 1,
        "consecutive_hysteresis": False,
        "min_loss_scale": 1.0,
    }
    return LossScaler(**{**settings, **changes})


def scales(subject, overflows):
    seen = []
    for found_inf in overflows:
        subject.update(found_inf=found_inf)
        seen.append(subject.loss_scale)
    return seen


@pytest.mark.parametrize("seed", range(20))
def test_hysteresis_one_is_the_rule_of_torch_amp(seed):
    overflows = (torch.rand(60, generator=torch.Generator().manual_seed(seed)) < 0.25).tolist()
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    theirs.scale(torch.ones(1))  # makes its lazily made tensors
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    expected = []
    for found_inf in overflows:
        parameter.grad = torch.tensor([float("inf") if found_inf else 1.0])
        theirs.step(optimizer)
        theirs.update()
        expected.append(theirs.get_scale())
    assert scales(scaler(min_loss_scale=0.0), overflows) == expected


YES, NO = True, False


@pytest.mark.parametrize(
    ("changes", "overflows", "expected"),
    [
        ({"hysteresis": 2}, [YES, YES, YES], [1024, 512, 256]),
        ({"hysteresis": 2}, [YES, NO, NO, NO, YES, YES], [1024, 1024, 1024, 2048, 2048, 1024]),
        ({"hysteresis": 2}, [YES, NO, YES, YES], [1024, 1024, 512, 256]),
        ({"hysteresis": 2, "consecutive_hysteresis": True}, [YES, NO, YES, YES], [1024, 1024, 1024, 512]),
        ({"min_loss_scale": 600.0}, [YES, YES, YES], [600, 600, 600]),
        ({"dynamic": False}, [YES, NO, NO, NO], [1024, 1024, 1024, 1024]),
    ],
    ids=["forgives until the last", "growth restores", "spent", "forgives again", "minimum", "static"],
)
def test_a_scale_follows_its_settings(changes, overflows, expected):
    assert scales(scaler(**changes), overflows) == expected


def test_without_a_minimum_it_and_its_inverse_stay_normal_numbers():
    [least] = set(scales(scaler(min_loss_scale=0.0), [True] * 200)[150:])
    assert torch.finfo(torch.float32).tiny == least
    assert torch.isfinite(1 / torch.tensor(least))


def test_its_state_goes_through_a_state_dict():
    first, second = scaler(hysteresis=3), scaler(loss_scale=1.0)
    scales(first, [True, False, False, True])
    second.load_state_dict(first.state_dict())
    overflows = [False, True, True, False, False, False, True]
    assert scales(first, overflows) == scales(second, overflows)
