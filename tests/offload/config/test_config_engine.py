"""The sections of the engine: precision, batch sizes, optimizer, scheduler; and whole files of DeepSpeed's users."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvme_offload import ConfigError, ConfigWarning, OffloadConfig

DTYPES = {
    "fp32": ("fp32", "float32", "float", "torch.float32", "FP32", torch.float32),
    "bf16": ("bf16", "bfloat16", "bfp16", "torch.bfloat16", "BF16", torch.bfloat16),
    "fp16": ("fp16", "float16", "half", "torch.float16", "FP16", torch.float16),
}
SPELLINGS = [(spelling, name) for name, spellings in DTYPES.items() for spelling in spellings]
SIXTEEN_BITS = [(spelling, name) for spelling, name in SPELLINGS if name != "fp32"]
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
MODES = {"fp32": {}, "bf16": BF16, "fp16": FP16, "torch_autocast": AUTOCAST}
ZERO = "zero_optimization"


def adam(**params):
    return {"optimizer": {"type": "Adam", "params": params}}


def schedule(kind, **params):
    return {"scheduler": {"type": kind, "params": params}}


def data_types(**keys):
    return {"data_types": keys}


# Rows as those of `BAD` in test_config.py, where they are tried.
BAD_OF_ENGINE = [
    # precision
    ({"bf16": {"enabled": "ja"}}, 'bf16.enabled = "ja"', "write true or false"),
    ({"fp16": {"loss_scale_window": "5e2"}}, 'fp16.loss_scale_window = "5e2"', "a whole number, 1 or more"),
    ({"bfloat16": {"enable": True}}, "bfloat16.enable = true", "the nearest known key is bf16.enabled"),
    ({**BF16, "bfloat16": {"enabled": False}}, 'bfloat16 = {"enabled": false}', "another spelling of it; keep bf16"),
    ({"bf16": {"bf16_optimizer_states": True}, "optimizer": {"type": "Lion"}}, "bf16.bf16_optimizer_states = true",
     "the moments of Lion are fp32 here; write false or leave it out"),
    ({"bf16": {"bf16_optimizer_states": True}, **adam(state_dtype="fp32")}, "bf16.bf16_optimizer_states = true",
     "the moments of AdamW are fp32 here"),
    (adam(state_dtype="fp16"), 'optimizer.params.state_dtype = "fp16"', "write one of these"),
    ({"optimizer": {"type": "Lion", "params": {"state_dtype": "bf16"}}}, "optimizer.params.state_dtype", "or int8"),
    ({"optimizer": {"type": "SGD", "params": {"state_dtype": "int8"}}}, "optimizer.params.state_dtype", "no state"),
    ({"optimizer": {"type": "paged_adamw_8bit"}}, "optimizer.type", 'with params.state_dtype = "int8"'),
    ({**BF16, **FP16}, "fp16.enabled = true", "bf16.enabled = true beside it; write true in one of them only"),
    ({**BF16, **AUTOCAST}, "torch_autocast.enabled = true", "bf16.enabled = true beside it"),
    ({**BF16, **FP16, **AUTOCAST}, "torch_autocast.enabled = true", "bf16.enabled and fp16.enabled = true"),
    ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale = -1", "a number, 0 or more (default 0.0)"),
    ({"fp16": {"initial_scale_power": 127}}, "fp16.initial_scale_power = 127", "a whole number, 0..126 (default 16)"),
    ({"fp16": {"min_loss_scale": 8, "initial_scale_power": 2}}, "fp16.min_loss_scale = 8", "initial_scale_power = 2"),
    ({"torch_autocast": {"enabled": True}}, "torch_autocast.dtype = missing", 'write "bfloat16" or "float16"'),
    ({"torch_autocast": {"dtype": "float32"}}, 'torch_autocast.dtype = "float32"', "'bf16' or 'fp16'"),
    ({"torch_autocast": {"lower_precision_safe_modules": ["torch.nn.Linear", "Linear"]}},
     'torch_autocast.lower_precision_safe_modules = ["torch.nn.Linear", "Linear"]',
     '"Linear" is no class name with its package; write a list of class names'),
    ({"gradient_accumulation_dtype": "fp32", **data_types(grad_accum_dtype="bf16"), **BF16},
     'data_types.grad_accum_dtype = "bf16"',
     'gradient_accumulation_dtype = "fp32" is another spelling of it; keep gradient_accumulation_dtype'),
    (data_types(grad_accum_dtype="bf16"), 'data_types.grad_accum_dtype = "bf16"', "neither bf16.enabled nor fp16."),
    (data_types(grad_accum_dtype="int8"), 'data_types.grad_accum_dtype = "int8"', "'fp32', 'bf16' or 'fp16'"),
    (data_types(param_dtype="bf16"), 'data_types.param_dtype = "bf16"', "bf16 and fp16 decide this"),
    (data_types(grad_acum_dtype="bf16"), 'data_types.grad_acum_dtype = "bf16"', "key is data_types.grad_accum_dtype"),
    ({"data_types": "auto"}, 'data_types = "auto"', "is not a section"),
    # batch sizes
    ({"train_batch_size": 0}, "train_batch_size = 0", "a whole number, 1 or more (default none)"),
    # optimizer and scheduler
    ({"optimizer": {"type": "Lamb"}}, 'optimizer.type = "Lamb"', "'AdamW', "),
    ({"optimizer": {"lr": 1e-3}}, "optimizer.lr = 0.001", "lr belongs in optimizer.params; write optimizer.params.lr"),
    (adam(lr=-1), "optimizer.params.lr = -1", "a number, 0 or more"),
    (adam(eps=float("inf")), "optimizer.params.eps = Infinity", "a number, 0 or more"),
    (adam(betas=[0.9]), "optimizer.params.betas[1] = null", "two numbers, each 0 or more and below 1"),
    (adam(betas=[0.9, 1.0]), "optimizer.params.betas[1] = 1.0", "two numbers, each 0 or more and below 1"),
    (adam(amsgrad=True), "optimizer.params.amsgrad = true", "there is no AMSGrad; write false"),
    (adam(max_grad_norm=1.0), "optimizer.params.max_grad_norm = 1.0", "write gradient_clipping"),
    ({"scheduler": {"type": "OneCycle"}}, 'scheduler.type = "OneCycle"', "'WarmupLR', 'WarmupDecayLR' or"),
    (schedule("WarmupLR", warmup_type="cos"), 'scheduler.params.warmup_type = "cos"', "'log' or 'linear'"),
    (schedule("WarmupLR", warmup_max_lr=0), "scheduler.params.warmup_max_lr = 0", "a number, more than 0"),
    (schedule("WarmupLR", total_num_steps=9), "scheduler.params.total_num_steps = 9", 'type = "WarmupLR" has no such'),
    (schedule("WarmupLR", last_batch_iteration=7), "scheduler.params.last_batch_iteration = 7", "load_checkpoint"),
    (schedule("WarmupDecayLR", total_num_steps=9), "scheduler.params.warmup_max_lr = missing", "or 0.001"),
    (schedule("WarmupCosineLR"), "scheduler.params.total_num_steps = missing", 'type = "WarmupCosineLR" needs it'),
    (schedule("WarmupCosineLR", total_num_steps=9, warmup_max_lr=1.0), "scheduler.params.warmup_max_lr = 1.0",
     'type = "WarmupCosineLR" has no such parameter; write warmup_min_ratio, warmup_num_steps'),
    # what would change what is computed, or where it lives
    ({"amp": {"enabled": True, "opt_level": "O1"}}, "amp = ", "enable bf16, fp16 or torch_autocast"),
    ({"amp": True}, "amp = true", 'write {"enabled": false} or leave it out'),
    ({"elasticity": {"enabled": True}}, "elasticity = ", "write the batch keys"),
    ({"gradient_allreduce_op": "sum"}, 'gradient_allreduce_op = "sum"', 'write "mean" or leave it out'),
    ({ZERO: {"offload_param": {"device": "nvme"}}}, f"{ZERO}.offload_param.nvme_path = ",
     "write a folder on the drive"),
    ({ZERO: {"offload_param": {"buffer_count": 1}}}, f"{ZERO}.offload_param.buffer_count = 1", "2"),
    ({"fp32_modules": ["router"]}, 'fp32_modules = ["router"]', "bf16.enabled or fp16.enabled = true"),
    ({"fp32_modules": ["router"], "torch_autocast": {"enabled": True, "dtype": "bf16"}}, 'fp32_modules = ["router"]',
     "all but lower_precision_safe_modules"),
    ({**BF16, "fp32_modules": [""]}, 'fp32_modules[0] = ""', "a list of patterns"),
    ({**BF16, "fp32_modules": "router"}, 'fp32_modules = "router"', "a list of patterns"),
    ({"host_budget": "8G"}, 'host_budget = "8G"', 'write "auto", or 4 KiB or more, as "8GiB"'),
    ({"host_budget": 0}, "host_budget = 0", 'is less than 4 KiB; write "auto", or 4 KiB'),
    ({"zero_optimization": {"host_budget": "8GiB"}}, "zero_optimization.host_budget", "write host_budget"),
    # the wrapper
    ({"deepspeed": BF16, "aio": {}}, "deepspeed = ", "move the keys beside it into it"),
    ({"deepspeed": 7}, "the whole = 7", "is not a section"),
]  # fmt: skip


@pytest.mark.parametrize(("spelling", "name"), SPELLINGS, ids=str)
def test_dtypes_have_many_spellings(spelling, name):
    mode = MODES[name]
    for keys in ({"gradient_accumulation_dtype": spelling}, data_types(grad_accum_dtype=spelling)):
        config = OffloadConfig.from_dict({**mode, **keys, "communication_data_type": spelling})
        assert (config.gradient_accumulation_dtype, config.communication_data_type) == (name, name)
        assert config.compute_dtype == name


@pytest.mark.parametrize(("spelling", "name"), SIXTEEN_BITS, ids=str)
def test_autocast_dtypes_too(spelling, name):
    config = OffloadConfig.from_dict({"torch_autocast": {"enabled": True, "dtype": spelling}})
    assert config.autocast_dtype == name
    assert config.compute_dtype == "fp32"


@pytest.mark.parametrize("switch", [True, 1, "true", "On"])
@pytest.mark.parametrize("optimizer", [{}, {"optimizer": {"type": "Adam"}}, adam(lr=1e-4)])
def test_deepspeeds_switch_of_the_moments_dtype(switch, optimizer):
    config = OffloadConfig.from_dict({"bf16": {"enabled": True, "bf16_optimizer_states": switch}, **optimizer})
    assert config.optimizer.hyperparameters["state_dtype"] == "bf16"


TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.mark.parametrize(("given", "expected"), [
    ({}, (None, None, 1)), ({STEPS: 4}, (None, None, 4)), ({MICRO: 2}, (6, 2, 1)), ({MICRO: 2, STEPS: 4}, (24, 2, 4)),
    ({TRAIN: 24}, (24, 8, 1)), ({TRAIN: 24, STEPS: 4}, (24, 2, 4)), ({TRAIN: 24, MICRO: 2}, (24, 2, 4)),
    ({TRAIN: 24, MICRO: 2, STEPS: 4}, (24, 2, 4)),
])  # fmt: skip
def test_what_is_left_out_is_derived(given, expected):
    config = OffloadConfig.from_dict(given)
    assert config.batch_sizes(3) == expected
    again = OffloadConfig.from_dict(json.loads(config.model_dump_json()))
    assert again.batch_sizes(3) == expected, "also after a round trip"


@pytest.mark.parametrize(("given", "right"), [
    ({TRAIN: 25, MICRO: 2, STEPS: 4}, 24), ({TRAIN: 12, MICRO: 2, STEPS: 4}, 24), ({TRAIN: 25, MICRO: 2}, 30),
    ({TRAIN: 1, MICRO: 2}, 6), ({TRAIN: 25, STEPS: 4}, 36), ({TRAIN: 25}, 27),
])  # fmt: skip
def test_batch_sizes_that_do_not_fit(given, right):
    config = OffloadConfig.from_dict(given)
    with pytest.raises(ConfigError) as caught:
        config.batch_sizes(3)
    [problem] = caught.value.problems
    assert all(name in problem for name in (TRAIN, MICRO, STEPS))
    assert problem.endswith(f"; write {right}")
    OffloadConfig.from_dict({**given, TRAIN: right}).batch_sizes(3)


SIZES = st.none() | st.integers(1, 64)


@given(SIZES, SIZES, SIZES, st.integers(1, 8))
def test_batch_sizes_are_a_product_or_an_error(train, micro, steps, world_size):
    config = OffloadConfig.from_dict({TRAIN: train, MICRO: micro, STEPS: steps})
    try:
        sizes = config.batch_sizes(world_size)
    except ConfigError:
        assert train is not None
        return
    for was, now in zip((train, micro, steps), sizes, strict=True):
        assert was in (None, now)
    if sizes.train_batch_size:
        micro_batch, num_steps = sizes.train_micro_batch_size_per_gpu, sizes.gradient_accumulation_steps
        assert sizes.train_batch_size == micro_batch * num_steps * world_size
    else:
        assert train is micro is None


def test_adam_is_adamw_unless_it_says_otherwise():
    assert OffloadConfig.from_dict(adam(weight_decay=0.1)).optimizer.kind == "AdamW"
    l2 = OffloadConfig.from_dict(adam(adam_w_mode=False, weight_decay=0.1)).optimizer
    assert (l2.kind, l2.hyperparameters["weight_decay"]) == ("Adam", 0.1)


SCHEDULES = [
    ("WarmupLR", {}),
    ("WarmupLR", {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 10, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 100, "warmup_max_lr": 1e-3, "warmup_num_steps": 1e1}),
    ("WarmupCosineLR", {"total_num_steps": 100, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.01}),
]


@pytest.mark.parametrize(("kind", "params"), SCHEDULES)
def test_schedules_and_their_round_trip(kind, params):
    config = OffloadConfig.from_dict(schedule(kind, **params))
    assert config.scheduler.type == kind
    assert {name: getattr(config.scheduler.params, name) for name in params} == params
    assert OffloadConfig.from_dict(json.loads(config.model_dump_json())) == config
    assert OffloadConfig.from_dict(config.model_dump()) == config
    assert hash(config) == hash(OffloadConfig.from_dict(config.model_dump()))


LEFT_OUT = 2  # lines that tell a section for DeepSpeed without gradient_clipping what that means


# The threads this project answers, word by word: the request for gradient_accumulation_dtype, and autocast with ZeRO.
THREAD_TOML = """\
[deepspeed.torch_autocast]
enabled = true # NOTE: turning this on makes grad norms explode in stage 2 (but not stage 3)
dtype = "bfloat16"
# [deepspeed.bf16]
# enabled = true # this works properly
[deepspeed.zero_optimization]
stage = 2
allgather_partitions = true
overlap_comm = false
reduce_scatter = true
contiguous_gradients = true
stage3_prefetch_bucket_size = 0
stage3_max_live_parameters = 0
stage3_max_reuse_distance = 0
stage3_gather_16bit_weights_on_model_save = true
"""


def test_toml_of_the_thread_loads_with_one_warning(tmp_path):
    path = tmp_path / "train.toml"
    path.write_text(THREAD_TOML)
    with pytest.warns(ConfigWarning) as caught:
        config = OffloadConfig.from_file(path)
    assert (config.autocast_dtype, config.zero_optimization.stage) == ("bf16", 2)
    assert len(caught) == 1
    lines = str(caught[0].message).splitlines()
    assert lines[0] == f"{path}, in deepspeed: accepted, but without effect here:"
    assert len(lines) == 1 + 8 + LEFT_OUT

    path.write_text(THREAD_TOML.replace("# [", "[").replace("# enabled", "enabled"))
    with pytest.raises(ConfigError, match=r"train\.toml, in deepspeed: torch_autocast\.enabled = true: bf16\.enabled"):
        OffloadConfig.from_file(path)
