"""FSDP2 at 2 ranks in Hugging Face's Trainer and in a loop of one's own: the losses of torch's AdamW."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

from nvme_offload import OffloadAdamW, split_parameters
from tests.support.accelerated import forget, sharding_on_cpu
from tests.support.clients import HIDES_SHARDS, SETTINGS, UNCHANGED, WITH_A_LINE, client
from tests.support.ranks import run_ranks
from tests.support.small_llama import llama, rows
from tests.support.training import section

pytestmark = pytest.mark.slow

STEPS = 6
PADDING = 32  # elements to which a parameter's state is rounded up
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8}


class Recording(Trainer):
    """Keeps the loss of each step on this rank, and looks whether the model is sharded."""

    def compute_loss(self, model, inputs, *arguments, **options):
        assert all(isinstance(param, DTensor) for param in model.parameters())
        loss = super().compute_loss(model, inputs, *arguments, **options)
        self.losses = [*getattr(self, "losses", ()), loss.item()]
        return loss


class SplitTrainer(Recording):
    """The shards in parts: when the schedule is made, the model is sharded and nothing is loaded yet."""

    def create_scheduler(self, *arguments, **options):
        split_parameters(self.model, torch.float32)
        return super().create_scheduler(*arguments, **options)


def train(folder, optimizer, make=Recording, *, resume=False, **options):
    forget()
    settings = {"max_steps": STEPS, "save_steps": STEPS // 2, "per_device_train_batch_size": 2, "logging_steps": 1}
    settings |= {"report_to": "none", "use_cpu": True, "lr_scheduler_type": "linear", "weight_decay": 0.1}
    wrapped = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    arguments = TrainingArguments(folder, fsdp="full_shard", fsdp_config=wrapped, **settings, **options)
    trainer = make(model=llama(), args=arguments, train_dataset=rows(), optimizer_cls_and_kwargs=optimizer)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}" if resume else None)
    inner = trainer.optimizer.optimizer
    if isinstance(inner, OffloadAdamW):
        shards = [param.to_local().numel() for param in trainer.model.parameters()]
        itemsize = 10 if make is SplitTrainer else 8
        assert (inner.stats().updates_behind > 0) == (make is SplitTrainer)
        assert 0 <= inner.stats().state_bytes - itemsize * sum(shards) < itemsize * PADDING * len(shards)
        dist.barrier()
        inner.close()
    return trainer.losses


def with_both(rank, world_size, folder, drive):
    with sharding_on_cpu():
        theirs = train(f"{folder}/stock", (torch.optim.AdamW, ADAMW))
        ours = (OffloadAdamW, ADAMW | {"offload": section(drive)})
        return theirs, train(f"{folder}/ours", ours), train(f"{folder}/ours", ours, resume=True)


@client("transformers", "`Trainer` with `fsdp=True`, version 2 (FSDP2), resume")
def test_losses_are_those_of_torch_adamw_and_so_are_those_after_a_resume(tmp_path, drive):
    for theirs, ours, resumed in run_ranks(with_both, 2, str(tmp_path), drive):
        assert len(theirs) == STEPS
        assert ours == pytest.approx(theirs, abs=1e-6, rel=0)
        assert resumed == ours[STEPS // 2 :]


def with_and_without_parts(rank, world_size, folder, drive):
    with sharding_on_cpu():
        ours = (OffloadAdamW, ADAMW | {"offload": section(drive)})
        whole = train(f"{folder}/whole", ours, bf16=True)
        parts = train(f"{folder}/parts", ours, SplitTrainer, bf16=True)
        return whole, parts, train(f"{folder}/parts", ours, SplitTrainer, resume=True, bf16=True)


@client(
    "transformers",
    "`Trainer` with FSDP2 and 16-bit shards in parts, resume",
    WITH_A_LINE,
    "`split_parameters` in `create_scheduler`",
)
def test_shards_in_parts_have_the_same_losses_and_so_have_those_after_a_resume(tmp_path, drive):
    for whole, parts, resumed in run_ranks(with_and_without_parts, 2, str(tmp_path), drive):
        assert parts == whole
        assert resumed == parts[STEPS // 2 :]


def sharded(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return model


def train_in_a_loop(model, optimizer, steps, seed):
    losses = []
    for step in range(steps):
        torch.manual_seed(100 * seed + 10 * step + dist.get_rank())
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(make, folder):
    model = sharded()
    optimizer = make(model)
    first = train_in_a_loop(model, optimizer, 3, seed=1)
    dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder)
    second = train_in_a_loop(model, optimizer, 3, seed=2)
    model = sharded(seed=7)
    again = make(model)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, again), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, again, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert train_in_a_loop(model, again, 3, seed=2) == second
    return first + second, [optimizer, again]


def loops_with_both(rank, world_size, folder, drive):
    def in_parts(model):
        split_parameters(model, fp32_too=True)
        return OffloadAdamW(model.parameters(), **SETTINGS, offload=section(drive))

    theirs, _ = run(lambda model: torch.optim.AdamW(model.parameters(), **SETTINGS), f"{folder}/theirs")
    ours, made = run(in_parts, f"{folder}/ours")
    for optimizer in made:
        optimizer.synchronize()
        assert optimizer.stats().updates_behind >= 3 * optimizer.stats().num_subgroups > 0
        optimizer.close()
    return theirs, ours


@client("torch", "`fully_shard`, `clip_grad_norm_`, checkpoint by `get_state_dict` and DCP", UNCHANGED, HIDES_SHARDS)
def test_losses_are_those_of_torch_adamw_and_a_checkpoint_resumes(tmp_path, drive):
    for theirs, ours in run_ranks(loops_with_both, 2, str(tmp_path), drive):
        assert ours == pytest.approx(theirs, abs=1e-6, rel=0)
