"""Adapters of PEFT: in the files that it loads, and merged into the weights of their base, one layer at a time."""

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nvme_offload.offload.weights.writer import named_tensors
from ..birth.published_names import plain_class
from ..weights.published import Conversion, conversions_by, kinds_of

Metas = Mapping[str, torch.Tensor]
"""The tensors of a model by name, on meta."""

_UNLOAD = "unload_and_optionally_merge_module"


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model has adapters of PEFT; nobody's has if nobody has imported that."""
    return "peft" in sys.modules and bool(getattr(model, "peft_config", None))


def names_of(model: Any, call: str, wanted: str | Iterable[str] | None) -> list[str]:
    """Return the names of adapters: those wanted, or all.

    Raises:
        TypeError: the model has no adapters of PEFT.
        ValueError: it has none of this name.
    """
    if not has_adapters(model):
        kind = type(model).__name__
        raise TypeError(f"engine.{call}: {kind} has no adapters of PEFT: call peft.get_peft_model before initialize")
    names = list(model.peft_config)
    chosen = [wanted] if isinstance(wanted, str) else names if wanted is None else list(wanted)
    if unknown := [name for name in chosen if name not in names]:
        raise ValueError(f"engine.{call}: no adapter is called {unknown[0]!r}; there are {', '.join(names)}")
    return chosen


def adapter_of(model: Any, name: str, tensors: Metas) -> list[Conversion]:
    """Return how to make the tensors of an adapter's file: PEFT says which of the model's they are, and their names.

    ValueError for a method whose tensors PEFT takes from the model itself, where they are shards.
    """
    prefix = "" if hasattr(model, "get_base_model") else "base_model.model."  # transformers' own add_adapter

    def revert(values: Metas) -> Metas:
        made = sys.modules["peft"].get_peft_model_state_dict(model, state_dict=dict(values), adapter_name=name)
        return {prefix + key: value for key, value in made.items()}

    try:
        return conversions_by(revert, tensors, uses_all=False)
    except Exception as error:
        kind = getattr(model.peft_config[name].peft_type, "value", "a method")
        raise ValueError(
            f"engine.save_adapter: {name!r} is {kind}, whose tensors PEFT does not take from a state dict ({error}): "
            "engine.save_checkpoint saves them, and engine.weights() gives them whole"
        ) from error


def config_of(model: Any, name: str) -> bytes:
    """Return the content of an adapter's ``adapter_config.json``, as PEFT writes it: for inference."""
    base = _base_of(model)[1]
    said = {**model.peft_config[name].to_dict(), "inference_mode": True}
    said["base_model_name_or_path"] = said["base_model_name_or_path"] or vars(base).get("name_or_path") or None
    if said["task_type"] is None:  # PEFT's AutoPeftModel finds the class by it
        kind = plain_class(base)
        said["auto_mapping"] = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    ordered = {key: sorted(value) if isinstance(value, set) else value for key, value in said.items()}
    return json.dumps(ordered, indent=2, sort_keys=True).encode()


def merged(
    model: Any, tensors: Metas, adapters: Sequence[str] | None
) -> tuple[nn.Module, list[Conversion], dict[str, str]]:
    """Return the base, how to make its weights with adapters merged into them, and the parameter that each was.

    `tensors` has each of the model's once, in the dtype in which it is merged. `adapters` is their names in order;
    None: the active ones. ValueError where PEFT cannot merge them, or would change more than it should.
    """
    (prefix, base), (_, tied) = _base_of(model), named_tensors(model)
    layers = {
        name: _Layer(module, name, name.removeprefix(prefix), tied, adapters) for name, module in _layers(base, prefix)
    }
    inside, parts, was = defaultdict[str, list[str]](list), list[Conversion](), dict[str, str]()
    for name in (*tensors, *tied):
        inside[_owner(name, layers)].append(name)
    check = getattr(getattr(model, "base_model", None), "_check_merge_allowed", None)  # PEFT's, of some kinds of base
    for name in tensors:
        owner = _owner(name, layers)
        if not owner and name.startswith(prefix):
            parts.append(Conversion([name], kinds_of({name.removeprefix(prefix): tensors[name]}), None))
            was[name.removeprefix(prefix)] = name
        elif owner and inside[owner]:
            layer, members = layers[owner], inside.pop(owner)
            sources = list(dict.fromkeys(tied.get(each, each) for each in members))
            _tried(owner, check)
            made = layer.merged({each: tensors[each] for each in sources})
            found = {new: source for new, (_, source) in made.items() if source is not None}
            _check_untied(set(found.values()), tied, members)
            kinds = kinds_of({new: tensor for new, (tensor, _) in made.items()})
            parts.append(Conversion(sources, kinds, layer.revert))
            was |= found
    return base, parts, was


