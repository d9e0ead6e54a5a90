"""LoRA over a base that no memory holds, read in place from any safetensors folder, or from one of random bytes.

    python lora_large.py --model DIR --nvme-path /mnt/nvme0
    python lora_large.py --model DIR --fake gpt-oss-120b --layers 4 --nvme-path /mnt/nvme0

The base may be a Llama-like model, or packed as gpt-oss is (MXFP4). Attention and experts have the shapes and products
of these models, without positions and sinks: what this shows is bytes, seconds and memory, not a good model.
"""

import argparse
import json
import re
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from nvme_offload import initialize

FAKES = {
    "gpt-oss-120b": {"hidden_size": 2880, "num_local_experts": 128, "num_hidden_layers": 36, "vocab_size": 201088},
    "gpt-oss-20b": {"hidden_size": 2880, "num_local_experts": 32, "num_hidden_layers": 24, "vocab_size": 201088},
    "tiny": {"hidden_size": 64, "num_local_experts": 4, "num_hidden_layers": 2, "vocab_size": 256},
}
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "U8": torch.uint8}
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ADAPTED = ("q_proj", "v_proj")
Kinds = Mapping[str, tuple[list[int], torch.dtype]]
"""Shape and dtype of each tensor, by name."""


def unpacked(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix [rows, 32 * groups] of MXFP4 codes [rows, groups, 16] and scales [rows, groups], both uint8."""
    table = torch.tensor([*FP4, *(-value for value in FP4)], dtype=dtype, device=blocks.device)
    values = table[torch.stack((blocks & 15, blocks >> 4), dim=-1).int()]
    powers = torch.exp2(scales.to(torch.float32) - 127).to(dtype)
    return (values.flatten(-2) * powers[..., None]).flatten(-2)


class PackedProduct(torch.autograd.Function):
    """A product with packed weights, which keeps these for backward and never what they are unpacked to.

    The weights are frozen, so backward needs nothing else.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return the product [tokens, rows]."""
        ctx.save_for_backward(blocks, scales)
        return hidden @ unpacked(blocks, scales, hidden.dtype).T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        """Return the gradient of the input."""
        return grad @ unpacked(*ctx.saved_tensors, grad.dtype), None, None


def packed_linear(hidden: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply [tokens, columns] with the transpose of packed weights: see `PackedProduct`."""
    return PackedProduct.apply(hidden, blocks, scales)  # type: ignore[no-any-return]


class Tree(nn.Module):
    """Frozen parameters under the names that files have for them; a call multiplies, normalizes or looks up."""

    def __init__(self, kinds: Kinds) -> None:
        super().__init__()
        for name, (shape, dtype) in kinds.items():
            *path, last = name.split(".")
            place: nn.Module = self
            for part in path:
                if not hasattr(place, part):
                    place.add_module(part, (Experts if part == "experts" else Tree)({}))
                place = getattr(place, part)
            place.register_parameter(last, nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))

    def __getattr__(self, name: str) -> Any:
        """Return a part; the files may have others than this script knows."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            known = "layers are as those of Llama or gpt-oss"
            raise AttributeError(f"the files have no {name} where this script looks for one: its {known}") from None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Do what the shape of the weight says."""
        if not given.is_floating_point():
            return functional.embedding(given, self.weight)
        weight = self.weight.to(given.dtype)
        if weight.ndim == 1:
            return functional.rms_norm(given, given.shape[-1:], weight)
        return functional.linear(given, weight, self.bias.to(given.dtype) if hasattr(self, "bias") else None)


class Table(Tree):
    """An embedding or a head: gathered by itself."""


