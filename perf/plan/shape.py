"""The shape of a model: how many parameters are gathered together, and what its activations depend on."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from nvme_offload.offload.activations.blocks import find_blocks
from nvme_offload.offload.foreign import parse_json, printable, read_text
from nvme_offload.optim.layout.blocks import find_ends
from ..measure.loading import nothing_to_collect
from .lora import FULL_BITS, Lora, bits_of_config, bits_of_files
from .machine import PlanError

_NUMBERED = re.compile(r"^n(um)?_.*(layer|expert|block)|(layers|experts|blocks|depth)$", re.IGNORECASE)
"""Keys that say how many modules are made."""
_MOST_MODULES = 10_000
_EXPERTS = (
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"),
)
"""Keys of a configuration that say how many experts a layer has, and how many of them a token visits."""


class LinearSize(NamedTuple):
    """A linear layer: its name within its layer, and the numbers of its columns and rows."""

    name: str
    sides: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A plan needs to know this of a model. FSDP2 gathers every layer and end by itself, the rest as one more group."""

    name: str
    layers: tuple[tuple[int, ...], ...]  # elements of each parameter of each repeated layer
    rest: tuple[int, ...]
    """Elements of each parameter outside layers and ends: last norm, small or tied embedding. Tied ones count once."""
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    before: tuple[tuple[int, ...], ...] = ()
    """Elements of each parameter of each large embedding or other end before the layers."""
    after: tuple[tuple[int, ...], ...] = ()  # the same of heads behind the layers
    idle: tuple[int, ...] = ()
    """Elements of each layer that a token is not multiplied with: those of experts that it does not visit. None: 0."""
    linears: tuple[tuple[LinearSize, ...], ...] = ()
    """The linear layers of each layer, by which adapters are counted. None: not known."""
    adapters: tuple[tuple[int, ...], ...] = ()
    """Elements of each trained parameter that LoRA adds to each layer; all others are frozen. None: all are trained."""
    base_bits: float = FULL_BITS
    """Bits of an element of frozen layers, as their files have them."""

    @property
    def numel(self) -> int:
        """Number of parameters of the whole model."""
        return sum(map(sum, self.groups))

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Parameters that are gathered at once, in the order of the forward: the rest comes first, if there is any."""
        return ((self.rest,) if self.rest else ()) + self.before + self.layers + self.after

    @property
    def work(self) -> tuple[int, ...]:
        """Elements of each of `groups` that a token is multiplied with: an embedding is looked up, a head is not."""
        vocabulary = self.vocab_size * self.hidden_size
        head = self.tied_numel or (0 if self.after else vocabulary)
        looked_up = sum(numel for numel in self.rest if numel >= vocabulary > 0)
        rest = (sum(self.rest) - looked_up + head,) if self.rest else ()
        idle = self.idle or (0,) * len(self.layers)
        layers = tuple(sum(layer) - unused for layer, unused in zip(self.layers, idle, strict=True))
        return rest + (0,) * len(self.before) + layers + tuple(map(sum, self.after))

    @property
    def tied_numel(self) -> int:
        """Elements of a weight that an embedding and a head share, or are gathered with; 0 where each is by itself."""
        numel = self.vocab_size * self.hidden_size
        return numel if numel and max(self.rest, default=0) >= numel else 0

    @property
    def largest_matrix(self) -> int:
        """Elements of the largest weight of a layer that is multiplied with at once: of experts, one by one."""
        return max((rows * columns for linears in self.linears for _, (rows, columns) in linears), default=0)

    @property
    def num_layers(self) -> int:
        """Number of repeated layers."""
        return len(self.layers)

    @property
    def first_layer(self) -> int:
        """The place of the first layer in `groups`."""
        return len(self.groups) - len(self.after) - len(self.layers)

    def with_layers(self, num_layers: int) -> Self:
        """A model of this shape with another number of layers; all are as large as the largest."""
        largest = max(range(len(self.layers)), key=lambda number: sum(self.layers[number]))
        of_layers: dict[str, Any] = {
            name: (known[largest],) * num_layers
            for name in ("layers", "idle", "linears", "adapters")
            if (known := getattr(self, name))
        }
        return replace(self, **of_layers)

    def with_lora(self, lora: Lora) -> Self:
        """This model with adapters beside its linear layers, and all else frozen. Raises PlanError for no adapter."""
        adapters = tuple(
            tuple(lora.rank * side for linear in linears if lora.takes(linear.name) for side in linear.sides)
            for linears in self.linears
        )
        if not any(adapters):
            names = sorted({linear.name for linears in self.linears for linear in linears})
            raise PlanError(f"--lora: {self.name} has none of these linear layers; it has {', '.join(names) or 'none'}")
        return replace(self, adapters=adapters, base_bits=lora.bits or self.base_bits)

    @classmethod
    def of_numbers(cls, num_params: int, num_layers: int, hidden_size: int | None = None, vocab_size: int = 0) -> Self:
        """The shape of a transformer of which little is known; a `vocab_size` of 0 leaves the (tied) embedding out.

        The hidden size is by default what 12 x hidden_size^2 parameters in a layer ask for.
        """
        if num_layers < 1:
            raise PlanError(f"--layers {num_layers}: a model has one layer or more")
        hidden_size = hidden_size or max(1, round((num_params / num_layers / 12) ** 0.5))
        layer_numel = (num_params - vocab_size * hidden_size) // num_layers
        if layer_numel < 1:
            what = f"an embedding of {vocab_size:,} x {hidden_size:,} leaves nothing for {num_layers} layers"
            raise PlanError(f"--params {num_params:,}: {what}; give a smaller --vocab or --hidden")
        square, wide = (hidden_size, hidden_size), (4 * hidden_size, hidden_size)
        return cls(
            name=f"{num_params / 1e9:.3g} B parameters",
            layers=((layer_numel,),) * num_layers,
            rest=(rest,) if (rest := num_params - num_layers * layer_numel) else (),
            linears=(linears_of(q=square, k=square, v=square, o=square, up=wide, down=wide[::-1]),) * num_layers,
            hidden_size=hidden_size,
            intermediate_size=4 * hidden_size,
            vocab_size=vocab_size,
        )

    @classmethod
    def of_config_file(cls, path: Path) -> Self:
        """The shape in a Hugging Face ``config.json``, or in the folder that holds it.

        The model is built without data (on the meta device).
        """
        file = path / "config.json" if path.is_dir() else path
        said = _read_config(file)
        try:
            with nothing_to_collect():
                import transformers
        except ImportError:
            how = "install it, or give --params, --layers, --hidden and --vocab"
            raise PlanError(f"{file}: reading it needs transformers, which is not installed; {how}") from None
        try:
            with nothing_to_collect(), torch.device("meta"):  # most of transformers is loaded here
                config = transformers.AutoConfig.from_pretrained(str(file), trust_remote_code=False)
                model = _model_of(transformers, config)
            name = config.name_or_path or type(model).__name__
            shape = cls.of_module(model, name=name, config=config.get_text_config())
            packable = sum(map(sum, shape.layers))
            bits = bits_of_files(file.parent, shape.numel - packable, packable) or bits_of_config(said)
            return replace(shape, base_bits=bits)
        except PlanError:
            raise
        except Exception as error:  # whatever its classes raise of what they did not expect
            why = printable(str(error) or type(error).__name__).partition("\n")[0]
            raise PlanError(f"{file}: transformers cannot build a model from it: {why}") from error

    @classmethod
    def of_module(cls, model: torch.nn.Module, *, name: str, config: Any) -> Self:
        """The shape of a module, on any device, whose configuration has ``hidden_size`` and ``vocab_size``."""
        shape = cls.of_layers(model, name, config.hidden_size)
        intermediate_size = getattr(config, "intermediate_size", None) or shape.intermediate_size
        idle = _idle(find_blocks(model), config)
        vocab_size = getattr(config, "vocab_size", 0)
        return replace(shape, intermediate_size=intermediate_size, vocab_size=vocab_size, idle=idle)

    @classmethod
    def of_layers(cls, model: torch.nn.Module, name: str, hidden_size: int) -> Self:
        """The shape of a module (on any device) with repeated layers of this width and no vocabulary."""
        blocks = find_blocks(model)
        if not blocks:
            raise PlanError(f"{name} has no repeated layers that could be gathered one by one")
        ends = find_ends(model, blocks)
        in_units = {param for unit in (*blocks, *ends) for param in unit.parameters()}
        order = list(model.modules())
        num_before, taken = sum(order.index(end) < order.index(blocks[0]) for end in ends), set[torch.nn.Parameter]()
        return cls(
            name=name,
            layers=_sizes(blocks, taken),
            linears=tuple(map(_linears, blocks)),
            rest=tuple(param.numel() for param in model.parameters() if param not in in_units),
            before=_sizes(ends[:num_before], taken),
            after=_sizes(ends[num_before:], taken),
            hidden_size=hidden_size,
            intermediate_size=4 * hidden_size,
            vocab_size=0,
        )


def _model_of(transformers: Any, config: Any) -> torch.nn.Module:
    """Build the class that the configuration names, or else a causal language model, or else the bare model."""
    named = (getattr(transformers, name, None) for name in config.architectures or ())
    if (found := next(filter(None, named), None)) is not None:
        return found(config)  # type: ignore[no-any-return]
    try:
        return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-any-return]
    except ValueError:  # its configuration is of no such class
        return transformers.AutoModel.from_config(config, trust_remote_code=False)  # type: ignore[no-any-return]


def _idle(blocks: Iterable[torch.nn.Module], config: Any) -> tuple[int, ...]:
    """Return the elements of each layer's experts that a token does not visit, on average."""
    known = (next((value for name in names if (value := getattr(config, name, None))), 0) for names in _EXPERTS)
    experts, visited = known
    share = 1 - visited / experts if 0 < visited < experts else 0.0
    return tuple(
        round(share * sum(p.numel() for name, p in block.named_parameters() if ".experts." in f".{name}"))
        for block in blocks
    )


