"""A few steps of OffloadAdamW with its state on NVMe, and a digest of every bit that came out."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nvme_offload import OffloadAdamW

SIZES = ((70_001, torch.bfloat16), (999, torch.float32), (131_072, torch.bfloat16), (5, torch.float16))


def train(path: Path, engine: str, *, num_steps: int = 4, before_step: Callable[[int], object] = int) -> dict[str, Any]:
    """Train on made-up gradients; the same arguments but for `path` and `engine` must give the same digest."""
    generator = torch.Generator().manual_seed(7)
    params = [torch.nn.Parameter(torch.randn(numel, generator=generator).to(dtype)) for numel, dtype in SIZES]
    offload = {"device": "nvme", "nvme_path": str(path), "staging_budget": "8MiB"}
    section = {"zero_optimization": {"sub_group_size": 65536, "offload_optimizer": offload}, "gradient_clipping": 1.0}
    section["aio"] = {"engine": engine, "direct": "optional", "block_size": "64KiB"}
    optimizer = OffloadAdamW(params, lr=1e-2, offload=section)
    tier = optimizer.store.tier
    try:
        for number in range(num_steps):
            before_step(number)
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            optimizer.step()
        digest = hashlib.sha256()
        for param in params:
            digest.update(param.detach().view(torch.uint8).numpy().tobytes())
            for name in ("exp_avg", "exp_avg_sq"):
                digest.update(optimizer.state[param][name].contiguous().view(torch.uint8).numpy().tobytes())
        return {"engine": tier.engine.name, "registered": tier.registration.buffers, "digest": digest.hexdigest()}
    finally:
        optimizer.close()