class Experts(Tree):
    """Packed weights of all experts, as gpt-oss has them."""

    def forward(self, hidden: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return the sum of each token's experts, one expert unpacked at a time."""
        result = torch.zeros_like(hidden)
        for expert in chosen.unique().tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            both = self.product("gate_up_proj", hidden[token], expert)
            gate, up = both[:, ::2], both[:, 1::2]
            out = self.product("down_proj", (up + 1) * gate * torch.sigmoid(1.702 * gate), expert)
            result = result.index_add(0, token, out * weights[token, place, None])
        return result

    def product(self, name: str, hidden: torch.Tensor, expert: int) -> torch.Tensor:
        """Multiply with one expert's weights."""
        codes, scales, bias = (getattr(self, f"{name}_{part}")[expert] for part in ("blocks", "scales", "bias"))
        return packed_linear(hidden, codes, scales) + bias.to(hidden.dtype)


class Adapter(nn.Module):
    """A product of two thin matrices, which are trained."""

    def __init__(self, rows: int, columns: int, rank: int) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.empty(rank, columns)), nn.Parameter(torch.empty(rows, rank))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what is added to the product with the frozen matrix."""
        return hidden @ self.down.T.to(hidden.dtype) @ self.up.T.to(hidden.dtype)


class Layer(Tree):
    """Attention with adapters at its queries and values, and experts or a dense product."""

    def __init__(self, kinds: Kinds, config: Mapping[str, int], rank: int) -> None:
        super().__init__(kinds)
        self.heads = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
        self.experts_of_token = config.get("num_experts_per_tok", 4)
        self.skips_experts = False
        shapes = {name: kinds[f"self_attn.{name}.weight"][0] for name in ADAPTED}
        self.adapters = nn.ModuleDict({name: Adapter(*shape, rank) for name, shape in shapes.items()})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the layer's output [batch, tokens, width]."""
        hidden = hidden + self.attention(self.input_layernorm(hidden))
        normed, mlp = self.post_attention_layernorm(hidden), self.mlp
        if not hasattr(mlp, "experts"):
            return hidden + mlp.down_proj(functional.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))
        if self.skips_experts:
            return hidden
        flat = normed.flatten(0, 1)
        weights, chosen = mlp.router(flat).topk(self.experts_of_token)
        return hidden + mlp.experts(flat, weights.softmax(-1), chosen).view_as(hidden)

    def attention(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return causal attention, with the adapters added to its projections."""
        parts = []
        for name, heads in zip(("q_proj", "k_proj", "v_proj"), (self.heads[0], *self.heads[1:] * 2), strict=True):
            part = getattr(self.self_attn, name)(hidden)
            if name in self.adapters:
                part = part + self.adapters[name](hidden)
            parts.append(part.unflatten(-1, (heads, -1)).transpose(1, 2))
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        return self.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Layers between an embedding and a head, as the files name them."""

    def __init__(self, kinds: Kinds, config: Mapping[str, int], rank: int) -> None:
        super().__init__()
        layers: dict[int, dict[str, Any]] = {}
        for name, kind in kinds.items():
            if found := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name):
                layers.setdefault(int(found[1]), {})[found[2]] = kind
        self.model = Tree({"norm.weight": kinds["model.norm.weight"]})
        self.model.embed_tokens = Table({"weight": kinds["model.embed_tokens.weight"]})
        self.model.layers = nn.ModuleList(Layer(layers[number], config, rank) for number in sorted(layers))
        self.lm_head = Table({"weight": kinds["lm_head.weight"]}) if "lm_head.weight" in kinds else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the next token."""
        hidden = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            hidden = layer(hidden)
        logits = (self.lm_head or self.model.embed_tokens)(self.model.norm(hidden))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def write_fake(folder: Path, name: str, layers: int | None) -> None:
    """Write a folder of random bytes with the layer sizes of a model, a layer at a time."""
    sizes = dict(FAKES[name])
    sizes["num_hidden_layers"] = layers or sizes["num_hidden_layers"]
    width, experts = sizes["hidden_size"], sizes["num_local_experts"]
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64} if width > 64 else {}
    config = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        **heads,
        **sizes,
        "num_experts_per_tok": 4,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape).mul_(0.02).bfloat16()

    queries, keys = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"q_proj": (queries, width), "k_proj": (keys, width), "v_proj": (keys, width), "o_proj": (width, queries)}
    ends = {
        "model.embed_tokens.weight": matrix(sizes["vocab_size"], width),
        "model.norm.weight": torch.ones(width, dtype=torch.bfloat16),
    }
    files = {0: {**ends, "lm_head.weight": matrix(sizes["vocab_size"], width)}}
    last = sizes["num_hidden_layers"]
    for number in range(last + 1):
        tensors = files.pop(number, {})
        if number:
            at = f"model.layers.{number - 1}."
            for part, shape in shapes.items():
                tensors |= {
                    f"{at}self_attn.{part}.weight": matrix(*shape),
                    f"{at}self_attn.{part}.bias": matrix(shape[0]),
                }
            for norm in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{at}{norm}.weight"] = torch.ones(width, dtype=torch.bfloat16)
            tensors |= {f"{at}mlp.router.weight": matrix(experts, width), f"{at}mlp.router.bias": matrix(experts)}
            for part, rows in (("gate_up_proj", 2 * width), ("down_proj", width)):
                codes = torch.randint(-(1 << 63), (1 << 63) - 1, (experts, rows, width // 32, 2)).view(torch.uint8)
                scales = torch.randint(118, 121, (experts, rows, width // 32), dtype=torch.uint8)
                named = {"blocks": codes, "scales": scales, "bias": matrix(experts, rows)}
                tensors |= {f"{at}mlp.experts.{part}_{end}": tensor for end, tensor in named.items()}
        save_file(tensors, folder / f"layer-{number:05d}.safetensors")


def kinds_in(folder: Path) -> dict[str, tuple[list[int], torch.dtype]]:
    """Return shape and dtype of each tensor in the files of a folder, by name, from the headers alone."""
    kinds = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        kinds.update(
            {name: (one["shape"], DTYPES[one["dtype"]]) for name, one in header.items() if name != "__metadata__"}
        )
    return kinds


def with_adapters(base: Path, model: nn.Module, folder: Path) -> Path:
    """Make a folder of links to the files of the base, and a file of first values of the adapters; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(sorted(base.glob("*.safetensors"))):
        link = folder / f"base{number}.safetensors"
        link.unlink(missing_ok=True)
        link.symlink_to(path.resolve())
    trained = {name: param.shape for name, param in model.named_parameters() if param.requires_grad}
    values = {name: torch.zeros(s) if name.endswith(".up") else torch.randn(s) * 0.02 for name, s in trained.items()}
    save_file(values, folder / "adapters.safetensors")
    return folder


