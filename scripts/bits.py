"""Digests of short trainings in every mode: run it before and after a change that must not change a bit, and compare.

python scripts/bits.py FOLDER [--ranks 1 2] [--resume OTHER]    # FOLDER gets a checkpoint of each run

With ``--resume`` every run begins from the checkpoint that an earlier call, perhaps of another commit, left in OTHER.
"""

import argparse
import hashlib
import itertools
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from nvme_offload import OffloadAdamW, initialize

PRECISIONS = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
    "fp32": {},
    "mixed": {"bf16": {"enabled": True}, "fp32_modules": ["*.1"]},
    "autocast-bf16": {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
    "autocast-fp16": {"torch_autocast": {"enabled": True, "dtype": "fp16"}, "fp16": {"initial_scale_power": 4}},
}
TIERS = ("memory", "state", "everything")
STEPS, ACCUMULATION = 6, 2


class Block(nn.Sequential):
    """One repeated layer."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 2 * width + 1), nn.LayerNorm(2 * width + 1), nn.Linear(2 * width + 1, width))


def model(width: int = 256) -> nn.Module:
    """The same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(4)))


def section(precision: str, tiers: str, drive: str) -> dict[str, object]:
    """A configuration section."""
    nvme = {"device": "nvme", "nvme_path": drive}
    state = {"device": "cpu"} if tiers == "memory" else {**nvme, "staging_budget": "4MiB", "buffer_count": 2}
    zero: dict[str, object] = {"stage": 3, "offload_optimizer": state, "sub_group_size": 131072}
    written = {
        "zero_optimization": zero,
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        **PRECISIONS[precision],
    }
    if tiers == "everything":
        zero["offload_param"] = dict(nvme)
        written["offload_gradients"] = dict(nvme)
    return written


def digest_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all weights and all optimizer state, in fp32."""
    found = hashlib.sha256()
    weights, state = get_state_dict(module, optimizer, options=StateDictOptions(full_state_dict=True))
    for name, value in sorted(weights.items()):
        value = value.joined() if hasattr(value, "joined") else value
        found.update(name.encode() + value.detach().float().contiguous().numpy().tobytes())
    for name, entries in sorted(state["state"].items()):
        for key, value in sorted(entries.items()):
            found.update(f"{name}{key}".encode() + torch.as_tensor(value).float().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def train(rank: int, precision: str, tiers: str, drive: str, folder: Path, resume: Path | None) -> str:
    """A run through `initialize`; its digest."""
    engine = initialize(model(), section(precision, tiers, drive))
    if resume is not None:
        engine.load_checkpoint(str(resume))
    for step in range(STEPS * ACCUMULATION):
        torch.manual_seed(1000 * rank + step)
        loss = (engine(torch.randn(8, 256)).float() - 1).square().mean()
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(folder))
    found = digest_of(engine.module, engine.optimizer)
    engine.optimizer.close()
    return found


def train_plain(precision: str, tiers: str, drive: str) -> str:
    """A plain module with a plain optimizer; its digest."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    module = model().to(dtype)
    if precision == "mixed":
        module[0].bfloat16()
        module[2].half()
    own = {key: section(precision, tiers, drive)[key] for key in ("zero_optimization", "gradient_clipping")}
    with OffloadAdamW(module.parameters(), lr=1e-3, weight_decay=0.1, offload=own) as optimizer:
        for step in range(STEPS):
            draw = torch.Generator().manual_seed(step)
            for param in module.parameters():
                param.grad = torch.randn(param.shape, generator=draw).to(param.dtype)
            optimizer.step()
        state = optimizer.state_dict()["state"]
    found = hashlib.sha256()
    for param in module.parameters():
        found.update(param.detach().view(torch.uint8).contiguous().numpy().tobytes())
    for index, entries in sorted(state.items()):
        for name, value in sorted(entries.items()):
            found.update(f"{index}{name}".encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def run_rank(rank: int, ranks: int, port: int, folder: str, drive: str, resume: str | None) -> None:
    """All runs of one number of ranks."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for precision, tiers in itertools.product(PRECISIONS, TIERS):
        name = f"{precision}-{tiers}-{ranks}"
        earlier = Path(resume) / name if resume else None
        found = train(rank, precision, tiers, drive, Path(folder) / name, earlier)
        if rank == 0:
            sys.stdout.write(f"{name:24} {found}\n")
        if ranks == 1 and not resume and tiers != "everything" and "autocast" not in precision:
            sys.stdout.write(f"{name + ' (plain)':24} {train_plain(precision, tiers, drive)}\n")
        sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--resume", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    resume = str(given.resume.resolve()) if given.resume else None
    for ranks in given.ranks:
        port = 29500 + os.getpid() % 1000 + ranks
        with tempfile.TemporaryDirectory(dir=given.folder) as drive:
            mp.spawn(run_rank, (ranks, port, str(given.folder.resolve()), drive, resume), nprocs=ranks)


if __name__ == "__main__":
    main()
