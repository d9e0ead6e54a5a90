"""Train with every DeepSpeed section (a JSON file) of a folder, and write what became of each.

python scripts/sections.py FOLDER --drive FOLDER [--report FILE.json]

An "auto" gets what `transformers.Trainer` would put there. A section trains when parameters change, all losses are
finite and the engine has its hyperparameters; a key is silent when it is no field here and no warning names it.
"""

import argparse
import copy
import json
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import nvme_offload.deepspeed as deepspeed
from nvme_offload import ConfigError, OffloadConfig
from nvme_offload.offload.config.keys import section_of

STEPS = 40
"""Most steps until parameters have to change: a loss scale may begin high, and a warm-up at a rate of 0."""


class Model(nn.Module):
    """A few layers of different kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of saying each token again."""
        hidden = self.words(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), tokens.flatten())


def value_of(section: Any, *path: str) -> Any:
    """Return the value of a key; None where it is missing or "auto"."""
    for name in path:
        section = section.get(name) if isinstance(section, dict) else None
    return None if section == "auto" else section


def has_auto(value: Any) -> bool:
    """Whether somebody has to put values where the section says "auto"."""
    return value == "auto" or (isinstance(value, dict) and any(map(has_auto, value.values())))


def on_one_rank(section: dict[str, Any], drive: str) -> dict[str, Any]:
    """Return the section for one rank and this drive: it may be for many ranks, and has paths of another machine."""
    section = copy.deepcopy(section)
    inner = section.get("deepspeed") if list(section) == ["deepspeed"] else section
    if not isinstance(inner, dict):
        return section
    train, micro, steps = (value_of(inner, key) for key in (BATCH, MICRO, ACCUMULATION))
    if train and micro:
        inner[BATCH] = micro * steps if steps else micro  # as on the number of ranks at which nothing accumulates
    for name in ("offload_optimizer", "offload_param"):
        place = value_of(inner, "zero_optimization", name)
        if isinstance(place, dict) and place.get("device") == "nvme":
            place["nvme_path"] = drive
    return section


