"""Trains a model of bytes through `initialize`: ZeRO-3, bf16, optimizer state on NVMe, on any number of ranks.

python docs/examples/train_with_torchrun.py --nvme-path /mnt/nvme0
torchrun --nproc-per-node 2 docs/examples/train_with_torchrun.py --nvme-path /mnt/nvme0 --steps 100
torchrun --nproc-per-node 2 docs/examples/train_with_torchrun.py --config offload.json
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from nvme_offload import initialize

CONTEXT, MICRO_BATCH = 128, 8


def byte_model(width: int) -> nn.Module:
    """Makes logits of the next byte, [numel, 256], from each byte, [numel]."""
    layers = (nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(4))
    return nn.Sequential(nn.Embedding(256, width), *layers, nn.Linear(width, 256))


def section(nvme_path: str) -> dict:
    """What --config replaces."""
    return {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": nvme_path}},
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    }


def micro_batches(rank: int):
    """Endless inputs and targets from this file, each [MICRO_BATCH, CONTEXT], other ones on every rank."""
    windows = torch.tensor(bytearray(Path(__file__).read_bytes())).long().unfold(0, CONTEXT + 1, 1)
    generator = torch.Generator().manual_seed(rank)
    while True:
        chosen = windows[torch.randint(len(windows), (MICRO_BATCH,), generator=generator)]
        yield chosen[:, :-1], chosen[:, 1:]


def main() -> None:
    """Trains as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--nvme-path", help="folder on the drive that takes the optimizer state")
    where.add_argument("--config", help="file with a configuration section, JSON, TOML or YAML")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()

    torch.manual_seed(0)  # the same weights on every rank
    with initialize(byte_model(args.width), args.config or section(args.nvme_path)) as engine:
        batches = micro_batches(rank := dist.get_rank())
        for step in range(1, args.steps + 1):
            total = torch.zeros(())
            for _ in range(engine.gradient_accumulation_steps):
                inputs, targets = next(batches)
                loss = nn.functional.cross_entropy(engine(inputs.flatten()).float(), targets.flatten())
                engine.backward(loss)
                engine.step()  # acts after the last micro-batch of a step
                total += loss.detach() / engine.gradient_accumulation_steps
            dist.all_reduce(total)
            if rank == 0:
                mean, norm = total.item() / dist.get_world_size(), engine.get_global_grad_norm()
                pace = engine.optimizer.stats().iteration or "begun"  # seconds, share of the ideal, what limits
                print(f"step {step}: loss {mean:.4f}, gradient norm {norm:.3f}; {pace}", flush=True)
        stats = engine.optimizer.stats()
        if rank == 0:
            print(f"state on {stats.engine}: {stats.bytes_read} bytes read, {stats.bytes_written} bytes written")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
