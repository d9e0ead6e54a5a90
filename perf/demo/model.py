"""A small GPT over bytes, in plain PyTorch."""

import math

import torch
import torch.nn.functional as F  # noqa: N812 - the name that all PyTorch code uses
from torch import Tensor, nn

from nvme_offload.perf.demo.options import HEAD_SIZE, PAIRS, VOCABULARY, ModelSize

ROTARY_BASE = 10_000.0


def rotary_tables(context: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary position embedding, each [context, HEAD_SIZE / 2]."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, HEAD_SIZE, 2, dtype=torch.float32) / HEAD_SIZE)
    angles = torch.arange(context, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns queries or keys by their position; `x` is [batch, heads, context, HEAD_SIZE]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Linear(nn.Linear):
    """A linear layer without bias whose arithmetic has the precision of its input, whatever the weight's is."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the input by the weight."""
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.RMSNorm):
    """A norm whose arithmetic has the precision of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the input."""
        assert self.weight is not None
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype))


class Block(nn.Module):
    """Attention and a feed-forward layer, each normalised before and added after."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = Norm(width)
        self.qkv = Linear(width, 3 * width)
        self.attention_out = Linear(width, width)
        self.feed_norm = Norm(width)
        self.feed_in = Linear(width, 4 * width)
        self.feed_out = Linear(4 * width, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Maps [batch, context, width] to the same shape."""
        batch, context, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, context, 3, width // HEAD_SIZE, HEAD_SIZE)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, context, width))
        feed = F.gelu(self.feed_in(self.feed_norm(x)), approximate="tanh")
        out: Tensor = x + self.feed_out(feed)
        return out


class ByteGPT(nn.Module):
    """Predicts the next byte.

    Besides the byte itself, a position embeds the pair of the previous byte and this one. The table of pairs is
    most of the parameters and costs no arithmetic: many parameters and quick learning on a small machine.

    Args:
        size: Layers and width.
        context: Positions of one sequence.
        arithmetic: The precision of forward and backward; that of the parameters is whatever they are converted to.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, size: ModelSize, context: int, arithmetic: torch.dtype) -> None:
        super().__init__()
        self.width = size.width
        self.arithmetic = arithmetic
        self.byte_embedding = nn.Embedding(VOCABULARY, size.width)
        self.pair_embedding = nn.Embedding(PAIRS, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.norm = Norm(size.width)
        self.head = Linear(size.width, VOCABULARY)
        cos, sin = rotary_tables(context)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                last = name.endswith(("attention_out.weight", "feed_out.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * size.layers) if last else 1.0))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy, in nats per byte, of `targets` after `inputs`, both [batch, context]."""
        previous = F.pad(inputs, (1, 0))[:, :-1]
        x = self.byte_embedding(inputs) + self.pair_embedding(previous * VOCABULARY + inputs)
        x = F.rms_norm(x.to(self.arithmetic), (self.width,))
        cos, sin = self.cos.to(self.arithmetic), self.sin.to(self.arithmetic)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
