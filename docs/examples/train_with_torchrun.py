"""Trains a byte-level GPT through `initialize`: ZeRO-3, bf16, optimizer state on NVMe, on any number of ranks.

python docs/examples/train_with_torchrun.py --nvme-path /mnt/nvme0
torchrun --nproc-per-node 2 docs/examples/train_with_torchrun.py --nvme-path /mnt/nvme0 --steps 100
torchrun --nproc-per-node 2 docs/examples/train_with_torchrun.py --config offload.json
"""

import argparse

import torch
import torch.distributed as dist

from nvme_offload import initialize
from nvme_offload.perf.demo.corpus import load_corpus
from nvme_offload.perf.demo.model import ByteGPT
from nvme_offload.perf.demo.options import parse_size

CONTEXT, MICRO_BATCH = 128, 8


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


def micro_batches(text: bytes, rank: int):
    """Endless inputs and targets, each [MICRO_BATCH, CONTEXT], other ones on every rank."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(rank)
    while True:
        starts = torch.randint(len(data) - CONTEXT - 1, (MICRO_BATCH,), generator=generator)
        windows = torch.stack([data[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
        yield windows[:, :-1], windows[:, 1:]


def main() -> None:
    """Trains as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--nvme-path", help="folder on the drive that takes the optimizer state")
    where.add_argument("--config", help="file with a configuration section, JSON or TOML")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--size", type=parse_size, default="4x256", help="layers and width of the model")
    args = parser.parse_args()

    torch.manual_seed(0)  # the same weights on every rank
    model = ByteGPT(args.size, CONTEXT, torch.bfloat16)
    with initialize(model, args.config or section(args.nvme_path)) as engine:
        rank = dist.get_rank()
        batches = micro_batches(load_corpus().train, rank)
        for step in range(1, args.steps + 1):
            total = torch.zeros(())
            for _ in range(engine.gradient_accumulation_steps):
                loss = engine(*next(batches))
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
            print(f"{stats.step_seconds:.2f} s in step(), {stats.wait_seconds:.2f} s of it waiting for the drive")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
