"""Open the door to the native kernels: tensors in, checks, and nothing else.

All kernels are exact: every ISA, any number of threads and the twins in `optim.rules` give the same bits, whatever
``torch.set_flush_denormal`` says. They run without the GIL over tiles of ``TILE_NUMEL`` elements. They raise
ValueError for a wrong dtype or number of elements, or a tensor that is not contiguous on the CPU.
"""

import enum
import math
import os
from collections.abc import Sequence
from functools import cache
from typing import Self

import torch

import nvme_offload.optim._kernels as _kernels
from ._kernels import LoggedStep as LoggedStep
from ._kernels import Segment as Segment
from ._kernels import SummedMemory
from ._kernels import renew as renew
from .layout.flat import Origin
from .layout.master import FORM_OF_DTYPE, MARKS_IN_WORD, MASTER_DTYPE, TILE_NUMEL, num_marks, num_tiles
from .rules.rule import UpdateRule

REVISION = 1
"""The revision of the kernels' bits, which a run keeps. Count it up whenever an update gives other bits."""

CHUNK_NUMEL = 256 * TILE_NUMEL
"""Elements that a device works on at a time: seven fp32 tensors of them are needed besides."""

_INF_BITS, _QUIET_BIT, _UPPER, _MAGNITUDE = 0x7F800000, 0x00400000, -0x10000, 0x7FFFFFFF


class GradDtype(enum.IntEnum):
    """Dtype of a stored gradient."""

    FP32 = 0
    BF16 = 1
    FP16 = 2

    @classmethod
    def of(cls, grad: torch.Tensor) -> Self:
        """Return the number of a gradient's dtype."""
        if (found := _GRAD_DTYPES.get(grad.dtype)) is None:
            raise ValueError(f"grad is {grad.dtype}; the kernels take float32, bfloat16 and float16")
        return found


_GRAD_DTYPES = {torch.float32: GradDtype.FP32, torch.bfloat16: GradDtype.BF16, torch.float16: GradDtype.FP16}
ABSENT = -1
"""In a table of offsets: a gradient whose every bit is zero, a parameter that nobody had changed."""

_NOWHERE = _kernels.Origin(0, 0, 0, (), (), 0)
_RULES = {name: number for number, name in enumerate(_kernels.rules())}


def available_isas() -> tuple[str, ...]:
    """Return the names of the instruction sets that this machine runs, slowest first."""
    return tuple(_kernels.available_isas())


def make_segment(
    *,
    param: torch.Tensor,
    grad: torch.Tensor | None,
    master: torch.Tensor | None,
    states: Sequence[torch.Tensor],
    checksums: torch.Tensor | None,
    rule: UpdateRule,
    scalars: Sequence[float],
    grad_scale: float,
    log: Sequence[LoggedStep] = (),
    base: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    tail: torch.Tensor | None = None,
    marks: torch.Tensor | None = None,
    origin: Origin | None = None,
    start: int = 0,
) -> Segment:
    """Describe one run of elements to `KernelPool.update`.

    A segment holds addresses: keep the tensors alive. `renew` says what is new of many in a step.

    Args:
        param: bf16, fp16 or fp32 [numel]; its dtype decides the `MasterForm`.
        grad: fp32, bf16 or fp16 [numel]; None: there is no update but those of the `log`.
        master: uint16 [numel] beside bf16, fp32 [numel] beside fp16, None for an fp32 parameter.
        states: what is kept of the rule's states: see `UpdateRule.kept`. [numel] each; of exponents one for each block.
        checksums: int64 [num_tiles(numel)], of the parameter; the update keeps them. None: changes are not looked for.
        rule: one with a native kernel.
        scalars: of this step: see `StepScalars.of_kernel`.
        grad_scale: the gradient is multiplied by this: unscaling and clipping in one factor, negative to maximize.
        log: earlier updates that `master` and `states` lack, the oldest first. They come first, in the cache.
        base: the parameter as it was before those, which becomes what it was after them, in the dtype of ``param``.
            Not used without a log, nor beside fp16, whose master is whole.
        offsets: int64 [num_tiles(numel), 2]: gets where `KernelPool.update_and_log` has put each tile's gradient, and
            the parameter where somebody had changed it, bytes from the beginning of the entry. None: not logged.
        tail: gets a copy of ``param`` as the step leaves it; None: not wanted. May be ``base``.
        marks: int64 [num_marks(numel)], of 16-bit parameters: gets a bit for each element that changes; None: no marks.
        origin: of this rank's part of the parameter, for a rule that dithers.
        start: the run's first element in that part.
    """
    if param.dtype not in FORM_OF_DTYPE:
        raise ValueError(f"param is {param.dtype}; the kernels take bfloat16, float16 and float32")
    form, numel = FORM_OF_DTYPE[param.dtype], param.numel()
    master_dtype = MASTER_DTYPE[form]
    if (master is None) != (master_dtype is None):
        wanted = "an fp32 parameter is its own master" if master_dtype is None else f"{master_dtype} is needed"
        raise ValueError(f"master does not fit a parameter of {param.dtype}: {wanted}")
    kernel = _number_of(rule)
    return Segment(
        param=_address("param", param, param.dtype, numel),
        grad=0 if grad is None else _address("grad", grad, grad.dtype, numel),
        master=0 if master is None else _address("master", master, master_dtype, numel),
        states=_addresses_of(rule, states, numel),
        checksums=0 if checksums is None else _address("checksums", checksums, torch.int64, num_tiles(numel)),
        numel=numel,
        form=form,
        grad_dtype=GradDtype.FP32 if grad is None else GradDtype.of(grad),
        rule=kernel,
        grad_scale=grad_scale,
        scalars=scalars,
        log=log,
        base=0 if base is None else _address("base", base, param.dtype, numel),
        offsets=0 if offsets is None else _address("offsets", offsets, torch.int64, 2 * num_tiles(numel)),
        tail=0 if tail is None else _address("tail", tail, param.dtype, numel),
        marks=0 if marks is None else _address("marks", marks, torch.int64, num_marks(numel)),
        origin=_NOWHERE if origin is None else _kernels.Origin(origin.param, start, *origin[1:], rule.block),
    )


