"""Update state on a device, and sum squares there, by one kernel of Triton's each, in place of many operators.

A rule's own `update` is traced: each operator that it calls becomes a line of a kernel, each number an argument. So a
rule is written once, and another way through it is another kernel. Nothing is contracted to fused multiply-adds, root
and division are those of IEEE 754, and sums have the order of the CPU's kernels: so has every bit.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from struct import pack
from typing import Any

import torch
import triton
import triton.language as tl

from ..kernels import tile_weights
from ..layout.codes import BOTTOMS
from ..layout.dither import keys
from ..layout.flat import Origin
from ..layout.master import FORM_OF_DTYPE, MARKS_IN_WORD, TILE_NUMEL, num_tiles
from ..rules.rule import UpdateRule

_BLOCK = tl.constexpr(2048)
_TILE = tl.constexpr(TILE_NUMEL)
_WORD = tl.constexpr(MARKS_IN_WORD)
_LANES = tl.constexpr(32)
_AT_ONCE = tl.constexpr(32)
"""Loads of a lane that are under way at once."""
_CALLED = ("_widened", "_settled", "_word", "_dithered", "_decoded", "_store_coded")
"""Lines of a traced update call these."""

# ---- from a rule to lines of a kernel ----


def _kinds(form: str) -> tuple[Callable[..., _Value], Callable[..., _Value]]:
    """Return an operator with this text, and the one that changes its first operand."""

    def operator(value: _Value, *others: _Value | float) -> _Value:
        return value.trace.line(form.format(value, *map(value.trace.operand, others)))

    def in_place(value: _Value, *others: _Value | float) -> _Value:
        value.text = operator(value, *others).text
        return value

    return operator, in_place


class _Value:
    """Stands for an fp32 tensor while a rule's `update` is traced. What it does not have, rules may not call."""

    def __init__(self, trace: _Trace, text: str) -> None:
        self.trace = trace
        self.text = text

    def __str__(self) -> str:
        return self.text

    __add__, add_ = _kinds("{} + {}")
    __sub__, sub_ = _kinds("{} - {}")
    __mul__, mul_ = _kinds("{} * {}")
    __truediv__, _ = _kinds("tl.div_rn({}, {})")
    __gt__, _ = _kinds("{} > {}")
    __lt__, _ = _kinds("{} < {}")
    isnan, _ = _kinds("{0} != {0}")
    float, _ = _kinds("{}.to(tl.float32)")
    double, sqrt_ = _kinds("{}")[0], _kinds("tl.sqrt_rn({})")[1]  # rounded once: it needs no way by fp64
    copy_, masked_fill_ = _kinds("{1}")[1], _kinds("tl.where({1}, {2}, {0})")[1]

    def new_full(self, size: tuple[()], number: Any) -> Any:
        return number


