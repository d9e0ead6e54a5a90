"""A committed step of a run that nobody is in, written as weights or as a checkpoint: without the model."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from itertools import chain
from pathlib import Path

import torch

from nvme_offload.offload.errors import ResumeError
from ..access.values import COMPUTED
from ..durable.identity import RecordedParam
from ..weights.whole import checked_cast, dtypes_in_files
from .committed_step import CommittedStep, RankOfStep
from .contents import MODEL, Contents, Item, Kind, plain_items, tier_items
from .export import write_weights
from .places import Visitor
from .run_state import Scalars, objects_bytes, state_json
from .save_load import AgreedSave, write
from .sites import CheckpointSite

_SHOWN = 4


def export_weights(step: CommittedStep, folder: Path, dtype: str, max_shard_bytes: int) -> list[Path]:
    """Write a step's parameters and buffers as safetensors in the layout of Hugging Face; return the files.

    They are what `export_safetensors` of an engine that resumed there would write, but for frozen parameters, of which
    a run keeps nothing. In memory is one parameter at a time, and one subgroup of each rank. If this raises, no file is
    left.

    Raises:
        ValueError: `dtype` or `max_shard_bytes` cannot be used, or a weight is too large for fp16; names it.
        CorruptionError, SwapIOError: an extent is damaged or cannot be read; names it.
        ResumeError: parts of a parameter are on no rank.
        CheckpointWriteError: the files could not be written.
    """
    params, buffers = _params_of(step), _buffers_of(step)
    tensors = {name: (param.part.whole, torch.float32) for name, param in params.items()}
    tensors |= {name: (buffer.shape, buffer.dtype) for name, buffer in buffers.items()}
    dtypes = dtypes_in_files(dtype, {name: param.dtype for name, param in params.items()}, tensors)
    weights = _Weights(step, COMPUTED if torch.bfloat16 in dtypes.values() else "master")

    def stored(name: str) -> torch.Tensor:
        if name in params:
            return weights.whole(name, params[name], dtypes[name])
        return checked_cast(name, buffers[name], dtypes[name])

    kinds = {name: (shape, dtypes[name]) for name, (shape, _) in tensors.items()}
    with _NothingLeft(folder), torch.no_grad():
        return write_weights(folder, kinds, stored, max_shard_bytes)


class _Weights:
    """Puts parameters of a step together, one at a time, of what all ranks have of them."""

    def __init__(self, step: CommittedStep, entry: str) -> None:
        self._name = step.name
        self._visitor = Visitor()
        self._items: defaultdict[str, list[Item]] = defaultdict(list)
        for item in chain.from_iterable(_items_of(rank, entry) for rank in step.ranks):
            self._items[item.name].append(item)

    def whole(self, name: str, param: RecordedParam, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter in its global shape."""
        whole = torch.empty(param.part.whole, dtype=dtype, device="cpu")
        filled: dict[tuple[int, ...], int] = {}
        for _, chunk, place in self._items[f"{MODEL}.{name}"]:
            offsets, sizes = chunk.saved.offsets, chunk.saved.sizes
            box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
            whole[box].copy_(checked_cast(name, chunk.view(self._visitor.read(place), place.start), dtype))
            filled[tuple(offsets)] = math.prod(sizes)
        _check_whole(self._name, name, sum(filled.values()), whole.numel())
        return whole


def _params_of(step: CommittedStep) -> dict[str, RecordedParam]:
    """Return the parameters that the run keeps, in the order of its subgroups: each is read once then."""
    of_ranks = [(run.param, rank) for rank in step.ranks for slot in rank.run.slots for run in slot.subgroup.runs]
    in_order = [rank.run.params[index] for index, rank in of_ranks]
    empty = [param for rank in step.ranks for param in rank.run.params if param.has_state]
    return {param.name: param for param in [*in_order, *empty]}


def _buffers_of(step: CommittedStep) -> dict[str, torch.Tensor]:
    tied = {alias for rank in step.ranks for alias in rank.run.tied}
    buffers: dict[str, torch.Tensor] = {}
    for rank in step.ranks:
        for name, buffer in rank.content.engine.get("buffers", {}).items():
            if name not in tied:
                buffers.setdefault(name, buffer)
    return buffers


