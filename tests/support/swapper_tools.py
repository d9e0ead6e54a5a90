"""Configurations, tensors of any bits, and child processes for the tests of TensorSwapper."""

import pytest
import torch

from tests.support.forked import printed
from tests.support.sandbox import run_python

KiB, MiB = 1 << 10, 1 << 20
PATIENCE = 60.0  # seconds after which a transfer counts as lost

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def config_for(*paths, staging_budget=256 * KiB, buffer_count=4, **aio):
    offload = {"device": "nvme", "nvme_path": [str(path) for path in paths]}
    offload |= {"staging_budget": staging_budget, "buffer_count": buffer_count}
    return {"zero_optimization": {"offload_optimizer": offload}, "aio": aio}


def random_bits(shape, dtype=torch.float32, seed=0):
    """Any bits, so NaNs with payloads and negative zeros too; for bool only the two that are allowed."""
    generator = torch.Generator().manual_seed(seed)
    numel = torch.Size(shape).numel()
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def same_bits(left, right):
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return False
    flat = (torch.empty(each.numel(), dtype=each.dtype).copy_(each.flatten()) for each in (left, right))
    return torch.equal(*(each.view(torch.uint8) for each in flat))


def swap_file(swapper, index=0):
    return swapper.tier.space.path_of(swapper.tier.space.fds[index])


PRELUDE = f"""
import os, signal, subprocess, sys
from pathlib import Path
import torch
from nvme_offload import ForkError, OutOfSpaceError, SwapIOError
from nvme_offload.offload.swapper.tensor_swapper import TensorSwapper
path = Path(sys.argv[1])
def open_swapper(**options):
    offload = {{"device": "nvme", "nvme_path": str(path), "staging_budget": 1 << 20}}
    return TensorSwapper({{"zero_optimization": {{"offload_optimizer": offload}}, "aio": options}})
PATIENCE = {PATIENCE}
"""


def run_with_swapper(code, path, **options):
    """What `code` prints in a child where `open_swapper()` opens one on `path`."""
    return printed(run_python(PRELUDE + code, path, **options))
