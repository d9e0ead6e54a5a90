"""A step under `initialize` moves no gradient byte to NVMe, and 10.1 bytes each way."""

import torch
from torch import nn

from nvme_offload import initialize
from tests.support.failing_drive import Op
from tests.support.ranks import run_ranks
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


def count_traffic(rank, world_size, path):
    """By accumulation dtype."""
    return {dtype: traffic_of(rank, path, {"gradient_accumulation_dtype": dtype}) for dtype in ("bf16", "fp32")}


def traffic_of(rank, path, settings):
    with initialize(model(), section(path, state="nvme") | settings) as engine:
        for step in range(2):
            step_of(engine, 10 * step + rank)
        tier, stats, before = engine.optimizer.store.tier, engine.optimizer.stats(), storage_io()
        step_of(engine, 99 + rank)
        after, last = storage_io(), engine.optimizer.stats()
        local = sum(p.to_local().numel() for p in engine.module.parameters())
        return {
            "numel": local,
            "staging": last.staging_bytes,
            "kernel": (after[0] - before[0], after[1] - before[1]),
            "engine": (last.bytes_read - stats.bytes_read, last.bytes_written - stats.bytes_written),
            "whole": (last.bytes_read, last.bytes_written),
            "kinds": [tier.bytes_of_kind(op, "optimizer state") for op in (Op.READ, Op.WRITE)],
        }


def test_no_gradient_byte_reaches_nvme(tmp_path):
    for rank in (by_dtype[dtype] for by_dtype in run_ranks(count_traffic, 2, tmp_path) for dtype in by_dtype):
        assert tuple(rank["kinds"]) == rank["whole"], "nothing else"
        numel, staging = rank["numel"], rank["staging"]
        assert numel == 4 * WIDTH**2 * NUM_BLOCKS
        assert staging < 10 * numel / 8, "else the copies left in staging buffers would hide what is moved"
        for bytes_read, bytes_written in (rank["kernel"], rank["engine"]):
            assert 10 * numel <= bytes_written <= 10.1 * numel
            assert 10 * numel - staging <= bytes_read <= 10.1 * numel
