"""Processor time of each operation, for each parameter, tensor, subgroup and GB, beside torch's in the same process."""

import copy
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import typer
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import Parameter

from nvme_offload import OffloadAdamW, initialize
from nvme_offload.offload.units import GB
from nvme_offload.perf.measure.command_line import Folder, Quads, SaveTo
from nvme_offload.perf.measure.comparison import Case
from nvme_offload.perf.measure.durable_runs import runs_removed, settle, unused_name
from nvme_offload.perf.measure.experiment import Row, run_experiment
from nvme_offload.perf.measure.sections import MODES, section
from nvme_offload.perf.measure.training import bf16_params, layered_model

CLIPPING = 1.0
LARGE = 8
TOKENS = 128

Work = Callable[[], object]
Part = Literal["steps", "tensors", "drive", "engines"]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One operation beside another one."""

    name: str
    beside: str
    unit: str
    """The operation is done to so many of these, by `count`."""
    count: float
    ours: Work
    other: Work
    further: bool = False
    """Whether the cost is that of what `ours` has more than the other."""

    def measured(self, quads: int) -> Row:
        """Measure by turns."""
        *_, found = Case(name=self.name, ours=_seconds(self.ours), reference=_seconds(self.other)).measure(quads)
        (own, other), (low, high) = found.medians, found.interval
        scale = 1e9 if self.unit == "parameter" else 1e6
        each = (own - other * self.further) / self.count * scale
        shown = {
            "": f"{self.name}, beside {self.beside}",
            "unit": f"{'ns' if self.unit == 'parameter' else 'us'} a {'further ' * self.further}{self.unit}",
            "ours": f"{each:.2f}",
            "the other": "" if self.further else f"{other / self.count * scale:.2f}",
            "ratio (95 %)": f"{found.quotient:.2f} ({low:.2f} to {high:.2f})",
            "control": f"{found.control:.2f}",
        }
        return Row(shown, {"each": each, "comparison": found.to_dict()})


def costs(
    path: Folder,
    millions: Annotated[int, typer.Option(min=1, help="Parameters of few large tensors, in millions.")] = 16,
    small: Annotated[int, typer.Option(min=1, help="Small tensors.")] = 5000,
    elements: Annotated[int, typer.Option(min=1, help="Elements of a small tensor.")] = 3,
    part: Annotated[Part | None, typer.Option(help="Measure this alone.")] = None,
    quads: Quads = 5,
    save_to: SaveTo = None,
) -> None:
    """Measure the processor time of each operation beside torch's, for each parameter, tensor, subgroup and GB."""
    of_small = partial(tensors, count=small, size=elements)
    known: dict[str, Any] = {"steps": steps, "tensors": of_small, "drive": drive, "engines": engines}

    def outcomes() -> Iterator[Row]:
        for family in known.values() if part is None else (known[part],):
            with ExitStack() as stack, TemporaryDirectory(prefix="nvme-offload-costs-", dir=path) as folder:
                yield from (cost.measured(quads) for cost in family(stack, Path(folder), millions * 10**6))

    torch.set_num_threads(1)  # its threads spin while they wait, which would count
    notes = [
        "processor time of all threads of the process, of which torch has one; every step clips by the norm",
        f"steps of {LARGE} tensors with {millions} million parameters, or of {small:,} tensors of {elements}",
        "ours in bf16 with fp32 masters, torch's in fp32",
    ]
    with runs_removed(path):
        run_experiment("costs", "What each operation costs", outcomes(), lambda _: notes, path=path, save_to=save_to)


