"""Calls that scripts for DeepSpeed make beside the loop: parts of checkpoints, values, sections with comments."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import nvme_offload.deepspeed as deepspeed
from nvme_offload import ConfigError, get_full_param
from nvme_offload.deepspeed import utils
from tests.support.build import section
from tests.support.ranks import run_ranks
from tests.support.sharded_model import CAN_GO_ON

SCHEDULER = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}


def made(folder, stage=3, *, params="none", precision="bf16", **more):
    """A door's engine whose first layer is frozen and whose second has a buffer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    model[1].register_buffer("seen", torch.zeros(2))
    config = section(folder, stage=stage, adamw={"lr": 0.1}, scheduler=SCHEDULER, **more)
    keys = {"bf16": {}, "fp16": {"initial_scale_power": 4}}
    config |= {precision: {"enabled": True, **keys[precision]}} if precision in keys else {}
    if params == "nvme":
        config["zero_optimization"]["offload_param"] = {"device": "nvme", "nvme_path": str(folder)}
    return deepspeed.initialize(model=model, config=config)[0]


def trained(engine, steps):
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 4)).float().square().sum())
        engine.step()
    engine.module[1].seen += steps
    return engine


def weights_of(engine):
    return {name: get_full_param(param) for name, param in engine.named_parameters()}


def state_of(engine):
    """First moments and step counts of what is trained."""
    params = [param for param in engine.parameters() if param.requires_grad]
    states = [utils.safe_get_full_optimizer_state(param, name) for param in params for name in ("exp_avg", "step")]
    return torch.cat([state.flatten() for state in states])


def parts_of_checkpoints(rank, world_size, folder, stage, options):
    """A run of one step takes of a checkpoint of three what the arguments of the call say."""
    saved = trained(made(folder, stage, **options), 3)
    saved.save_checkpoint(f"{folder}/saved", client_state={"epoch": 2})
    weights, state = weights_of(saved), state_of(saved)
    saved.destroy()
    only = {"load_optimizer_states": False}
    for wanted in ({}, only, {**only, "load_lr_scheduler_states": False}, {"load_module_only": True}):
        engine = trained(made(folder, stage, **options), 1)
        own, is_alone = state_of(engine), "load_module_only" in wanted
        path, client = engine.load_checkpoint(f"{folder}/saved", **wanted)
        assert path.endswith("global_step3")
        assert all(torch.equal(value, weights[name]) for name, value in weights_of(engine).items())
        assert engine.module[1].seen.tolist() == [3, 3]
        assert torch.equal(state_of(engine), own if wanted else state)
        assert (client, engine.global_steps) == (({}, 1) if is_alone else ({"epoch": 2}, 3))
        has_schedule = not is_alone and "load_lr_scheduler_states" not in wanted
        assert engine.lr_scheduler.last_batch_iteration == (2 if has_schedule else 0)
        trained(engine, 1).destroy()  # it goes on
    return True


