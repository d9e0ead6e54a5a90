"""LoRA over a frozen base on NVMe: ours in place and block by block, beside ours copied in a loop, and DeepSpeed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nvme_offload import get_full_param, initialize
from nvme_offload.offload.devices.device import HOST
from nvme_offload.offload.units import format_bytes
from ..measure.child import Send
from ..measure.command_line import Folder, Quads, SaveTo
from ..measure.machine import num_cpus
from ..measure.sections import MODES, Layer
from .compare import Contender, Seen, Side, beside
from .experiment import run_experiment
from .peers.worker import SideOrder, Trainer, deepspeed_of, digest, train

OURS = Contender("ours", "nvme-offload, base in place, block by block")
COPIED = Contender("copied", "nvme-offload, base copied, a loop over micro-batches")
PEERS = (COPIED, Contender("deepspeed", "DeepSpeed ZeRO-3, base on NVMe", "deepspeed"))
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}}


@dataclass(frozen=True, kw_only=True)
class LoraOrder(SideOrder):
    """One child process is to do this; it writes no weights."""

    layers: int
    width: int
    rank: int
    micro_batches: int
    tokens: int  # of a micro-batch
    base: str  # folder of the files that the model begins with
    turn: int = 1


class Adapted(nn.Module):
    """A frozen layer, and beside it a product of two thin matrices, which are trained (LoRA, arXiv:2106.09685)."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = Layer(width).bfloat16().requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [tokens, width] to the same shape."""
        out: Tensor = self.base(hidden) + self.up(self.down(hidden))
        return out


def model_of(order: LoraOrder) -> nn.Sequential:
    """Make the layers on the device of the context."""
    return nn.Sequential(*(Adapted(order.width, order.rank) for _ in range(order.layers)))


def write_base(order: LoraOrder) -> int:
    """Write the files that a model begins with, a layer each; return the bytes of what is frozen."""
    torch.manual_seed(0)
    count = 0
    for index in range(order.layers):
        layer = Adapted(order.width, order.rank)
        tensors = {f"{index}.{name}": value for name, value in layer.state_dict().items()}
        save_file(tensors, Path(order.base) / f"layer{index:03d}.safetensors")
        count += sum(param.nbytes for param in layer.parameters() if not param.requires_grad)
    return count


def work(told: Iterator[Any], send: Send) -> None:
    """Train as told, see `peers.worker.train`; at the end the adapters are digested."""
    order: LoraOrder = next(told)
    torch.set_num_threads(order.threads)
    shape, generator = (order.micro_batches, order.tokens, order.width), torch.Generator().manual_seed(1)
    data = ((torch.randn(shape, generator=generator).bfloat16(),) for _ in count())
    trainer = (_deepspeed if order.contender == "deepspeed" else _ours)(order)
    ended = train(told, send, trainer, data, HOST, order.package)
    ended.digests.update({name: digest(value.float()) for name, value in trainer.weights()})
    trainer.close()
    send("ended", ended)


def _loss(engine: Any, hidden: Tensor) -> Tensor:
    out: Tensor = engine(hidden)
    return out.float().square().mean()


def _ours(order: LoraOrder) -> Trainer:
    in_place = order.contender == "ours"
    drive = {"device": "nvme", "nvme_path": order.swap, "frozen": "in_place" if in_place else "copy"}
    section = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": drive},
        "optimizer": ADAMW,
        "gradient_accumulation_steps": order.micro_batches,
        "micro_batch_order": "vertical" if in_place else "horizontal",
        **MODES["bf16"],
    }
    with torch.device("meta"):
        model = model_of(order)
    engine = initialize(model, section, weights=order.base, blocks=["Adapted"])

    def iterate(batches: Tensor) -> float:
        losses = engine.accumulate(lambda hidden: _loss(engine, hidden), batches)
        engine.step()
        return float(losses[-1])

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, param in engine.module.named_parameters():
            if param.requires_grad:
                yield name, get_full_param(param)

    return Trainer(iterate=iterate, weights=weights, settle=engine.optimizer.synchronize, close=engine.close)


