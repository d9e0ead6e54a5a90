"""What holds for every optimizer: bits, torch's numbers, traffic, groups, state dicts, ranks, checkpoints.

A new optimizer comes under all of these tests with a line in `tests.support.rules`.
"""

import inspect
import math

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from nvme_offload import OffloadConfig, initialize
from nvme_offload.offload.config.optimizer import OPTIMIZERS
from nvme_offload.optim.layout.master import MasterForm, state_itemsize
from nvme_offload.optim.named_optimizers import optimizer_class
from nvme_offload.optim.rules.registry import RULES
from tests.support.resuming import fresh_engine
from tests.support.rules import CASES, NAMES, VARIANTS
from tests.support.training import (
    BLOCK,
    MILLION,
    assert_same_training,
    param,
    params_of,
    section,
    set_grads,
    storage_io,
    take_steps,
)

SHAPES = [(251, 257), (7,), (), (65537,), (0,), (3, 5, 7)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
every_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(autouse=True)
def nothing_is_left(drive):
    yield
    assert list(drive.iterdir()) == []


def difference(ours, theirs):
    """Norm of the difference over norm of the weights."""
    ours, theirs = (torch.cat([w.detach().double().flatten() for w in weights]) for weights in (ours, theirs))
    return float((ours - theirs).norm() / theirs.norm())


def masters_of(optimizer):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = optimizer.state_dict()["state"]
    return [state[i].get("master", p.detach()) for i, p in enumerate(params)]


def test_every_optimizer_of_the_table_has_a_case_and_a_class():
    assert {case.name for case in CASES} == {name for name in OPTIMIZERS if not RULES[name].whole}
    for name, hyperparameters in OPTIMIZERS.items():
        found = inspect.signature(optimizer_class(name).__init__).parameters
        defaults = {key: found[key].default for key in hyperparameters}
        assert optimizer_class(name).rule.name == name
        if name == "AdamW":
            defaults["weight_decay"] = 0.0  # DeepSpeed's, in the section
        assert defaults == dict(hyperparameters)


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_without_bias_correction_it_is_torchs_at_a_step_without_any(name, drive):
    case = next(case for case in CASES if case.name == name)
    theirs, ours = params_of([(1000,)], torch.float32), params_of([(1000,)], torch.float32)
    stock = case.make_torch(theirs)
    with case.make(ours, section(drive), bias_correction=False) as optimizer:
        for step in range(3):
            set_grads(theirs, step)
            ours[0].grad = theirs[0].grad.clone()
            for param in theirs:  # 1 - beta**step is 1 in fp64
                state = stock.state[param] or {
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }
                stock.state[param] = {**state, "step": torch.tensor(1e6)}
            stock.step()
            optimizer.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)
        assert optimizer.param_groups[0]["bias_correction"] is False


@pytest.mark.parametrize(
    ("case", "grad_dtype"),
    [
        pytest.param(case, dtype, id=f"{case}-{dtype}", marks=() if number % 3 == place else pytest.mark.slow)
        for number, case in enumerate(CASES)
        for place, dtype in enumerate(DTYPES)
    ],
)
def test_nvme_memory_and_the_twin_agree_bit_for_bit(case, grad_dtype, drive):
    runs = [params_of([shape for shape in SHAPES for _ in DTYPES], *DTYPES) for _ in range(3)]
    twin = case.twin(runs[2], clip=1.0)
    settings = [section(drive, buffers=2, clip=1.0), section(None, clip=1.0)]
    with case.make(runs[0], settings[0]) as nvme, case.make(runs[1], settings[1]) as memory:
        for step in range(4):
            set_grads(runs[2], step, without=[1])
            for params in runs:
                for p, like in zip(params, runs[2], strict=True):
                    p.grad_dtype = None
                    p.grad = None if like.grad is None else like.grad.to(grad_dtype)
            nvme.step()
            memory.step()
            twin.step([p.grad for p in runs[2]])
        assert nvme.stats().clip_coef < 1, "clipping acts"
        assert_same_training(nvme, memory)
        twin.assert_equals(nvme)


