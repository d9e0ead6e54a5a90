"""pytest-benchmark suite: the kernels on data in memory. GB/s counts the bytes that an update must read and write."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from nvme_offload.optim.kernels import KernelPool, available_isas, make_segment
from nvme_offload.optim.rules.adamw_reference import AdamWScalars

MASTER_DTYPES = {torch.bfloat16: torch.uint16, torch.float16: torch.float32, torch.float32: None}


@pytest.fixture(scope="module")
def numel(bench_size: int) -> int:
    return bench_size // 16  # about the bytes of an update per element


def scalars() -> AdamWScalars:
    return AdamWScalars.at_step(step=10, lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, grad_scale=1.0)


@pytest.mark.parametrize("dtype", MASTER_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("isa", available_isas())
def test_adamw_update(measure: Callable[..., Any], numel: int, isa: str, dtype: torch.dtype) -> None:
    master_dtype = MASTER_DTYPES[dtype]
    param, grad = torch.ones(numel, dtype=dtype), torch.full((numel,), 1e-3, dtype=dtype)
    master = None if master_dtype is None else torch.zeros(numel, dtype=master_dtype)
    exp_avg, exp_avg_sq = torch.zeros(numel), torch.zeros(numel)
    segment = make_segment(
        param=param,
        grad=grad,
        master=master,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        checksums=None,
        scalars=scalars(),
    )
    changed = [tensor for tensor in (param, master, exp_avg, exp_avg_sq) if tensor is not None]
    size_bytes = grad.nbytes + 2 * sum(tensor.nbytes for tensor in changed)
    measure(partial(KernelPool(isa=isa).adamw_update, [segment]), size_bytes)


@pytest.mark.parametrize("isa", available_isas())
def test_grad_norm(measure: Callable[..., Any], numel: int, isa: str) -> None:
    grad = torch.ones(numel, dtype=torch.bfloat16)
    measure(partial(KernelPool(isa=isa).block_sq_sums, grad), grad.nbytes)