@pytest.mark.parametrize("options", [{}, {"params": "nvme"}, {"precision": "fp32"}], ids=["bf16", "on_nvme", "fp32"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_checkpoint_gives_what_is_asked_for_and_leaves_the_rest(alone, tmp_path, stage, options):
    assert parts_of_checkpoints(0, 1, str(tmp_path), stage, options)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_two_ranks_take_parts_of_a_checkpoint(tmp_path, stage):
    assert run_ranks(parts_of_checkpoints, 2, str(tmp_path), stage, {"precision": "fp16"})


def test_frozen_parameters_are_left_out_and_a_load_that_is_not_strict_keeps_the_own(alone, tmp_path):
    engine = trained(made(tmp_path), 2)
    engine.save_checkpoint(tmp_path / "saved", exclude_frozen_parameters=True)
    whole = weights_of(engine)
    found = utils.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved")
    assert found.keys() == {"1.weight", "1.bias", "2.weight", "2.bias", "1.seen"}
    assert all(torch.equal(found[name], whole[name]) for name in found if name != "1.seen")
    for is_safe, name, read in ((False, "pytorch_model.bin", torch.load), (True, "model.safetensors", load_file)):
        utils.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "saved", tmp_path / "fp32", "5GB", is_safe)
        written = read(tmp_path / "fp32" / name)
        assert written.keys() == found.keys()
        assert all(torch.equal(written[key], value) for key, value in found.items())
    plain = nn.Sequential(*(nn.Linear(4, size) for size in (4, 4, 3)))
    assert torch.equal(utils.load_state_dict_from_zero_checkpoint(plain, tmp_path / "saved")[2].bias, whole["2.bias"])
    for name in ("pytorch_model.bin", "model.safetensors"):
        assert engine.save_16bit_model(tmp_path / "weights", name, exclude_frozen_parameters=True)
    weights = torch.load(tmp_path / "weights" / "pytorch_model.bin")
    assert weights.keys() == load_file(tmp_path / "weights" / "model.safetensors").keys() == found.keys()
    assert torch.equal(weights["1.weight"], whole["1.weight"].bfloat16())
    assert engine.module_state_dict().keys() == {"0.weight", "0.bias", *found}
    engine.destroy()
    engine = made(tmp_path)
    utils.safe_set_full_fp32_param(engine.module[0].weight, torch.full((4, 4), 7.0))
    with pytest.raises(ValueError, match=r"not in the checkpoint: model\.0\.bias, model\.0\.weight"):
        engine.load_checkpoint(tmp_path / "saved")
    utils.load_state_dict_from_zero_checkpoint(engine.module, tmp_path / "saved")
    assert torch.equal(weights_of(engine)["1.weight"], whole["1.weight"])
    engine.load_checkpoint(tmp_path / "saved", load_module_strict=False)
    weights = weights_of(engine)
    assert weights.pop("0.weight").unique().tolist() == [7.0]
    assert all(torch.equal(weights[name], whole[name]) for name in weights)
    engine.load_module_state_dict({name: torch.full_like(value, 2.0) for name, value in weights.items()}, strict=False)
    assert {float(value) for value in weights_of(engine)["1.weight"].flatten()} == {2.0}
    with pytest.raises(KeyError, match=r"not in both.*0\.weight"):
        engine.load_module_state_dict(weights)
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_values_of_parameters_are_read_and_set_by_deepspeeds_names(alone, tmp_path, stage):
    engine = trained(made(tmp_path, stage), 1)
    param = engine.module[2].weight
    engine.backward(engine(torch.ones(2, 4)).float().square().sum())
    assert utils.safe_get_full_grad(param).abs().sum() > 0
    frozen = engine.module[0].weight
    assert (utils.safe_get_full_fp32_param(frozen), utils.safe_get_full_optimizer_state(frozen, "step")) == (None, None)
    utils.safe_set_full_grad(param, torch.zeros(3, 4))
    utils.safe_set_full_optimizer_state(param, torch.zeros(3, 4), "exp_avg")
    before = utils.safe_get_full_fp32_param(param)
    engine.step()
    assert engine.was_step_applied()
    assert torch.equal(
        utils.safe_get_full_fp32_param(param), before * (1 - 0.01 * float(engine.lr_scheduler.min_lrs[0]))
    )
    assert (engine.skipped_steps, engine.micro_steps, engine.optimizer.overflow) == (0, 2, False)
    assert engine.get_mom() == [(0.9, 0.999)]
    engine.destroy()


class Computing(nn.Module):
    """Its constructor computes a buffer, numbers, a scale, and a parameter that is filled before it is one."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8), persistent=False)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.scale = nn.Parameter(torch.full((8,), 0.1))
        filled = torch.empty(8)
        filled.fill_(0.3)
        self.shift = self.also = nn.Parameter(filled)

    def forward(self, x):
        return self.norm(self.first(x)) * self.scale + self.shift + self.frequencies.sum()


def computed(rank, world_size, folder):
    torch.manual_seed(rank)
    with deepspeed.zero.Init():
        model = Computing()
        model.drawn = nn.Parameter(torch.randn(8))
    model.late = nn.Linear(8, 2)
    assert {param.device.type for param in (model.first.weight, model.scale, model.shift)} == {"meta"}
    assert model.shift is model.also
    assert {param.ds_status for param in model.first.parameters()} == {deepspeed.zero.ZeroParamStatus.NOT_AVAILABLE}
    expected, rates = model.frequencies.clone(), model.rates
    engine = deepspeed.initialize(model=model, config=section(folder, adamw={"lr": 0.1}))[0]
    found = weights_of(engine)
    assert torch.equal(engine.module.frequencies, expected)
    assert rates == pytest.approx([0, 0.05, 0.1])
    assert found["scale"].unique().tolist() == pytest.approx([0.1])
    assert found["shift"].unique().tolist() == pytest.approx([0.3])
    assert found["norm.weight"].unique().tolist() == [1]
    trained_loss = engine(torch.ones(2, 8)).sum() + engine.module.drawn.sum() * 0
    engine.destroy()
    return found, trained_loss.detach()


def test_zero_init_keeps_what_a_constructor_computes(alone, tmp_path):
    found, _ = computed(0, 1, str(tmp_path))
    assert 0 < found["first.weight"].abs().max() < 1


MOVES = [
    nn.Module.cpu,
    lambda model: model.to("cpu", torch.bfloat16),
    nn.Module.half,
    lambda model: model.first.weight.cpu(),
]


@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("move", MOVES, ids=["cpu", "to", "half", "one parameter"])
def test_what_zero_init_makes_may_be_moved_within_it_and_after_it(alone, tmp_path, move, within):
    class Moved(Computing):
        def __init__(self):
            super().__init__()
            if within:
                move(self)

    with deepspeed.zero.Init():
        model = Moved()
    if not within:
        move(model)
    assert {param.device.type for param in model.parameters()} == {"meta"}
    engine = deepspeed.initialize(model=model, config=section(tmp_path, adamw={"lr": 0.1}))[0]
    found = weights_of(engine)
    assert found["scale"].unique().tolist() == pytest.approx([0.1], rel=1e-2)
    assert 0 < found["first.weight"].abs().max() < 1
    assert not {name for param in engine.module.parameters() for name in ("to", "cpu", "cuda") if name in vars(param)}
    engine.destroy()


@pytest.mark.slow
def test_what_a_constructor_draws_is_rank_0s_on_all_ranks(tmp_path):
    first, second = run_ranks(computed, 2, str(tmp_path))
    assert all(torch.equal(first[0][name], second[0][name]) for name in first[0])
    assert first[0]["drawn"].unique().numel() == 8


class Borrowing(nn.Module):
    """Its blocks use a weight of the first of them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3))
        deepspeed.zero.register_external_parameter(self, self.blocks[0][0].weight)

    def forward(self, x):
        for block in self.blocks:
            x = block(x) + nn.functional.linear(x, self.blocks[0][0].weight)
        return x


