"""A small GPT over bytes, in plain PyTorch, and the text that it learns: the source of Python's own library."""

import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the name that all PyTorch code uses
from torch import Tensor, nn

from nvme_offload.offload.units import round_up
from nvme_offload.optim.layout.master import TILE_NUMEL
from ..measure.command_line import KnobError

HEAD_SIZE = 64
VOCABULARY = 256
PAIRS = VOCABULARY * VOCABULARY
SUBGROUPS_WANTED = 16
STATE_BYTES_PER_PARAMETER = 12  # the most any precision needs: fp32 master weight, exp_avg and exp_avg_sq
SLACK_BYTES = 64 * 2**20
ROTARY_BASE = 10_000.0
SKIPPED_DIRECTORIES = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}
LEAST_FILES = 40
SEPARATOR = b"\0"
CONTEXT = 128  # bytes of a sequence


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The shape of the GPT, and how long it trains unless told otherwise."""

    layers: int
    width: int
    steps: int = 24

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters; `test_demo.py` compares it with the real module."""
        embeddings = (VOCABULARY + PAIRS + VOCABULARY) * self.width
        return embeddings + self.layers * (12 * self.width**2 + 2 * self.width) + self.width

    @property
    def sub_group_size(self) -> int:
        """Elements of one subgroup, so that a step has about sixteen and the pipeline can be seen."""
        return round_up(-(-self.num_parameters // SUBGROUPS_WANTED), TILE_NUMEL)

    @property
    def swap_bytes(self) -> int:
        """Space that the swap file may need, a little generous."""
        return self.num_parameters * STATE_BYTES_PER_PARAMETER * 21 // 20 + SLACK_BYTES


PRESETS = {
    "tiny": ModelSize(layers=2, width=64),
    "small": ModelSize(layers=6, width=384, steps=32),
    "medium": ModelSize(layers=12, width=768),
}


def parse_size(text: str) -> ModelSize:
    """Reads a preset's name, or layers and width as in `8x512`."""
    if text in PRESETS:
        return PRESETS[text]
    layers, cross, width = text.lower().partition("x")
    if not (cross and layers.isdecimal() and width.isdecimal()):
        raise KnobError("size", f"{text!r} is not {', '.join(PRESETS)} or LAYERSxWIDTH such as 8x512")
    size = ModelSize(layers=int(layers), width=int(width))
    if not 1 <= size.layers <= 96:
        raise KnobError("size", f"{text!r} asks for {size.layers} layers; 1 to 96 are possible")
    if not HEAD_SIZE <= size.width <= 8192 or size.width % HEAD_SIZE:
        raise KnobError("size", f"{text!r} asks for width {size.width}; choose multiples of {HEAD_SIZE} up to 8192")
    return size


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


class TransformerLayer(nn.Module):
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
        out: Tensor = x + self.feed_out(F.gelu(self.feed_in(self.feed_norm(x)), approximate="tanh"))
        return out


class ByteGPT(nn.Module):
    """Predicts the next byte of sequences of `context` bytes; `arithmetic`: precision of forward and backward.

    Besides the byte itself, a position embeds the pair of the previous byte and this one. The table of pairs is
    most of the parameters and costs no arithmetic: many parameters and quick learning on a small machine.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, size: ModelSize, context: int, arithmetic: torch.dtype) -> None:
        super().__init__()
        self.width = size.width
        self.arithmetic = arithmetic
        self.byte_embedding = nn.Embedding(VOCABULARY, size.width)
        self.pair_embedding = nn.Embedding(PAIRS, size.width)
        self.blocks = nn.ModuleList(TransformerLayer(size.width) for _ in range(size.layers))
        self.norm = Norm(size.width)
        self.head = Linear(size.width, VOCABULARY)
        frequencies = ROTARY_BASE ** (-torch.arange(0, HEAD_SIZE, 2, dtype=torch.float32) / HEAD_SIZE)
        angles = torch.arange(context, dtype=torch.float32)[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
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
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def load_corpus() -> bytes:
    """Read all modules of the interpreter's library but tests and installed packages, always in one order."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = sorted(path.as_posix() for path in files if not SKIPPED_DIRECTORIES & set(path.parts[:-1]))
    if len(kept) < LEAST_FILES:
        raise FileNotFoundError(
            f"{root} holds {len(kept)} Python source files, at least {LEAST_FILES} are needed: "
            "this interpreter comes without its library's source"
        )
    return SEPARATOR.join((root / name).read_bytes() for name in kept)


def batches(text: bytes, rows: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Give inputs and targets without end, int64 [rows, CONTEXT], the same for the same seed."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - CONTEXT - 1, (rows,), generator=generator)
        windows = torch.stack([data[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
        yield windows[:, :-1], windows[:, 1:]
