"""Keep states in codes of 8 bits with an exponent for each block, with the same bits whoever does it and wherever.

A code is a small float: 16 levels for each octave below the block's largest magnitude, 7 octaves of a signed state and
15 of a mean of squares, and 16 levels below these, down to 0. It is rounded by chance as bf16 is, and exact otherwise.
A mean of squares is never 0 beside others that are not, or a first moment would be divided by eps alone there.
docs/numerics.md says all of it; `Code` in optim/src/coded.hpp does the same.
"""

from collections.abc import Sequence

import torch

from .dither import store_rounded

_LEAST, _MOST = 0x0D800000, 0x7E800000
"""Bits of 2^-100 and 2^126: a block whose largest magnitude is below the one is zero, from the other on it is NaN."""
_SHIFT = 19
BOTTOMS = {torch.int8: 121 << 23, torch.uint8: 113 << 23}
"""Bits of the least octave, where the largest is that of 1."""


def decoded(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return the values of codes, int8 or uint8 [numel], with the exponents of their blocks, uint8: fp32 [numel]."""
    bottom = BOTTOMS[codes.dtype]
    levels = codes.int() & (0x7F if codes.dtype is torch.int8 else 0xFF)
    is_low = (levels < 16).int()
    shares = (levels + is_low * 16 + ((bottom >> _SHIFT) - 16) << _SHIFT).view(torch.float32)
    shares -= (is_low * bottom).view(torch.float32)
    scales = exponents.int()
    scales = torch.where(scales == 255, 0x7FC00000, scales << 23).view(torch.float32)
    values = (shares.view(len(exponents), -1) * scales[:, None]).view(-1)
    return torch.where(codes < 0, -values, values)


def store_coded(
    codes: torch.Tensor, exponents: torch.Tensor, values: torch.Tensor, dither: torch.Tensor | int = 1 << _SHIFT - 1
) -> None:
    """Put values, fp32 [numel], into codes and exponents. `dither` has 19 bits: by itself it gives the nearest code."""
    bottom = BOTTOMS[codes.dtype]
    bits = values.contiguous().view(torch.int32)
    magnitudes = (bits & 0x7FFFFFFF).view(len(exponents), -1)
    top = magnitudes.amax(1)
    is_coded = (top >= _LEAST) & (top < _MOST)
    own = top + (1 << _SHIFT) - 1 >> 23
    factors = torch.where(is_coded, 254 - own << 23, 0).view(torch.float32)
    shares = (magnitudes.view(torch.float32) * factors[:, None]).view(-1)
    is_low = (shares < 2.0 ** ((bottom >> 23) - 127)).int()
    shares += (is_low * bottom).view(torch.float32)
    levels = (shares.view(torch.int32) + dither >> _SHIFT) - (bottom >> _SHIFT) + 16 - is_low * 16
    levels = torch.where(bits < 0, levels - 0x80, levels) if codes.dtype is torch.int8 else levels.clamp(min=1)
    codes.copy_((levels.view(len(exponents), -1) * is_coded[:, None]).view(-1))
    exponents.copy_(torch.where(is_coded, own, (top >= _MOST) * 255))


def block_of(kept: Sequence[torch.Tensor], numel: int) -> int:
    """Return how many elements share an exponent, where states are kept in codes; else 0."""
    return numel // len(kept[-1]) if kept and kept[0].dtype in BOTTOMS else 0


def loaded(kept: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return states, fp32 [numel] each, of what is kept of them, see `UpdateRule.kept`: in fp32 it is them."""
    if kept and kept[0].dtype in BOTTOMS:
        count = len(kept) // 2
        return [decoded(*pair) for pair in zip(kept[:count], kept[count:], strict=True)]
    return [state.float() for state in kept]


def store(kept: Sequence[torch.Tensor], states: Sequence[torch.Tensor], words: torch.Tensor | None) -> None:
    """Put states where they are kept; `words` are those of `dither`, for states that have fewer bits than 32."""
    for number, (own, values) in enumerate(zip(kept, states, strict=False)):
        if words is None or own.dtype is torch.float32:
            own.copy_(values)  # it may be the same memory
        elif own.dtype is torch.bfloat16:
            store_rounded(own, values, words, number)
        else:
            store_coded(own, kept[len(states) + number], values, _dither(words, number))


def _dither(words: torch.Tensor, number: int) -> torch.Tensor:
    """Return 19 bits of each word: the upper ones for the first state, the lower ones for the second."""
    return (words >> 32 - _SHIFT if number == 0 else words & (1 << _SHIFT) - 1).int()
