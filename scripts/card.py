"""Training of large layers within the memory of a small card, each beside what `offload plan` says of this machine.

python -m scripts.card --path /mnt/nvme0 --memory 24GiB

Two cases: two layers and the head of a Llama of 70 B parameters, all of it trained, with the section that
`offload init` would write; and LoRA over a packed base with the layers of gpt-oss-120b, read in place
(docs/examples/lora_large.py). The plan gets rates that are measured here first: of the drive, of copies, of products,
of the update. On a GPU no more than `--memory` of it may be taken. On a CPU the same runs, with sizes to try it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that all PyTorch code uses
from torch import Tensor, nn

from nvme_offload import OffloadAdamW, initialize
from nvme_offload.offload.devices.device import HOST, current_of, default_device_type, is_host, wait_for_all
from nvme_offload.offload.host.available_memory import total_bytes
from nvme_offload.offload.units import format_bytes, parse_bytes
from nvme_offload.perf.measure.on_device import peak_reserved_bytes, reset_peak_reserved_bytes
from nvme_offload.perf.plan.catalog import shape_of
from nvme_offload.perf.plan.choosing import Chooser
from nvme_offload.perf.plan.lora import Lora
from nvme_offload.perf.plan.machine import Drives, Machine
from nvme_offload.perf.plan.prediction import Prediction, predict
from nvme_offload.perf.plan.shape import ModelShape

EXAMPLE = Path(__file__).resolve().parents[1] / "docs" / "examples" / "lora_large.py"
HEAD_SIZE = 128
UPDATED = 2**26  # parameters whose update is timed
COPIED = 2**28  # bytes whose copies are timed


class Layer(nn.Module):
    """A layer of Llama, without positions: eight queries share a key."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner, self.heads = width * 7 // 2, max(8, width // HEAD_SIZE)
        keys = width // 8
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q_proj, self.o_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k_proj, self.v_proj = nn.Linear(width, keys, bias=False), nn.Linear(width, keys, bias=False)
        self.gate_proj, self.up_proj = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [batch, tokens, width] to the same shape."""
        normed = self.before_attention(hidden)
        heads = ((self.q_proj, self.heads), (self.k_proj, self.heads // 8), (self.v_proj, self.heads // 8))
        query, key, value = (made(normed).unflatten(-1, (count, -1)).transpose(1, 2) for made, count in heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        hidden = hidden + self.o_proj(mixed.transpose(1, 2).flatten(2))
        normed = self.before_mlp(hidden)
        out: Tensor = hidden + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return out


class Model(nn.Module):
    """Layers between an embedding and a head."""

    def __init__(self, width: int, vocabulary: int, layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm, self.lm_head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of the next token, of [batch, tokens]."""
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.lm_head(self.norm(hidden))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def seconds_of(device: torch.device, work: Callable[[], object], count: int = 3) -> float:
    """Return the least seconds that some work takes, until the device has done it."""
    found = []
    for _ in range(1 + count):
        start = time.perf_counter()
        work()
        if not is_host(device):
            wait_for_all(device)
        found.append(time.perf_counter() - start)
    return min(found[1:])


def flops_of(device: torch.device, chosen: argparse.Namespace) -> float:
    """Return the operations per second that forward and backward of one layer reach."""
    layer = Layer(chosen.width).to(device, torch.bfloat16)
    hidden = torch.randn(1, chosen.tokens, chosen.width, device=device, dtype=torch.bfloat16, requires_grad=True)
    seconds = seconds_of(device, lambda: layer(hidden).float().sum().backward())
    return 6 * sum(param.numel() for param in layer.parameters()) * chosen.tokens / seconds


