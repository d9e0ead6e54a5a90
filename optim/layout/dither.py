"""Round states to bf16 by chance, with the same bits whoever does it and wherever.

A value between two neighbours becomes the upper one as often as it lies above the lower one. So changes of less than
half a last place count in the mean, which rounding to the nearest loses (Connolly, Higham and Mary, "Stochastic
rounding and its probabilistic backward error analysis", 2021). Chance is a hash of the parameter's number, its step and
the element's index in the whole parameter: it has no state and no order, as in Salmon et al., "Parallel random numbers:
as easy as 1, 2, 3", 2011. The hash is lowbias32 (Wellons, "Prospecting for hash functions", 2018) with a second key in
its middle; one half of it is for the first state, the other for the second. States in codes of 8 bits hash once for
each block, and count on from there by the golden ratio, as Weyl's sequence does: no word is likelier than another.
`Chance` in optim/src/loops.cpp does the same.
"""

import math
from typing import TypeVar

import torch

from .flat import Origin

_WORD = 2**32 - 1
_BETWEEN = 0x9E3779B9
"""From a word to the next one of a block: 2^32 over the golden ratio, which is odd."""


def words(origin: Origin, start: int, stop: int, step: float, device: torch.device, block: int = 0) -> torch.Tensor:
    """Return 32 random bits for each element from `start` to `stop` of a part, int64 [stop - start].

    With a `block` only the first element of each is hashed, see above.
    """
    at = torch.arange(start, stop, dtype=torch.int64, device=device)
    index = torch.full_like(at, origin.offset)
    for size, stride in zip(reversed(origin.sizes), reversed(origin.strides), strict=True):
        index += at % size * stride
        at //= size
    before, between = keys(origin, step)
    within = index % block if block else 0
    return _rest(_halfway(index - within & _WORD ^ before) ^ between) + within * _BETWEEN & _WORD


def keys(origin: Origin, step: float) -> tuple[int, int]:
    """Return what the hash of an index is keyed with, before its first half and between both: 32 bits each."""
    before = _mixed(_mixed(origin.param) + int(step) & _WORD)
    return before, _mixed(before + origin.param & _WORD)


def store_rounded(state: torch.Tensor, values: torch.Tensor, words: torch.Tensor, number: int) -> None:
    """Put fp32 values into a bf16 state, which is the first of its rule (`number` 0), the second, and so on."""
    bits = values.masked_fill(values.isnan(), math.nan).view(torch.int32)
    state.view(torch.int16).copy_(bits + halves(words, number) >> 16)


def halves(words: torch.Tensor, number: int) -> torch.Tensor:
    """Return the 16 bits of each word that are for the state with this number, int32."""
    return (words >> 16 * (number % 2) & 0xFFFF).int()


Bits = TypeVar("Bits", int, torch.Tensor)


def _mixed(x: int) -> int:
    return _rest(_halfway(x))


def _halfway(x: Bits) -> Bits:
    x = (x ^ x >> 16) * 0x7FEB352D & _WORD
    return x ^ x >> 15


def _rest(x: Bits) -> Bits:
    x = x * 0x846CA68B & _WORD
    return x ^ x >> 16
