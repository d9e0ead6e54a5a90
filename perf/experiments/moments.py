"""The demo's model learns with moments in fp32, in bf16 rounded by chance, and in bf16 rounded to the nearest."""

from collections.abc import Iterator, Sequence
from itertools import islice
from statistics import mean
from typing import Annotated, Any

import torch
import typer

from nvme_offload import OffloadAdamW
from nvme_offload.optim.rules.adamw import AdamW
from nvme_offload.perf.experiments.demo.training import ACCUMULATION, LEARNING_RATE, MICRO_BATCH
from nvme_offload.perf.measure.command_line import SaveTo
from nvme_offload.perf.measure.experiment import Row, run_experiment
from nvme_offload.perf.measure.gpt import CONTEXT, ByteGPT, batches, load_corpus, parse_size

_BETAS = (0.9, 0.999)
_WINDOW = 100  # steps, over which losses are averaged


class Nearest(AdamW):
    """AdamW whose moments are bf16 numbers after each step, ties to even; without its kernel."""

    kernel = ""

    def update(self, master: torch.Tensor, grad: torch.Tensor, states: Sequence[torch.Tensor], scalars: Any) -> None:
        """See `UpdateRule.update`."""
        super().update(master, grad, states, scalars)
        for state in states:
            state.copy_(state.bfloat16())


class NearestAdamW(OffloadAdamW):
    """Its optimizer."""

    rule = Nearest()


def moments(
    size: Annotated[str, typer.Option(help="Of the model, as of the demo.")] = "tiny",
    steps: Annotated[int, typer.Option(min=_WINDOW, help="Steps of each training.")] = 2000,
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = 0,
    save_to: SaveTo = None,
) -> None:
    """Train the demo's model three times, with moments kept in three ways, and compare the losses."""
    marks = [max(_WINDOW, steps * part // 8) for part in (1, 2, 4, 6, 8)]

    def outcomes() -> Iterator[Row]:
        for name, kind, more in (
            ("fp32", OffloadAdamW, {}),
            ("bf16 by chance", OffloadAdamW, {"state_dtype": "bf16"}),
            ("bf16 to the nearest", NearestAdamW, {}),
        ):
            losses = losses_of(kind, more, size, steps, seed)
            shown = {f"step {mark}": f"{mean(losses[mark - _WINDOW : mark]):.4f}" for mark in marks}
            yield Row({"moments": name, **shown}, {"losses": [round(loss, 4) for loss in losses]})

    title = f"Loss of the demo's model ({size}) by the dtype of AdamW's moments"
    notes = [
        f"bf16 parameters with fp32 masters; {ACCUMULATION} micro-batches of {MICRO_BATCH} x {CONTEXT} bytes; betas "
        f"{_BETAS}, weight decay 0.1, learning rate {LEARNING_RATE}, seed {seed}; the same weights and batches",
        f"nats per byte, the mean of the {_WINDOW} steps before",
    ]
    run_experiment("moments", title, outcomes(), lambda _: notes, save_to=save_to)


def losses_of(kind: type[OffloadAdamW], more: dict[str, Any], size: str, steps: int, seed: int) -> list[float]:
    """Train a new model; return the loss of each step, in nats per byte."""
    torch.set_num_threads(1)  # arithmetic is repeatable
    torch.manual_seed(seed)
    model = ByteGPT(parse_size(size), CONTEXT, torch.float32).bfloat16()
    stream, losses = batches(load_corpus(), MICRO_BATCH, seed), []
    memory = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "gradient_clipping": 1.0}
    arguments: dict[str, Any] = {"lr": LEARNING_RATE, "betas": _BETAS, "weight_decay": 0.1, **more}
    with kind(model.parameters(), offload=memory, **arguments) as optimizer:
        for _ in range(steps):
            parts = [model(*batch) / ACCUMULATION for batch in islice(stream, ACCUMULATION)]
            torch.autograd.backward(parts)
            losses.append(sum(part.item() for part in parts))
            optimizer.step()
            optimizer.zero_grad()
    return losses
