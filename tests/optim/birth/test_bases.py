"""Frozen parameters that are read where others wrote them: the bits of a run in memory, and nothing is copied."""

import hashlib

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from nvme_offload import initialize
from tests.support.ranks import on_ranks
from tests.support.sharded_model import SHARDS_CODES
from tests.support.tiers import section

ROWS, WIDTH = 13, 19
"""Two ranks have shards of different sizes, and tensors lie at odd places of the file."""

KINDS = (
    torch.bfloat16,
    torch.float16,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
)


class Adapted(nn.Module):
    """Codes of one dtype beside a frozen bias, and a thin adapter. What is computed with lies at multiples of 64."""

    def __init__(self, dtype, rows=ROWS, width=WIDTH):
        super().__init__()
        codes = torch.randint(1, 100, (rows, width * max(dtype.itemsize, 1)), dtype=torch.uint8)
        self.codes = nn.Parameter(codes.view(dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(3).to(torch.bfloat16), requires_grad=False)
        self.down = nn.Parameter(torch.randn(3, 2))
        self.up = nn.Parameter(torch.randn(2, 3))

    def reset_parameters(self):
        """Nothing: its values are in files."""

    def forward(self, hidden):
        for param in (self.codes, self.bias):
            assert param.data_ptr() % 64 == 0, param.data_ptr() % 64
        codes = self.codes.contiguous().view(torch.uint8)
        seen = codes.sum(dim=1)[:3].to(hidden.dtype) / 8192
        return hidden + seen + self.bias.to(hidden.dtype) + hidden @ self.down @ self.up


def build(kinds=KINDS, **sizes):
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted(dtype, **sizes) for dtype in kinds))


def publish(folder, model):
    """Files of two, in the layout of the Hugging Face hub's cache: links, in a folder that is read only."""
    (folder / "blobs").mkdir(parents=True)
    save_file(model.state_dict(), folder / "blobs" / "0123")
    (folder / "snapshot").mkdir()
    (folder / "snapshot" / "model.safetensors").symlink_to("../blobs/0123")
    (folder / "blobs" / "0123").chmod(0o444)
    return folder / "snapshot"


def born(folder, config, build=build, **options):
    with torch.device("meta"):
        model = build()
    return initialize(model, config, weights=folder, blocks=["Adapted"], **options)


def train(engine, step, rank=0, *, block_by_block=True):
    """A step of several micro-batches; returns their losses."""

    def loss_of(hidden):
        return engine(hidden).float().square().mean()

    batches = [
        torch.randn(2, 3, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
        for micro in range(engine.gradient_accumulation_steps)
    ]
    if block_by_block:
        losses = engine.accumulate(loss_of, batches)
        engine.step()
        return losses
    losses = []
    for hidden in batches:
        losses.append(loss_of(hidden))
        engine.backward(losses[-1])
        engine.step()
    return losses


def values(engine):
    return {name: value.clone() for name, value in engine.weights("own")}


def assert_same_bytes(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype is value.dtype
        assert torch.equal(ours[name].contiguous().view(torch.uint8), value.contiguous().view(torch.uint8)), name


def digest(folder):
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def files_of(engine):
    return list(engine.optimizer.store.blocks.bases)


TIERS = {"param": "nvme", "grads": "nvme", "state": "nvme"}


@SHARDS_CODES
@pytest.mark.parametrize(
    ("ranks", "precision"),
    [(1, "bf16"), (2, "bf16"), pytest.param(1, "fp32", marks=pytest.mark.slow)],
)
@on_ranks("ranks")
def test_adapters_have_the_bits_of_a_run_in_memory(rank, world_size, tmp_path, precision):
    """Of every dtype, block by block and in a loop, in place and copied, also where a durable run goes on."""
    folder, keys = tmp_path / "base", {"bf16": {"enabled": precision == "bf16"}}
    if rank == 0:
        publish(folder, build())
    torch.distributed.barrier()
    folder /= "snapshot"
    before = digest(folder)

    def run(frozen=None, *, tiers=TIERS, block_by_block=True, durable=False):
        """Losses and weights of three steps, the last of them perhaps in an engine that resumes."""
        config = section(tmp_path, **tiers, **({"frozen": frozen} if frozen else {})) | keys
        if durable:
            config["zero_optimization"]["offload_optimizer"]["durable"] = "run"
        losses = []
        for steps in ((0, 1), (2,)) if durable else ((0, 1, 2),):
            with born(folder, config) as engine:
                assert not steps[0] or engine.resume() is not None
                losses += [train(engine, step, rank, block_by_block=block_by_block) for step in steps]
                assert files_of(engine) == (["model.safetensors"] if tiers and frozen is None else [])
                if files_of(engine):
                    cache = engine.optimizer.store.blocks.params.cache
                    trained = sum(block.size_bytes for block in cache.blocks if not block.name.endswith("(frozen)"))
                    assert sum(cache.tier.space.file_sizes) == trained, "there is not even room for the base"
                weights = values(engine)
        return losses, weights

    losses, weights = run(tiers={})
    for ours in (run("copy"), run(block_by_block=False), run(durable=True)):
        assert ours[0] == losses
        assert_same_bytes(ours[1], weights)
    assert digest(folder) == before
