"""Train a Llama-shaped model that is larger than memory: born from meta, state on NVMe, written out as safetensors.

    python docs/examples/train_large.py --nvme-path /mnt/nvme0 --output /mnt/nvme0/weights
    python docs/examples/train_large.py --nvme-path /tmp --output /tmp/weights --size 20M  # to try it

It needs transformers. Before it starts it says how much disk it needs, and refuses if there is less.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nvme_offload import ConfigError, initialize

VOCABULARY = 32_000
STATE_BYTES = {"bf16": 10, "fp16": 12, "fp32": 8, "autocast": 8}
"""On NVMe per parameter: two moments and, of 16-bit weights, what the fp32 master has besides."""
BLOCK_BYTES = {"bf16": 4, "fp16": 4, "fp32": 8, "autocast": 8}
"""And where parameters and gradients go there too: a weight and a gradient."""
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 12}},
    "fp32": {},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
}
EXPORT_BYTES = 2
CHECKPOINT_BYTES = 12
MARGIN = 1.03


def options(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme-path", type=Path, required=True, help="folder for the training state")
    parser.add_argument("--output", type=Path, required=True, help="folder for the weights, bf16 safetensors")
    parser.add_argument("--size", type=parameters, default=parameters("2B"), help="at least so many; 2B, 350M")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--sequence", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--micro-batches", type=int, default=1, help="sequences of a step, which go block by block")
    parser.add_argument("--memory-limit", type=float, default=4, help="GiB; stop as soon as resident memory was larger")
    parser.add_argument("--keep-parameters", action="store_true", help="only optimizer state on NVMe")
    parser.add_argument("--checkpoint", type=Path, help="folder for a full checkpoint besides")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def parameters(text: str) -> int:
    """A number of parameters, as 2B or 350M."""
    factor = {"M": 10**6, "B": 10**9}.get(text[-1:].upper())
    if factor is None:
        raise argparse.ArgumentTypeError(f"{text!r}: write 350M or 2B")
    return round(float(text[:-1]) * factor)


def gib(size_bytes: int) -> str:
    """A number of bytes, for people."""
    return f"{size_bytes / 2**30:.2f} GiB"


def shape_of(size: int) -> tuple[dict[str, int], int]:
    """Hidden size, layers and so on of the smallest model of usual proportions with at least `size` parameters."""
    for heads in range(1, 1000):
        hidden, layers = 64 * heads, max(2, round(heads * 2 / 3))
        inner = -(-8 * hidden // 3 // 64) * 64
        numel = VOCABULARY * hidden + layers * (4 * hidden**2 + 3 * hidden * inner + 2 * hidden) + hidden
        if numel >= size:
            break
    shape = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return {**shape, "num_attention_heads": heads, "num_key_value_heads": heads}, numel


def section(chosen: argparse.Namespace) -> dict[str, Any]:
    """The configuration."""
    place = {"device": "nvme", "nvme_path": str(chosen.nvme_path)}
    zero: dict[str, Any] = {"stage": 3, "offload_optimizer": {**place, "staging_budget": "512MiB"}}
    more: dict[str, Any] = {}
    if not chosen.keep_parameters:
        zero["offload_param"], more["offload_gradients"] = place, place
        if chosen.micro_batches > 1:  # each keeps a gradient of the tied embedding between its two uses
            more["activations"] = {**place, "host_budget": "64MiB"}
    optimizer = {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}}
    return {
        "zero_optimization": zero,
        **PRECISIONS[chosen.precision],
        "optimizer": optimizer,
        "gradient_clipping": 1,
        "gradient_accumulation_steps": chosen.micro_batches,
        **more,
    }


def check_disks(chosen: argparse.Namespace, numel: int) -> None:
    """Say what is needed where, and stop if there is less."""
    on_tier = STATE_BYTES[chosen.precision] + (0 if chosen.keep_parameters else BLOCK_BYTES[chosen.precision])
    needs = [(chosen.nvme_path, on_tier, "training state"), (chosen.output, EXPORT_BYTES, "weights")]
    needs += [(chosen.checkpoint, CHECKPOINT_BYTES, "checkpoint")] if chosen.checkpoint else []
    by_device: dict[int, list[tuple[Path, int, str]]] = {}
    for path, per_parameter, what in needs:
        path.mkdir(parents=True, exist_ok=True)
        by_device.setdefault(path.stat().st_dev, []).append((path, round(MARGIN * per_parameter * numel), what))
    for wanted in by_device.values():
        needed, free = sum(size for _, size, _ in wanted), shutil.disk_usage(wanted[0][0]).free
        listed = ", ".join(f"{gib(size)} for the {what} in {path}" for path, size, what in wanted)
        print(f"disk: needs {listed}; {gib(free)} are free")
        if free < needed:
            short = f"{gib(needed)} are needed and {gib(free)} are free"
            sys.exit(f"too little disk: {short}; free space, choose other folders or a smaller --size")


def peak_resident_bytes() -> int:
    """Largest resident memory of this process so far, as the kernel counted it: nothing is missed between two looks."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def check_memory(limit_gib: float, after: str) -> None:
    """Stop if there ever was more."""
    if (peak := peak_resident_bytes()) > limit_gib * 2**30:
        sys.exit(f"resident memory was {gib(peak)} in {after}: the limit is {limit_gib} GiB")


def build(shape: Mapping[str, int], sequence: int, *, checkpointing: bool = True) -> nn.Module:
    """The model, on meta. Micro-batches that go block by block need no checkpointing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=sequence, tie_word_embeddings=True, use_cache=False, **shape
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None)  # since transformers 5.23
        (enable or model.gradient_checkpointing_enable)()
    return model


def main(arguments: list[str]) -> None:
    """Everything, with a line for each phase."""
    chosen = options(arguments)
    limit = chosen.memory_limit
    shape, numel = shape_of(chosen.size)
    print(f"model: {numel / 1e9:.3f} B parameters, {shape}")
    check_disks(chosen, numel)
    torch.manual_seed(chosen.seed)
    start = time.perf_counter()

    def report(phase: str) -> None:
        check_memory(limit, phase)
        print(f"{time.perf_counter() - start:7.1f} s  {phase}; peak {gib(peak_resident_bytes())}", flush=True)

    try:
        model = build(shape, chosen.sequence, checkpointing=chosen.micro_batches == 1 or chosen.keep_parameters)
        engine = initialize(model, section(chosen))
    except ConfigError as error:
        sys.exit(f"{error}\nWith --keep-parameters only optimizer state goes to NVMe.")
    with engine:
        report("born")
        for step in range(chosen.steps):
            sequences = torch.randint(VOCABULARY, (chosen.micro_batches, 1, chosen.sequence))
            losses = engine.accumulate(lambda tokens: engine(tokens, labels=tokens).loss, sequences)
            engine.step()
            loss = torch.stack(losses).mean()
            pace = engine.optimizer.stats().iteration or "begun"  # seconds, share of the ideal, what limits
            report(f"step {step + 1}, loss {loss.item():.3f}, norm {engine.get_global_grad_norm():.3f}, {pace}")
        files = engine.export_safetensors(chosen.output, "bf16", max_shard_bytes="1GiB")
        report(f"wrote {len(files)} files of weights")
        if chosen.checkpoint:
            engine.save_checkpoint(chosen.checkpoint)
            report("wrote a checkpoint")
        stats = engine.optimizer.stats()
    print(f"state moved: {gib(stats.bytes_read)} read, {gib(stats.bytes_written)} written")
    peak = peak_resident_bytes()
    print(f"peak resident memory: {peak} bytes ({gib(peak)})")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
