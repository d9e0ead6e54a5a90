"""The model and the data that all contenders train with."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nvme_offload.perf.demo.corpus import load_corpus
from nvme_offload.perf.demo.model import ByteGPT
from nvme_offload.perf.demo.options import parse_size

CONTEXT = 128
SEED = 0


def model_of(size: str) -> ByteGPT:
    """The model of the demo, in fp32, with the same values each time it is made; it computes in bf16."""
    torch.manual_seed(SEED)
    return ByteGPT(parse_size(size), CONTEXT, torch.bfloat16)


def windows(tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless inputs and targets, int64 [tokens / CONTEXT, CONTEXT], the same each time."""
    text = torch.frombuffer(bytearray(load_corpus().train), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(SEED)
    while True:
        starts = torch.randint(len(text) - CONTEXT - 1, (tokens // CONTEXT,), generator=generator)
        rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
        yield rows[:, :-1], rows[:, 1:]