class _Trace:
    """Keeps the lines of one update, and the numbers that they take, in their order."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.numbers: list[float] = []

    def line(self, text: str) -> _Value:
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return _Value(self, name)

    def operand(self, value: _Value | float) -> str:
        if isinstance(value, _Value):
            return value.text
        self.numbers.append(float(value))
        return f"numbers[{len(self.numbers) - 1}]"


def traced(rule: UpdateRule, scalars: Sequence[float]) -> tuple[Any, tuple[float, ...]]:
    """Return the rule's update as a function of Triton's, and the numbers that it takes in a step with these scalars.

    The function loads and stores states; it takes masters and gradients, fp32, and returns masters.
    """
    return _traced(rule, scalars, pack(f"{len(scalars)}d", *scalars))


@lru_cache
def _traced(rule: UpdateRule, scalars: Sequence[float], bits: bytes) -> tuple[Any, tuple[float, ...]]:
    """See `traced`. Most runs of a step have the same scalars; `bits` keep -0.0 from being taken for 0.0."""
    trace, dithers = _Trace(), rule.dithers
    loaded = "_widened(tl.load({} + at, mask=there, other=0))" if dithers else "tl.load({} + at, mask=there, other=0.0)"
    loaded = "_decoded({}, at, there, {}, {})" if rule.block else loaded
    kept = [_where_kept(rule, place) for place in range(len(rule.states))]
    master, grad = _Value(trace, "master"), _Value(trace, "grad")
    states = [trace.line(loaded.format(*where)) for where in kept]
    rule.update(master, grad, states, scalars)  # type: ignore[arg-type]
    if dithers:
        trace.lines.append(f"word = _word(at, origin, {rule.block})")
    for place, (state, where) in enumerate(zip(states, kept, strict=True)):
        if rule.block:
            dither = "word & 0x7FFFF" if place else "word >> 13"
            trace.lines.append(f"_store_coded({', '.join(where)}, {state}, {dither}, at, there)")
            continue
        stored = f"_dithered({state}, word, {place % 2})" if dithers else f"_settled({state})"
        trace.lines.append(f"tl.store({where[0]} + at, {stored}, mask=there)")
    return _compiled("\n    ".join([*trace.lines, f"return {master}\n"])), tuple(trace.numbers)


def _where_kept(rule: UpdateRule, place: int) -> tuple[str, ...]:
    """Return the arguments that say where a state is; in 8 bits with its exponents, their block and the bottom."""
    if not rule.block:
        return (f"states[{place}]",)
    bottom = BOTTOMS[rule.states[place].dtype]
    return f"states[{place}], states[{place + len(rule.states)}]", str(rule.block), str(bottom)


@cache
def _compiled(body: str) -> Any:
    """Return a function with these lines. Triton reads them again, by the name of their file."""
    name = f"update_{hashlib.sha256(body.encode()).hexdigest()[:16]}"
    source = f"def {name}(master, grad, states, at, there, origin, numbers):\n    {body}"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    made = {each: globals()[each] for each in ("__name__", "tl", *_CALLED)}
    exec(compile(source, name, "exec"), made)
    return triton.jit(made[name])


# ---- what the lines call ----


@triton.jit
def _widened(half):
    """Bits of bf16 as fp32."""
    return (half.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _settled(values):
    """Devices have NaNs of their own: give each the bits of the CPU's."""
    return tl.where(values != values, tl.full(values.shape, 0x7FC00000, tl.int32).to(tl.float32, bitcast=True), values)


@triton.jit
def _word(at, origin, BLOCK: tl.constexpr):  # noqa: N803
    """See `dither.words`."""
    begin, offset, before, between, sizes, strides = origin
    at += begin
    index = at * 0
    for dim in tl.static_range(len(sizes) - 1):
        index += at % sizes[dim] * strides[dim]
        at = at // sizes[dim]
    index += at * strides[len(sizes) - 1] + offset
    within = index % BLOCK if BLOCK else index * 0
    x = (index - within ^ before).to(tl.uint32)
    x = (x ^ x >> 16) * 0x7FEB352D
    x = (x ^ x >> 15 ^ between.to(tl.uint32)) * 0x846CA68B
    return (x ^ x >> 16) + within.to(tl.uint32) * 0x9E3779B9


@triton.jit
def _dithered(values, word, PLACE: tl.constexpr):  # noqa: N803
    """See `dither.store_rounded`."""
    bits = _settled(values).to(tl.int32, bitcast=True)
    return (bits + (word >> 16 * PLACE & 0xFFFF).to(tl.int32) >> 16).to(tl.int16)


