"""The pictures of the pages: `python -m scripts.pictures [NAME ...]`, or all of `CHARTS`.

They go to docs/pictures. `python -m scripts.pictures top RUN` takes one of `offload top` over a run that goes on.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from nvme_offload import OffloadAdamW
from nvme_offload.offload.durable.manifest import Manifest
from nvme_offload.perf.experiments.paced import SCHEDULES, Setup
from nvme_offload.perf.experiments.paced_drive import paced_drive
from nvme_offload.perf.experiments.training import SleepingModel
from nvme_offload.perf.top.command import runs_of, view
from scripts.picture import LANES, LINE, PICTURES, SPANS, WIDTH, Picture

GIB = 2**30
TIERS = {"device": "compute", "host": "read", "nvme": "write"}
NAMES = {"device": "GPU", "host": "host", "nvme": "NVMe"}
COMPUTING = 5.0  # seconds of an iteration: so many that a busy machine does not change the picture
PLAN = ("--model", "qwen3-8b", "--card", "4090", "--drive", "gen4-consumer")
PIPES: dict[str, Any] = {"check": True, "capture_output": True, "text": True}


def planned(*options: str) -> dict[str, Any]:
    """Return what `offload plan` says of the README's training, with these options."""
    said = subprocess.run([sys.executable, "-m", "nvme_offload.perf.cli", "plan", *PLAN, *options, "--json"], **PIPES)
    return dict(json.loads(said.stdout))


def tiers() -> None:
    """Draw which bytes of one training lie where, on hosts with more and more memory."""
    picture = Picture("Qwen3-8B on a card of 24 GB: GiB by tier")
    picture.legend({"compute": "GPU", "read": "host memory", "write": "NVMe"})
    hosts = {memory: planned("--host", memory) for memory in ("16GiB", "32GiB", "64GiB", "128GiB")}
    sums = {memory: _by_tier(plan["bytes_per_rank"].values()) for memory, plan in hosts.items()}
    scale = (WIDTH - 16) / max(sum(each.values()) for each in sums.values())
    for memory, plan in hosts.items():
        picture.y += 6
        picture.line(f"{memory.replace('GiB', ' GiB')} of host memory: {plan['iteration']['seconds']:.0f} s a step")
        picture.stack(((TIERS[tier], sums[memory][tier]) for tier in TIERS), scale)
        x = 8.0
        for tier in TIERS:
            if (size := sums[memory][tier]) * scale > 24:
                picture.text(x + 4, picture.y + 13, f"{size / GIB:.0f}", kind="paper")
            x += size * scale
        picture.y += LINE
    picture.save(PICTURES / "tiers.svg", f"offload plan {' '.join(PLAN)} --host {' | '.join(hosts)} --json")


def _by_tier(kinds: Iterable[Mapping[str, int]]) -> dict[str, int]:
    kinds = list(kinds)
    return {tier: sum(sizes.get(tier, 0) for sizes in kinds) for tier in TIERS}


def plan() -> None:
    """Draw where each kind of bytes of one training lies."""
    found = planned("--host", "64GiB")
    picture = Picture("Qwen3-8B, a card of 24 GB, a host of 64 GiB")
    picture.legend({"compute": "GPU", "read": "host memory", "write": "NVMe"})
    kinds: dict[str, dict[str, int]] = found["bytes_per_rank"]
    most = max(sum(sizes.values()) for sizes in kinds.values())
    for kind, sizes in sorted(kinds.items(), key=lambda each: -sum(each[1].values())):
        picture.y += 4
        said = ", ".join(f"{NAMES[tier]} {sizes[tier] / GIB:.1f}" for tier in TIERS if sizes.get(tier))
        picture.line(f"{kind}: {said} GiB")
        picture.stack(((TIERS[tier], sizes.get(tier, 0)) for tier in TIERS), (WIDTH - 16) / most, height=12)
        picture.y += 13
    took = found["iteration"]
    picture.y += 6
    picture.line(f"A step: {took['seconds']:.0f} s, {took['compute']:.0f} s computing, {took['nvme']:.0f} s NVMe")
    picture.save(PICTURES / "plan.svg", f"offload plan {' '.join(PLAN)} --host 64GiB --json")