@pytest.mark.parametrize("is_registered", [True, False])
def test_a_registered_parameter_of_another_module_is_whole_in_a_forward(alone, tmp_path, is_registered):
    torch.manual_seed(0)
    model, batch = Borrowing(), torch.ones(2, 8)
    if not is_registered:  # the leaf, a list, has them all gathered with the model
        deepspeed.zero.unregister_external_parameter(model, model.blocks[0][0].weight)
    expected = model(batch).detach()
    found = utils.set_z3_leaf_modules_by_suffix(model, ["s.1", "none"], flag=False, raise_if_not_found=False)
    assert found == ([model.blocks[1]], ["none"])
    with pytest.raises(ValueError, match=r"No modules named \['s\.1'\]"):
        utils.set_z3_leaf_modules_by_name(model, ["s.1", "blocks.1"])
    assert utils.set_z3_leaf_modules(model, [nn.ModuleList]) == utils.get_z3_leaf_modules(model) == [model.blocks]
    with pytest.raises(ValueError, match="No modules of type"):
        utils.set_z3_leaf_modules(model, [nn.Conv1d])
    engine = deepspeed.initialize(model=model, config=section(tmp_path, adamw={"lr": 0.1}))[0]
    found = engine(batch)
    assert torch.equal(found, expected)
    engine.backward(found.sum())
    engine.step()
    engine.destroy()