BATCH, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def arguments_for(section: dict[str, Any]) -> SimpleNamespace:
    """Return Trainer's arguments, with the section's own values where it has some: Trainer refuses different ones."""

    def own(default: Any, *path: str) -> Any:
        found = value_of(section, *path)
        return default if found is None else found

    betas = own([0.9, 0.999], "optimizer", "params", "betas")
    steps, batch = own(None, ACCUMULATION), own(None, BATCH)
    micro = own(None, MICRO) or (batch // (steps or 1) if batch else 2)
    steps = steps or (batch // micro if batch else 1)
    warmup = own(2, "scheduler", "params", "warmup_num_steps")
    has_bf16 = bool(own(False, "bf16", "enabled") or own(False, "bfloat16", "enabled"))
    return SimpleNamespace(
        per_device_train_batch_size=micro, gradient_accumulation_steps=steps, world_size=1,
        max_grad_norm=own(1.0, "gradient_clipping"), learning_rate=own(1e-3, "optimizer", "params", "lr"),
        adam_beta1=betas[0], adam_beta2=betas[1], adam_epsilon=own(1e-8, "optimizer", "params", "eps"),
        weight_decay=own(0.0, "optimizer", "params", "weight_decay"), bf16=has_bf16, bf16_full_eval=False,
        fp16=bool(own(False, "fp16", "enabled")), fp16_full_eval=False, get_warmup_steps=lambda steps: warmup,
    )  # fmt: skip


def other_than_said(engine: Any, section: dict[str, Any]) -> list[str]:
    """Return what the engine has otherwise than the section says, looked up without its reader."""
    group, config = engine.engine.optimizer.param_groups[0], engine.engine.config
    params = value_of(section, "optimizer", "params") or {}
    pairs = [
        (name, params[name], group[name])
        for name in ("lr", "betas", "eps", "weight_decay", "momentum")
        if value_of(params, name) is not None and name in group and not (name == "lr" and section.get("scheduler"))
    ]
    pairs += [("gradient_clipping", value_of(section, "gradient_clipping"), config.gradient_clipping)]
    pairs += [(ACCUMULATION, value_of(section, ACCUMULATION), engine.gradient_accumulation_steps())]
    pairs += [("bf16", value_of(section, "bf16", "enabled"), engine.bfloat16_enabled())]
    pairs += [("fp16", value_of(section, "fp16", "enabled"), engine.fp16_enabled())]
    pairs += [("stage", value_of(section, "zero_optimization", "stage"), engine.zero_optimization_stage())]
    for name in ("offload_optimizer", "offload_param"):
        said = value_of(section, "zero_optimization", name, "device")
        pairs += [(name, said, getattr(config.zero_optimization, name).device)]
    return [f"{name}: {said} is {has}" for name, said, has in pairs if said is not None and not _same(said, has)]


def _same(said: Any, has: Any) -> bool:
    return tuple(said) == tuple(has) if isinstance(said, list) else said == has


def silent_keys(model: Any, section: dict[str, Any], told: str, prefix: str = "") -> list[str]:
    """Return the keys that are no fields here, and that no warning names."""
    found = []
    for key, value in section.items():
        name = f"{prefix}{key}"
        field = model.model_fields.get(model.SPELLINGS.get(key, key))
        inner = section_of(field) if field is not None else None
        if inner is not None and isinstance(value, dict):
            found += silent_keys(inner, value, told, f"{name}.")
        elif field is None and f"{name} = " not in told and value is not None and key not in model.TRANSLATED:
            nested = isinstance(value, dict) and all(f"{name}.{rest}" in model.SPELLINGS for rest in value)
            found += [] if nested else [name]
    return found


def trained(section: dict[str, Any]) -> tuple[str, list[str]]:
    """Train; return one word for what became of the section, and the lines that say more."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            if has_auto(section) or not value_of(section, "optimizer"):
                args, steps = arguments_for(section), value_of(section, "scheduler", "params", "total_num_steps")
                config = OffloadConfig.from_training_arguments(section, args, num_training_steps=steps or 1000)
            else:
                config = OffloadConfig.from_dict(section)
            engine, *_ = deepspeed.initialize(model=Model(), config=config)
        except ConfigError as error:
            return "refused", list(error.problems)
        before = [param.full_tensor().clone() for param in engine.module.parameters()]
        changed, losses = False, []
        tokens = torch.arange(32).reshape(2, 16)
        while not changed and len(losses) < STEPS * engine.gradient_accumulation_steps():
            losses.append(engine(tokens))
            engine.backward(losses[-1])
            engine.step()
            after = [param.full_tensor() for param in engine.module.parameters()]
            changed = any(not torch.equal(*values) for values in zip(before, after, strict=True))
        wrong = other_than_said(engine, section)
        engine.destroy()
    if not changed or not all(loss.isfinite() for loss in losses):
        return "does not train", [f"{len(losses)} losses, the last {losses[-1].item()}"]
    told = "\n".join(str(warning.message) for warning in caught)
    if silent := silent_keys(OffloadConfig, section, told):
        return "silent", silent
    return ("other than said", wrong) if wrong else ("trains", [line.strip() for line in told.splitlines()])


def main() -> None:
    """Go through the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--drive", type=Path, help="a folder for swap files")
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    found: dict[str, tuple[str, list[str]]] = {}
    drive = tempfile.mkdtemp(dir=args.drive)
    for file in sorted(args.folder.glob("*.json")):
        section = on_one_rank(json.loads(file.read_text(encoding="utf-8")), drive)
        try:
            found[file.name] = trained(section)
        except Exception as error:  # all that users would see
            found[file.name] = ("error", [f"{type(error).__name__}: {error}"])
    shutil.rmtree(drive)
    if args.report:
        args.report.write_text(json.dumps(found, indent=1))
    for name, (word, lines) in found.items():
        if word != "trains":
            sys.stdout.write(f"{word}: {name}: {' | '.join(lines)}\n")
    sys.stdout.write(f"{dict(Counter(word for word, _ in found.values()))} of {len(found)}\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