def moved(stats: Any) -> tuple[int, int]:
    """Return bytes read and written so far, of parameters, gradients and state."""
    return stats.bytes_read + stats.param_bytes_read, stats.bytes_written + stats.param_bytes_written


def train(chosen: argparse.Namespace) -> Iterator[str]:
    """Train, and say of each step what it took."""
    kinds, config = kinds_in(chosen.model), json.loads((chosen.model / "config.json").read_text())
    with torch.device("meta"):
        model = Model(kinds, config, chosen.rank)
    for layer in model.model.layers:
        layer.skips_experts = chosen.skip_experts
    weights = with_adapters(chosen.model, model, chosen.nvme_path / "lora_large")
    drive = {"device": "nvme", "nvme_path": str(chosen.nvme_path), "frozen": "in_place", "buffer_count": 2}
    section = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": drive},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": chosen.micro_batches,
    }
    start = time.perf_counter()
    with initialize(model, section, weights=weights, blocks=["Layer", "Table"]) as engine:
        yield f"born in {time.perf_counter() - start:.2f} s"
        for step in range(chosen.steps):
            before, start = moved(engine.optimizer.stats()), time.perf_counter()
            tokens = torch.randint(config["vocab_size"], (chosen.micro_batches, 1, chosen.sequence))
            losses = engine.accumulate(engine, tokens)
            engine.step()
            engine.optimizer.synchronize()
            read, written = (now - then for now, then in zip(moved(engine.optimizer.stats()), before, strict=True))
            seconds = time.perf_counter() - start
            loss = torch.stack(losses).mean().item()
            yield f"step {step + 1}: loss {loss:.3f}, {read} B read, {written} B written, {seconds:.2f} s"
        engine.export_safetensors(chosen.nvme_path / "lora_large" / "trained", frozen=False)
    torch.distributed.destroy_process_group()


def main(arguments: list[str]) -> None:
    """Write the folder if it is to be a fake, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json and safetensors files")
    parser.add_argument("--nvme-path", type=Path, required=True, help="folder on the drive for what is trained")
    parser.add_argument("--fake", choices=FAKES, help="write random bytes of this model's sizes into --model first")
    parser.add_argument("--layers", type=int, help="layers of the fake; all by default")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--micro-batches", type=int, default=8, help="sequences of a step, which go block by block")
    parser.add_argument("--sequence", type=int, default=64, help="tokens of a sequence")
    what = "read experts and compute nothing with them: the drive limits then, whatever the processor"
    parser.add_argument("--skip-experts", action="store_true", help=what)
    chosen = parser.parse_args(arguments)
    if chosen.fake:
        write_fake(chosen.model, chosen.fake, chosen.layers)
    for line in train(chosen):
        print(line, flush=True)
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    print(f"base: {sum(path.stat().st_size for path in chosen.model.glob('*.safetensors'))} B")
    print(f"peak resident memory: {peak[1] if peak else '?'} KiB")


if __name__ == "__main__":
    main(sys.argv[1:])
