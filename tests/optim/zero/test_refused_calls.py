"""A sharded module, or a class of weights with tensors of its own, refuses by value, place and remedy."""

import copy
import io
import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

import nvme_offload
import nvme_offload.deepspeed
from nvme_offload import (
    OffloadAdamW,
    get_full_param,
    initialize,
    set_full_grad,
    set_full_optimizer_state,
    set_full_param,
    split_parameters,
)
from tests.support.ranks import be_alone, on_ranks
from tests.support.small_engine import BF16, section


class Pretrained(nn.Sequential):
    """As models of transformers and PEFT, it writes what it is given, or else its own."""

    def save_pretrained(self, folder, is_main_process=True, state_dict=None, **more):
        return {name: value.clone() for name, value in (state_dict or self.state_dict()).items()}


def plain():
    return Pretrained(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))


def first(engine):
    return next(engine.module.parameters())


WHOLE = plain().state_dict()
CALLS = [
    (lambda e: DistributedDataParallel(e.module), r"around engine.module: .* Call the engine itself"),
    (lambda e: torch.save(e, io.BytesIO()), "cannot be pickled .* Use save_checkpoint, or weights"),
    (copy.deepcopy, "cannot be pickled or copied"),
    (lambda e: torch.save(e.module, io.BytesIO()), r"engine.module cannot be pickled .* dict\(engine.weights\(\)\)"),
    (lambda e: e.module.load_state_dict(WHOLE), r"0.weight is sharded .* set_full_param.* weights="),
    (lambda e: e.module.load_state_dict(WHOLE, strict=False), "0.weight is sharded"),
    (lambda e: e.module[0].load_state_dict(nn.Linear(8, 8).state_dict()), ": weight is sharded here"),
    (lambda e: e.module.load_state_dict(e.module.state_dict(), assign=True), "0.weight: assign=True .* leave it"),
    (lambda e: e.module.save_pretrained("x"), r"Pretrained.save_pretrained: .* state_dict=dict\(engine"),
    (lambda e: e.module.save_pretrained("x", state_dict=e.module.state_dict()), "it writes whole ones"),
    (lambda e: set_full_param(first(e), first(e)), r"not a DTensor, .* value.full_tensor\(\)"),
    (lambda e: set_full_grad(first(e), first(e)), "set_full_grad: .* not a DTensor"),
    (lambda e: set_full_optimizer_state(first(e), "exp_avg", first(e)), "optimizer_state: .* not a DTensor"),
]


@pytest.mark.parametrize(
    ("world_size", "stages"), [(1, [(0, False), (3, False), (3, True)]), (2, [(1, False), (2, False), (3, True)])]
)
@on_ranks("world_size")
def test_what_needs_whole_weights_is_refused_with_the_way_and_changes_nothing(rank, world_size, stages, tmp_path):
    for stage, tier in stages:
        place = {"device": "nvme", "nvme_path": tmp_path} if tier else {"device": "cpu"}
        zero = {"stage": stage, "offload_optimizer": place, **({"offload_param": place} if tier else {})}
        torch.manual_seed(0)
        with initialize(plain(), section(zero_optimization=zero, gradient_accumulation_steps=1)) as engine:
            engine.backward(engine(torch.ones(2, 8)).square().mean())
            before = {name: get_full_param(param) for name, param in engine.named_parameters()}
            for call, words in CALLS:
                with pytest.raises((TypeError, ValueError), match=words):
                    call(engine)
                assert all(torch.equal(get_full_param(p), before[n]) for n, p in engine.named_parameters()), words
            saved = engine.module.save_pretrained("x", state_dict=dict(engine.weights("fp32")))
            assert all(torch.equal(saved[name], value) for name, value in before.items())
            engine.module.load_state_dict(engine.module.state_dict())  # of shards, as torch's own tools load
            for param, value in zip(engine.module.parameters(), plain().parameters(), strict=True):
                set_full_param(param, value.detach())
            assert not torch.equal(get_full_param(first(engine)), before["0.weight"])


