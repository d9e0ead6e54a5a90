"""pytest-benchmark suite: the kernels on data in memory. GB/s counts the bytes that an update must read and write."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from nvme_offload.offload.config.optimizer import OPTIMIZERS
from nvme_offload.offload.host.region import HostRegion
from nvme_offload.offload.units import round_up
from nvme_offload.optim.kernels import ABSENT, KernelPool, available_isas, make_logged_step, make_segment
from nvme_offload.optim.layout.flat import Origin
from nvme_offload.optim.layout.master import TILE_NUMEL
from nvme_offload.optim.rules.registry import RULES
from nvme_offload.optim.rules.rule import MOST_BLOCK

MASTER_DTYPES = {torch.bfloat16: torch.uint16, torch.float16: torch.float32, torch.float32: None}


@pytest.fixture(scope="module")
def numel(bench_size: int) -> int:
    return bench_size // 16  # about the bytes of an update per element


@pytest.mark.parametrize("dtype", MASTER_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("state_dtype", ["fp32", "int8"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_update(
    measure: Callable[..., Any], numel: int, name: str, state_dtype: str, isa: str, dtype: torch.dtype
) -> None:
    master_dtype, numel = MASTER_DTYPES[dtype], round_up(numel, MOST_BLOCK)
    param, grad = torch.ones(numel, dtype=dtype), torch.full((numel,), 1e-3, dtype=dtype)
    master = None if master_dtype is None else torch.zeros(numel, dtype=master_dtype)
    settings = {**OPTIMIZERS[name], "state_dtype": state_dtype}
    rule = RULES[name].of(settings).of_param((numel // MOST_BLOCK, MOST_BLOCK), (0, 1))
    if not rule.kernel or (state_dtype == "int8") != rule.dithers:
        pytest.skip(f"{name} has no native kernel with states in {state_dtype}")
    states = [torch.zeros(numel // kept.per, dtype=kept.dtype) for kept in rule.kept]
    what: dict[str, Any] = {"param": param, "grad": grad, "master": master, "states": states, "rule": rule}
    if rule.dithers:
        what["origin"] = Origin(0, 0, (numel,), (1,))
    scalars = rule.scalars(settings, 10) + (10.0,) * rule.dithers
    segment = make_segment(**what, checksums=None, scalars=scalars, grad_scale=1.0)
    changed = [tensor for tensor in (param, master, *states) if tensor is not None]
    size_bytes = grad.nbytes + 2 * sum(tensor.nbytes for tensor in changed)
    measure(partial(KernelPool(isa=isa).update, [segment]), size_bytes)


@pytest.mark.parametrize("num_logged", [0, 1, 3])
@pytest.mark.parametrize("keeps", [False, True], ids=["rewrites", "keeps"])
def test_logged_update(measure: Callable[..., Any], numel: int, num_logged: int, keeps: bool) -> None:
    """A step of a durable run: it does the logged updates again, and its own; some keep their gradient for the log."""
    numel = round_up(numel, TILE_NUMEL)
    settings, pool = OPTIMIZERS["AdamW"], KernelPool()
    rule = RULES["AdamW"].of(settings)
    param, grad = torch.ones(numel).bfloat16(), torch.full((numel,), 1e-3).bfloat16()
    master, states = torch.zeros(numel, dtype=torch.uint16), [torch.full((numel,), 1e-3) for _ in rule.states]
    offsets = torch.full((numel // TILE_NUMEL, 2), ABSENT)
    offsets[:, 0] = torch.arange(numel // TILE_NUMEL) * 2 * TILE_NUMEL
    entry = HostRegion(grad.nbytes).view(torch.uint8, 0, grad.nbytes)
    entry.view(torch.bfloat16).copy_(grad)
    scaled: dict[str, Any] = {"scalars": rule.scalars(settings, 10), "grad_scale": 1.0}
    logged = make_logged_step(entry=entry, offsets=offsets, numel=numel, grad_dtype=torch.bfloat16, **scaled)
    # A segment holds addresses: what they point at has to outlive it.
    checksums, base, kept_offsets = pool.tile_checksums(param), param.clone(), torch.empty_like(offsets)
    what: dict[str, Any] = {"param": param, "grad": grad, "master": master, "states": states, "rule": rule}
    log: dict[str, Any] = {"log": [logged] * num_logged, "base": base, "offsets": kept_offsets if keeps else None}
    segment = make_segment(**what, **scaled, **log, checksums=checksums)
    size_bytes = grad.nbytes + 2 * sum(tensor.nbytes for tensor in (param, master, *states)) + num_logged * grad.nbytes
    kept = HostRegion(grad.nbytes).view(torch.uint8, 0, grad.nbytes)
    update = partial(pool.update_and_log, [segment], kept) if keeps else partial(pool.update, [segment])
    measure(update, size_bytes)


@pytest.mark.parametrize("isa", available_isas())
def test_grad_norm(measure: Callable[..., Any], numel: int, isa: str) -> None:
    grad = torch.ones(numel, dtype=torch.bfloat16)
    measure(partial(KernelPool(isa=isa).tile_sq_sums, grad), grad.nbytes)