def steps(stack: ExitStack, folder: Path, numel: int) -> Iterator[Cost]:
    """Steps of few large tensors, in memory."""
    each: dict[str, Any] = {"unit": "parameter", "count": numel}
    ours = stack.enter_context(_ours(LARGE, numel // LARGE, section(None, gradient_clipping=CLIPPING)))
    for kind in ("fused", "foreach"):
        theirs = _torchs(LARGE, numel // LARGE, kind)
        yield Cost(name="step, large tensors", beside=f"torch {kind}", ours=ours.step, other=_clipped(theirs), **each)
    copied: Work = lambda: copy.deepcopy(theirs.state_dict())  # noqa: E731
    yield Cost(name="state_dict, large tensors", beside="a copy of torch's", ours=ours.state_dict, other=copied, **each)


def tensors(stack: ExitStack, folder: Path, numel: int, *, count: int, size: int) -> Iterator[Cost]:
    """Operations on many small tensors, in memory."""
    each: dict[str, Any] = {"unit": "tensor", "count": count}
    memory = section(None, gradient_clipping=CLIPPING)
    ours = stack.enter_context(_ours(count, size, memory))
    spare = [Parameter(torch.zeros(size, dtype=torch.bfloat16)) for _ in range(count)]
    for kind in ("fused", "foreach"):
        other = _clipped(_torchs(count, size, kind))
        yield Cost(name="step, small tensors", beside=f"torch {kind}", ours=ours.step, other=other, **each)
    theirs = _torchs(count, size, "fused")
    saved = ours.state_dict(), theirs.state_dict()

    def made() -> None:
        with OffloadAdamW(spare, offload=memory) as optimizer:
            optimizer.place()

    pairs = (
        ("construct and place", made, lambda: torch.optim.AdamW(spare)),
        ("state_dict", ours.state_dict, theirs.state_dict),
        ("load_state_dict", lambda: ours.load_state_dict(saved[0]), lambda: theirs.load_state_dict(saved[1])),
    )
    for name, own, other in pairs:
        yield Cost(name=f"{name}, small tensors", beside="torch fused", ours=own, other=other, **each)


def drive(stack: ExitStack, folder: Path, numel: int) -> Iterator[Cost]:
    """Steps with state on the drive."""

    def made(sub_group_size: int = numel // 4, num_steps: int = 2, **lasts: Any) -> OffloadAdamW:
        state = {"buffer_count": 3, "staging_budget": "320MiB", **lasts}
        its = section(folder, state=state, sub_group_size=sub_group_size, gradient_clipping=CLIPPING)
        return stack.enter_context(_ours(LARGE, numel // LARGE, its, num_steps))

    in_memory = section(None, gradient_clipping=CLIPPING)
    few, many, memory = made(), made(numel // 64), stack.enter_context(_ours(LARGE, numel // LARGE, in_memory))
    before = few.stats()
    _settle(few)
    after = few.stats()
    moved = (after.bytes_read - before.bytes_read + after.bytes_written - before.bytes_written) / GB
    pair: dict[str, Any] = {"ours": partial(_settle, few), "other": partial(_settle, memory), "beside": "one in memory"}
    yield Cost(name="step on NVMe", unit="GB", count=moved, further=True, **pair)
    pair = {"ours": partial(_settle, many), "other": partial(_settle, few), "beside": "one of fewer subgroups"}
    more = len(many.store.slots) - len(few.store.slots)
    yield Cost(name="step on NVMe", unit="subgroup", count=more, further=True, **pair)
    each: dict[str, Any] = {"unit": "parameter", "count": numel}
    for period in (1, 3):
        lasting = made(durable=unused_name(), rewrite_every=period)
        pair = {"ours": partial(_settle, lasting), "other": partial(_settle, few), "beside": "one in place"}
        yield Cost(name=f"durable step, k = {period}", **pair, **each)
    name = unused_name()
    _settle(made(durable=name))

    def begin(*, resumes: bool) -> None:
        stack.pop_all().close()
        made(num_steps=0, durable=name if resumes else unused_name()).resume()

    resume, fresh = partial(begin, resumes=True), partial(begin, resumes=False)
    yield Cost(name="resume, with construction", beside="a fresh run", ours=resume, other=fresh, **each)


def engines(stack: ExitStack, folder: Path, numel: int) -> Iterator[Cost]:
    """Passes and checkpoints of a model in `initialize` and in FSDP2."""
    layers, width = 8, int((numel / 64) ** 0.5) // 64 * 64
    batch = torch.randn(TOKENS, width)
    config = {**section(None), **MODES["bf16"], "gradient_clipping": CLIPPING}
    engine = stack.enter_context(initialize(layered_model(layers, width), config))
    model = layered_model(layers, width)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for unit in [*model.children(), model]:
        fully_shard(unit, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)), mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    each: dict[str, Any] = {"unit": "parameter", "count": sum(param.numel() for param in model.parameters())}
    ours: Work = lambda: engine.backward(engine(batch).float().square().mean())  # noqa: E731
    theirs: Work = lambda: model(batch).float().square().mean().backward()  # noqa: E731
    for _ in range(2):
        for work in (ours, theirs, engine.step, optimizer.step):
            work()
    yield Cost(name="forward and backward", beside="FSDP2", ours=ours, other=theirs, **each)
    engine.step()

    def load() -> None:
        state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
        load_dcp(state, storage_reader=FileSystemReader(folder / "dcp"))
        set_optimizer_state_dict(model, optimizer, state["optim"])

    def save() -> None:
        state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
        save_dcp(state, storage_writer=FileSystemWriter(folder / "dcp", overwrite=True))

    own: Work = lambda: engine.save_checkpoint(folder / "ours", "newest")  # noqa: E731
    yield Cost(name="save", beside="DCP", ours=own, other=save, **each)
    yield Cost(name="load", beside="DCP", ours=lambda: engine.load_checkpoint(folder / "ours"), other=load, **each)


def _ours(count: int, numel: int, its: dict[str, Any], num_steps: int = 2) -> OffloadAdamW:
    optimizer = OffloadAdamW(bf16_params(count, numel), lr=1e-3, offload=its)
    for _ in range(num_steps):
        optimizer.step()
    return optimizer


def _torchs(count: int, numel: int, kind: str) -> torch.optim.AdamW:
    params = [Parameter(torch.randn(numel).mul_(0.05)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn(numel)
    optimizer = torch.optim.AdamW(params, lr=1e-3, fused=kind == "fused", foreach=kind == "foreach")
    optimizer.step()
    return optimizer


def _clipped(optimizer: torch.optim.AdamW) -> Work:
    """Return a step that clips first, as ours does."""
    params = optimizer.param_groups[0]["params"]
    return lambda: (torch.nn.utils.clip_grad_norm_(params, CLIPPING), optimizer.step())


def _settle(optimizer: OffloadAdamW) -> None:
    optimizer.step()
    settle(optimizer)


def _seconds(work: Work) -> Callable[[], float]:
    """Return what does it and gives the seconds of processor time that it took."""

    def measure() -> float:
        gc.disable()  # as timeit does: it looks through the whole process, whenever it happens to begin
        try:
            start = time.process_time()
            work()
            return time.process_time() - start
        finally:
            gc.enable()

    return measure
