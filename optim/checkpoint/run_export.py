"""A committed step of a run that nobody is in, written as weights or as a checkpoint: without the model."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch

from nvme_offload.offload.errors import ResumeError
from nvme_offload.optim.checkpoint.committed_step import CommittedStep, RankOfStep
from nvme_offload.optim.checkpoint.export import checked_cast, write_weights
from nvme_offload.optim.checkpoint.places import pieces
from nvme_offload.optim.durable.recorded import RecordedParam
from nvme_offload.optim.layout.geometry import Part
from nvme_offload.optim.layout.subgroup import Run
from nvme_offload.optim.state.slots import SlotRecord


class _Piece(NamedTuple):
    """Elements of a parameter, and where they are."""

    rank: RankOfStep
    slot: SlotRecord
    run: Run
    part: Part


def export_weights(step: CommittedStep, folder: Path, dtype: str, max_shard_bytes: int) -> list[Path]:
    """Write a step's parameters and buffers as safetensors in the layout of Hugging Face; see `export_safetensors`.

    What `export_safetensors` of an engine would write that has resumed there, but for frozen parameters, of which a run
    keeps nothing. One parameter is in memory at a time, and one subgroup of each rank.

    Args:
        step: that is open.
        folder: made if it is missing. If this raises, nothing of it is left.
        dtype: ``fp32``, ``bf16`` or ``fp16``, of floating-point tensors; others keep theirs.
        max_shard_bytes: of one file; a larger tensor has a file of its own.

    Returns:
        The files.

    Raises:
        ValueError: `dtype` or `max_shard_bytes` cannot be used, or a weight is too large for fp16; names it.
        CorruptionError, SwapIOError: an extent is damaged or cannot be read; names it.
        ResumeError: parts of a parameter are on no rank.
        CheckpointWriteError: the files could not be written.
    """
    params, buffers = _params_of(step), _buffers_of(step)
    weights = _Weights(step)
    items = [(name, torch.empty(param.part.whole, dtype=param.dtype, device="meta")) for name, param in params.items()]

    def stored(name: str, value: torch.Tensor, wanted: torch.dtype) -> torch.Tensor:
        return weights.whole(name, params[name], wanted) if name in params else checked_cast(name, value, wanted)

    with _nothing_left(folder), torch.no_grad():
        return write_weights(folder, [*items, *buffers.items()], stored, dtype, max_shard_bytes)


class _Weights:
    """Parameters of a step, one at a time, put together of what all ranks have of them."""

    def __init__(self, step: CommittedStep) -> None:
        self._name = step.name
        self._pieces: defaultdict[str, list[_Piece]] = defaultdict(list)
        for rank in step.ranks:
            for slot in rank.run.slots:
                for run in slot.subgroup.runs:
                    param = rank.run.params[run.param]
                    self._pieces[param.name] += [_Piece(rank, slot, piece, param.part) for piece in pieces(run)]

    def whole(self, name: str, param: RecordedParam, dtype: torch.dtype) -> torch.Tensor:
        """A parameter in its global shape."""
        whole = torch.empty(param.part.whole, dtype=dtype, device="cpu")
        filled: dict[tuple[int, ...], int] = {}
        for piece in self._pieces[name]:
            values = piece.rank.state.weights(piece.slot, piece.run, dtype)
            values = checked_cast(name, values, dtype)
            for chunk in piece.part.chunks(piece.run.start, piece.run.stop):
                offsets, sizes = chunk.saved.offsets, chunk.saved.sizes
                box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
                whole[box].copy_(chunk.view(values, piece.run.start))
                filled[tuple(offsets)] = math.prod(sizes)
        if sum(filled.values()) != whole.numel():
            have = f"{sum(filled.values())} of its {whole.numel()} elements"
            raise ResumeError(self._name, f"has of {name} {have}: parts of it are on no rank that is here")
        return whole


def _params_of(step: CommittedStep) -> dict[str, RecordedParam]:
    """Parameters that the run keeps, in the order in which its subgroups have them: each is read once then."""
    of_ranks = [(run.param, rank) for rank in step.ranks for slot in rank.run.slots for run in slot.subgroup.runs]
    in_order = [rank.run.params[index] for index, rank in of_ranks]
    empty = [param for rank in step.ranks for param in rank.run.params if param.has_state]
    return {param.name: param for param in [*in_order, *empty]}


def _buffers_of(step: CommittedStep) -> dict[str, torch.Tensor]:
    """Buffers that a training engine has committed, under their first names."""
    tied = {alias for rank in step.ranks for alias in rank.run.tied}
    buffers: dict[str, torch.Tensor] = {}
    for rank in step.ranks:
        for name, buffer in rank.content.engine.get("buffers", {}).items():
            if name not in tied:
                buffers.setdefault(name, buffer)
    return buffers


@contextmanager
def _nothing_left(folder: Path) -> Iterator[None]:
    """Where the block raises, a folder that was not there before is not there afterwards."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for each in made:
                each.rmdir()
        raise