def _base_of(model: Any) -> tuple[str, nn.Module]:
    """Return what the names of the model without adapters begin with, and that model."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    name = next(name for name, module in model.named_modules() if module is base)
    return (f"{name}." if name else ""), base


def _layers(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Return the layers of PEFT, outermost alone, each with its name."""
    for key, child in module.named_children():
        if hasattr(child, _UNLOAD) or (hasattr(child, "base_layer") and hasattr(child, "merge")):
            yield prefix + key, child
        else:
            yield from _layers(child, f"{prefix}{key}.")


def _owner(name: str, layers: Mapping[str, object]) -> str:
    while name and name not in layers:
        name = name.rpartition(".")[0]
    return name


def _check_untied(weights: Collection[str], tied: Mapping[str, str], members: Collection[str]) -> None:
    """Raise ValueError if one of a layer's weights is another layer's, too, which a merge would change."""
    for alias, first in tied.items():
        if first in weights and not {alias, first} <= set(members):
            raise ValueError(
                f"export_safetensors: {first} and {alias} are one weight, and only one of them has adapters: merged, "
                "both would change. Untie them before initialize (tie_word_embeddings=False), or save the adapter alone"
            )


def _tried(layer: str, action: Callable[[], Any] | None) -> Any:
    try:
        return action() if action is not None else None
    except Exception as error:
        raise ValueError(
            f"export_safetensors: PEFT cannot merge the adapters of {layer} ({type(error).__name__}: {error}). Codes "
            "of a quantized base have to be weights first; engine.save_adapter saves the adapters alone"
        ) from error


@dataclass(frozen=True)
class _Layer:
    """A layer of PEFT around one of the base, which takes its place with the adapters merged into it."""

    module: nn.Module
    name: str
    name_in_base: str
    tied: Mapping[str, str]
    adapters: Sequence[str] | None

    def revert(self, values: Metas) -> Metas:
        """Return the tensors of the base's layer, by their names in the base."""
        return {name: tensor for name, (tensor, _) in self.merged(values).items()}

    def merged(self, values: Metas) -> dict[str, tuple[torch.Tensor, str | None]]:
        """Return each tensor of the base's layer, and the name of the model's parameter that became it."""

        def value_of(name: str) -> torch.Tensor | None:
            source = self.tied.get(name, name)
            return values[source].clone() if source in values else None  # PEFT adds in place to what is not ours

        layer: Any = _copied(self.module, f"{self.name}.", value_of)
        names = {id(one): f"{self.name}.{key}" for key, one in named_tensors(layer)[0].items()}
        given = {"safe_merge": False, "adapter_names": self.adapters}

        def merge() -> nn.Module:
            if hasattr(layer, _UNLOAD):
                return layer.unload_and_optionally_merge_module(merge=True, **given)  # type: ignore[no-any-return]
            layer.merge(**given)
            return layer.get_base_layer()  # type: ignore[no-any-return]

        found = named_tensors(_tried(self.name, merge))[0]
        sources = {key: self.tied.get(name, name) for key, one in found.items() if (name := names.get(id(one)))}
        return {f"{self.name_in_base}.{key}": (one.detach(), sources.get(key)) for key, one in found.items()}


def _copied(module: nn.Module, prefix: str, value_of: Callable[[str], torch.Tensor | None]) -> nn.Module:
    """Return a module with other values, by names that begin with `prefix`; `module` stays as it is."""
    copied: Any = object.__new__(plain_class(module))
    own = vars(module).items()
    vars(copied).update({key: copy(value) if isinstance(value, list | dict | set) else value for key, value in own})
    for key, _ in module.named_parameters(recurse=False):
        if (value := value_of(prefix + key)) is not None:
            setattr(copied, key, nn.Parameter(value, requires_grad=False))
    for key, buffer in module.named_buffers(recurse=False):
        setattr(copied, key, buffer if (value := value_of(prefix + key)) is None else value)
    for key, child in module.named_children():
        setattr(copied, key, _copied(child, f"{prefix}{key}.", value_of))
    return copied  # type: ignore[no-any-return]
