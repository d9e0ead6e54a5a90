"""Losses of 2,000 steps under optimizers with states of 32, 16 and 8 bits.

    python -m scripts.losses RUN OPTIMIZER FOLDER

RUN is ``masters`` (updates go to fp32 weights, arithmetic is bf16), ``bf16`` (weights are bf16 and nothing else) or
``lora`` (adapters over a frozen model that was trained before). FOLDER gets a JSON file with the losses.
bitsandbytes and torchao are installed by whoever asks for them.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nvme_offload import OffloadAdamW
from nvme_offload.perf.experiments.gpt import ByteGPT, Linear, batches, load_corpus, parse_size

STEPS, MEAN_OF, BASE_STEPS, ROWS, CONTEXT = 2000, 20, 500, 8, 128
SIZES = {"masters": "2x64", "bf16": "2x64", "lora": "2x128"}
ADAM = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}


class Adapted(nn.Module):
    """A frozen linear layer, and beside it a product of two thin matrices, which are trained (LoRA)."""

    def __init__(self, base: Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = Linear(base.in_features, rank), Linear(rank, base.out_features)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]."""
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def made(run: str, name: str, folder: Path) -> tuple[ByteGPT, list[nn.Parameter]]:
    """Return the model of a run, and what of it is trained."""
    torch.manual_seed(0)
    model = ByteGPT(parse_size(SIZES[run]), CONTEXT, torch.bfloat16)
    if run == "lora":
        model.load_state_dict(base_of(model, folder))
        model.requires_grad_(False)
        for block in model.blocks:
            for each in ("qkv", "attention_out", "feed_in", "feed_out"):
                setattr(block, each, Adapted(getattr(block, each), rank=32))
    elif run == "bf16" or name.startswith("ours"):  # ours has the masters beside bf16 weights
        model.bfloat16()
    return model, [param for param in model.parameters() if param.requires_grad]


def base_of(model: ByteGPT, folder: Path) -> dict[str, Tensor]:
    """Return a model that was trained for some steps; it is kept for the other runs."""
    kept = folder / "base.pt"
    if not kept.exists():
        optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
        losses_of(model, optimizer, batches(load_corpus(), ROWS, 1), BASE_STEPS)
        torch.save(model.state_dict(), kept)
    found: dict[str, Tensor] = torch.load(kept)
    return found


def losses_of(model: nn.Module, optimizer: Optimizer, data: Iterator[tuple[Tensor, Tensor]], steps: int) -> list[float]:
    """Train, and return the loss of each step."""
    losses = []
    for _, (inputs, targets) in zip(range(steps), data, strict=False):
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ours(state_dtype: str) -> Callable[[list[nn.Parameter]], Optimizer]:
    """Return what makes our optimizer with such states."""
    memory = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    return lambda params: OffloadAdamW(params, **ADAM, state_dtype=state_dtype, offload=memory)


def torchao(params: list[nn.Parameter]) -> Optimizer:
    """Return the 8-bit optimizer of torchao."""
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, **ADAM)


def bitsandbytes(params: list[nn.Parameter]) -> Optimizer:
    """Return the 8-bit optimizer of bitsandbytes."""
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(params, **ADAM)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "torch": lambda params: torch.optim.AdamW(params, **ADAM),
    "ours-fp32": ours("fp32"),
    "ours-bf16": ours("bf16"),
    "ours-int8": ours("int8"),
    "torchao": torchao,
    "bitsandbytes": bitsandbytes,
}


def main() -> None:
    """Train as the command line says, and write down the losses."""
    run, name, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    model, params = made(run, name, folder)
    text = load_corpus()
    data = batches(text.upper() if run == "lora" else text, ROWS, 2)
    optimizer, began = OPTIMIZERS[name](params), time.process_time()
    losses = losses_of(model, optimizer, data, STEPS)
    with torch.no_grad():
        unseen = [model(*batch).item() for _, batch in zip(range(50), data, strict=False)]
    means = [sum(losses[at : at + MEAN_OF]) / MEAN_OF for at in range(0, STEPS, MEAN_OF)]
    found = {"run": run, "optimizer": name, "means": means, "after": sum(unseen) / len(unseen)}
    (folder / f"{run}-{name}.json").write_text(json.dumps(found | {"seconds": time.process_time() - began}))


if __name__ == "__main__":
    main()
