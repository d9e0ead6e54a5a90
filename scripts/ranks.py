"""Measure the memory of ranks on one host, for constant work, beside FSDP2 and torch's AdamW.

python scripts/ranks.py DRIVE [--ranks 1 2 4 8] [--save]    # a rank is a process; DRIVE gets the state of ours
"""

import argparse
import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

from nvme_offload import initialize
from nvme_offload.offload.units import MiB
from nvme_offload.perf.measure.machine import environment
from nvme_offload.perf.measure.results import RESULTS, page, save
from nvme_offload.perf.measure.sections import MODES, section

LAYERS, WIDTH, TOKENS, STEPS = 8, 1536, 8, 4
NUMEL = LAYERS * WIDTH * WIDTH
WAYS = ("ours, state on NVMe", "ours, state in memory", "FSDP2 and torch's AdamW")


def model() -> nn.Module:
    """Make layers of one size: the same work, however many ranks share it."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU()) for _ in range(LAYERS)))


def pss() -> float:
    """Return this process's share of the memory that is in use, in MiB."""
    found = re.search(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024 / MiB


def training(way: str, drive: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return an iteration, and what ends it."""
    batch = torch.ones(TOKENS, WIDTH)
    if way == WAYS[2]:
        net = model()
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        for unit in [*net.children(), net]:
            fully_shard(unit, mesh=mesh)
        adamw = torch.optim.AdamW(net.parameters(), fused=True)

        def plain() -> None:
            net(batch).square().mean().backward()
            adamw.step()
            adamw.zero_grad()

        return plain, lambda: None
    config = {**section(Path(drive) if way == WAYS[0] else None), **MODES["bf16"]}
    engine = initialize(model(), {**config, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}})

    def iterate() -> None:
        engine.backward(engine(batch).float().square().mean())
        engine.step()
        engine.optimizer.synchronize()

    return iterate, engine.close


def run_rank(rank: int, ranks: int, way: str, drive: str, out: str) -> None:
    """Train in one rank, and note what it took."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/group", rank=rank, world_size=ranks)
    dist.barrier()
    before = pss()
    dist.barrier()
    iterate, end = training(way, drive)
    for _ in range(STEPS):
        iterate()
    dist.barrier()
    (Path(out) / f"{rank}.json").write_text(json.dumps({"before": before, "after": pss()}))
    dist.barrier()
    end()
    os._exit(0)


def measured(ranks: int, way: str, drive: Path) -> list[dict[str, float]]:
    """Return what each of so many ranks has noted."""
    with tempfile.TemporaryDirectory(dir=drive) as out:
        mp.spawn(run_rank, (ranks, way, str(drive), out), ranks)
        return [json.loads((Path(out) / f"{rank}.json").read_text()) for rank in range(ranks)]


def memory(counts: list[int], drive: Path) -> Iterator[list[str]]:
    """Measure the memory of all ranks for the same work, and what each further rank adds."""
    for way in WAYS:
        for ranks in counts:
            found = measured(ranks, way, drive)
            before, after = (sum(each[key] for each in found) for key in ("before", "after"))
            yield [way, str(ranks), f"{before:.0f}", f"{after:.0f}", f"{after - before:.0f}", f"{before / ranks:.0f}"]


def main() -> None:
    """Measure, print, and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drive", type=Path)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    facts = environment([args.drive])

    head = ["", "ranks", "before, MiB", "in training, MiB", "training takes, MiB", "a rank before, MiB"]
    rows = list(memory(args.ranks, args.drive))
    notes = [
        f"PSS of all ranks: {NUMEL / 1e6:.1f} million parameters in {LAYERS} layers, however many ranks share them",
        "before: Python, torch and a process group",
    ]
    text = page("Memory of ranks on one host", facts, head, rows, notes)
    sys.stdout.write(text)
    if args.save:
        save(RESULTS, "ranks-memory", {"environment": facts, "head": head, "rows": rows}, text)


if __name__ == "__main__":
    main()
