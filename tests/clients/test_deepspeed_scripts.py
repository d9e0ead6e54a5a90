"""Scripts as people write them for DeepSpeed, of kinds that are public: they run with their import line changed."""

import argparse
import contextlib
import os
import sys
import textwrap
from pathlib import Path

import nvme_offload.deepspeed.comm as comm
import pytest
import torch
from nvme_offload.deepspeed.compression.helper import recursive_getattr, recursive_setattr
from nvme_offload.deepspeed.moe.layer import MoE
from nvme_offload.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from safetensors.torch import load_file
from torch import nn

import nvme_offload
import nvme_offload.deepspeed as deepspeed
from nvme_offload.deepspeed.accelerator import get_accelerator
from tests.support.build import section
from tests.support.forked import output_of
from tests.support.ranks import run_ranks
from tests.support.small_llama import llama, rows

CIFAR = """
    import argparse, json, sys
    import torch, torch.nn as nn, torch.nn.functional as F
    import nvme_offload.deepspeed as deepspeed
    from nvme_offload.deepspeed.accelerator import get_accelerator

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.pool = nn.Conv2d(3, 6, 5), nn.MaxPool2d(4)
            self.classes = nn.Linear(6 * 49, 10)

        def forward(self, x):
            return self.classes(torch.flatten(self.pool(F.relu(self.conv(x))), 1))

    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=2)
    args = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    images = torch.randn(32, 3, 32, 32)
    train = torch.utils.data.TensorDataset(images, torch.randint(10, (32,)))
    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    model_engine, optimizer, trainloader, __ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=train
    )
    device = get_accelerator().device_name(model_engine.local_rank)
    dtype = torch.bfloat16 if model_engine.bfloat16_enabled() else torch.float32
    losses = []
    for epoch in range(args.epochs):
        for inputs, labels in trainloader:
            outputs = model_engine(inputs.to(device).to(dtype))
            loss = F.cross_entropy(outputs.float(), labels.to(device))
            model_engine.backward(loss)
            model_engine.step()
            losses.append(loss.item())
    model_engine.save_checkpoint(save_dir=sys.path[0] + "/saved", tag="end", client_state={"epoch": args.epochs})
    path, client = model_engine.load_checkpoint(load_dir=sys.path[0] + "/saved", tag="end")
    assert client == {"epoch": 2}, client
    said = [args.local_rank, model_engine.world_size, len(trainloader), model_engine.global_steps, losses[0]]
    sys.stdout.write(json.dumps(said) + "\\n")  # in one piece, beside the other rank
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_images_by_torchrun_with_arguments_and_a_loader(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(CIFAR))
    (tmp_path / "ds.json").write_text(
        '{"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true}, "gradient_clipping": 1.0, '
        '"optimizer": {"type": "Adam", "params": {"lr": 0.001}}, "zero_optimization": '
        f'{{"stage": 3, "offload_optimizer": {{"device": "nvme", "nvme_path": "{tmp_path}"}}}}}}'
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    arguments = ["train.py", "--deepspeed", "--deepspeed_config", "ds.json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(nvme_offload.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    printed = output_of(*command, *arguments, cwd=tmp_path, env=environment, timeout=100)
    said = sorted(line for line in printed.splitlines() if line.startswith("["))
    assert [line.split(", ")[:4] for line in said] == [["[0", "2", "4", "8"], ["[1", "2", "4", "8"]]


class Pretraining(nn.Module):
    """An encoder with a tied head for masked words, as BERT's."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(32)

    def forward(self, tokens, labels):
        hidden = self.norm(self.encoder(self.words(tokens)))
        return nn.functional.cross_entropy((hidden @ self.words.weight.T).flatten(0, 1).float(), labels.flatten())


def words(step):
    tokens = torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(step))
    return tokens, (tokens * 7 + 3) % 50


def decay_groups(model):
    small = [p for p in model.parameters() if p.ndim < 2]
    large = [p for p in model.parameters() if p.ndim >= 2]
    return [{"params": large, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0}]


