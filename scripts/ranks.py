"""Measure what ranks on one host cost: memory of each, for constant work, and how they share a drive.

python scripts/ranks.py DRIVE [--ranks 1 2 4 8] [--save]    # a rank is a process; DRIVE gets state and a file of fio's
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

from nvme_offload import initialize
from nvme_offload.offload.units import GB, MiB
from nvme_offload.perf.measure.machine import environment
from nvme_offload.perf.measure.results import RESULTS, page, save
from nvme_offload.perf.measure.sections import MODES, section

LAYERS, WIDTH, TOKENS, STEPS = 8, 1536, 8, 4
NUMEL = LAYERS * WIDTH * WIDTH
WAYS = ("ours, state on NVMe", "ours, state in memory", "FSDP2 and torch's AdamW")
FIO = ("--name=ranks", "--rw=rw", "--bs=1M", "--iodepth=16", "--direct=1", "--ioengine=io_uring", "--size=256M")


def model() -> nn.Module:
    """Make layers of one size: the same work, however many ranks share it."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU()) for _ in range(LAYERS)))


def pss(name: str = "Pss") -> float:
    """Return this process's share of the memory that is in use, in MiB."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024 / MiB


def training(way: str, drive: str) -> tuple[Callable[[], None], Callable[[], dict[str, float]], Callable[[], None]]:
    """Return an iteration, what says how many bytes the drive has moved, and what ends it."""
    batch = torch.ones(TOKENS, WIDTH)
    if way == WAYS[2]:
        net = model()
        for unit in [*net, net]:
            fully_shard(unit, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
        adamw = torch.optim.AdamW(net.parameters(), fused=True)

        def plain() -> None:
            net(batch).square().mean().backward()
            adamw.step()
            adamw.zero_grad()

        return plain, dict, lambda: None
    config = {**section(Path(drive) if way == WAYS[0] else None), **MODES["bf16"]}
    engine = initialize(model(), {**config, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}})

    def iterate() -> None:
        engine.backward(engine(batch).float().square().mean())
        begun = time.perf_counter()
        engine.step()
        engine.optimizer.synchronize()
        seconds[0] += time.perf_counter() - begun

    def moved() -> dict[str, float]:
        stats = engine.optimizer.stats()
        return {"bytes": stats.bytes_read + stats.bytes_written, "seconds": seconds[0]}

    seconds = [0.0]
    return iterate, moved, engine.close


def run_rank(rank: int, ranks: int, way: str, drive: str, steps: int, out: str) -> None:
    """Train in one rank, and note what it took."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo", init_method=f"file://{out}/group", rank=rank, world_size=ranks)
    dist.barrier()
    before = pss()
    dist.barrier()
    iterate, moved, end = training(way, drive)
    iterate()
    first = moved()
    for _ in range(steps):
        iterate()
    dist.barrier()
    last, after = moved(), pss()
    dist.barrier()
    its = {"before": before, "after": after, **{key: last[key] - first[key] for key in last}}
    (Path(out) / f"{rank}.json").write_text(json.dumps(its))
    dist.barrier()
    end()
    os._exit(0)


def measured(ranks: int, way: str, drive: Path, steps: int = STEPS) -> list[dict[str, float]]:
    """Return what each of so many ranks has noted."""
    with tempfile.TemporaryDirectory(dir=drive) as out:
        mp.spawn(run_rank, (ranks, way, str(drive), steps, out), ranks)
        return [json.loads((Path(out) / f"{rank}.json").read_text()) for rank in range(ranks)]


def memory(counts: list[int], drive: Path) -> Iterator[list[str]]:
    """Measure the memory of all ranks for the same work, and what each further rank adds."""
    for way in WAYS:
        for ranks in counts:
            found = measured(ranks, way, drive)
            before, after = (sum(each[key] for each in found) for key in ("before", "after"))
            yield [way, str(ranks), f"{before:.0f}", f"{after:.0f}", f"{after - before:.0f}", f"{before / ranks:.0f}"]


def rates(drive: Path, turns: int) -> Iterator[list[str]]:
    """Measure the bytes a second that one rank and four move through one drive, and fio's jobs."""
    found: dict[tuple[str, int], list[float]] = {}
    for turn in range(turns):
        for ranks in (1, 4) if turn % 2 == 0 else (4, 1):
            of_ranks = measured(ranks, WAYS[0], drive, 8)
            moved = sum(each["bytes"] for each in of_ranks) / max(each["seconds"] for each in of_ranks)
            found.setdefault(("ours", ranks), []).append(moved / GB)
            if shutil.which("fio"):
                found.setdefault(("fio", ranks), []).append(fio(drive, ranks))
    for who in dict.fromkeys(name for name, _ in found):
        one, four = (median(found[who, ranks]) for ranks in (1, 4))
        yield [who, f"{one:.2f}", f"{four:.2f}", f"{four / one:.2f}"]


def fio(drive: Path, jobs: int) -> float:
    """Return the bytes that fio's jobs read and write a second, in GB."""
    command = ["fio", *FIO, f"--directory={drive}", f"--numjobs={jobs}", "--time_based", "--runtime=4"]
    said = subprocess.run(
        [*command, "--unlink=1", "--group_reporting", "--output-format=json"], capture_output=True, check=True
    )
    [job] = json.loads(said.stdout)["jobs"]
    moved: float = job["read"]["bw_bytes"] + job["write"]["bw_bytes"]
    return moved / GB


def main() -> None:
    """Measure, print, and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drive", type=Path)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    facts = environment([args.drive])

    def show(name: str, title: str, head: list[str], rows: Iterator[list[str]], *notes: str) -> None:
        known = [dict(zip(head, row, strict=True)) for row in rows]
        text = page(title, facts, known, notes)
        sys.stdout.write(text + "\n")
        if args.save:
            save(RESULTS, name, {"environment": facts, "rows": known}, text)

    if args.ranks:
        show(
            "ranks-memory",
            "Memory of ranks on one host",
            ["", "ranks", "before, MiB", "in training, MiB", "training takes, MiB", "a rank before, MiB"],
            memory(args.ranks, args.drive),
            f"PSS of all ranks: {NUMEL / 1e6:.1f} million parameters in {LAYERS} layers, however many ranks share them",
            "before: Python, torch and a process group",
        )
    if args.turns:
        show(
            "ranks-drive",
            "Ranks that share a drive",
            ["GB/s", "one", "four", "four beside one"],
            rates(args.drive, args.turns),
            "ours: bytes that steps read and write a second, of all ranks",
            f"fio: {' '.join(FIO[1:])}, a job for each rank",
        )


if __name__ == "__main__":
    main()