@triton.jit
def _decoded(codes, exponents, at, there, BLOCK: tl.constexpr, BOTTOM: tl.constexpr):  # noqa: N803
    """See `codes.decoded`."""
    code = tl.load(codes + at, mask=there, other=0).to(tl.int32)
    level = code & 0x7F if BOTTOM == 121 << 23 else code
    is_low = (level < 16).to(tl.int32)
    share = (level + is_low * 16 + (BOTTOM >> 19) - 16 << 19).to(tl.float32, bitcast=True)
    share -= (is_low * BOTTOM).to(tl.float32, bitcast=True)
    exponent = tl.load(exponents + at // BLOCK, mask=there, other=0).to(tl.int32)
    value = share * tl.where(exponent == 255, 0x7FC00000, exponent << 23).to(tl.float32, bitcast=True)
    return value * tl.where(code < 0, -1.0, 1.0)  # in Triton 3.7 minus is a difference, which loses the sign of zero


@triton.jit
def _store_coded(codes, exponents, BLOCK: tl.constexpr, BOTTOM: tl.constexpr, values, dither, at, there):  # noqa: N803
    """See `codes.store_coded`."""
    bits = values.to(tl.int32, bitcast=True)
    rows: tl.constexpr = [values.shape[0] // BLOCK, BLOCK]
    magnitudes = tl.reshape(tl.where(there, bits & 0x7FFFFFFF, 0), rows)
    top = tl.max(magnitudes, 1)
    is_coded = (top >= 0x0D800000) & (top < 0x7E800000)
    own = top + 0x7FFFF >> 23
    factor = tl.where(is_coded, 254 - own << 23, 0).to(tl.float32, bitcast=True)
    share = magnitudes.to(tl.float32, bitcast=True) * factor[:, None]
    is_low = (share.to(tl.int32, bitcast=True) < BOTTOM).to(tl.int32)
    share += (is_low * BOTTOM).to(tl.float32, bitcast=True)
    dither = tl.reshape(dither.to(tl.int32), rows)
    level = (share.to(tl.int32, bitcast=True) + dither >> 19) - (BOTTOM >> 19) + 16 - is_low * 16
    level = tl.where(tl.reshape(bits, rows) < 0, level - 0x80, level) if BOTTOM == 121 << 23 else tl.maximum(level, 1)
    level = tl.reshape(tl.where(is_coded[:, None], level, 0), values.shape)
    tl.store(codes + at, level.to(codes.dtype.element_ty), mask=there)
    block = tl.min(tl.reshape(at, rows), 1) // BLOCK
    present = tl.max(tl.reshape(there.to(tl.int32), rows), 1) > 0
    exponent = tl.where(is_coded, own, tl.where(top >= 0x7E800000, 255, 0))
    tl.store(exponents + block, exponent.to(exponents.dtype.element_ty), mask=present)


@triton.jit
def _checksum(param, weights, start, numel):
    """See `OnAccelerator.tile_checksums`."""
    sums = tl.zeros([_BLOCK], tl.int64)
    for first in range(0, _TILE, _BLOCK):
        place = first + tl.arange(0, _BLOCK)
        bits = tl.load(param + start + place, mask=start + place < numel, other=0)
        sums += bits.to(tl.int64) * tl.load(weights + place)
    return tl.sum(sums, 0)


# ---- kernels: 16-bit floats come as their bits, int16 ----


@triton.jit
def _update_tile(
    UPDATE: tl.constexpr, FORM: tl.constexpr, BF16_GRAD: tl.constexpr,  # noqa: N803
    param, grad, master, states, checksums, weights, changed, numbers, grad_scale, origin, marks, numel,
    MARKS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Update one tile. `FORM` is that of the master; `MARKS` says whether elements that change are marked."""
    tile = tl.program_id(0).to(tl.int64)
    start = tile * _TILE
    if FORM != 2:
        differs = _checksum(param, weights, start, numel) != tl.load(checksums + tile)
        tl.atomic_add(changed, 1, mask=differs)
        sums = tl.zeros([_BLOCK], tl.int64)
    for first in range(0, _TILE, _BLOCK):
        place = first + tl.arange(0, _BLOCK)
        at = start + place
        there = at < numel
        value = tl.load(param + at, mask=there, other=0)
        was = value
        if FORM == 0:
            upper = value.to(tl.int32)
            lower = tl.load(master + at, mask=there, other=0).to(tl.int32) & 0xFFFF
            joined = upper - (lower >> 15) << 16 | lower
            value = tl.where(differs, upper << 16, joined).to(tl.float32, bitcast=True)
        elif FORM == 1:
            half = value.to(tl.float16, bitcast=True).to(tl.float32)
            value = tl.where(differs, half, tl.load(master + at, mask=there, other=0.0))
        gradient = tl.load(grad + at, mask=there, other=0)
        gradient = (_widened(gradient) if BF16_GRAD else gradient.to(tl.float32)) * grad_scale
        value = _settled(UPDATE(value, gradient, states, at, there, origin, numbers))
        if FORM == 2:
            tl.store(param + at, value, mask=there)
        else:
            is_nan = value != value
            bits = value.to(tl.int32, bitcast=True)
            if FORM == 0:
                half = tl.where(is_nan, bits, bits + 0x8000) >> 16
                tl.store(master + at, tl.where(is_nan, 0, bits).to(tl.int16), mask=there)
            else:
                half = tl.where(is_nan, 0x7E00, value.to(tl.float16).to(tl.int16, bitcast=True))
                tl.store(master + at, value, mask=there)
            half = half.to(tl.int16)
            if MARKS:
                flags = tl.reshape((there & (differs | (half != was))).to(tl.int64), [_BLOCK // _WORD, _WORD])
                word = (start + first) // _WORD + tl.arange(0, _BLOCK // _WORD)
                present = word * _WORD < numel
                known = tl.load(marks + word, mask=present, other=0)
                tl.store(marks + word, known | tl.sum(flags << tl.arange(0, _WORD)[None, :], 1), mask=present)
            tl.store(param + at, half, mask=there)
            sums += tl.where(there, half, 0).to(tl.int64) * tl.load(weights + place)
    if FORM != 2:
        tl.store(checksums + tile, tl.sum(sums, 0))


@triton.jit
def _sum_tile(grad, sums, numel, BF16_GRAD: tl.constexpr):  # noqa: N803
    """Sum the squares of one tile, in as many lanes as the CPU's kernel does, and in its order."""
    tile = tl.program_id(0).to(tl.int64)
    lanes = tl.zeros([_LANES], tl.float64)
    for first in range(0, tl.minimum(numel - tile * _TILE, _TILE), _LANES * _AT_ONCE):
        for number in tl.static_range(_AT_ONCE):
            at = tile * _TILE + first + number * _LANES + tl.arange(0, _LANES)
            value = tl.load(grad + at, mask=at < numel, other=0)
            value = (_widened(value) if BF16_GRAD else value).to(tl.float64)
            lanes += value * value
    for halving in tl.static_range(5):
        lanes = tl.sum(tl.reshape(lanes, [2, _LANES >> halving + 1]), 0)
    tl.store(sums + tile, tl.sum(lanes, 0))


# ---- their doors ----


def update_run(
    rule: UpdateRule,
    param: torch.Tensor,
    grad: torch.Tensor,
    master: torch.Tensor | None,
    states: Sequence[torch.Tensor],
    checksums: torch.Tensor | None,
    scalars: Sequence[float],
    grad_scale: float,
    *,
    origin: Origin | None,
    start: int,
    dither: Sequence[float],
    marks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Update one run of elements on its device by one kernel, with the bits of `KernelPool.update`.

    Tensors are as for `make_segment`, on that device, and of a rule with a native kernel; checksums are from
    `OnAccelerator.tile_checksums`. Nothing is changed if this raises.

    Returns:
        The number of tiles whose parameter no longer matched its checksum: int64, 0D, there.
    """
    changed = torch.zeros((), dtype=torch.int64, device=param.device)
    update, numbers = traced(rule, scalars)
    chance: tuple[Any, ...] = ()
    if origin is not None:
        before, between = (key - (key >> 31 << 32) for key in keys(origin, dither[0]))  # of one dtype: int32
        chance = start, origin.offset, before, between, origin.sizes[::-1], origin.strides[::-1]
    _update_tile[(num_tiles(param.numel()),)](
        update, FORM_OF_DTYPE[param.dtype].value, grad.dtype is torch.bfloat16,
        _bits(param), _bits(grad, but=torch.float16), param if master is None else _bits(master),
        tuple(map(_bits, states)), changed if checksums is None else checksums, tile_weights(param.device), changed,
        numbers, grad_scale, chance, changed if marks is None else marks, param.numel(), marks is not None,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return changed


def tile_sq_sums(grad: torch.Tensor) -> torch.Tensor:
    """Return the sums of squares of every tile of a flat gradient, fp64 [num_tiles] there: the CPU's."""
    sums = torch.empty(num_tiles(grad.numel()), dtype=torch.float64, device=grad.device)
    if len(sums):
        bits, is_bf16 = _bits(grad, but=torch.float16), grad.dtype is torch.bfloat16
        _sum_tile[(len(sums),)](bits, sums, grad.numel(), is_bf16, num_warps=1, enable_fp_fusion=False)
    return sums


def _bits(tensor: torch.Tensor, *, but: torch.dtype | None = None) -> torch.Tensor:
    return tensor.view(torch.int16) if tensor.element_size() == 2 and tensor.dtype is not but else tensor