def pretrained(tmp_path, kind):
    """Losses of two steps of four micro-batches, with a schedule of the script's own; by torch, or by an engine."""
    torch.manual_seed(0)
    model = Pretraining()
    make = {"torch": torch.optim.AdamW, "fused": FusedAdam, "cpu": DeepSpeedCPUAdam}[kind]
    optimizer = make(decay_groups(model), lr=1e-2, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    losses, rates = [], []
    if kind == "torch":
        for step in range(8):
            loss = model(*words(step))
            (loss / 4).backward()
            losses.append(loss.item())
            if step % 4 == 3:
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                rates.append([group["lr"] for group in optimizer.param_groups])
        return losses, rates
    config = section(tmp_path, accumulation=4)
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args=argparse.Namespace(local_rank=-1), model=model, optimizer=optimizer, lr_scheduler=schedule, config=config
    )
    assert (loader, scheduler) == (None, schedule)
    assert engine.gradient_accumulation_steps() == 4
    for step in range(8):
        loss = engine(*words(step))
        engine.backward(loss)
        losses.append(loss.item())
        if engine.is_gradient_accumulation_boundary():
            engine.step()
            rates.append(engine.get_lr())
        else:
            engine.step()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    engine.destroy()
    return losses, rates


@pytest.mark.parametrize("kind", ["fused", "cpu"])
def test_pretraining_with_accumulation_groups_and_a_schedule_of_ones_own(alone, tmp_path, kind):
    expected, expected_rates = pretrained(tmp_path, "torch")
    losses, rates = pretrained(tmp_path, kind)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert rates == expected_rates


class WithScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def change(self):
        self.scale.data = self.scale.data + 1
        return self


def test_a_value_that_is_changed_through_data_is_not_taken_for_the_first(alone, tmp_path):
    with deepspeed.zero.Init():
        kept, changed = WithScale(), WithScale().change()
        engine, _, _, _ = deepspeed.initialize(model=kept, config=section(tmp_path, adamw={"lr": 1e-3}))
    assert torch.equal(engine.module.scale.full_tensor(), torch.ones(4))
    with pytest.raises(ValueError, match=r"zero\.Init: scale was initialised by code of the model"):
        deepspeed.initialize(model=changed, config=section(tmp_path, adamw={"lr": 1e-3}))
    engine.destroy()


class GPT(nn.Module):
    def __init__(self, *, also=None):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(50, 16), nn.Embedding(8, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(2))
        self.head = nn.Linear(16, 50, bias=False)
        self.apply(self._init_weights)
        if also:
            also(self)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.constant_(module.weight, 0.125)

    def forward(self, tokens):
        hidden = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def test_a_gpt_that_is_made_within_zero_init(alone, tmp_path):
    config = section(tmp_path, bf16={"enabled": True}, adamw={"lr": 1e-3})
    config["zero_optimization"]["offload_param"] = {"device": "nvme", "nvme_path": str(tmp_path)}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = GPT()
    assert model.wte.weight.is_meta
    with pytest.raises(ValueError, match=r"made within zero\.Init have values after initialize"):
        deepspeed.zero.GatheredParameters([model.wte.weight])
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    with deepspeed.zero.GatheredParameters(engine.module.head.weight):
        assert torch.equal(engine.module.head.weight.data, torch.full((50, 16), 0.125))
    tokens, labels = words(0)
    losses = []
    for _ in range(3):
        loss = nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), labels.flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    engine.destroy()


def set_data(model):
    model.head.weight.data = model.head.weight.data + 1


def set_what_was_changed_after_a_cast(model):
    cast = model.head.weight.half()
    model.head.weight.data = cast.mul_(2)


WRITES = {
    "in_place": lambda model: nn.init.zeros_(model.head.weight),
    "data": lambda model: nn.init.zeros_(model.head.weight.data),
    "method_of_data": lambda model: model.head.weight.data.normal_(0, 0.02),
    "item_of_data": lambda model: model.head.weight.data[:2].fill_(1),
    "data_itself": set_data,
    "cast": set_what_was_changed_after_a_cast,
}


