"""Trains with FSDP2 in a plain PyTorch loop: your own `fully_shard`, parameters in two halves, state on NVMe.

torchrun --nproc-per-node 2 docs/examples/train_with_fsdp2.py --nvme-path /mnt/nvme0
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from nvme_offload import OffloadAdamW, split_parameters

FEATURES, CLASSES, BATCH, MICRO_BATCHES, BLOCKS = 64, 10, 32, 2, 4


class Classifier(nn.Module):
    """Residual blocks between two linear layers; makes logits [batch, CLASSES]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(features)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def main() -> None:
    """Trains as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme-path", required=True, help="folder on the drive that takes the optimizer state")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights on every rank
    model = Classifier(args.width)
    mesh = init_device_mesh("cpu", (world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in [*model.blocks, model]:
        fully_shard(part, mesh=mesh, mp_policy=policy)
    split_parameters(model)  # the upper halves stay in memory, the lower ones go to the drive with the moments
    nvme = {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": args.nvme_path}}}
    optimizer = OffloadAdamW(model.parameters(), lr=1e-3, offload={**nvme, "gradient_clipping": 1.0})
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    teacher = torch.randn(FEATURES, CLASSES)
    generator = torch.Generator().manual_seed(1 + rank)
    with optimizer:
        for step in range(1, args.steps + 1):
            total = torch.zeros(())
            for _ in range(MICRO_BATCHES):
                features = torch.randn(BATCH, FEATURES, generator=generator)
                loss = nn.functional.cross_entropy(model(features).float(), (features @ teacher).argmax(dim=1))
                (loss / MICRO_BATCHES).backward()  # p.grad is this rank's partition, in bf16
                total += loss.detach() / MICRO_BATCHES
            optimizer.step()  # clips by the norm over all ranks
            optimizer.zero_grad()
            schedule.step()
            dist.all_reduce(total)
            if rank == 0:
                norm = optimizer.total_norm
                print(f"step {step}: loss {total.item() / world_size:.4f}, gradient norm {norm:.3f}", flush=True)
        if rank == 0:
            print(f"state on {optimizer.stats().engine}: {optimizer.stats().bytes_written} bytes written")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
