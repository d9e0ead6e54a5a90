"""Adapters of PEFT around a base on meta: the base has values in files, the adapters have initialisers of PEFT."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

from torch import nn

_RESET = "reset_lora_parameters"
_WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")


class BaseNames(NamedTuple):
    """A base that adapters may be around: PEFT wraps it, and some of its modules, which changes their names."""

    module: nn.Module
    """The base; of a model without adapters the model itself."""
    prefix: str

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Look for a base of PEFT in a model."""
        base = model.get_base_model() if callable(getattr(model, "get_base_model", None)) else model  # type: ignore[operator]
        name = next(name for name, module in model.named_modules() if module is base)
        return cls(base, f"{name}." if name else "")

    def of_file(self, name: str) -> str:
        """Return the name that a parameter of the model has in the files of the base."""
        return _WRAPPED.sub("", name.removeprefix(self.prefix)) if self.prefix else name


def adapter_units(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield the modules of each layer's LoRA adapters, and that layer behind them; not what it wraps."""
    for layer in model.modules():
        if hasattr(layer, _RESET):
            wrapped = set(layer.base_layer.modules())  # type: ignore[union-attr]
            found: list[nn.Module] = []
            for child in layer.children():
                child.apply(found.append)
            yield [*(module for module in dict.fromkeys(found) if module not in wrapped), layer]


def initialize_adapters(model: Any, layer: Any) -> None:
    """Have PEFT initialise the adapters of a layer; a ValueError of PEFT names a way that needs the base's weights."""
    for name in {**layer.lora_A, **layer.lora_embedding_A}:
        getattr(layer, _RESET)(name, model.peft_config[name].init_lora_weights)