def export_checkpoint(step: CommittedStep, root: Path) -> Path:
    """Write a step of a training engine as the checkpoint that it could have saved then; return its folder.

    Any number of ranks and any tier can load it; `client_state` is that of rank 0. If this raises, nothing is left.

    Raises:
        ResumeError: it is of an optimizer alone, or the model has parameters that the run does not keep.
        CorruptionError, SwapIOError: an extent is damaged or cannot be read; names it.
        ValueError, FileExistsError, StateError, CheckpointWriteError: see `save_load.save`.
    """
    first = step.ranks[0]
    if not first.content.engine:
        raise ResumeError(step.name, "is of an optimizer without an engine, which has no checkpoints: export weights")
    if missing := step.missing:
        listed = ", ".join(missing[:_SHOWN]) + (" ..." if len(missing) > _SHOWN else "")
        raise ResumeError(
            step.name,
            f"does not keep {listed}, which were always frozen, and a checkpoint has all parameters: start the run "
            "once more, resume(), and save_checkpoint()",
        )
    contents, scalars = _contents_of(step), _scalars_of(step)
    objects = objects_bytes(scalars, first.content.client_state)
    save = AgreedSave(f"global_step{step.step}", contents, state_json(scalars, contents), objects)
    with _NothingLeft(root), torch.no_grad():
        return write(root, save, CheckpointSite(None))


def _scalars_of(step: CommittedStep) -> Scalars:
    content = step.ranks[0].content
    return Scalars(
        optimizer=step.ranks[0].run.rule,
        global_steps=content.step,
        groups=content.groups,
        loss_scale=content.engine["loss_scale"],
        lr_scheduler_type=content.engine["lr_scheduler_type"],
        lr_scheduler=content.engine["lr_scheduler"],
    )


def _contents_of(step: CommittedStep) -> Contents:
    """Return all of a checkpoint, in the order in which the subgroups of one rank after the other are read."""
    contents = Contents(group_names=[[] for _ in step.ranks[0].content.groups])
    for rank in step.ranks:
        contents.tied.update({f"{MODEL}.{alias}": f"{MODEL}.{name}" for alias, name in rank.run.tied.items()})
        for param, steps in zip(rank.run.params, rank.content.steps.tolist(), strict=True):
            if f"{MODEL}.{param.name}" not in contents.kinds:
                contents.add_param(param.name, param.part.whole, steps, param.rule)
                contents.group_names[param.group].append(param.name)
    for name, buffer in _buffers_of(step).items():
        full_name = contents.add(Kind(buffer.shape, buffer.dtype), MODEL, name)
        contents.items.extend(plain_items(full_name, buffer))
    found = {(item.name, item.chunk.saved.offsets): item for item in contents.items}
    for item in chain.from_iterable(map(_items_of, step.ranks)):
        found.setdefault((item.name, item.chunk.saved.offsets), item)  # ranks may have copies
    contents.items[:] = found.values()
    numels = Counter[str]()
    for item in contents.items:
        numels[item.name] += item.chunk.numel
    for name, kind in contents.kinds.items():
        _check_whole(step.name, name, numels[name], kind.size.numel())
    return contents


def _items_of(rank: RankOfStep, weights: str = "master") -> Iterator[Item]:
    parts = {index: param.part for index, param in enumerate(rank.run.params)}
    names = {index: param.name for index, param in enumerate(rank.run.params)}
    return tier_items(rank.values, parts, names, weights)


def _check_whole(run: str, name: str, numel: int, whole_numel: int) -> None:
    if numel != whole_numel:
        what = f"has {numel} of {whole_numel} elements of {name}: the others are on no rank that is here"
        raise ResumeError(run, what)


class _NothingLeft(AbstractContextManager["_NothingLeft"]):
    """Removes a folder that was not there before, if the block raises."""

    def __init__(self, folder: Path) -> None:
        self._made = [each for each in (folder, *folder.parents) if not each.exists()]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            with suppress(OSError):
                for each in self._made:
                    each.rmdir()