def _read_config(file: Path) -> dict[str, Any]:
    """Raise PlanError for what is no model's configuration, before a library is loaded that would work on it."""
    try:
        said = parse_json(read_text(file))
    except FileNotFoundError:
        remedy = "give a config.json, its folder, or --params and --layers"
        raise PlanError(f"{file}: there is no such file; {remedy}") from None
    except OSError as error:
        raise PlanError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise PlanError(f"{file}: this is no JSON: {error}") from None
    if not isinstance(said, dict):
        raise PlanError(f"{file}: this is no config.json of a model")
    document: dict[str, Any] = said
    for section in (document, *(part for part in document.values() if isinstance(part, dict))):
        for name, value in section.items():
            if _NUMBERED.search(name) and type(value) in (int, float) and not 0 <= value <= _MOST_MODULES:
                raise PlanError(f"{file}: {name} is {value!r}; a number from 0 to {_MOST_MODULES} can be built")
    return document


def _linears(block: torch.nn.Module) -> tuple[LinearSize, ...]:
    """Return the linear layers of a block, of any class that has the attributes of torch's."""
    found = (
        (name, getattr(module, "in_features", None), getattr(module, "out_features", None))
        for name, module in block.named_modules()
    )
    return tuple(LinearSize(name, (rows, columns)) for name, columns, rows in found if rows and columns)


def linears_of(**sides: tuple[int, int]) -> tuple[LinearSize, ...]:
    """Return linear layers with names as models have them, of the sides of q, k, v, o, gate, up and down."""
    return tuple(LinearSize(f"{name}_proj", each) for name, each in sides.items())


def _sizes(modules: Iterable[torch.nn.Module], taken: set[torch.nn.Parameter]) -> tuple[tuple[int, ...], ...]:
    """Return the elements of each module's parameters; of those that modules share, where they come first."""
    sizes = []
    for module in modules:
        own = [param for param in module.parameters() if param not in taken]
        taken.update(own)
        sizes.append(tuple(param.numel() for param in own))
    return tuple(sizes)