COMMENTED = """{
  # a comment, and "a string" in it
  "optimizer": {"type": "AdamW", "params": {"lr": 0.125,}}, // another, of a URL: https://here
  /* and { one
     of two lines */
  "train_micro_batch_size_per_gpu": 2, "run_log": %s,
}"""


def test_sections_have_deepspeeds_comments(alone, tmp_path):
    with pytest.raises(RuntimeError, match="dist_init_required = False, and there is no process group"):
        deepspeed.initialize(model=nn.Linear(2, 2), config={}, dist_init_required=False)
    log = json.dumps(str(tmp_path / "a#b, c,}.jsonl"))
    (tmp_path / "section.hjson").write_text(COMMENTED % log)
    engine, _, _, _ = deepspeed.initialize(model=nn.Linear(2, 2), config=str(tmp_path / "section.hjson"))
    assert (engine.get_lr(), engine.train_micro_batch_size_per_gpu()) == ([0.125], 2)
    assert str(engine.engine.config.run_log).endswith("a#b, c,}.jsonl")
    engine.destroy()
    (tmp_path / "twice.json").write_text('{"optimizer": {}, # twice\n "optimizer": {}}')
    with pytest.raises(ConfigError, match=r"twice\.json: line 1.*comments and commas too many are read"):
        deepspeed.initialize(model=nn.Linear(2, 2), config=str(tmp_path / "twice.json"))