@pytest.mark.parametrize("also", WRITES.values(), ids=WRITES)
def test_values_that_zero_init_would_lose_are_refused_by_name(alone, tmp_path, also):
    with deepspeed.zero.Init():
        model = GPT(also=also)
    with pytest.raises(ValueError, match=r"zero\.Init: head\.weight was initialised by code of the model"):
        deepspeed.initialize(model=model, config=section(tmp_path, adamw={"lr": 1e-3}))
    with deepspeed.zero.Init(enabled=False):
        assert not GPT().head.weight.is_meta


def test_fine_tuning_of_a_hugging_face_model(alone, tmp_path):
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    given = {"model_parameters": trained, "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-3)}
    engine, *_ = deepspeed.initialize(model=model, config=section(tmp_path, bf16={"enabled": True}), **given)
    tokens = torch.stack([row["input_ids"] for row in rows(2)])
    before = engine.module.model.embed_tokens.weight.full_tensor().clone()
    for _ in range(2):
        engine.train()
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    assert engine.module.config.model_type == "llama"
    assert torch.equal(engine.module.model.embed_tokens.weight.full_tensor(), before)
    engine.eval()
    with torch.no_grad():
        assert engine(input_ids=tokens).logits.shape == (2, 16, model.config.vocab_size)
    engine.destroy()


def test_a_model_without_an_optimizer_is_only_run(alone, tmp_path):
    with pytest.warns(RuntimeWarning, match="there is no optimizer"):
        engine, optimizer, _, _ = deepspeed.initialize(model=nn.Linear(4, 4), config=section(tmp_path))
    assert optimizer is None
    assert engine(torch.ones(2, 4)).shape == (2, 4)
    engine.destroy()


def changed(rank, world_size, folder):
    """The last rank changes a trained and a frozen weight; return what each rank has after a step at a rate of 0."""
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 4, bias=False))
    model[1].weight.requires_grad_(False)
    place = {"device": "nvme", "nvme_path": folder}
    zero = {"stage": 3, "offload_optimizer": place, "offload_param": place}
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.0}}, "zero_optimization": zero}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    weights = [layer.weight for layer in engine.module]
    with deepspeed.zero.GatheredParameters(weights, modifier_rank=world_size - 1):
        assert torch.cat([weight.flatten() for weight in weights]).shape == (35,)
        if rank == world_size - 1:
            nn.init.constant_(weights[0], 2.0)
            weights[1].data[1:, 2] = 3.0
    with contextlib.suppress(KeyError), deepspeed.zero.GatheredParameters(weights[0], modifier_rank=0):
        weights[0].data.zero_()
        raise KeyError
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()
    with deepspeed.zero.GatheredParameters(weights):
        found = [weight.data.clone() for weight in weights]
    engine.destroy()
    return found


@pytest.mark.slow
def test_what_one_rank_changes_in_gathered_parameters_all_have(tmp_path):
    found = run_ranks(changed, 2, str(tmp_path))
    for trained, frozen in found:
        assert torch.equal(trained, torch.full((5, 3), 2.0))
        assert torch.equal(frozen[1:, 2], torch.full((3,), 3.0))
        assert torch.equal(frozen, found[0][1])


class Lookahead(torch.optim.AdamW):
    pass