@pytest.mark.parametrize(("case", "changes"), VARIANTS, ids=str)
def test_stays_with_torch_on_fp32_masters(case, changes, drive):
    params = params_of([(51, 257), (77,), (5537,)], *DTYPES)
    masters = [Parameter(p.detach().float()) for p in params]
    theirs = case.make_torch(masters, **changes)
    with case.make(params, section(drive), **changes) as ours:
        for step in range(20):
            set_grads(params, step)
            for p, master in zip(params, masters, strict=True):
                master.grad = p.grad.float()
            ours.step()
            theirs.step()
        assert difference(masters_of(ours), masters) <= case.tolerance


@every_case
def test_bytes_per_parameter_each_way(case, drive):
    """By the kernel's counters: of a bf16 parameter 2 of the lower half, 4 or 2 of a state, and rounding to blocks."""
    params = [param((700_001,)) for _ in range(8)]
    total, wanted = 8 * 700_001, state_itemsize(MasterForm.SPLIT, case.rule.states)
    for p in params:
        p.grad = torch.full_like(p, 0.01)
    with case.make(params, section(drive, buffers=2, sub_group_size=MILLION)) as optimizer:
        for step in range(3):
            before, engine_before = storage_io(), optimizer.stats()
            optimizer.step()
            optimizer.synchronize()
            after, engine_after = storage_io(), optimizer.stats()
            if step == 0:
                continue
            left = engine_after.staging_bytes  # what the step before left there is not read again
            for moved in (after[0] - before[0], engine_after.bytes_read - engine_before.bytes_read):
                assert wanted * total - left <= moved <= (wanted + 0.1) * total - left / 2
            for moved in (after[1] - before[1], engine_after.bytes_written - engine_before.bytes_written):
                assert wanted * total <= moved <= (wanted + 0.1) * total


@every_case
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_state_has_the_bytes_that_the_rule_says(case, dtype, drive):
    itemsize = {torch.bfloat16: 2, torch.float16: 4, torch.float32: 0}[dtype]
    itemsize += (2 if case.settings.get("state_dtype") == "bf16" else 4) * len(case.rule.states)
    with case.make([param((4 * BLOCK,), dtype)], section(drive)) as optimizer:
        optimizer.place()
        assert optimizer.stats().state_bytes == 4 * BLOCK * itemsize
        take_steps(optimizer, optimizer.param_groups[0]["params"], 0)
        optimizer.synchronize()
        assert optimizer.stats().bytes_written == optimizer.stats().state_bytes


@every_case
def test_a_state_dict_goes_on_on_another_tier(case, drive, tmp_path):
    """Through a file, in other subgroups, and over a past of its own."""
    straight, resumed = (params_of(SHAPES, *DTYPES) for _ in range(2))
    with (
        case.make(straight, section(drive)) as first,
        case.make(resumed, section(None, sub_group_size=200_000)) as second,
    ):
        take_steps(second, resumed, 50)
        take_steps(first, straight, *range(3))
        counted = {"step"} if case.rule.counts_steps else set()
        assert set(first.state[straight[0]]) == {"master", *counted, *(state.name for state in case.rule.states)}
        with torch.no_grad():
            for p, q in zip(straight, resumed, strict=True):
                q.copy_(p)
        torch.save(first.state_dict(), tmp_path / "saved")
        second.load_state_dict(torch.load(tmp_path / "saved", weights_only=True))
        for step in range(3, 5):
            for params, optimizer in ((straight, first), (resumed, second)):
                take_steps(optimizer, params, step)
        assert_same_training(first, second)


@every_case
def test_arguments_that_are_not_supported_are_named(case):
    owner = f"Offload{case.name}"
    with case.make([param((8,))], section(), fused=True, foreach=False) as optimizer:
        assert optimizer.param_groups[0]["fused"]
    for name in case.rule.refused:
        case.make([param((8,))], section(), **{name: False}).close()
        with pytest.raises(TypeError, match=f"{owner}: {name} = True is not supported"):
            case.make([param((8,))], section(), **{name: True})
        with pytest.raises(ValueError, match=f"group 0: {name} = True: is not supported"):
            case.make([{"params": [param((8,))], name: True}], section())
    with pytest.raises(TypeError, match=f"{owner} has no argument 'speed'"):
        case.make([param((8,))], section(), speed=True)


