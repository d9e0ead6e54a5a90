"""LoRA over a frozen base on NVMe: ours in place and block by block, beside ours copied in a loop, and DeepSpeed."""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nvme_offload import get_full_param, initialize
from nvme_offload.offload.units import format_bytes
from ..measure.child import Child, ChildFailedError, Send
from ..measure.command_line import Folder, Quads, SaveTo
from ..measure.comparison import Quad
from ..measure.machine import moved_since, num_cpus, peak_resident_bytes, reset_peak_resident_bytes, storage_bytes
from ..measure.sections import MODES, Layer
from .compare import Contender, tools_of
from .experiment import run_experiment
from .peers.worker import deepspeed_of

OURS = Contender("ours", "nvme-offload, base in place, block by block")
COPIED = Contender("copied", "nvme-offload, base copied, a loop over micro-batches")
PEERS = (COPIED, Contender("deepspeed", "DeepSpeed ZeRO-3, base on NVMe", "deepspeed"))
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}}


@dataclass(frozen=True, kw_only=True)
class LoraOrder:
    """One child process is to do this."""

    contender: str
    package: str | None
    layers: int
    width: int
    rank: int
    micro_batches: int
    tokens: int  # of a micro-batch
    threads: int
    base: str  # folder of the files that the model begins with
    swap: str  # folder on the drive


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
    """Train as told, number by number of iterations, whose seconds are sent; at the end memory, bytes and a digest."""
    order: LoraOrder = next(told)
    torch.set_num_threads(order.threads)
    generator = torch.Generator().manual_seed(1)
    iterate, weights, close = (_deepspeed if order.contender == "deepspeed" else _ours)(order)

    def one() -> None:
        shape = order.micro_batches, order.tokens, order.width
        iterate(torch.randn(shape, generator=generator).bfloat16())

    one()  # what is made once is made now
    reset_peak_resident_bytes()
    before, iterations = storage_bytes(), 0
    send("ready", None)
    for count in told:
        start = time.perf_counter()
        for _ in range(count):
            one()
        send("turn", (time.perf_counter() - start) / count)
        iterations += count
    moved, peak = moved_since(before), peak_resident_bytes()
    digest = hashlib.sha256()
    for _, value in weights():
        digest.update(value.float().contiguous().numpy().data)
    send("ended", {"moved": moved, "peak": peak, "iterations": iterations, "digest": digest.hexdigest()})
    close()
    dist.destroy_process_group()


Trained = tuple[Callable[[Tensor], None], Callable[[], Iterator[tuple[str, Tensor]]], Callable[[], None]]
"""A trainer takes a step with micro-batches [count, tokens, width], gives the adapters by name, and ends."""


def _loss(engine: Any, hidden: Tensor) -> Tensor:
    out: Tensor = engine(hidden)
    return out.float().square().mean()


def _ours(order: LoraOrder) -> Trained:
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

    def iterate(batches: Tensor) -> None:
        engine.accumulate(lambda hidden: _loss(engine, hidden), batches)
        engine.step()
        engine.optimizer.synchronize()

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, param in engine.module.named_parameters():
            if param.requires_grad:
                yield name, get_full_param(param)

    return iterate, weights, engine.close


def _deepspeed(order: LoraOrder) -> Trained:
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

    def iterate(batches: Tensor) -> None:
        for hidden in batches:
            engine.backward(_loss(engine, hidden))
            engine.step()

    def weights() -> Iterator[tuple[str, Tensor]]:
        return ((name, whole(param)) for name, param in engine.module.named_parameters() if param.requires_grad)

    return iterate, weights, engine.destroy


@dataclass
class LoraSeen:
    """One contender was seen so; `quads` are seconds of an iteration: ours, theirs, theirs, ours."""

    contender: Contender
    base_bytes: int
    seconds: list[float] = field(default_factory=list)
    quads: list[Quad] = field(default_factory=list)
    ended: dict[str, Any] | None = None
    problem: str | None = None

    @property
    def shown(self) -> dict[str, str]:
        """Its row, by the heads of the columns."""
        row = dict.fromkeys(("", "iteration", "times ours", "B read", "B written", "peak memory"), "")
        row[""] = self.contender.text
        if self.ended is None:
            return row | {"iteration": "cannot" if self.problem else "not yet"}
        read, written = (count / self.base_bytes / self.ended["iterations"] for count in self.ended["moved"])
        times = f"{median(1 / quad.ratio for quad in self.quads):.2f}" if self.quads else "1"
        row |= {"B read": f"{read:.2f}", "B written": f"{written:.2f}", "times ours": times}
        return row | {"iteration": f"{median(self.seconds):.2f} s", "peak memory": format_bytes(self.ended["peak"])}

    def to_dict(self) -> dict[str, Any]:
        """In plain types, for JSON."""
        quads = [quad.rates for quad in self.quads]
        return {"name": self.contender.name, "base_bytes": self.base_bytes, "seconds": self.seconds, "quads": quads} | {
            "ended": self.ended,
            "problem": self.problem,
        }


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
        sizes = {"layers": layers, "width": width, "rank": rank, "micro_batches": micro_batches, "tokens": tokens}
        order = LoraOrder(contender="", package=None, threads=num_cpus(), base=str(base), swap="", **sizes)
        count = write_base(order)
        peers = [each for each in PEERS if not only or each.name in only]
        said = [
            f"base of {format_bytes(count)} in bf16, frozen; adapters of rank {rank}; {micro_batches} micro-batches of "
            f"{tokens} tokens; {quads} rounds of ours, theirs, theirs, ours",
            "B: bytes per byte of the base and iteration as the kernel counts them; times ours: median over rounds",
        ]
        seen = _seen(peers, order, Path(folder), count, quads)
        run_experiment("lora", "LoRA beside others", seen, partial(_notes, said), path=path, save_to=save_to)


def _notes(said: Sequence[str], all_found: Sequence[LoraSeen]) -> list[str]:
    """Add why some could not train to what is said of all."""
    return [*said, *(f"{found.contender.text}: {found.problem}" for found in all_found if found.problem)]


class LoraSide(Child):
    """A contender's process, which takes turns."""

    def __init__(self, found: LoraSeen, order: LoraOrder, folder: Path) -> None:
        name, python = found.contender.name, found.contender.python()
        if python is None:
            raise ChildFailedError(f"{found.contender.package} is not installed")
        super().__init__(work, folder / f"{name}.log", python=python, environment=tools_of(python))
        self._found, swap = found, folder / name
        swap.mkdir(exist_ok=True)
        self.tell(replace(order, contender=name, package=found.contender.package, swap=str(swap)))
        self.expect("ready")

    def turn(self) -> float:
        """Take an iteration; return its seconds."""
        self.tell(1)
        seconds = float(self.expect("turn"))
        self._found.seconds.append(seconds)
        return seconds


def _seen(
    peers: Sequence[Contender], order: LoraOrder, folder: Path, base_bytes: int, quads: int
) -> Iterator[LoraSeen]:
    """Find out about ours and each of the others, by turns."""
    ours = LoraSeen(OURS, base_bytes)
    for peer in peers:
        found = LoraSeen(peer, base_bytes)
        try:
            with LoraSide(found, order, folder) as other, LoraSide(ours, order, folder) as own:
                found.quads = [Quad.measure(own.turn, other.turn) for _ in range(quads)]
                ours.ended, found.ended = own.finish("ended"), other.finish("ended")
        except ChildFailedError as error:
            found.problem = str(error).splitlines()[0]
        yield ours
        yield found