def test_what_is_not_done_is_refused_by_name(alone, tmp_path):
    model, config = nn.Linear(4, 4), section(tmp_path)
    with pytest.raises(AttributeError, match=r"deepspeed has no PipelineModule.*from_deepspeed\.md"):
        _ = deepspeed.PipelineModule
    with pytest.raises(ImportError, match="MoE"):
        from nvme_offload.deepspeed.ops import MoE  # noqa: F401
    with pytest.raises(ValueError, match=r"mpu is not taken: give nvme_offload\.initialize"):
        deepspeed.initialize(model=model, config=config, mpu=object())
    with pytest.raises(TypeError, match=r"optimizer = Lookahead: its state cannot be offloaded; here are .*AdamW"):
        deepspeed.initialize(model=model, config=config, optimizer=Lookahead(model.parameters()))
    with pytest.raises(ValueError, match="optimizer = AdamW: amsgrad = True is not done here"):
        deepspeed.initialize(model=model, config=config, optimizer=torch.optim.AdamW(model.parameters(), amsgrad=True))
    with pytest.raises(ValueError, match="bias requires a gradient and is in no group"):
        deepspeed.initialize(model=model, config=config, optimizer=torch.optim.AdamW([model.weight]))
    with pytest.raises(ValueError, match="no section: pass config=, or --deepspeed_config"):
        deepspeed.initialize(model=model)
    stepped = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    stepped.step()
    with pytest.raises(ValueError, match="has taken steps"):
        deepspeed.initialize(model=model, config=config, optimizer=stepped)
    engine, *_ = deepspeed.initialize(model=model, config=section(tmp_path, adamw={"lr": 0.1}))
    with pytest.raises(TypeError, match=r"load_checkpoint: custom_load_fn = .* is not done here; write None"):
        engine.load_checkpoint(tmp_path, custom_load_fn=print)
    with pytest.raises(TypeError, match=r"save_checkpoint: save_latest = False is not done here"):
        engine.save_checkpoint(tmp_path, save_latest=False)
    with pytest.raises(AttributeError, match=r"engine\.offload_states is not there.*from_deepspeed\.md"):
        _ = engine.offload_states
    with pytest.raises(AttributeError, match=r"optimizer\.bit16_groups_flat is not there.*from_deepspeed\.md"):
        _ = engine.optimizer.bit16_groups_flat
    engine.destroy()


def test_a_change_after_an_evaluation_is_in_what_is_saved(alone, tmp_path):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[0].weight.requires_grad_(False)
    engine, *_ = deepspeed.initialize(model=model, config=section(tmp_path, stage=2, adamw={"lr": 1e-3}))
    with torch.no_grad():
        engine(torch.ones(2, 4))  # which leaves gathered copies, at stages below 3
    expected = engine.module[0].weight.full_tensor() + 1
    engine.module[0].weight.data.add_(1)
    assert engine.save_16bit_model(tmp_path / "weights", "model.safetensors")
    assert torch.equal(load_file(tmp_path / "weights" / "model.safetensors")["0.weight"], expected.bfloat16())
    with pytest.warns(RuntimeWarning, match=r"has the shards of this rank.*save_16bit_model"):
        engine.module.state_dict()
    engine.destroy()


def test_submodules_that_scripts_import(alone):
    deepspeed.init_distributed()
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    recursive_setattr(model, "0.0", nn.Linear(2, 3))
    assert recursive_getattr(model, "0.0").out_features == 3
    with pytest.raises(TypeError, match=r"moe\.layer\.MoE is not done here"):
        MoE(2)
    deepspeed.get_accelerator().manual_seed_all(1)
    assert torch.initial_seed() == 1
    assert (comm.get_rank(), comm.get_world_size(), comm.ReduceOp) == (0, 1, torch.distributed.ReduceOp)
    accelerator = get_accelerator()
    assert accelerator.device_name(0) == accelerator.current_device_name()
    assert accelerator.is_available()
    assert accelerator.communication_backend_name() == torch.distributed.get_backend().removeprefix("cpu:")


def test_our_own_initialize_says_what_to_write(alone, tmp_path):
    model = nn.Linear(4, 4)
    with pytest.raises(TypeError, match=r"no argument 'model_parameters': write engine = initialize\(model, config\)"):
        nvme_offload.initialize(model=model, config=section(tmp_path), model_parameters=model.parameters())
    with pytest.raises(TypeError, match="config is missing"):
        nvme_offload.initialize(model)
    engine = nvme_offload.initialize(model, section(tmp_path))
    with pytest.raises(TypeError, match="returns the engine alone"):
        _, _, _, _ = engine
    engine.close()
