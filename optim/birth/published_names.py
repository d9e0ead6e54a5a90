"""Models of transformers hold weights fused that are published apart, and under other names."""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

Revert = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""It makes published tensors of a model's own."""


class Region(NamedTuple):
    """The elements of a parameter, flat, that are a tensor of the files: as `torch.as_strided` has them."""

    name: str
    """The tensor is called this in the files."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def whole(cls, name: str, shape: torch.Size) -> Self:
        """Return all of a tensor of this shape, under a name."""
        return cls(name, tuple(shape), torch.empty(shape, device="meta").stride(), 0)

    @property
    def is_range(self) -> bool:
        """Return whether they lie one after the other, in the order of the files."""
        return torch.empty_strided(self.shape, self.strides, device="meta").is_contiguous()


def revert_of(model: nn.Module) -> Revert | None:
    """Return transformers' reverse conversion for a model, if it is one of its; nothing is imported for that."""
    library: Any = sys.modules.get("transformers.modeling_utils")
    if not hasattr(library, "revert_weight_conversion") or not isinstance(model, library.PreTrainedModel):
        return None
    plain: Any = object.__new__(plain_class(model))
    vars(plain).update(vars(model))  # the conversion is found by the name of the class, which FSDP2 changes
    if getattr(plain, "_weight_conversions", None) is None and getattr(plain.config, "quantization_config", None):
        vars(plain)["_weight_conversions"] = _with_quantizer(plain)
    return partial(library.revert_weight_conversion, plain)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before FSDP2 gave it one of its own."""
    kinds: Any = type(module).__mro__
    return next(kind for kind in kinds if not issubclass(kind, FSDPModule))  # type: ignore[no-any-return]


def _with_quantizer(model: Any) -> list[Any]:
    """Return the conversions of a quantized model, also those of its scales; not names that only some files have."""
    quantizers = import_module("transformers.quantizers")
    conversions_of = import_module("transformers.conversion_mapping").get_model_conversion_mapping
    quantizer = quantizers.AutoHfQuantizer.from_config(model.config.quantization_config, pre_quantized=True)
    known = [(type(each), each.source_patterns) for each in conversions_of(model, add_legacy=False)]
    every = conversions_of(model, hf_quantizer=quantizer, add_legacy=False)
    return [each for each in every if hasattr(each, "operations") or (type(each), each.source_patterns) in known]


def regions_of(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, list[Region]]:
    """Return of what tensors of the files those of a model on meta are made, by name, the first elements first.

    Those are left out that transformers does not make of views of one tensor.
    """
    if (revert := revert_of(model)) is None:
        return {}
    storages = {name: tensor.untyped_storage() for name, tensor in tensors.items()}
    owners = {id(storage): name for name, storage in storages.items()}  # one object for all tensors that share it
    found: dict[str, list[Region]] = {}
    for name, made in revert(
        {name: tensor.detach().as_subclass(_Uncopied) for name, tensor in tensors.items()}
    ).items():
        if (owner := owners.get(id(made.untyped_storage()))) is not None:
            region = Region(name, tuple(made.shape), made.stride(), int(made.storage_offset()))
            found.setdefault(owner, []).append(region)
    return {
        name: sorted(regions, key=lambda region: region.offset)
        for name, regions in found.items()
        if sum(torch.Size(region.shape).numel() for region in regions) == tensors[name].numel()
    }


class _Uncopied(torch.Tensor):
    """A tensor on meta that is not copied where that would make it contiguous: its strides say where it was."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.contiguous, torch.Tensor.clone):
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]  # of torch