def on(path):
    return {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": path}}}


def yaml_in(folder):
    (folder / "accelerate.yaml").write_text("deepspeed_config: {}\n")
    return folder / "accelerate.yaml"


def optimizer_with(offload, params=None, **more):
    return OffloadAdamW(plain().parameters() if params is None else params, offload=offload, **more)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda _: optimizer_with({}, iter([])), ValueError, "OffloadAdamW: params is empty"),
        (lambda _: optimizer_with({}, learning_rate=1), TypeError, "no argument 'learning_rate'; .* are lr, betas"),
        (lambda _: optimizer_with(on("$HERE/x")), OSError, r"\$ is not expanded"),
        (lambda _: optimizer_with(on("/sys")), OSError, "as /proc and /sys"),
        (lambda _: initialize(plain(), "$SCRATCH/nvme"), ValueError, r"^\$SCRATCH/nvme: \$ is not expanded"),
        (lambda folder: initialize(plain(), yaml_in(folder)), ValueError, "deepspeed_config_file"),
    ],
)
def test_what_cannot_be_used_is_said_at_the_call_without_frames_of_the_package_below_it(tmp_path, call, error, words):
    with pytest.raises(error, match=words) as caught:
        call(tmp_path)
    frames = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert sum(frame != __file__ for frame in frames) <= 2, frames
    assert caught.value.__suppress_context__


def test_an_error_of_the_users_own_code_keeps_its_frames(alone):
    def own(module):
        raise ValueError("mine")

    with torch.device("meta"):
        model = plain()
    with pytest.raises(ValueError, match="mine") as caught:
        initialize(model, section(), init=own)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "own"


def test_no_parameter_in_any_group_is_warned_of(tmp_path):
    with pytest.warns(RuntimeWarning, match="no parameter group has a parameter: nothing is trained before add_param"):
        optimizer = OffloadAdamW([{"params": []}], offload=on(str(tmp_path)))
    with optimizer:
        optimizer.add_param_group({"params": list(plain().parameters())})


@pytest.mark.parametrize("name", ["AdamW", "OffloadAdamw", "OffloadAdam_W"])
def test_a_name_that_is_nearly_one_is_told_which(name):
    with pytest.raises(AttributeError, match=r"did you mean OffloadAdamW\?"):
        getattr(nvme_offload, name)


ops = torch.ops.aten


class Scaled(torch.Tensor):
    """One tensor inside, to which every operator goes; and an all-gather of its own."""

    @staticmethod
    def __new__(cls, inside):
        return torch.Tensor._make_wrapper_subclass(
            cls, inside.shape, strides=inside.stride(), dtype=inside.dtype, device=inside.device
        )

    def __init__(self, inside):
        self.inside = inside

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def plain(value):
            return value.inside if isinstance(value, cls) else value

        result = func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))
        if func is ops.copy_.default:
            return args[0]
        return tree_map(lambda value: cls(value) if isinstance(value, torch.Tensor) else value, result)

    def fsdp_pre_all_gather(self, *unused):
        return (self.inside,), None

    def fsdp_post_all_gather(self, gathered, metadata, dtype, *, out=None):
        return None if out is not None else (gathered[0], gathered)


REFUSED = r"is a Scaled, which keeps its values in other tensors: .* Give its module a plain torch.nn.Parameter"


def wrapped(device="cpu", requires_grad=True):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    model[1].weight = nn.Parameter(Scaled(model[1].weight.detach()), requires_grad=requires_grad)
    return model


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("stage", [0, 3])
def test_initialize_names_the_parameter_and_its_class(alone, device, requires_grad, stage):
    for enter in (initialize, lambda model, config: nvme_offload.deepspeed.initialize(model=model, config=config)):
        for keys in ({}, BF16):
            model = wrapped(device, requires_grad)
            with pytest.raises(ValueError, match=rf"initialize: '1\.weight' {REFUSED}"):
                enter(model, {**section(stage), **keys, "gradient_accumulation_steps": 1})
            assert type(model[1].weight) is Scaled
            if dist.is_initialized():
                dist.destroy_process_group()


def test_an_optimizer_says_so_of_one_and_of_two(alone, tmp_path):
    be_alone()
    sharded = wrapped()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    for params, place in (
        ([wrapped()[1].weight], "0 of group 0"),
        ([wrapped()[1].weight, wrapped()[1].weight], "0 of group 0"),
        (list(sharded.parameters()), "2 of group 0"),
    ):
        with pytest.raises(ValueError, match=f"parameter {place} {REFUSED}"):
            OffloadAdamW(params, offload=section(path=tmp_path))
    with pytest.raises(ValueError, match=rf"split_parameters: '1\.weight' {REFUSED}"):
        split_parameters(sharded, fp32_too=True)
    assert not list(tmp_path.iterdir())
