"""Memory at the peak and time of an iteration, with what forwards save in memory, computed again, and on a drive."""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import torch
import typer

from nvme_offload.offload.activations.activation_swapper import ActivationSwapper
from nvme_offload.offload.activations.blocks import checkpoint_calls
from nvme_offload.offload.units import MiB
from nvme_offload.perf.measure.child import Child, Send
from nvme_offload.perf.measure.command_line import Folder, Quads, SaveTo
from nvme_offload.perf.measure.comparison import Case
from nvme_offload.perf.measure.experiment import Row, run_experiment
from nvme_offload.perf.measure.gpt import VOCABULARY, ByteGPT, ModelSize
from nvme_offload.perf.measure.machine import peak_resident_bytes, reset_peak_resident_bytes, settled_resident_bytes

Way = Literal["plain", "checkpointing", "boundaries", "attention", "all"]
WAYS: tuple[Way, ...] = ("plain", "checkpointing", "boundaries", "attention", "all")
"""The first two keep all in memory; the others name what is kept on the drive beyond the budget."""
DEPTHS = [8, 16, 32]
BUDGETS = {"boundaries": 4, "attention": 16, "all": 48}
"""The drive gets what is beyond so many inputs of layers: what two layers keep or more, so that reads can be ahead."""
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""Has glibc give memory back as soon as it is free; else what it keeps for later hides what is in use."""
ITERATIONS = 2  # iterations whose peak counts, after one that does not

activations = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Measure what keeping activations on a drive saves and costs."
)
Width = Annotated[int, typer.Option(min=64, help="Width of the model, a multiple of 64.")]
Context = Annotated[int, typer.Option(min=16, help="Tokens of the sequence.")]


class Iterations(AbstractContextManager["Iterations"]):
    """Iterations of one model in one way, over one sequence of `context` tokens, without an optimizer.

    Gradients are there from the first and are added to: what comes later cannot hide behind what is not there yet. The
    large embedding is not trained, for its gradient is made at one piece and would hide all else.
    """

    def __init__(self, way: Way, layers: int, width: int, context: int, path: Path) -> None:
        torch.manual_seed(0)
        self._model = ByteGPT(ModelSize(layers=layers, width=width), context, torch.float32)
        self._model.pair_embedding.requires_grad_(False)
        for param in self._model.parameters():
            param.grad = torch.full_like(param, 0.0) if param.requires_grad else None
        self.resident_before = settled_resident_bytes()
        tokens = torch.randint(VOCABULARY, (1, context + 1))
        self._batch = tokens[:, :-1], tokens[:, 1:]
        self._stack = ExitStack()
        self._saving: Callable[[], Any] = nullcontext
        if way == "checkpointing":
            self._stack.callback(checkpoint_calls(list(self._model.blocks), lambda: True))
        elif way != "plain":
            budget = BUDGETS[way] * width * context * torch.float32.itemsize
            place = {"device": "nvme", "nvme_path": str(path), "host_budget": budget}
            swapper = ActivationSwapper({"activations": {"keep": way, **place}}, model=self._model)
            self._saving = self._stack.enter_context(swapper).saving

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def seconds(self, count: int = 1) -> float:
        """Run iterations; returns what one of them takes, in seconds."""
        start = time.perf_counter()
        for _ in range(count):
            with self._saving():
                loss = self._model(*self._batch)
            loss.backward()
        return (time.perf_counter() - start) / count

    def digest(self) -> str:
        """Return what tells gradients of other bits."""
        found = hashlib.sha256()
        for param in self._model.parameters():
            if param.grad is not None:
                found.update(param.grad.numpy().tobytes())
        return found.hexdigest()


def peak_of(told: Iterator[Any], send: Send) -> None:
    """Run one way in a child: send its peak of resident memory without parameters and gradients, and its digest."""
    way, layers, width, context, path = next(told)
    with Iterations(way, 2, 64, 64, path) as small:
        small.seconds()  # what torch and the libraries take once and for all
    with Iterations(way, layers, width, context, path) as iterations:
        iterations.seconds()
        reset_peak_resident_bytes()
        iterations.seconds(ITERATIONS)
        send("peak", (peak_resident_bytes() - iterations.resident_before, iterations.digest()))


def peak_row(way: Way, depths: Sequence[int], width: int, context: int, path: Path) -> Row:
    """Measure one way at each depth, each in a process of its own."""
    peaks, digests = [], []
    for layers in depths:
        with TemporaryDirectory() as folder, Child(peak_of, Path(folder) / "log", environment=GIVES_BACK) as child:
            child.tell((way, layers, width, context, path))
            peak, digest = child.finish("peak")
        peaks.append(peak)
        digests.append(digest)
    of_depths = zip(depths, peaks, strict=True)
    shown = {"way": way} | {f"{layers} layers, MiB": f"{peak / MiB:.0f}" for layers, peak in of_depths}
    growth = max(peaks) / min(peaks)
    return Row(shown | {"most / least": f"{growth:.2f}"}, {"peaks": peaks, "growth": growth, "digests": digests})


@activations.command()
def memory(
    path: Folder,
    width: Width = 512,
    context: Context = 1024,
    depths: Annotated[list[int], typer.Option("--depth", min=1, help="Layers; several times.")] = DEPTHS,
    save_to: SaveTo = None,
) -> None:
    """Measure resident memory at the peak of an iteration, without parameters and gradients, over the model's depth."""
    budgets = ", ".join(f"{way} {count}" for way, count in BUDGETS.items())
    notes = [
        f"width {width}, one sequence of {context} tokens, fp32, no optimizer; besides staging buffers and memory for "
        f"reads there is host memory for so many inputs of layers: {budgets}",
        "the peak of resident memory, less what it was with parameters and gradients there; "
        "malloc gives back at once what is free",
    ]

    def with_bits(found: list[Row]) -> list[str]:
        alike = all(one.figures["digests"] == found[0].figures["digests"] for one in found)
        return [*notes, f"gradients have {'the same' if alike else 'OTHER'} bits in all rows"]

    with TemporaryDirectory(prefix="nvme-offload-activations-", dir=path) as folder:
        rows = (peak_row(way, depths, width, context, Path(folder)) for way in WAYS)
        run_experiment("activations-memory", "Activations: memory", rows, with_bits, path=path, save_to=save_to)


@activations.command()
def iterations(
    path: Folder,
    width: Width = 512,
    context: Context = 1024,
    layers: Annotated[int, typer.Option(min=2, help="Layers of the model.")] = 8,
    quads: Quads = 10,
    save_to: SaveTo = None,
) -> None:
    """Measure an iteration with each way of keeping on the drive beside plain checkpointing, by turns."""
    notes = [f"{layers} layers of width {width}, one sequence of {context} tokens, fp32, no optimizer"]
    with TemporaryDirectory(prefix="nvme-offload-activations-", dir=path) as folder, ExitStack() as stack:
        of = {way: stack.enter_context(Iterations(way, layers, width, context, Path(folder))) for way in WAYS[1:]}
        for one in of.values():
            one.seconds()
        cases = [Case(name=way, ours=of[way].seconds, reference=of["checkpointing"].seconds) for way in WAYS[2:]]
        compared = (found for case in cases for found in case.measure(quads))
        title = "Activations: iterations beside plain checkpointing"
        run_experiment("activations-iterations", title, compared, lambda found: notes, path=path, save_to=save_to)
