"""Take what has changed of weights since a version: values at indices, or whole weights where that is less."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from nvme_offload.offload._torch_private import local_tensor
from nvme_offload.offload.devices.device import is_host
from nvme_offload.offload.errors import StateError
from nvme_offload.offload.warn import warn_user
from nvme_offload.offload.weights.patch import WeightChange, WeightPatch
from nvme_offload.offload.weights.writer import weight_items
from ..access.same_values import bits_of
from ..kernels import num_marked
from ..layout.flat import flat_view
from ..layout.geometry import Part
from ..layout.master import MasterForm
from ..layout.subgroup import Run
from ..ranks.collective import gather, on_every_rank
from ..state.body import StateBody
from ..state.condition import Need
from ..state.marks import Found
from ..state.slots import Residency
from ..state.table import ParamRecord
from ..tiers.parts import parts_of
from .published import Conversion
from .whole import Sources, checked_cast, dtypes_in_files, planned

_ALL = -1  # in place of a number of elements
_INT32 = 2**31
_TOGETHER = 16 << 20  # bytes of changes that ranks exchange at a time


def version_of(body: StateBody, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> str:
    """Return the version of the weights as they are; from the first call on their changes are marked. Collective.

    `tensors` are those that may have no marks, by name: their bits are noted. StateError: a step stopped halfway.
    """
    with body.at_rest():
        body.check(Need.PARAMS)
        _agree(body, group)
        marks = body.table.marks
        if not marks.known:
            _begin(body)
            marks.restart(marks.version, {name: _digest_of(body, tensor) for name, tensor in tensors.items()})
        marks.known.add(marks.version)
        return marks.version


def patch_of(
    model: nn.Module,
    body: StateBody,
    since: str,
    dtype: str,
    own: Mapping[str, torch.dtype],
    group: dist.ProcessGroup | None,
) -> WeightPatch:
    """Return what has changed since a version; see `OffloadEngine.weights`. Collective, as going through it is."""
    tensors = dict(weight_items(model))
    sources = Sources.of(model, tensors, own, group)
    dtypes = dtypes_in_files(dtype, own, sources.kinds)
    conversions = planned(model, sources.kinds, dtypes, published=True)
    kinds = {name: kind for conversion in conversions for name, kind in conversion.made.items()}
    with body.at_rest():
        body.check(Need.PARAMS)
        marks = body.table.marks
        digests = {name: _digest_of(body, tensor) for name, tensor in tensors.items()}
        _note_edits(body)
        _agree(body, group)
        known = gather(since in marks.known, group)
        reason = "" if all(known.values()) else _why_unknown(since, is_begun=bool(marks.known))
        asked = _Asked(body, tensors, dtypes, group)
        here = [_ALL if reason else asked.num_changed(name, digests[name]) for name in tensors]
        num_changed = dict(zip(tensors, _together(here, tensors, group), strict=True))
        unmarked = (name for name, digest in digests.items() if not isinstance(digest, _Marked))
        if marks.version in marks.known and any(num_changed[name] for name in unmarked):
            marks.note_change()  # nobody noted it when it came: somebody may have this version without it
    version, changes = marks.version, marks.changes

    def check() -> None:
        if marks.changes != changes:
            raise StateError("weights(since=...)", "the weights as they were when it was called", "a change since then")

    def sparse_bytes(conversion: Conversion) -> int | None:
        first = conversion.sources[0]
        return asked.sparse_bytes(first, num_changed[first]) if conversion.revert is None else None

    def go_through() -> Iterator[WeightChange]:
        changed = (conversion for conversion in conversions if any(num_changed[name] for name in conversion.sources))
        for some in _in_batches(changed, sparse_bytes):
            check()
            conversion = some[0]
            if sparse_bytes(conversion) is not None:
                yield from asked.sparse({each.sources[0]: next(iter(each.made)) for each in some})
                continue
            with torch.no_grad():
                made = conversion.values(lambda name: sources.whole(name, dtypes[name]))
            while made:
                value = made.pop(name := next(iter(made)))
                yield WeightChange(name, tuple(value.shape), value.dtype, value.reshape(-1))
        with body.at_rest():
            check()
            _begin(body)
            marks.restart(version, {name: _digest_of(body, tensors[name], known) for name, known in digests.items()})

    return WeightPatch(None if reason else since, version, reason, kinds, go_through())


def _in_batches(
    conversions: Iterable[Conversion], sparse_bytes: Callable[[Conversion], int | None]
) -> Iterator[list[Conversion]]:
    """Yield conversions in their order: those that are sparse some MiB at a time, and each other one alone."""
    batch, size = list[Conversion](), 0
    for conversion in conversions:
        own = sparse_bytes(conversion)
        if batch and (own is None or size + own > _TOGETHER):
            yield batch
            batch, size = [], 0
        if own is None:
            yield [conversion]
        else:
            batch, size = [*batch, conversion], size + own
    if batch:
        yield batch


def _why_unknown(since: str, *, is_begun: bool) -> str:
    if not since:
        return "no version was named"
    why = "changes since then are not known any more" if is_begun else "nobody had asked for versions before"
    warn_user(f"weights(since={since!r}): {why}, so the patch has all weights")
    return why


def _agree(body: StateBody, group: dist.ProcessGroup | None) -> None:
    """Have all ranks count alike, in one history."""
    marks = body.table.marks
    histories, changes, committed = zip(
        *gather((marks.draw_history(), marks.changes, marks.is_committed), group).values(), strict=True
    )
    marks.agree(histories[0], max(changes), is_committed=all(committed))


def _together(here: Sequence[int], tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> list[int]:
    """Return how much has changed of each tensor on all ranks; of copies what the first rank says."""
    of_all = [*gather(here, group).values()]
    each = zip(tensors.values(), zip(*of_all, strict=True), strict=True)
    return [_ALL if _ALL in said else sum(said) if isinstance(tensor, DTensor) else said[0] for tensor, said in each]


def _begin(body: StateBody) -> None:
    """Mark all 16-bit parameters with state whose changes are not marked yet from here on."""
    marks = body.table.marks
    new = {record.index for record in body.table if record.form is not MasterForm.ITSELF and body.has_state(record)}
    new = {index for index in new if not marks.has(index)}
    for record, run, on_device, is_born in _plain_runs(body, new):
        if not is_born:  # what was born has sums of what its last update left
            record.note_written(run, record.copy_of(run), body.kernels, on_device=on_device)
    for index in new:
        leaf = body.table[index].leaf
        part, wide = Part.of(leaf), leaf.numel() >= _INT32
        marks.begin(index, body.table[index].param.numel(), (part.first, wide) if part.is_rows else None)


def _note_edits(body: StateBody) -> None:
    """Mark what somebody has changed of plain parameters since their last updates."""
    has_marks = {record.index for record in body.table if body.table.marks.has(record.index)}
    for record, run, on_device, _ in _plain_runs(body, has_marks):
        body.table.note_edits(run, record.copy_of(run), body.kernels, on_device=on_device)


def _plain_runs(body: StateBody, indices: set[int]) -> Iterator[tuple[ParamRecord, Run, bool, bool]]:
    """Yield the runs of those parameters that are not split: others could change them unnoticed.

    With each comes whether its state is on a device, and whether it was born.
    """
    plain = {index for index in indices if parts_of(body.table[index].leaf) is None}
    for slot in body.slots:
        for run in slot.subgroup.runs:
            if run.param in plain:
                yield body.table[run.param], run, slot.home.on_device, slot.residency is not Residency.UNBORN
    for index in plain:
        if not body.table[index].is_placed:
            yield body.table[index], Run(index, 0, body.table[index].param.numel(), 0), False, False


def _digest_of(body: StateBody, tensor: torch.Tensor, known: object = None) -> object:
    """Return what differs when a tensor without marks has changed; `known` is that, if nothing has changed since."""
    record, marks = body.table.find(tensor), body.table.marks
    if record is not None and marks.has(record.index):
        return _Marked(marks.updates[record.index])
    if known is not None and not isinstance(known, _Marked):
        return known
    if (parts := parts_of(tensor)) is not None:
        return type(parts).__name__, parts.num_writes, 0 if record is None else marks.updates[record.index]
    return bits_of(tensor, body.kernels)


class _Marked(NamedTuple):
    """Stands for the bits of a tensor that has marks."""

    updates: int


class _Asked(NamedTuple):
    """Weights of which somebody wants to know what has changed, each in a dtype."""

    body: StateBody
    tensors: Mapping[str, torch.Tensor]
    dtypes: Mapping[str, torch.dtype]
    group: dist.ProcessGroup | None

    def num_changed(self, name: str, digest: object) -> int:
        """Return how many elements of this rank's part have changed; `_ALL` if nobody knows, or it is of no use."""
        tensor, marks = self.tensors[name], self.body.table.marks
        if not isinstance(digest, _Marked):
            return 0 if marks.digests.get(name) == digest else _ALL
        record, parts = self.body.table.of(tensor), parts_of(tensor)
        kept = self._kept(record)
        found = sum(indices.numel() for indices, _ in kept)
        found = found if kept else num_marked(marks.collected(record.index), record.param.numel())
        if parts is not None and parts.stored.form.dtype is not self.dtypes[name]:
            # Masters are finer than what is stored: they may have changed without it.
            return 0 if not found and marks.digests.get(name) == digest else _ALL
        is_plain = not isinstance(tensor, DTensor) or all(type(at) in (Shard, Replicate) for at in tensor.placements)
        return found if is_plain or not found else _ALL

    def sparse_bytes(self, name: str, num_changed: int) -> int | None:
        """Return the bytes of values with their indices, if they are fewer than those of all values."""
        numel, itemsize = self.tensors[name].numel(), self.dtypes[name].itemsize
        size = num_changed * (itemsize + self._index_dtype(name).itemsize)
        return size if num_changed != _ALL and size < numel * itemsize else None

    def sparse(self, names: Mapping[str, str]) -> Iterator[WeightChange]:
        """Yield the elements that have changed, of all ranks; `names` says what each is called. Collective."""
        of_all = gather(on_every_rank(partial(self._here, names), self.group), self.group)
        for name, published in names.items():
            tensor, found = self.tensors[name], [of_one.pop(name) for of_one in of_all.values()]
            indices, values = found[0]
            if len(found) > 1 and isinstance(tensor, DTensor):
                indices, values = (torch.cat(each) for each in zip(*found, strict=True))
                indices, order = indices.sort()
                first = torch.ones_like(indices, dtype=torch.bool)
                first[1:] = indices[1:] != indices[:-1]  # ranks may have copies
                indices, values = indices[first], values[order[first]]
            yield WeightChange(published, tuple(tensor.shape), self.dtypes[name], values, indices)

    def _kept(self, record: ParamRecord) -> list[Found]:
        marks = self.body.table.marks
        return marks.latest.of(record.index, record.param.numel(), marks.changes)

    def _index_dtype(self, name: str) -> torch.dtype:
        return torch.int32 if self.tensors[name].numel() < _INT32 else torch.int64

    def _here(self, names: Iterable[str]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return where this rank's part of each has changed, in row-major order of the whole tensor, and the values."""
        found = {}
        for name in names:
            tensor, dtype = self.tensors[name], self.dtypes[name]
            if kept := self._kept(self.body.table.of(tensor)):
                indices, values = kept[0] if len(kept) == 1 else (torch.cat(each) for each in zip(*kept, strict=True))
            elif (parts := parts_of(tensor)) is None:
                indices, values = self._found(name, flat_view(local_tensor(tensor.detach())))
            else:
                with parts.between_steps(), parts.held(change=False) as flat:
                    indices, values = self._found(name, flat)
            if dtype is torch.float16 and values.isinf().any() and (parts := parts_of(tensor)) and parts.is_in_state:
                too_large = "weights beyond 65504, which fp16 cannot hold; take it in bf16 or fp32"
                raise ValueError(f"{name} has {too_large}")
            found[name] = indices, checked_cast(name, values, dtype)
        return found

    def _found(self, name: str, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where a part has changed, and its values there; `flat` is its memory, perhaps with padding behind."""
        record, marks, dtype = self.body.table.of(self.tensors[name]), self.body.table.marks, self._index_dtype(name)
        numel, kernels, of_part = record.param.numel(), self.body.kernels, marks.collected(record.index)
        if (numbers := marks.latest.numbers[record.index]) is not None and is_host(flat.device):
            return kernels.marked(of_part, numel, flat[:numel], first=numbers[0], wide=numbers[1])
        part, (at, _) = Part.of(record.leaf), kernels.marked(of_part, numel)
        indices, values = part.in_rows(at), flat[at.to(flat.device)].cpu()
        if [*part.order] != sorted(part.order):
            indices, order = indices.sort()
            values = values[order]
        return indices.to(dtype), values