def hidden_step() -> None:
    """Draw an iteration with each of three schedules, over a drive of an exact rate, with layers that sleep."""
    setup = Setup(layers=16, width=512, tokens=2, micro_batches=1, buffers=4, everything=False, mode="bf16")
    strips = {name: _iteration_of(setup, SCHEDULES[name]) for name in ("off", "forward", "backward")}
    longest = max(end for spans in strips.values() for *_, end in spans)
    picture, left = Picture("One iteration with each overlap_step"), 76
    picture.legend(SPANS)
    scale, top = (WIDTH - left - 24) / longest, picture.y + 4
    for name, spans in strips.items():
        picture.y += 8
        picture.line(f'"{name}": {max(end for *_, end in spans):.2f} s', "ink bold")
        for lane, kinds in LANES.items():
            picture.text(left - 6, picture.y + 11, lane, anchor="end")
            for kind, start, end in spans:
                if kind in kinds:
                    picture.bar(left + start * scale, picture.y, (end - start) * scale, 13, kind)
            picture.y += 16
    picture.ticks(left, scale, top, range(0, int(longest) + 1, 2), " s")
    picture.save(PICTURES / "hidden_step.svg", "python -m scripts.pictures hidden_step")


def _iteration_of(setup: Setup, case: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Return spans of the third of some iterations, in seconds since its forward began."""
    with TemporaryDirectory() as folder, paced_drive() as pace, setup.sleeping(case, Path(folder)) as training:
        model = training.engine.module
        assert isinstance(model, SleepingModel)
        model.compute_for(COMPUTING)
        pace.rate = 20 * setup.layers * setup.width**2 / COMPUTING  # moving takes as long as computing
        training.seconds(2)
        spans = training.engine.timeline()
    zero = min(span.start_ns for span in spans if span.kind == "forward")
    last = max(span.end_ns for span in spans if span.kind == "step")
    return [
        (span.kind, max(0, span.start_ns - zero) / 1e9, (min(span.end_ns, last) - zero) / 1e9)
        for span in spans
        if span.kind in SPANS and span.start_ns < last and span.end_ns > zero
    ]


def durable() -> None:
    """Draw what the steps of a small durable run wrote, and to which of them it can go back."""
    picture, left, wide = Picture('What a durable step writes ("rewrite_every": 3)'), 104, 32
    picture.legend({"compute": "base: all of its state", "read": "log: its gradient", "write": "manifest"})
    picture.y += 6
    steps, can = _durable_steps()
    for row, kinds in enumerate([*zip(*(kinds for kinds, _ in steps), strict=True), ["write"] * len(steps)]):
        picture.text(left - 8, picture.y + 13, "commit" if row == len(steps[0][0]) else f"subgroup {row}", anchor="end")
        for step, kind in enumerate(kinds):
            height = {"compute": 16, "read": 16 / 6, "write": 2}[kind]  # 12 bytes for a parameter, and 2
            picture.bar(left + step * wide, picture.y + 16 - height, wide - 4, height, kind)
        picture.y += LINE
    rows = {
        "B / parameter": [f"{written:.1f}" for _, written in steps],
        "step": [str(1 + step) for step in range(len(steps))],
    }
    for words, values in rows.items():
        picture.y += LINE
        picture.text(left - 8, picture.y - 4, words, anchor="end")
        for step, value in enumerate(values):
            picture.text(left + step * wide + wide / 2 - 2, picture.y - 4, value, anchor="middle")
    for words, step in can.items():
        picture.y += LINE
        picture.text(left + (step - 1) * wide - 6, picture.y - 4, f"{words} →", anchor="end")
        picture.bar(left + (step - 1) * wide, picture.y - 15, wide - 4, 14, "wait")
    picture.save(PICTURES / "durable.svg", "python -m scripts.pictures durable")


def _durable_steps() -> tuple[list[tuple[list[str], float]], dict[str, int]]:
    """Run nine steps; return what each wrote of every subgroup, with bytes per parameter, and where calls lead back."""
    count, size, steps = 6, 512, list[tuple[list[str], float]]()
    layers = [torch.nn.Linear(size, size, bias=False, dtype=torch.bfloat16) for _ in range(count)]
    model, batch, before, written = torch.nn.Sequential(*layers), torch.ones(4, size, dtype=torch.bfloat16), 0, 0
    with TemporaryDirectory(dir=".") as folder:
        keys = {"durable": "run", "rewrite_every": 3, "rewind_steps": 2, "buffer_count": 2}
        state = {"device": "nvme", "nvme_path": folder, **keys}
        section = {"zero_optimization": {"sub_group_size": size**2, "offload_optimizer": state}}
        with OffloadAdamW(model.parameters(), offload=section) as optimizer:
            for step in range(9):
                model(batch).square().mean().backward()
                optimizer.step()
                while optimizer.stats().committed_step != step + 1:
                    time.sleep(0.01)
                manifest = next(iter(Manifest.all_in(Path(folder) / "nvme-durable-run-rank0").values()))
                kinds = ["compute" if row[0] > before else "read" for row in manifest.tables["slots"]]
                moved = optimizer.stats().bytes_written
                steps.append((kinds, (moved - written) / (count * size**2)))
                before, written = manifest.sequence, moved
                if step == 4:
                    optimizer.snapshot("good")
            went = {"rewind(2)": optimizer.rewind(2), 'resume("good")': optimizer.resume("good")}
    return steps, {"resume()": 9} | {call: found[0] for call, found in went.items() if found}


WRITTEN = {
    "PCIe 4.0, TLC, 4 TB": [(5.0, 615), (2.0, 1985), (0.6, 1400)],
    "PCIe 4.0, TLC, 1 TB": [(4.5, 280), (2.0, 220), (0.5, 500)],
    "PCIe 3.0, TLC, 1 TB": [(2.0, 150), (0.5, 450), (0.4, 400)],
    "PCIe 3.0, QLC, 1 TB": [(1.6, 140), (0.15, 860)],
}
"""GB/s and how many GB it lasted, from tests that write an empty drive full; the tutorial names them."""


def drives() -> None:
    """Draw the rate at which consumer drives take writes over an hour."""
    picture = Picture("GB/s at which consumer drives were written")
    left, height, top = 24.0, 40, picture.y
    scale = (WIDTH - left - 28) / 60
    for name, parts in WRITTEN.items():
        picture.y += 8
        picture.line(f"{name}: {', then '.join(f'{rate:g}' for rate, _ in parts)}")
        minute = 0.0
        for rate, size in parts:
            until = min(minute + size / rate / 60, 60)
            tall = height * rate / 5
            picture.bar(left + minute * scale, picture.y + height - tall, (until - minute) * scale, tall, "write")
            minute = until
        picture.y += height
    picture.ticks(left, scale, top + LINE, range(0, 61, 15), " min")
    picture.save(PICTURES / "drives.svg", "python -m scripts.pictures drives")


def top() -> None:
    """Take a picture of `offload top` as a terminal of 80 x 24 shows it, over the run named behind it."""
    (found, *_), _ = runs_of(Path(sys.argv[2]))
    console = Console(record=True, width=80, file=StringIO(), highlight=False, markup=False)
    console.print(Text(f"$ offload top {Path(sys.argv[2]).name}"), view(found, time.time(), lines=24, width=80))
    drawn = console.export_svg(title="offload top", unique_id="top")
    alone = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)  # nothing is fetched
    (PICTURES / "top.svg").write_text(alone, encoding="utf-8")


CHARTS = {"tiers": tiers, "hidden_step": hidden_step, "plan": plan, "durable": durable, "drives": drives}


if __name__ == "__main__":
    if sys.argv[1:2] == ["top"]:
        top()
    else:
        for chart in sys.argv[1:] or CHARTS:
            CHARTS[chart]()