def _addresses_of(rule: UpdateRule, states: Sequence[torch.Tensor], numel: int) -> list[int]:
    if len(states) != len(rule.kept):
        raise ValueError(f"{rule.name} has {len(rule.kept)} states, not {len(states)}")
    pairs = zip(rule.kept, states, strict=True)
    return [_address(kept.name, own, kept.dtype, numel // kept.per) for kept, own in pairs]


def _number_of(rule: UpdateRule) -> int:
    kernel = f"{rule.kernel} with {'int8' if rule.block else 'bf16'} states" if rule.dithers else rule.kernel
    if kernel not in _RULES:
        raise ValueError(f"{kernel or rule.name} has no native kernel; those are of {', '.join(_RULES)}")
    return _RULES[kernel]


def make_logged_step(
    *,
    entry: torch.Tensor,
    offsets: torch.Tensor,
    numel: int,
    grad_dtype: torch.dtype,
    scalars: Sequence[float],
    grad_scale: float,
) -> LoggedStep:
    """Describe one update of a run of elements as `KernelPool.update_and_log` has kept it. Keep the tensors alive.

    Offsets that lead out of the entry are refused by the update.

    Args:
        entry: uint8 [size_bytes], at a multiple of 64 bytes: the offsets count from there.
        offsets: int64 [num_tiles(numel), 2], as that call has filled them in.
        numel: elements of the run.
        grad_dtype: of its gradient then.
        scalars: of that step.
        grad_scale: of that step.
    """
    if grad_dtype not in _GRAD_DTYPES:
        raise ValueError(f"grad_dtype is {grad_dtype}; the kernels take float32, bfloat16 and float16")
    return LoggedStep(
        entry=_address("entry", entry, torch.uint8, entry.numel()),
        entry_bytes=entry.numel(),
        offsets=_address("offsets", offsets, torch.int64, 2 * num_tiles(numel)),
        grad_dtype=_GRAD_DTYPES[grad_dtype],
        grad_scale=grad_scale,
        scalars=scalars,
    )


def num_marked(marks: torch.Tensor, numel: int) -> int:
    """Return how many of so many elements are marked; `marks` is int64 [num_marks(numel)]."""
    return _kernels.num_marked(available_isas()[-1], _address("marks", marks, torch.int64, num_marks(numel)), numel)


def ordered_sum(values: torch.Tensor) -> float:
    """Sum fp64 [n] in index order, so that a norm depends on nothing but the gradients."""
    return _kernels.ordered_sum(_address("values", values, torch.float64, values.numel()), values.numel())


class KernelPool:
    """Threads for the kernels, and the ISA they use.

    Threads start with the first call that has work for them. A forked child has none of them: there every call
    runs in the calling thread. Calls from several threads take turns.
    """

    def __init__(self, num_threads: int | None = None, *, isa: str | None = None) -> None:
        """Start nothing yet. `isa` is one of `available_isas`, by default the fastest.

        `num_threads` work on one call, the caller included; by default one per CPU that this process may run on. Ranks
        that share a machine should share its CPUs.
        """
        isas = available_isas()
        if isa is not None and isa not in isas:
            raise ValueError(f"isa {isa!r} is not available on this machine; available: {', '.join(isas)}")
        self._isa = isa or isas[-1]
        num_threads = len(os.sched_getaffinity(0)) if num_threads is None else num_threads
        self._threads = _kernels.ThreadPool(num_threads=num_threads)

    @property
    def isa(self) -> str:
        """The name of the instruction set in use."""
        return self._isa

    @property
    def num_threads(self) -> int:
        """Threads that work on one call, the caller included."""
        return self._threads.num_threads

    @property
    def num_workers(self) -> int:
        """Threads of the pool that run now; 0 before the first call and in a forked child."""
        return self._threads.num_workers

    def end_workers(self) -> None:
        """End the threads. The pool stays usable: a later call starts them again."""
        self._threads.end_workers()

    def update(
        self, segments: Sequence[Segment], summed: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    ) -> list[int]:
        """Update parameters, masters and states in place: apply the log, then one step for every gradient.

        A tile whose parameter no longer matches its checksum was changed by somebody else: before the update its
        master is made from the parameter as found. ValueError: a segment has a null or unaligned address, or an
        unknown rule, form or dtype.

        Args:
            segments: made by `make_segment`.
            summed: memory, 1D int32, and what gets its `tile_checksums`, as they are after the update: int64
                [num_tiles(memory)]. They are taken on the way, while the memory is in the cache.

        Returns:
            The number of such tiles, per segment.
        """
        return _kernels.update(self._threads, self._isa, segments, 0, 0, [_summed(*pair) for pair in summed])[0]

    def update_and_log(self, segments: Sequence[Segment], entry: torch.Tensor) -> tuple[list[int], int]:
        """Update, and keep what it takes to do the same again: of each tile its gradient, unless every bit is zero.

        A tile that was found changed is kept with its parameter as found. In which order tiles lie in the entry is up
        to the threads; `offsets` of the segments say where, and those without offsets are not kept.

        Args:
            segments: as in `update`; each with its `offsets`.
            entry: uint8 [size_bytes], at a multiple of 64 bytes.

        Returns:
            As `update`, and the bytes that the entry takes. More than it has: the update is done, but the entry and
            the offsets are of no use.
        """
        address = _address("entry", entry, torch.uint8, entry.numel())
        return _kernels.update(self._threads, self._isa, segments, address, entry.numel(), [])

    def split(
        self, src: torch.Tensor, *, out: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Split fp32, any shape, into its two halves, losslessly.

        Returns:
            hi, bf16: the nearest (ties away from zero); lo, uint16: what leads back. A NaN becomes a quiet NaN with
                ``lo = 0``. Both have the shape of ``src``.
        """
        numel = src.numel()
        address = _address("src", src, torch.float32, numel)
        hi, lo = out or (torch.empty_like(src, dtype=torch.bfloat16), torch.empty_like(src, dtype=torch.uint16))
        hi_address = _address("hi", hi, torch.bfloat16, numel)
        lo_address = _address("lo", lo, torch.uint16, numel)
        _kernels.split(self._threads, self._isa, address, hi_address, lo_address, numel)
        return hi, lo

    def join(self, hi: torch.Tensor, lo: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Join bf16 and uint16, the halves that `split` made, to fp32 in the shape of ``hi``."""
        numel = hi.numel()
        hi_address = _address("hi", hi, torch.bfloat16, numel)
        lo_address = _address("lo", lo, torch.uint16, numel)
        dst = torch.empty_like(hi, dtype=torch.float32) if out is None else out
        dst_address = _address("out", dst, torch.float32, numel)
        _kernels.join(self._threads, self._isa, hi_address, lo_address, dst_address, numel)
        return dst

    def joined(self, stored: torch.Tensor, rest: torch.Tensor | None) -> torch.Tensor:
        """Return the fp32 master weights of which `divide` makes these: a new tensor, in the shape of ``stored``.

        Without a ``rest`` 16-bit weights are the masters.
        """
        if rest is None:
            return stored.to(torch.float32, copy=True)
        return self.join(stored, rest) if rest.dtype is torch.uint16 else rest.view(stored.shape).clone()

    def divide(self, master: torch.Tensor, stored: torch.Tensor, rest: torch.Tensor | None) -> None:
        """Put fp32 master weights where they are kept: ``stored`` is computed with, ``rest`` has `MASTER_DTYPE`."""
        if rest is None:
            stored.copy_(master)
        elif rest.dtype is torch.uint16:
            self.split(master, out=(stored, rest))
        else:
            rest.copy_(master)
            stored.copy_(self.fp32_to_fp16(master))

    def fp16_to_fp32(self, src: torch.Tensor) -> torch.Tensor:
        """Widen fp16 exactly, in the same shape."""
        dst = torch.empty_like(src, dtype=torch.float32)
        address = _address("src", src, torch.float16, src.numel())
        _kernels.fp16_to_fp32(self._threads, self._isa, address, dst.data_ptr(), src.numel())
        return dst

    def fp32_to_fp16(self, src: torch.Tensor) -> torch.Tensor:
        """Round fp32 to the nearest fp16, ties to even, in the same shape."""
        dst = torch.empty_like(src, dtype=torch.float16)
        address = _address("src", src, torch.float32, src.numel())
        _kernels.fp32_to_fp16(self._threads, self._isa, address, dst.data_ptr(), src.numel())
        return dst

    def tile_checksums(self, tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a checksum of the bits of every tile, int64 [num_tiles]; one changed 32-bit word always shows.

        Each has 64 hash bits (torch.uint64 lacks most operations). The tensor has any dtype and shape.
        """
        numel = tensor.numel()
        address = _address("tensor", tensor, tensor.dtype, numel)
        sums = torch.empty(num_tiles(numel), dtype=torch.int64, device="cpu") if out is None else out
        sums_address = _address("out", sums, torch.int64, num_tiles(numel))
        _kernels.checksum(self._threads, self._isa, address, tensor.element_size(), numel, sums_address)
        return sums

    def mark_changed(self, before: torch.Tensor, after: torch.Tensor, marks: torch.Tensor) -> None:
        """Mark the elements whose bits differ: of 16 bits each [numel]; `marks` is int64 [num_marks(numel)]."""
        numel = after.numel()
        was, now = (_address(name, each, after.dtype, numel) for name, each in (("before", before), ("after", after)))
        _kernels.mark_changed(
            self._threads, self._isa, was, now, numel, _address("marks", marks, torch.int64, num_marks(numel))
        )

    def marked(
        self, marks: torch.Tensor, numel: int, source: torch.Tensor | None = None, *, first: int = 0, wide: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where elements are marked of so many, and the values there.

        Args:
            marks: int64 [num_marks(numel)].
            numel: elements that have marks.
            source: 16-bit [numel]; None: no values are wanted.
            first: the number of the first element.
            wide: whether the numbers are int64; else int32.

        Returns:
            The numbers [`num_marked`], in order, and as many values, or none.
        """
        count = num_marked(marks, numel)
        indices = torch.empty(count, dtype=torch.int64 if wide else torch.int32, device="cpu")
        dtype = torch.int16 if source is None else source.dtype
        values = torch.empty(0 if source is None else count, dtype=dtype, device="cpu")
        there = 0 if source is None else _address("source", source, dtype, numel)
        _kernels.marked(
            self._threads, self._isa, marks.data_ptr(), numel, first, there, indices.data_ptr(), indices.itemsize,
            values.data_ptr(), count,
        )  # fmt: skip
        return indices, values

    def tile_sq_sums(self, *grads: torch.Tensor) -> torch.Tensor:
        """Return the sums of squares of every tile, fp64 [num_tiles], those of one gradient after the other."""
        numels = [grad.numel() for grad in grads]
        dtypes = [GradDtype.of(grad) for grad in grads]
        addresses = [_address("grad", grad, grad.dtype, numel) for grad, numel in zip(grads, numels, strict=True)]
        sums = torch.empty(sum(map(num_tiles, numels)), dtype=torch.float64, device="cpu")
        _kernels.grad_sq_sums(self._threads, self._isa, addresses, dtypes, numels, sums.data_ptr())
        return sums


def _summed(memory: torch.Tensor, sums: torch.Tensor) -> SummedMemory:
    numel = memory.numel()
    address = _address("summed memory", memory, torch.int32, numel)
    return SummedMemory(
        address=address,
        size_bytes=numel * memory.element_size(),
        sums=_address("sums", sums, torch.int64, num_tiles(numel)),
    )


def _address(name: str, tensor: torch.Tensor, dtype: torch.dtype | None, numel: int) -> int:
    """Return the address of a tensor that a kernel can take, or raise ValueError saying what is wrong with it."""
    if tensor.is_cpu and tensor.dtype is dtype and tensor.numel() == numel and tensor.is_contiguous():
        return tensor.data_ptr()
    if not tensor.is_cpu:
        raise ValueError(f"{name} is on {tensor.device}; the kernels run on the CPU")
    if tensor.dtype is not dtype:
        raise ValueError(f"{name} is {tensor.dtype}; it must be {dtype}")
    if tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} elements; it must have {numel}")
    raise ValueError(f"{name} is not contiguous; pass tensor.contiguous() or write the result back yourself")


class OnAccelerator:
    """Does what `KernelPool` does to parameters, in torch's operators: for memory of a device."""

    def tile_checksums(self, param: torch.Tensor) -> torch.Tensor:
        """Return a checksum of each tile; it differs from the kernel's.

        Each element counts with an odd weight of its own, modulo 2^64: that a single one changed always shows, of
        other changes about one in 2^64 does not.
        """
        weights = tile_weights(param.device)
        sums = []
        for start in range(0, param.numel(), CHUNK_NUMEL):
            bits = param[start : start + CHUNK_NUMEL].view(torch.int16).to(torch.int64)
            whole = bits.numel() // TILE_NUMEL * TILE_NUMEL
            sums.append((bits[:whole].view(-1, TILE_NUMEL) * weights).sum(1))
            if whole < bits.numel():
                sums.append((bits[whole:] * weights[: bits.numel() - whole]).sum(0, keepdim=True))
        return torch.cat(sums) if sums else torch.empty(0, dtype=torch.int64, device=param.device)

    def mark_changed(self, before: torch.Tensor, after: torch.Tensor, marks: torch.Tensor) -> None:
        """Mark the elements whose bits differ; see `KernelPool.mark_changed`."""
        differ = before.view(torch.int16) != after.view(torch.int16)
        padded = torch.nn.functional.pad(differ, (0, marks.numel() * MARKS_IN_WORD - differ.numel()))
        places = torch.arange(MARKS_IN_WORD, device=marks.device)
        marks |= (padded.view(-1, MARKS_IN_WORD).to(torch.int64) << places).sum(1)

    def join(self, hi: torch.Tensor, lo: torch.Tensor) -> torch.Tensor:
        """Join bf16 and uint16 [numel], which `divide` made, to fp32."""
        upper = hi.view(torch.int16).to(torch.int32)
        lower = lo.view(torch.int16).to(torch.int32) & 0xFFFF
        return ((upper - (lower >> 15)) << 16 | lower).view(torch.float32)

    def divide(self, master: torch.Tensor, param: torch.Tensor, lower: torch.Tensor | None) -> None:
        """Round to the nearest: for bf16 ties away from zero, for fp16 to even."""
        if lower is None:
            return
        if lower.dtype is not torch.uint16:
            param.copy_(master)
            param.masked_fill_(master.isnan(), math.nan)
            return
        bits = master.view(torch.int32)
        is_nan = (bits & _MAGNITUDE) > _INF_BITS
        upper = torch.where(is_nan, (bits | _QUIET_BIT) & _UPPER, bits + 0x8000) >> 16
        param.view(torch.int16).copy_(upper)
        lower.view(torch.int16).copy_(bits.masked_fill(is_nan, 0))  # conversion keeps the lower half


@cache
def tile_weights(device: torch.device) -> torch.Tensor:
    """Return odd numbers without a pattern, int64 [TILE_NUMEL]: of splitmix64, but for the sign in its shifts."""
    mixed = torch.arange(1, TILE_NUMEL + 1, dtype=torch.int64, device="cpu") * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return (mixed ^ (mixed >> 31) | 1).to(device)
