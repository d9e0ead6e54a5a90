"""torch's FSDP2 in a loop of one's own: clipping, and a checkpoint through torch's helpers."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from nvme_offload import OffloadAdamW, split_parameters
from tests.support.clients import HIDES_SHARDS, SETTINGS, UNCHANGED, client
from tests.support.ranks import run_ranks
from tests.support.training import section

pytestmark = pytest.mark.slow


def sharded(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return model


def train(model, optimizer, steps, seed):
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
    first = train(model, optimizer, 3, seed=1)
    dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder)
    second = train(model, optimizer, 3, seed=2)
    model = sharded(seed=7)
    again = make(model)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, again), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, again, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert train(model, again, 3, seed=2) == second
    return first + second, [optimizer, again]


def with_both(rank, world_size, folder, drive):
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
    for theirs, ours in run_ranks(with_both, 2, str(tmp_path), drive):
        assert ours == pytest.approx(theirs, abs=1e-6, rel=0)
