"""A step under `initialize` moves no gradient byte to NVMe, and 10.1 bytes each way."""

import pytest
import torch
from torch import nn

from nvme_offload import initialize
from tests.support.failing_drive import Op
from tests.support.ranks import on_ranks
from tests.support.tiers import section
from tests.support.training import storage_io

WIDTH, NUM_BLOCKS = 256, 6


def model():
    """Blocks of 8 x width^2 parameters, and no more."""
    torch.manual_seed(0)
    shapes = [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)] * NUM_BLOCKS
    return nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in shapes))


def step_of(engine, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(engine.gradient_accumulation_steps):
        engine.backward(engine(torch.randn(4, WIDTH, generator=generator)).float().square().mean())
        engine.step()
    engine.optimizer.synchronize()


@pytest.mark.parametrize("dtype", [pytest.param("bf16", marks=pytest.mark.slow), "fp32"])
@on_ranks(2)
def test_no_gradient_byte_reaches_nvme(rank, world_size, tmp_path, dtype):
    with initialize(model(), section(tmp_path, state="nvme") | {"gradient_accumulation_dtype": dtype}) as engine:
        for step in range(2):
            step_of(engine, 10 * step + rank)
        tier, stats, before = engine.optimizer.store.tier, engine.optimizer.stats(), storage_io()
        step_of(engine, 99 + rank)
        after, last = storage_io(), engine.optimizer.stats()
        numel, staging = sum(p.to_local().numel() for p in engine.module.parameters()), last.staging_bytes
        kinds = tuple(tier.bytes_of_kind(op, "optimizer state") for op in (Op.READ, Op.WRITE))
        assert kinds == (last.bytes_read, last.bytes_written), "nothing else"
        assert numel == 4 * WIDTH**2 * NUM_BLOCKS
        assert staging < 10 * numel / 8, "else the copies left in staging buffers would hide what is moved"
        of_kernel = after[0] - before[0], after[1] - before[1]
        of_engine = last.bytes_read - stats.bytes_read, last.bytes_written - stats.bytes_written
        for bytes_read, bytes_written in (of_kernel, of_engine):
            assert 10 * numel <= bytes_written <= 10.1 * numel
            assert 10 * numel - staging <= bytes_read <= 10.1 * numel
