"""accelerate's FSDP2 shards the model in `prepare`, after the optimizer was made: it goes on with the shards."""

import os
import weakref

import pytest
import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.tensor import DTensor

from nvme_offload import OffloadAdamW, split_parameters
from tests.support.accelerated import accelerator, sharding_on_cpu
from tests.support.clients import WITH_A_LINE, client
from tests.support.ranks import run_ranks
from tests.support.training import section

WIDTH, LAYERS, STEPS = 64, 3, 4
NUM_BYTES_PER_MASTER = 8  # of an fp32 parameter: its two moments
PAGE_BYTES = 4096  # to which the state of a shard is rounded up on the drive; all of it is one subgroup here
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.outer(nn.functional.gelu(self.inner(x)))


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(Layer() for _ in range(LAYERS)))


def plugin(state_dict_type="SHARDED_STATE_DICT"):
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Layer"],
        state_dict_type=state_dict_type,
    )


def train(acc, module, optimizer, steps, seed):
    losses = []
    for step in range(steps):
        torch.manual_seed(100 * seed + 10 * step + acc.process_index)
        loss = module(torch.randn(8, WIDTH)).float().square().mean()
        acc.backward(loss)
        acc.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def reserved(drive):
    """Bytes that the swap files of all ranks hold."""
    return sum(path.stat().st_size for path in drive.rglob("swap"))


def prepared(make, kind, seed=0, **options):
    acc = accelerator(plugin(kind), **options)
    plain = model(seed)
    unsharded = [weakref.ref(param) for param in plain.parameters()]
    made = acc.prepare(plain, make(plain.parameters()))
    assert not any(param() is not None for param in unsharded), "its memory is free when it is sharded"
    return acc, *made


def close(made):
    """All ranks have looked at the drive before, and find it empty after it."""
    dist.barrier()
    while made:
        made.pop().close()
    dist.barrier()


def stock(params):
    return torch.optim.AdamW(params, **SETTINGS)


def train_and_resume(rank, world_size, folder, drive, kind):
    """Losses of a run, and of another that resumes it in the middle, with torch's optimizer and with ours."""
    runs = {}
    with sharding_on_cpu():
        for name in ("stock", "offloaded"):
            made = []

            def make(params, made=made, name=name):
                if name == "stock":
                    return stock(params)
                made.append(OffloadAdamW(params, **SETTINGS, offload=section(drive)))
                assert reserved(drive) == 0, "the unsharded model has no place"
                return made[-1]

            acc, module, optimizer = prepared(make, kind)
            assert all(isinstance(param, DTensor) for param in module.parameters())
            assert reserved(drive) == 0
            first = train(acc, module, optimizer, STEPS, seed=1)
            if made:
                dist.barrier()
                shards = sum(param.to_local().numel() for param in module.parameters())
                assert made[0].stats().state_bytes == NUM_BYTES_PER_MASTER * shards
                pages = -(-NUM_BYTES_PER_MASTER * shards // PAGE_BYTES)
                assert reserved(drive) == world_size * pages * PAGE_BYTES
            acc.save_state(os.path.join(folder, name))
            second = train(acc, module, optimizer, STEPS, seed=2)
            close(made)
            acc, module, optimizer = prepared(make, kind, seed=7)
            acc.load_state(os.path.join(folder, name))
            resumed = train(acc, module, optimizer, STEPS, seed=2)
            close(made)
            assert resumed == second, name
            runs[name] = first + second
    return runs


@client("accelerate", "FSDP2 plug-in, clipping, `save_state`, `load_state`")
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", pytest.param("FULL_STATE_DICT", marks=pytest.mark.slow)])
def test_it_trains_and_resumes_as_torch_adamw(tmp_path, drive, kind):
    for runs in run_ranks(train_and_resume, 2, str(tmp_path), drive, kind):
        assert runs["offloaded"] == pytest.approx(runs["stock"], abs=1e-6, rel=0)
        assert runs["stock"][-1] < runs["stock"][0]


def train_split(rank, world_size, drive):
    runs = []
    with sharding_on_cpu():
        for split in (False, True):
            made = []

            def make(params, made=made):
                made.append(OffloadAdamW(params, **SETTINGS, offload=section(drive)))
                return made[-1]

            acc, module, optimizer = prepared(make, "SHARDED_STATE_DICT", mixed_precision="bf16")
            if split:
                split_parameters(module, torch.float32)
            losses = train(acc, module, optimizer, STEPS, seed=1)
            runs.append((losses, made[0].state_dict(), made[0].stats().state_bytes))
            assert (made[0].stats().updates_behind > 0) == split
            close(made)
    (whole, _, whole_bytes), (parts, state, part_bytes) = runs
    assert parts == whole
    assert part_bytes == whole_bytes // 8 * 10
    assert set(state["state"][0]) == {"step", "master", "exp_avg", "exp_avg_sq"}
    return parts


@client(
    "accelerate", "FSDP2 plug-in with 16-bit shards in parts", WITH_A_LINE, "`split_parameters(model)` after `prepare`"
)
def test_shards_in_parts_have_the_same_bits(tmp_path):
    first, second = run_ranks(train_split, 2, tmp_path)
    assert len(first) == len(second) == STEPS