def machine_here(path: Path, device: torch.device, chosen: argparse.Namespace) -> Machine:
    """Measure this machine, with as much memory as it is to have."""
    command = [sys.executable, "-m", "nvme_offload.perf.cli", "bench", "--path", str(path), "--json"]
    done = subprocess.run([*command, "--runtime", str(chosen.runtime)], check=True, capture_output=True, text=True)
    with TemporaryDirectory() as folder:
        bench = Path(folder) / "bench.json"
        bench.write_text(done.stdout)
        drives = Drives.of_bench(bench)
    flops = flops_of(device, chosen)
    param = nn.Parameter(torch.zeros(UPDATED))
    param.grad = torch.ones_like(param)
    with OffloadAdamW(
        [param], lr=1e-3, offload={"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    ) as optimizer:
        update_rate = UPDATED / seconds_of(HOST, lambda: (optimizer.step(), optimizer.synchronize()))
    here: dict[str, Any] = {"drives": drives, "flops": flops, "update_rate": update_rate}
    if not is_host(device):
        pinned, there = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True), torch.empty(COPIED, device=device)
        bytes_there = there.view(torch.uint8)[:COPIED]
        here["pcie"] = COPIED / seconds_of(device, lambda: bytes_there.copy_(pinned, non_blocking=True))
        here["device_memory"] = chosen.memory
    return Machine(host_memory=min(chosen.host, total_bytes()), **here)


def dense(path: Path, machine: Machine, device: torch.device, chosen: argparse.Namespace) -> dict[str, Any]:
    """Train layers and head of a large model with the section that the plan chooses."""
    with torch.device("meta"):
        model = Model(chosen.width, chosen.vocabulary, chosen.layers)
    shape = ModelShape.of_layers(model, "two layers and the head of a 70 B", chosen.width)
    shape = replace(shape, vocab_size=chosen.vocabulary, intermediate_size=chosen.width * 7 // 2)
    found = Chooser(machine, [path], chosen.tokens, checkpointing=False, sequence=chosen.tokens).choose(shape)
    tokens = torch.randint(chosen.vocabulary, (1, chosen.tokens), device=device)
    with initialize(model, found.section) as engine:
        seconds = []
        for _ in range(chosen.steps):
            start = time.perf_counter()
            engine.accumulate(engine, [tokens] * (engine.gradient_accumulation_steps))
            engine.step()
            seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        engine.optimizer.synchronize()
        seconds[-1] += time.perf_counter() - start
    torch.distributed.destroy_process_group()
    return figures(found.name, sum(seconds[1:]) / (len(seconds) - 1), device, predict(found.job, machine))


def lora(path: Path, machine: Machine, device: torch.device, chosen: argparse.Namespace) -> dict[str, Any]:
    """Train adapters over a packed base in place."""
    spec = importlib.util.spec_from_file_location("lora_large", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    base = path / "base"
    example.write_fake(base, chosen.fake, chosen.fake_layers)
    given = {"rank": 16, "steps": chosen.steps, "micro_batches": 8, "sequence": chosen.sequence}
    said = list(example.train(SimpleNamespace(model=base, nvme_path=path, **given)))
    seconds = [float(found[1]) for line in said if (found := re.search(r"([\d.]+) s$", line)) and "step" in line]
    reads = [int(found[1]) for line in said if (found := re.search(r"(\d+) B read", line))]
    drive = {"device": "nvme", "nvme_path": str(path), "frozen": "in_place", "buffer_count": 2}
    section = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": drive},
        "optimizer": {"type": "AdamW"},
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": 8,
        "micro_batch_order": "vertical",
    }
    shape = shape_of(Path("gpt-oss-120b")).with_layers(chosen.fake_layers)
    shape = shape.with_lora(Lora(16, 4.25, ("q_proj", "v_proj")))
    planned = predict(Chooser(machine, [path], chosen.sequence).job(section, shape), machine)
    found = figures("base in place", sum(seconds[1:]) / (len(seconds) - 1), device, planned)
    rate = sum(reads[1:]) / sum(seconds[1:])
    return found | {"read_rate": rate, "share_of_drive": rate / (machine.drives.read if machine.drives else rate)}


def figures(section: str, seconds: float, device: torch.device, planned: Prediction) -> dict[str, Any]:
    """Return what was measured beside what was planned."""
    time_planned = planned.time.seconds if planned.time else None
    held = {tier: planned.tiers.bytes_on(tier) for tier in ("device", "host", "nvme")}
    peak = peak_reserved_bytes(device)
    quotient = seconds / time_planned if time_planned else None
    return {"section": section, "seconds": seconds, "plan": time_planned, "quotient": quotient, "held": held} | {
        "device_peak_bytes": peak
    }


def main(arguments: list[str]) -> None:
    """Measure the machine, run both cases, print a line for each, and JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="folder on the drive")
    parser.add_argument("--memory", type=parse_bytes, default=parse_bytes("24GiB"), help="of the card, at most")
    parser.add_argument("--host", type=parse_bytes, default=parse_bytes("32GiB"), help="of host memory, for the plan")
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--fake", default="gpt-oss-120b", help="a base of docs/examples/lora_large.py")
    parser.add_argument("--fake-layers", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=1024, help="tokens of each of 8 micro-batches over that base")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--runtime", type=float, default=3.0, help="seconds of each direction of the drive")
    chosen = parser.parse_args(arguments)
    kind = default_device_type()
    device = current_of(kind)
    module = torch.get_device_module(device)
    if hasattr(module, "set_per_process_memory_fraction") and not is_host(device):
        total = module.get_device_properties(device).total_memory
        module.set_per_process_memory_fraction(min(1.0, chosen.memory / total))
    with TemporaryDirectory(prefix="nvme-offload-card-", dir=chosen.path) as folder:
        machine = machine_here(Path(folder), device, chosen)
        sys.stdout.write(f"{machine}\n")
        found = {}
        for name, case in (("dense", dense), ("lora", lora)):
            reset_peak_reserved_bytes(device)
            found[name] = case(Path(folder), machine, device, chosen)
            sys.stdout.write(f"{name}: {shown(found[name])}\n")
    sys.stdout.write(json.dumps(found) + "\n")


def shown(found: dict[str, Any]) -> str:
    """Return the figures in words."""
    planned = f"plan {found['plan']:.2f} s, {found['quotient']:.2f} of it" if found["plan"] else "no plan of time"
    rate = f", {found['share_of_drive']:.2f} of the drive's rate" if "share_of_drive" in found else ""
    peak = format_bytes(found["device_peak_bytes"])
    return f"{found['seconds']:.2f} s an iteration, {planned}{rate}; device memory {peak}; {found['section']}"


if __name__ == "__main__":
    main(sys.argv[1:])