def _deepspeed(order: LoraOrder) -> Trainer:
    """Its base begins whole in memory, in bf16, and is swapped out by `initialize`; two blocks may be gathered."""
    with torch.device("meta"):
        model = model_of(order)
    files = sorted(Path(order.base).glob("*.safetensors"))
    model.load_state_dict({name: value for file in files for name, value in load_file(file).items()}, assign=True)
    for name, param in model.named_parameters():
        param.requires_grad_(".base." not in name)
    largest = max(param.numel() for param in model.parameters())
    drive = {"device": "nvme", "nvme_path": order.swap, "buffer_count": 6, "buffer_size": largest, "max_in_cpu": 0}
    block = sum(param.numel() for param in model[0].parameters())
    live = ("max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")  # as where no memory holds the base
    limits = {f"stage3_{name}": 2 * block for name in live}
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": drive, **limits}
    section = {
        "zero_optimization": zero,
        "optimizer": ADAMW,
        "gradient_accumulation_steps": order.micro_batches,
        **MODES["bf16"],
    }
    engine, whole = deepspeed_of(model, section)

    def iterate(batches: Tensor) -> float:
        for hidden in batches:
            engine.backward(loss := _loss(engine, hidden))
            engine.step()
        return float(loss)

    def weights() -> Iterator[tuple[str, Tensor]]:
        return ((name, whole(param)) for name, param in engine.module.named_parameters() if param.requires_grad)

    return Trainer(iterate=iterate, weights=weights, close=engine.destroy)


class LoraSeen(Seen):
    """One contender was seen so; its `numel` are the bytes of the base."""

    digits = 2

    @property
    def shown(self) -> dict[str, str]:
        """Its row, by the heads of the columns: weights are in none."""
        return {head: cell for head, cell in super().shown.items() if head != "distance"}


def lora(
    path: Folder = Path(),
    layers: Annotated[int, typer.Option(min=1)] = 16,
    width: Annotated[int, typer.Option(min=64, help="A frozen layer has 16 x width^2 bytes.")] = 2048,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapters.")] = 16,
    micro_batches: Annotated[int, typer.Option(min=1)] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a micro-batch.")] = 32,
    quads: Quads = 2,
    only: Annotated[list[str] | None, typer.Option("--with", help="Beside whom: copied, deepspeed.")] = None,
    save_to: SaveTo = None,
) -> None:
    """Train adapters over a frozen base on NVMe by turns: iteration time, bytes per byte of the base, memory."""
    with TemporaryDirectory(prefix="nvme-offload-lora-", dir=path) as folder:
        base = Path(folder) / "base"
        base.mkdir()
        sizes: dict[str, Any] = {
            "layers": layers,
            "width": width,
            "rank": rank,
            "micro_batches": micro_batches,
            "tokens": tokens,
        }
        order = LoraOrder(threads=num_cpus(), base=str(base), **sizes)
        base_bytes = write_base(order)
        peers = [each for each in PEERS if not only or each.name in only]
        said = [
            f"base of {format_bytes(base_bytes)} in bf16, frozen; adapters of rank {rank}; {micro_batches} "
            f"micro-batches of {tokens} tokens; {quads} rounds of ours, theirs, theirs, ours",
            "B: bytes per byte of the base and iteration as the kernel counts them; times ours: median over rounds",
        ]
        seen = _seen(peers, order, Path(folder), base_bytes, quads)
        run_experiment("lora", "LoRA beside others", seen, partial(_notes, said), path=path, save_to=save_to)


def _notes(said: Sequence[str], all_found: Sequence[LoraSeen]) -> list[str]:
    """Add why some could not train to what is said of all."""
    return [*said, *(f"{found.contender.text}: {found.problem}" for found in all_found if found.problem)]


def _seen(
    peers: Sequence[Contender], order: LoraOrder, folder: Path, base_bytes: int, quads: int
) -> Iterator[LoraSeen]:
    """Find out about ours and each of the others, by turns."""
    ours = LoraSeen(OURS, base_bytes)
    for peer in peers:
        found = LoraSeen(peer, base_bytes)
        beside(ours, found, lambda seen, python: Side(seen, python, order, folder, does=work), quads)
        yield ours
        yield found
