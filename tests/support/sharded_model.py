"""A small model that FSDP2 shards, an optimizer over it, and its whole state from all ranks."""

import hashlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from nvme_offload import OffloadAdamW, split_parameters
from tests.support.build import nudged, token_loss

VOCABULARY = 61
ACCUMULATION = 2
CAN_GO_ON = hasattr(FSDPModule, "reset_iter_state")
"""Whether FSDP2 of this torch (2.13 and newer) can leave a pass halfway, and what the reasons below say."""
GOES_ON = pytest.mark.skipif(not CAN_GO_ON, reason="FSDP2 of this torch cannot leave a pass halfway")
CASTS_AGAIN = pytest.mark.skipif(not CAN_GO_ON, reason="FSDP2 of this torch casts nothing where backward computes it")
SHARDS_CODES = pytest.mark.skipif(not CAN_GO_ON, reason="FSDP2 of this torch shards floating point alone")


class Model(nn.Module):
    """Two blocks and a tied embedding, in sizes that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 37)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(37, 131), nn.GELU(), nn.Linear(131, 37), nn.LayerNorm(37)) for _ in range(2)
        )
        self.head = nn.Linear(37, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def sharded_model(dtype, *, mesh=None, reshard=True, split=True, reduce_dtype=torch.float32):
    torch.manual_seed(0)
    model = Model()
    nudged(model)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return split_parameters(model) if split and dtype is torch.bfloat16 else model


def section(device, path, clip=0.5, host_budget=None):
    offload = {"device": device, "buffer_count": 2, "staging_budget": "2MiB"}
    if device == "nvme":
        offload["nvme_path"] = str(path)
    zero, aio = {"sub_group_size": 65536, "offload_optimizer": offload}, {"block_size": "128KiB"}
    return {"zero_optimization": zero, "aio": aio, "gradient_clipping": clip, "host_budget": host_budget}


def loss_of(model, rank, step, micro):
    return token_loss(model, 1000 * step + 10 * micro + rank, VOCABULARY)


def backward(model, rank, step):
    for micro in range(ACCUMULATION):
        (loss_of(model, rank, step, micro) / ACCUMULATION).backward()


def make(model, config):
    """Weights of every part in a group of their own, so that there are several subgroups; all else in the last."""
    parts = [model.embedding, *model.blocks]
    groups = [{"params": [p for p in part.parameters() if p.ndim > 1], "weight_decay": 0.1} for part in parts]
    groups.append({"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0})
    return OffloadAdamW(groups, lr=1e-2, offload=config)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _shards_of(mesh):
    return mesh.size(mesh.ndim - 1)


@torch.no_grad()
def gathered(tensors):
    """Values of these tensors, whole: of shards, and of copies of them, all in one collective; it takes little time."""
    whole, pieces = dict(tensors), {}
    for name, value in tensors.items():
        if not isinstance(value, DTensor):
            continue
        shard, size, (*copies, last) = value.to_local(), _shards_of(value.device_mesh), value.placements
        if value.device_mesh.size() == 1:
            whole[name] = shard.clone()
        elif last != Shard(0) or not all(copy.is_replicate() for copy in copies) or value.device.type != "cpu":
            whole[name] = value.full_tensor().clone()
        else:
            pieces[name] = torch.zeros(-(-len(value) // size), *value.shape[1:], dtype=value.dtype)
            pieces[name][: len(shard)] = shard
    if not pieces:
        return whole
    packed = torch.cat([piece.flatten().view(torch.uint8) for piece in pieces.values()])
    mesh = tensors[next(iter(pieces))].device_mesh
    parts = [torch.empty_like(packed) for _ in range(_shards_of(mesh))]
    dist.all_gather(parts, packed, mesh.get_group(mesh.ndim - 1))
    sizes = [piece.nbytes for piece in pieces.values()]
    for (name, piece), *of_ranks in zip(pieces.items(), *(part.split(sizes) for part in parts), strict=True):
        rows_of_ranks = [part.clone().view(piece.dtype).view(piece.shape) for part in of_ranks]
        whole[name] = torch.cat(rows_of_ranks)[: len(tensors[name])]
    return whole


def full_state(model, optimizer):
    """Whole fp32 parameters, masters and moments, from all ranks."""
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    for index, entries in optimizer.state_dict()["state"].items():
        tensors |= {f"{index}.{name}": value for name, value in entries.items()}
    return gathered(tensors)


def digest_of(engine):
    digest = hashlib.sha256(str(engine.global_steps).encode())
    for value in full_state(engine.module, engine.optimizer).values():
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def assert_same_run(ours, theirs):
    """Two runs had the same losses and norms, and have the same state."""
    assert ours[:2] == theirs[:2]
    assert_same(ours[2], theirs[2])
