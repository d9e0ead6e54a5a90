"""The smallest changes with which a model fits that does not fit, found by the search that found that it does not."""

from bisect import bisect
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, takewhile

from .choosing import Chooser
from .lora import Lora
from .shape import ModelShape

_GRAIN = 128  # tokens
_MOST_RANKS = 4096
_CHUNKED = "a loss that is computed in chunks (Liger's fused linear cross entropy, TRL's use_liger_kernel)"
_LORA = Lora(16)
_MOMENTS = 'moments in %s ("optimizer": {"params": {"state_dtype": "%s"}}; it is another optimizer)'


def remedies(chooser: Chooser, shape: ModelShape) -> list[str]:
    """Return in words each single change with which the model fits; if there is none, a pair."""
    chunked = replace(chooser, chunked_loss=True)
    found = list(_single(chooser, shape))
    if not found and not chooser.chunked_loss:
        found = [f"{_CHUNKED} and {each}" for each in _single(chunked, shape)]
    return found


def _single(chooser: Chooser, shape: ModelShape) -> Iterator[str]:
    if tokens := _most_tokens(chooser, shape):
        yield f"{tokens:,} tokens in a micro-batch in place of {chooser.tokens:,}"
    if not chooser.chunked_loss and replace(chooser, chunked_loss=True).fits(shape):
        yield _CHUNKED
    narrow = ("bf16", "int8") if chooser.moments == "fp32" else ()
    if dtype := next((dtype for dtype in narrow if replace(chooser, moments=dtype).fits(shape)), None):
        yield _MOMENTS % (dtype, dtype)
    if shape.linears and not shape.adapters and chooser.fits(shape.with_lora(_LORA)):
        yield f"LoRA of rank {_LORA.rank} over the frozen model (--lora r={_LORA.rank})"
    if ranks := _fewest_ranks(chooser, shape):
        yield f"{ranks} ranks, on {ranks // chooser.machine.ranks_per_node} machines like this one"


def _most_tokens(chooser: Chooser, shape: ModelShape) -> int:
    """Return the most tokens of a micro-batch that fit, in steps of 128, and one sequence at least; 0: none do."""
    fewer = range(_GRAIN, chooser.tokens, _GRAIN)
    most = _GRAIN * bisect(fewer, False, key=lambda tokens: not replace(chooser, tokens=tokens).fits(shape))
    return most if most >= chooser.sequence else 0


def _fewest_ranks(chooser: Chooser, shape: ModelShape) -> int:
    """Return the fewest ranks that fit, twice as many each time, on more nodes of this kind; 0: no number does."""
    machine = chooser.machine
    more = takewhile(lambda ranks: ranks <= _MOST_RANKS, (machine.ranks << times for times in count(1)))
    fitting = (ranks for ranks in more if replace(chooser, machine=replace(machine, ranks=ranks)).fits(shape))
    return next(fitting, 0)