@every_case
def test_hyperparameters_that_cannot_be_are_named(case):
    for name, value in case.settings.items():
        bad = (-0.1, 2.0) if isinstance(value, tuple) else -0.1
        if isinstance(value, bool):
            continue
        with pytest.raises(ValueError, match=rf"parameter group 0: {name} = \(?-0.1"):
            case.make([param((8,))], section(), **{name: bad})
        with case.make([param((8,))], section()) as optimizer:
            set_grads(optimizer.param_groups[0]["params"], 0)
            optimizer.param_groups[0][name] = "much"
            with pytest.raises(ValueError, match=f"parameter group 0: {name} = 'much'"):
                optimizer.step()
            assert optimizer.stats().steps == 0


def test_a_group_keeps_the_states_that_it_was_made_with():
    case = NAMES["Adagrad"]
    params = [param((8,)), param((8,), seed=1)]
    groups = [{"params": params[:1]}, {"params": params[1:], "initial_accumulator_value": 0.5}]
    with case.make(groups, section()) as optimizer:
        assert [float(optimizer.state[p]["sum"][0]) for p in params] == [float(torch.tensor(0.1)), 0.5]
        optimizer.param_groups[1]["initial_accumulator_value"] = 0.25
        set_grads(params, 0)
        with pytest.raises(
            ValueError, match=r"group 1: initial_accumulator_value = 0.25: its state is then sum \(torch.float32, from"
        ):
            optimizer.step()
        assert optimizer.stats().steps == 0


@every_case
def test_the_section_makes_it(case, tmp_path):
    config = OffloadConfig.from_dict(
        {
            "optimizer": {"type": case.name.lower(), "params": case.section_params},
            "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}},
        }
    )
    torch.manual_seed(0)
    with initialize(torch.nn.Linear(64, 64), config) as engine:
        assert type(engine.optimizer) is optimizer_class(case.name)
        assert {key: engine.optimizer.param_groups[0][key] for key in case.settings} == dict(case.settings)
        itemsize = state_itemsize(MasterForm.ITSELF, case.rule.states)
        [row, _] = engine.precision_plan.to_dict()["parameters"]
        assert row["bytes_per_parameter"].get("nvme", 0) == itemsize


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    optimizers = [{"optimizer": {"type": case.name, "params": case.section_params}} for case in NAMES.values()]
    with fresh_engine("fp32", **optimizers[0]) as engine:
        engine.save_checkpoint(tmp_path)
    for name, optimizer in list(zip(NAMES, optimizers, strict=True))[1:]:
        with fresh_engine("fp32", **optimizer) as engine, pytest.raises(ValueError, match=f"this run has {name}"):
            engine.load_checkpoint(tmp_path)


@every_case
def test_every_scalar_is_an_fp32_number(case):
    for step in (1, 2, 1000):
        scalars = case.rule.scalars(case.settings, step)
        assert list(scalars) == [float(np.float32(value)) for value in scalars]


def test_scalars_of_adamw_are_rounded_once():
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    scalars = NAMES["AdamW"].rule.scalars(group, 3)
    assert scalars.decay == np.float32(1 - 1e-3 * 0.1)
    assert scalars.beta1_complement == np.float32(1 - 0.9)
    assert scalars.beta2_complement == np.float32(1 - 0.95)
    assert scalars.step_size == np.float32(1e-3 / (1 - 0.9**3))
    assert scalars.bias_correction2_sqrt == np.float32(math.sqrt(1 - 0.95**3))


def test_the_first_step_is_one():
    with pytest.raises(ValueError, match="step is 0"):
        NAMES["AdamW"].rule.scalars(NAMES["AdamW"].settings, 0)