class Answering(nn.Module):
    """Like a Hugging Face model: its loss is computed from the logits that it returns, too."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        logits = self.head(self.first(x).relu())
        return {"loss": logits.mean(), "logits": logits}


def engine_of(folder, **more):
    torch.manual_seed(0)
    return deepspeed.initialize(model=Answering(), config=section(folder, adamw={"lr": 0.1}, **more))[0]


BACKWARDS = (
    lambda engine, loss: engine.backward(loss),
    lambda engine, loss: engine.scale(loss).backward(),
    lambda engine, loss: loss.backward(),
    lambda engine, loss: engine.backward(loss) if engine.micro_steps % 2 else loss.backward(),
)
IN_BACKWARD = {"overlap_step": "backward", "skip_non_finite": False, "gradient_clipping": 0.0}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_plain_backward_is_that_of_the_engine(alone, tmp_path, stage):
    found = []
    for backward in BACKWARDS:
        engine = engine_of(tmp_path, stage=stage, accumulation=2, **IN_BACKWARD)
        for batch in torch.arange(32.0).view(4, 2, 4):
            out = engine(batch)
            out["logits"] /= 2.0
            backward(engine, out["loss"] + out["logits"].sum())
            engine.step()
        found.append(
            (engine.get_global_grad_norm(), {name: tuple(w.flatten()) for name, w in weights_of(engine).items()})
        )
        engine.destroy()
    assert all(each == found[0] for each in found)
    engine = engine_of(tmp_path, stage=1, accumulation=2)
    torch.manual_seed(0)
    if CAN_GO_ON:  # before, FSDP2 takes no transform of a function
        found, expected = (
            torch.func.grad(lambda x, of=of: of(x)["loss"])(torch.ones(2, 4)) for of in (engine, Answering())
        )
        assert torch.equal(found, expected)
    with pytest.raises(ValueError, match=r"first\.weight is sharded already.*engine.*before; pass a plain module"):
        deepspeed.initialize(model=engine.module, config=section(tmp_path, adamw={"lr": 0.1}))
    engine.destroy()
    engine = engine_of(tmp_path, stage=stage, fp16={"enabled": True})
    assert engine.optimizer.needs_scaler()
    with pytest.raises(RuntimeError, match=r"Loss scaling is required under fp16: write engine\.backward\(loss\)"):
        engine(torch.ones(2, 4))["loss"].backward()
    engine.destroy()


def test_who_does_not_let_micro_batches_be_counted_ends_each_step(alone, tmp_path):
    found = {}
    for is_managed in (True, False):
        keys = {"managed_gradient_accumulation": is_managed, "train_micro_batch_size_per_gpu": 2}
        engine = engine_of(tmp_path, stage=1, accumulation=2, **keys)
        for index, batch in enumerate(torch.arange(32.0).view(4, 2, 4)):
            engine.backward(engine(batch)["loss"])
            if is_managed or index % 2:
                engine.step()
        assert (engine.was_step_applied(), engine.global_steps, engine.global_samples) == (True, 2, 8)
        found[is_managed] = weights_of(engine)
        said = "called within" if is_managed else "managed_gradient_accumulation is false"
        with pytest.raises(RuntimeError, match=said), engine.coalesce_grad_reduction():
            engine.step()
        engine.destroy()
    assert all(torch.equal(value, found[True][name]) for name, value in found[False].items())


def parts_of_parameters(rank, world_size, folder, options):
    """Scripts gather them by hand, or take the parts of this rank."""
    engine = engine_of(folder, **options)
    status = deepspeed.zero.ZeroParamStatus
    engine.backward(engine(torch.ones(2, 4))["loss"])
    for param in engine.module.parameters():
        assert (param.ds_status, param.ds_shape, param.ds_numel) == (status.NOT_AVAILABLE, param.shape, param.numel())
        with deepspeed.zero.GatheredParameters([param]), deepspeed.zero.GatheredParameters([param]):
            assert param.ds_status == status.AVAILABLE
        assert param.ds_status == status.NOT_AVAILABLE
        part = utils.safe_get_local_fp32_param(param)
        for kind, *key in (("fp32_param",), ("grad",), ("optimizer_state", "exp_avg")):
            get, get_local = getattr(utils, f"safe_get_full_{kind}"), getattr(utils, f"safe_get_local_{kind}")
            set_local = getattr(utils, f"safe_set_local_{kind}")
            assert torch.equal(get_local(param, *key), get(param, *key).chunk(world_size)[rank])
            set_local(param, torch.full_like(part, rank + 1.0), *key)
            assert get(param, *key).flatten()[[0, -1]].tolist() == [1.0, world_size]
            assert torch.equal(get_local(param, *key), torch.full_like(part, rank + 1.0))
    utils.safe_update_full_grad_vectorized(engine.module.parameters(), lambda old, param: old * 2)
    assert utils.safe_get_full_grad(engine.module.first.bias).tolist() == [2.0] * 4 + [2.0 * world_size] * 4
    engine.destroy()
    return True


@pytest.mark.parametrize("options", [{"bf16": {"enabled": True}}, {"stage": 1}], ids=["bf16", "fp32"])
def test_parts_of_parameters_are_read_and_set_by_deepspeeds_names(alone, tmp_path, options):
    assert parts_of_parameters(0, 1, str(tmp_path), options)


@pytest.mark.slow
def test_each_rank_reads_and_sets_its_own_parts(tmp_path):
    options = {"bf16": {"enabled": True}, "offload_gradients": {"device": "nvme", "nvme_path": str(tmp_path)}}
    assert run_ranks(parts_of_parameters, 2, str(tmp_path), options)
