"""Keys of groups and state are those of torch's optimizers; keys of a section that nobody reads are named."""

import json
import warnings

import pytest
import torch
from torch import nn

from nvme_offload import (
    ConfigWarning,
    OffloadAdagrad,
    OffloadAdam,
    OffloadAdamW,
    OffloadLion,
    OffloadMuon,
    OffloadSGD,
    TensorSwapper,
    initialize,
)
from tests.support.build import section
from tests.support.training import params_of, take_steps

PAIRS = [
    (torch.optim.AdamW, OffloadAdamW, {"weight_decay": 0.1}),
    (torch.optim.Adam, OffloadAdam, {"betas": (0.8, 0.9)}),
    (torch.optim.SGD, OffloadSGD, {"momentum": 0.9, "dampening": 0.5}),
    (torch.optim.SGD, OffloadSGD, {}),
    (torch.optim.Adagrad, OffloadAdagrad, {"initial_accumulator_value": 0.1}),
    (torch.optim.Muon, OffloadMuon, {}),
]
SHAPES = [(4, 6), (3, 3)]


def options_of(optimizer):
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def steps(optimizer, params, first, last):
    take_steps(optimizer, params, *range(first, last))


@pytest.mark.parametrize(("theirs", "ours", "options"), PAIRS, ids=str)
def test_keys_are_those_of_torch_and_state_dicts_go_both_ways(theirs, ours, options):
    with_torch, with_us, later = (params_of(SHAPES, torch.float32) for _ in range(3))
    expected = theirs(with_torch, lr=0.01, **options)
    with ours(with_us, lr=0.01, **options, offload=section()) as optimizer:
        assert options_of(optimizer) == options_of(expected)
        unstepped = optimizer.state_dict()
        steps(expected, with_torch, 0, 3)
        steps(optimizer, with_us, 0, 3)
        assert [set(optimizer.state[p]) for p in with_us] == [set(expected.state[p]) for p in with_torch]
        saved = optimizer.state_dict()
        assert saved["param_groups"] == expected.state_dict()["param_groups"]
        optimizer.load_state_dict(expected.state_dict())
        expected.load_state_dict(saved)
        for each, params in ((optimizer, with_us), (expected, with_torch)):
            steps(each, params, 3, 5)
        for p, q in zip(with_us, with_torch, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    with ours(later, lr=0.01, **options, offload=section()) as optimizer:
        optimizer.load_state_dict(unstepped)
        steps(optimizer, later, 0, 5)
        for p, q in zip(later, with_torch, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_muons_groups_have_a_rule_only_beside_adamw():
    with OffloadMuon(params_of([(4, 4), (4,)], torch.float32), offload=section()) as optimizer:
        assert [group["rule"] for group in optimizer.param_groups] == ["Muon", "AdamW"]
        optimizer.add_param_group({"params": params_of([(4,)], torch.float32), "rule": "AdamW"})
        assert optimizer.param_groups[2]["betas"] == (0.9, 0.999)


def test_a_wrapper_that_keeps_values_in_the_state_is_refused_by_name():
    """Schedule-free does so: ``state["z"] = p.clone()`` in its first step."""
    params = params_of([(3,)], torch.bfloat16)
    with OffloadAdamW(params, offload=section()) as optimizer:
        with pytest.raises(KeyError, match=r"'z' is not optimizer state here; AdamW has step, master, .* in memory"):
            optimizer.state[params[0]]["z"] = params[0].detach().clone()
        with pytest.raises(KeyError, match="'z' is not optimizer state here"):
            optimizer.state[params[0]] = {"z": 1}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("overlap", ["off", "forward"])
def test_a_group_may_be_added_while_a_step_is_hidden(tmp_path, overlap):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    late = nn.Parameter(torch.ones(64))
    with initialize(model, section(tmp_path, overlap_step=overlap, bf16={"enabled": True})) as engine:
        for step in range(4):
            inputs = torch.randn(2, 64, generator=torch.Generator().manual_seed(step))
            engine.backward((engine(inputs).float() * (late if step > 1 else 1)).square().mean())
            engine.step()
            if step == 1:
                engine.optimizer.add_param_group({"params": [late], "lr": 0.1})
                assert "exp_avg" in engine.optimizer.state[late]
        engine.optimizer.synchronize()
        result = [param.full_tensor().clone() for param in engine.module.parameters()]
        assert int(engine.optimizer.state[late]["step"]) == 2
    expected = BITS.setdefault("off", [*result, late.detach()])
    assert all(torch.equal(*pair) for pair in zip([*result, late.detach()], expected, strict=True))


BITS = {}  # of the first of the runs above


WHOLE = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "gradient_clipping": 1.0,
    "aio": {"queue_depth": 8},
    "gradient_accumulation_steps": 4,
    "train_batch_size": 8,
    "fp16": {"enabled": True},
    "bf16": {"enabled": False},
    "communication_data_type": "fp32",
    "fp32_modules": ["LayerNorm"],
    "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    "scheduler": {"type": "WarmupLR"},
}
UNREAD = (
    "train_batch_size, gradient_accumulation_steps, fp16, communication_data_type, fp32_modules, optimizer, scheduler"
)


def params():
    return [torch.nn.Parameter(torch.zeros(8))]


@pytest.mark.parametrize("kind", [OffloadAdamW, OffloadLion])
@pytest.mark.parametrize("as_file", [False, True])
def test_an_optimizer_names_the_keys_that_only_initialize_honours(tmp_path, kind, as_file):
    path = tmp_path / "offload.json"
    path.write_text(json.dumps(WHOLE))
    with pytest.warns(ConfigWarning) as caught, kind(params(), offload=path if as_file else WHOLE):
        pass
    [warning] = caught
    assert f"{kind.__name__} does not honour these keys of the section: {UNREAD}. " in str(warning.message)
    assert "nvme_offload.initialize does" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize(
    "more", [{}, {"fp16": {"enabled": False, "loss_scale": 0}}, {"gradient_accumulation_steps": 1}, {"scheduler": None}]
)
def test_what_asks_for_nothing_is_not_named(more):
    read = {key: WHOLE[key] for key in ("zero_optimization", "gradient_clipping", "aio")}
    with warnings.catch_warnings(action="error"), OffloadAdamW(params(), offload={**read, **more}):
        pass


def test_initialize_honours_them_and_says_nothing(alone):
    section = {key: value for key, value in WHOLE.items() if key != "fp32_modules"}
    with warnings.catch_warnings(action="error"), initialize(torch.nn.Linear(4, 4), section) as engine:
        assert engine.optimizer.config.gradient_clipping == engine.config.gradient_clipping == 1.0
        assert engine.optimizer.config.gradient_accumulation_steps == 4
        assert engine.optimizer.config.zero_optimization == engine.config.zero_optimization
        assert type(engine.optimizer).__name__ == "OffloadSGD"


def test_a_swapper_names_what_it_does_not_read(tmp_path):
    nvme = {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}}
    with pytest.warns(ConfigWarning, match="TensorSwapper does not honour .*: gradient_clipping, fp16") as caught:
        TensorSwapper({**nvme, "gradient_clipping": 1.0, "fp16": {"enabled": True}}).close()
    assert [warning.filename for warning in caught] == [__file__]
